"""MIG instances on demand, slices inside them, and daemons that are killed while they make them."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fenka.hardware import nvml_mig
from fenka.hardware.nvml import Driver
from fenka.hardware.simulated_node import SimulatedNode
from fenka.isolation import lease_control
from fenka.procfs import process_name
from tests.hardware.client import Client
from tests.workstation.conftest import (
    HOLD,
    PROGRAMS,
    Workstation,
    eventually,
    refused,
    workstation_at,
)

NUMBA = [sys.executable, str(PROGRAMS / "mig_client.py")]


@pytest.fixture
def a100(station: Workstation) -> Workstation:
    """A workstation with one simulated A100 that is divided on demand."""
    station.start("--simulate", "A100-40G", "--mig", "all")
    return station


@pytest.fixture(scope="module")
def untouched() -> Iterator[Workstation]:
    """The same, for tests that start no program."""
    with workstation_at([]) as station:
        station.start("--simulate", "A100-40G", "--mig", "all")
        yield station


@contextmanager
def driver_of(station: Workstation) -> Iterator[Driver]:
    """Open the driver as an administrator's programs do."""
    with Driver.open(station.root / "simulated" / "lib") as driver:
        yield driver


def layout(station: Workstation, card: int = 0) -> list[str]:
    """Return what exists on a card, as `start profile`."""
    with driver_of(station) as driver:
        uuid = driver.cards()[card].uuid
        geometry = driver.geometry(uuid)
        assert geometry
        listed = nvml_mig.instances(uuid, geometry)
    return sorted(f"{each.start} {each.profile.name}" for each in listed)


def administrator_creates(station: Workstation, profile: str, start: int) -> int:
    """Create an instance as nvidia-smi does, and return its id."""
    with driver_of(station) as driver:
        uuid = driver.cards()[0].uuid
        geometry = driver.geometry(uuid)
        assert geometry
        gpu = nvml_mig.create_gpu_instance(uuid, geometry.by_name[profile], start)
        nvml_mig.create_compute_instance(uuid, gpu)
    return gpu


def hold(station: Workstation, *words: str) -> Any:
    """Start a program that holds one MiB, and return what it sees of its card."""
    (seen,) = station.run(*words, "--", *HOLD, "1").report()["cards"]
    return seen


class NumbaProgram:
    """A running numba program."""

    def __init__(self, station: Workstation, *words: str) -> None:
        self._program = station.run(*words, "--", *NUMBA)
        self.first = self._program.report()

    def allocate(self, mib: int) -> Any:
        """Ask for memory, and return what the program sees then."""
        stdin = self._program.process.stdin
        assert stdin
        stdin.write(f"{mib}\n")
        stdin.flush()
        return self._program.report()

    def end(self) -> None:
        """End the program."""
        assert self._program.end() == 0


@pytest.mark.parametrize(
    ("model", "profile", "count", "mib"),
    [("A100-40G", "1g.5gb", 7, 4864), ("A30", "1g.6gb", 4, 5952)],
)
def test_card_is_divided_into_all_its_small_instances(
    station: Workstation, model: str, profile: str, count: int, mib: int
) -> None:
    """The next one is refused, or waits until one of them has ended."""
    station.start("--simulate", model, "--mig", "0")
    seen = [hold(station, "--mig", profile, "--name", f"a{number}") for number in range(count)]
    assert [each["total"] for each in seen] == [mib] * count
    assert layout(station) == [f"{start} {profile}" for start in range(count)]
    reason = rf"no card has room for {profile}: 0/0 {profile} is held by a\d, 0/1 .*"
    refused(station.fenka("run", "--no-wait", "--mig", profile, "--", "true"), 75, reason)
    waiting = station.run("--mig", profile, "--", *HOLD, "1")
    assert waiting.says().startswith("fenka: waiting, position 1 of 1: no card has room for")
    station.ok("stop", "a2")
    assert waiting.report()["cards"][0]["total"] == mib
    for program in station.programs:
        program.end()
    eventually(lambda: not layout(station))


def test_slices_of_one_instance_add_up_and_another_instance_is_apart(a100: Workstation) -> None:
    """Memory of numba programs is refused at the slice, and each sees its slice as a card."""
    first = NumbaProgram(
        a100, "--inside", "mig", "--gpu-mem", "10", "--gpu-core", "20", "--name", "a"
    )
    second = NumbaProgram(
        a100, "--inside", "mig", "--gpu-mem", "9", "--gpu-core", "10", "--name", "b"
    )
    third = NumbaProgram(
        a100, "--inside", "mig", "--gpu-mem", "18", "--gpu-core", "30", "--name", "c"
    )
    assert layout(a100) == ["0 4g.20gb", "4 3g.20gb"]
    totals = [each.first["total"] for each in (first, second, third)]
    assert totals == [20096 * 10 // 19, 20096 * 9 // 19, 20096 * 18 // 19]
    assert first.first["name"].endswith("MIG 3g.20gb")
    assert third.first["name"].endswith("MIG 4g.20gb")
    assert [each.allocate(9000)["succeeded"] for each in (first, second, third)] == [True] * 3
    assert [each.allocate(5000)["succeeded"] for each in (first, second, third)] == [
        False,
        False,
        True,
    ]
    with driver_of(a100) as driver:
        used = {each.used_mib for each in driver.readings() if each.uuid.startswith("MIG-")}
    assert used == {18000, 14000}
    for program in (first, second, third):
        program.end()
    eventually(lambda: not layout(a100))


def test_compute_share_is_of_the_instances_own_time(a100: Workstation) -> None:
    """20 and 10 percent of the card are 53 and 26 percent of a 3g, which has 38; no more is given."""
    for name, core in (("a", "20"), ("b", "10")):
        hold(a100, "--inside", "3g.20gb", "--gpu-mem", "4", "--gpu-core", core, "--name", name)
    jobs = a100.jobs()
    percents = [
        lease_control.read(a100.root / "leases" / jobs[name]["id"] / "lease" / "control")
        .limits[0]
        .compute_percent
        for name in ("a", "b")
    ]
    assert percents == [53, 26]
    asked = ("--inside", "3g.20gb", "--gpu-mem", "1", "--gpu-core", "39")
    refused(
        a100.fenka("run", *asked, "--", "true"),
        2,
        r"no instance here is large enough: no card gives more than 38 .*",
    )


def test_screens_show_instances_with_their_slices(a100: Workstation) -> None:
    """`ps` names the instance, and `top node` has a row for each, its slices below, and what else fits."""
    hold(a100, "--mig", "2g.10gb", "--name", "whole")
    hold(a100, "--inside", "3g.20gb", "--gpu-mem", "4", "--gpu-core", "20", "--name", "part")
    administrator_creates(a100, "1g.5gb", 6)
    rows = [line.split() for line in a100.ok("top", "node").splitlines()[-5:]]
    assert rows == [
        ["0/0", "3g.20gb", "1", "slice(s)", "4.1/19.6", "GiB", "20/38", "%"],
        ["root/part", "4.1", "GiB", "20", "%"],
        ["0/4", "2g.10gb", "root/whole", "9.8/9.8", "GiB", "25/25", "%"],
        ["0/6", "1g.5gb", "administrator", "0.0/4.8", "GiB", "0/12", "%"],
        ["0", "free:", "nothing"],
    ]
    assert "0/0 3g.20gb" in a100.ok("ps")
    (node,) = json.loads(a100.ok("top", "node", "-o", "json"))
    assert [each["profile"] for each in node["instances"]] == ["3g.20gb", "2g.10gb", "1g.5gb"]
    assert (node["cards"][0]["total"], node["cards"][0]["core"]) == (39, 20)
    # 4 units of the 3g.20gb, all 9 of the 2g.10gb. No card is held whole.
    assert (node["cards"][0]["allocated"], node["whole"]) == (13, 0)


def test_nvitop_shows_a_slice_of_an_instance_as_one_card(a100: Workstation) -> None:
    """With the slice's memory, though nvitop fails on a bare instance."""
    nvitop = str(Path(sys.executable).parent / "nvitop")
    asked = ("--inside", "mig", "--gpu-mem", "4")
    assert "0B / 4230MiB" in a100.ok("run", *asked, "--", nvitop, "--once", "--ascii")


def test_program_gets_several_instances(a100: Workstation) -> None:
    """All are its own; a driver before 570 shows it the first."""
    program = a100.run("--mig", "1g.5gb", "--mig-count", "2", "--", *HOLD, "1")
    assert [card["total"] for card in program.report()["cards"]] == [4864]
    assert len(layout(a100)) == 2


def test_administrators_instances_are_never_used_or_destroyed(a100: Workstation) -> None:
    """They occupy their place, and the reason names them."""
    administrator_creates(a100, "3g.20gb", 0)
    seen = hold(a100, "--mig", "3g.20gb", "--name", "a")
    assert seen["total"] == 20096
    refused(
        a100.fenka("run", "--no-wait", "--mig", "4g.20gb", "--", "true"),
        75,
        r"no card has room for 4g.20gb: 0/0 3g.20gb is an administrator's, 0/4 3g.20gb is held by a",
    )
    a100.ok("stop", "a")
    eventually(lambda: layout(a100) == ["0 3g.20gb"])


def test_daemon_goes_on_with_instances_when_it_was_killed(a100: Workstation) -> None:
    """The program keeps its instance; another's that ended meanwhile is destroyed by the next daemon."""
    hold(a100, "--mig", "2g.10gb", "--name", "stays")
    hold(a100, "--mig", "1g.5gb", "--name", "ends")
    a100.kill_daemon()
    administrator_creates(a100, "1g.5gb", 0)
    a100.programs[1].end()
    assert len(layout(a100)) == 3
    a100.start("--simulate", "A100-40G", "--mig", "all")
    eventually(lambda: len(layout(a100)) == 2)
    assert list(a100.jobs()) == ["stays"]
    assert "MiB, " not in (a100.root / "daemon.log").read_text()  # instances are no cards
    a100.programs[0].end()
    eventually(lambda: layout(a100) == ["0 1g.5gb"])


def test_nothing_is_leaked_when_programs_and_daemon_are_killed_together(a100: Workstation) -> None:
    """Whatever the daemon was doing; an administrator's instance stays."""
    administrator_creates(a100, "1g.5gb", 3)
    for attempt in range(3):
        program = a100.run("--mig", "1g.5gb", "--", *HOLD, "1")
        if attempt:
            program.report()
        a100.kill_daemon()
        program.process.kill()
        program.process.wait()
        a100.start("--simulate", "A100-40G", "--mig", "all")
        eventually(lambda: layout(a100) == ["3 1g.5gb"])


def test_instances_are_kept_when_their_card_is_lost_for_a_while(station: Workstation) -> None:
    """The daemon answers meanwhile, another card is used, and nothing is destroyed or forgotten."""
    station.start("--simulate", "A100-40G,T4", "--mig", "0")
    held = station.run("--mig", "2g.10gb", "--name", "held", "--", *HOLD, "1")
    held.report()
    before = layout(station)
    station.ok("sim", "card", "0", "--lose")
    assert "held" in station.ok("ps")
    assert re.search(r"^1 +no MIG +- ", station.ok("mig", "list"), re.M)
    refused = station.fenka("run", "--mig", "1g.5gb", "--no-wait", "--", "true")
    assert refused.returncode == 75
    assert station.ok("run", "--gpu-mem", "1", "--", "echo", "other") == "other\n"
    station.ok("sim", "card", "0", "--recover")
    assert layout(station) == before
    held.end()
    eventually(lambda: layout(station) == [])


def test_creation_is_tried_again_when_the_driver_refuses_it(a100: Workstation) -> None:
    """The job waits with the driver's reason meanwhile."""
    SimulatedNode(a100.root / "simulated").fail_mig(0, 1)
    program = a100.run("--mig", "1g.5gb", "--", *HOLD, "1")
    assert "cannot be created: its place is taken; trying again" in program.says()
    assert program.report()["cards"][0]["total"] == 4864


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--mig", "1g.5GB"], r"'1g.5GB' is no MIG profile: write 1g.5gb"),
        (
            ["--mig", "mig-1g.5gb.me"],
            r".* is no MIG profile; the profile of that resource is 1g.5gb\+me",
        ),
        (
            ["--mig", "mig-1g.5gb+me"],
            r".* is no MIG profile; the profile of that resource is 1g.5gb\+me",
        ),
        (
            ["--mig", "1c.3g.20gb"],
            r".* is a part of a GPU instance, which fenka does not create: .*",
        ),
        (["--mig", "1.5"], r"'1.5' is no MIG profile: names are like 1g.5gb, .*"),
        (
            ["--mig", "1g.10gb+gfx"],
            r"no card has a profile 1g.10gb\+gfx: NVIDIA A100-SXM4-40GB has 1g.5gb, .*",
        ),
        (
            ["--mig", "1g.5gb+me", "--mig-count", "2"],
            r"the cards here have at most 1 instances 1g.5gb\+me, .*",
        ),
        (
            ["--mig", "3g.20gb", "--mig-count", "3"],
            r"the cards here have at most 2 instances 3g.20gb, .*",
        ),
        (["--mig", "1g.5gb", "--mig-count", "0"], r"the number of cards must be 1 to 1024, not 0"),
        (
            ["--mig", "1g.5gb", "--mig-count", "-1"],
            r"the number of cards must be 1 to 1024, not -1",
        ),
        (["--mig", "1g.5gb", "--gpu-mem", "1"], r"an instance 1g.5gb comes with all its memory .*"),
        (
            ["--mig", "1g.5gb", "--inside", "mig"],
            r"an instance 1g.5gb comes with all its memory .*",
        ),
        (["--mig", "1g.5gb", "--cards", "2"], r"--mig takes instances: .*"),
        (["--mig-count", "2", "--gpu-mem", "1"], r"--mig-count requires --mig"),
        (
            ["--mig", "1g.5gb", "--gang", "2"],
            r"the members of a gang cannot be in MIG instances: .*",
        ),
        (["--inside", "mig"], r"no amount given: .*"),
        (["--inside", "half", "--gpu-mem", "1"], r"'half' is no MIG profile: .*"),
        (
            ["--inside", "mig", "--gpu-mem", "40"],
            r".*the largest card has 39 units, ask for no more",
        ),
        (
            ["--inside", "1g.5gb", "--gpu-mem", "5"],
            r".*the largest card has 4 units, ask for no more",
        ),
        (
            ["--gpu-mem", "1"],
            r"no GPU fits: 1 of 1 is divided into instances; ask for an instance with --mig, .*",
        ),
    ],
)
def test_bad_request_is_refused_with_one_sentence(
    untouched: Workstation, words: list[str], sentence: str
) -> None:
    """Nothing is created."""
    refused(untouched.fenka("run", *words, "--", "true"), 2, sentence)
    assert layout(untouched) == []


def test_request_is_refused_when_no_card_is_divided(t4: Workstation) -> None:
    """And the daemon refuses to divide a card that has no MIG."""
    refused(t4.fenka("run", "--mig", "1g.5gb", "--", "true"), 2, r"no card here is divided into .*")
    t4.ok("daemon", "--stop")
    for option, sentence in (("0", "card 0 .* has no MIG: .*"), ("9", "--mig 9 is no card .*")):
        started = t4.fenka("daemon", "--background", "--simulate", "T4", "--mig", option)
        assert started.returncode != 0
        assert re.search(sentence, started.stderr), started.stderr


CONFIGS = """version: v1
mig-configs:
  balanced: [{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 2, 2g.10gb: 1, 3g.20gb: 1}}]
  seven: [{devices: [0], mig-enabled: yes, mig-devices: {7g.40gb: 1}}]
  wrong: [{devices: all, mig-enabled: true, mig-devices: {3g.20gb: 3}}]
  whole: [{devices: all, mig-enabled: false}]
"""


Apply = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with layouts."""
    file = tmp_path / "configs.yaml"
    file.write_text(CONFIGS)
    return file


@pytest.fixture
def apply(station: Workstation, file: Path) -> Apply:
    """Return a function that applies a layout, and returns the exit code and all lines."""

    def applied(name: str, *words: str) -> tuple[int, list[str]]:
        result = station.fenka("mig", "apply", "-f", str(file), "-c", name, *words)
        return result.returncode, [*result.stdout.splitlines(), *result.stderr.splitlines()]

    return applied


BALANCED = ["0 2g.10gb", "2 1g.5gb", "3 1g.5gb", "4 3g.20gb"]


def test_layouts_are_applied_around_what_is_in_use(
    station: Workstation, file: Path, apply: Apply, tmp_path: Path
) -> None:
    """Step by step; nothing that a program uses is touched, and instances stay while nobody uses them."""
    station.start("--simulate", "A100-40G")
    whole = station.run("--gpu-mem", "4", "--name", "w", "--", *HOLD, "1")
    whole.report()
    code, lines = apply("balanced")
    assert (code, lines[0]) == (75, "waits: enable MIG on card 0: w must end")
    whole.end()
    eventually(lambda: not station.jobs())
    eventually(lambda: layout(station) == BALANCED)
    assert apply("balanced") == (0, ["nothing changes"])
    station.ok("mig", "assert", "-f", str(file), "-c", "balanced")
    exported = tmp_path / "exported.yaml"
    exported.write_text(station.ok("mig", "export"))
    station.ok("mig", "assert", "-f", str(exported), "-c", "current")
    asserted = ("mig", "assert", "-f", str(file), "-c", "seven")
    refused(station.fenka(*asserted), 1, r"card 0 is divided into 2×1g.5gb, .* wants .*7g.40gb: .*")
    seen = hold(station, "--mig", "3g.20gb", "--name", "a")
    assert seen["total"] == 20096
    assert apply("seven") == (
        75,
        [
            *("destroy 0/0 2g.10gb", "destroy 0/2 1g.5gb", "destroy 0/3 1g.5gb"),
            "waits: create 0/0 7g.40gb: 0/4 3g.20gb is held by a",
            "waits: destroy 0/4 3g.20gb is held by a",
            "fenka: 2 steps wait, and are done by themselves when what they name has ended: "
            "`fenka mig list` shows them, `fenka mig cancel` gives them up",
        ],
    )
    assert station.ok("mig", "list").splitlines()[-2:] == [
        "waits: create 0/0 7g.40gb: 0/4 3g.20gb is held by a",
        "waits: destroy 0/4 3g.20gb is held by a",
    ]
    code, lines = apply("wrong")
    assert code != 0
    assert lines == ["fenka: NVIDIA A100-SXM4-40GB cannot be divided into 3x 3g.20gb at once"]
    station.programs[-1].end()
    eventually(lambda: layout(station) == ["0 7g.40gb"])
    assert "waits" not in station.ok("mig", "list")
    assert apply("whole", "--dry-run") == (0, ["destroy 0/0 7g.40gb", "disable MIG on card 0"])
    assert layout(station) == ["0 7g.40gb"]
    assert apply("whole")[0] == 0
    assert station.ok("mig", "list").splitlines()[1].split()[:2] == ["0", "whole"]
    eventually(lambda: not (station.root / "layouts.json").exists())


def test_nothing_is_granted_that_would_delay_a_layout(station: Workstation, apply: Apply) -> None:
    """New programs wait until it is complete, or use its instances."""
    station.start("--simulate", "A100-40G")
    whole = station.run("--gpu-mem", "4", "--name", "w", "--", *HOLD, "1")
    whole.report()
    assert apply("balanced")[0] == 75
    refused(
        station.fenka("run", "--no-wait", "--gpu-mem", "4", "--", "true"),
        75,
        r"no GPU fits: 1 of 1 is cordoned.*",
    )
    waiting = station.run("--gpu-mem", "4", "--", "true")
    assert "cordoned" in waiting.says()
    waiting.process.kill()
    whole.end()
    eventually(lambda: layout(station) == BALANCED)
    hold(station, "--mig", "3g.20gb", "--name", "a")
    hold(station, "--mig", "2g.10gb", "--name", "b")
    assert apply("seven")[0] == 75
    refused(
        station.fenka("run", "--no-wait", "--mig", "1g.5gb", "--", "true"),
        75,
        r"no card has room for 1g.5gb: no GPU fits: .*cordoned.*",
    )
    assert apply("balanced")[0] == 0
    assert layout(station) == BALANCED
    assert hold(station, "--mig", "1g.5gb", "--name", "c")["total"] == 4864


def test_layout_is_completed_by_the_next_daemon_when_this_one_is_killed(
    station: Workstation, apply: Apply
) -> None:
    """Also if what was in use has ended meanwhile, and a later layout replaces the one that waits."""
    station.start("--simulate", "A100-40G", "--mig", "all")
    hold(station, "--mig", "3g.20gb", "--name", "a")
    assert apply("whole")[0] == 75
    code, lines = apply("seven")
    assert (code, lines[0]) == (75, "waits: create 0/0 7g.40gb: 0/4 3g.20gb is held by a")
    station.kill_daemon()
    station.start("--simulate", "A100-40G", "--mig", "all")
    assert "waits: destroy 0/4 3g.20gb is held by a" in station.ok("mig", "list")
    station.kill_daemon()
    station.programs[0].end()
    assert layout(station) == ["4 3g.20gb"]
    station.start("--simulate", "A100-40G", "--mig", "all")
    eventually(lambda: layout(station) == ["0 7g.40gb"])
    assert hold(station, "--mig", "7g.40gb", "--name", "b")["total"] == 40320


def test_layout_that_waits_can_be_given_up(station: Workstation, apply: Apply) -> None:
    """What has been done stays, and so does what is in use."""
    station.start("--simulate", "A100-40G", "--mig", "all")
    hold(station, "--mig", "3g.20gb", "--name", "a")
    assert apply("seven")[0] == 75
    assert station.ok("mig", "cancel").splitlines() == [
        "given up: create 0/0 7g.40gb: 0/4 3g.20gb is held by a",
        "given up: destroy 0/4 3g.20gb is held by a",
    ]
    assert station.ok("mig", "cancel") == "nothing waits\n"
    hold(station, "--mig", "1g.5gb", "--name", "b")
    station.programs[0].end()
    eventually(lambda: [each.split()[1] for each in layout(station)] == ["1g.5gb"])


def test_layout_waits_for_an_administrators_program_on_the_card(
    station: Workstation, apply: Apply
) -> None:
    """The card stays whole while a program without a lease has it open."""
    station.start("--simulate", "A100-40G")
    client = Client(station.root / "simulated" / "lib").enter()
    user = f"process {client.pid} ({process_name(client.pid)}) has card 0 open"
    assert apply("seven")[1][:2] == [
        f"waits: enable MIG on card 0: {user}",
        f"waits: create 0/0 7g.40gb: {user}",
    ]
    assert f"waits: enable MIG on card 0: {user}" in station.ok("mig", "list")
    client.kill()
    eventually(lambda: layout(station) == ["0 7g.40gb"])


def test_layout_is_tried_again_when_the_driver_refuses_it_later(
    station: Workstation, apply: Apply
) -> None:
    """A refusal while the administrator waits ends the command, and nothing is repeated."""
    station.start("--simulate", "A100-40G", "--mig", "all")
    simulated = SimulatedNode(station.root / "simulated")
    simulated.fail_mig(0, 1)
    code, lines = apply("seven")
    assert (code, len(lines)) == (1, 1)
    assert "7g.40gb at 0 of GPU-" in lines[0]
    assert "waits" not in station.ok("mig", "list")
    assert not (station.root / "layouts.json").exists()
    hold(station, "--mig", "3g.20gb", "--name", "a")
    assert apply("seven")[0] == 75
    simulated.fail_mig(0, 1)
    station.programs[0].end()
    eventually(lambda: layout(station) == ["0 7g.40gb"])
    log = (station.root / "daemon.log").read_text()
    assert "cannot be created: its place is taken; trying again" in log


def test_daemon_does_not_start_when_the_record_of_layouts_is_damaged(station: Workstation) -> None:
    """It says what to do."""
    station.root.chmod(0o700)
    (station.root / "layouts.json").write_text("{")
    started = station.fenka("daemon", "--background", "--simulate", "A100-40G")
    assert started.returncode != 0
    assert "layouts.json is not understood" in started.stderr
    assert "remove it, start again, and apply the layout again" in started.stderr
