"""Containers of real engines in slices: Debian's Podman with runc and crun, rootful and rootless; Docker."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from e2e.container_engines import ENGINES, Engine
from e2e.container_machine import ALICE, IMAGE, ContainerMachine, eventually, serving

DEVICE = ("--device", "fenka.io/slice=4")
FULL = pytest.mark.full

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the daemon of all users is root's")


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, slice_image: Path) -> Iterator[ContainerMachine]:
    """A machine with one T4: 15079 MiB, 14 units."""
    chosen: Engine = request.param
    with serving(chosen.create(), slice_image) as made:
        yield made


@pytest.fixture(autouse=True)
def _remove_containers(engine: ContainerMachine) -> Iterator[None]:
    yield
    engine.remove_containers()


@pytest.mark.parametrize(
    "options",
    [
        "",
        *(
            pytest.param(f"--{option}", marks=FULL)
            for option in ("user=1000", "read-only", "privileged")
        ),
        *(
            pytest.param(f"--{option}", marks=FULL)
            for option in ("pid=host", "cgroups=disabled", "init")
        ),
    ],
)
def test_last_mib_of_the_slice_fits_and_no_more(engine: ContainerMachine, options: str) -> None:
    """4 units of a T4 are 15079 * 4 // 14 = 4308 MiB, whatever the options; 2 is out of memory."""
    if "cgroups" in options and (engine.engine, engine.runtime) != ("podman", "crun"):
        pytest.skip("only Podman with crun makes no control group")
    for mib, result in ((4308, 0), (4309, 2)):
        done = engine.container(*options.split(), *DEVICE, IMAGE, "slice_client", str(mib))
        assert done.stdout == f"1 4308 {result}\n", done.stderr


def _load_for_alice(engine: ContainerMachine) -> None:
    if engine.engine != "podman":
        pytest.skip("Docker without root is not tried")
    engine.load(ALICE)


@pytest.mark.parametrize(
    "options",
    [
        "",
        *(
            pytest.param(f"--{option}", marks=FULL)
            for option in ("user=1000", "read-only", "userns=keep-id")
        ),
    ],
)
def test_rootless_container_has_its_slice(engine: ContainerMachine, options: str) -> None:
    """It counts for its user, whom the kernel names."""
    _load_for_alice(engine)
    for mib, result in ((4308, 0), (4309, 2)):
        words = (*options.split(), *DEVICE, IMAGE, "slice_client", str(mib))
        done = engine.container(*words, user=ALICE)
        assert done.stdout == f"1 4308 {result}\n", done.stderr
    engine.command("run", "-d", "--name", "a", *DEVICE, IMAGE, "sleep", "1000", user=ALICE)
    (job,) = engine.jobs().values()
    assert (job["user"], job["state"]) == ("alice", "running")
    engine.remove("a", user=ALICE)


@FULL
def test_rootless_container_counts_for_nobody_else(engine: ContainerMachine) -> None:
    """Annotations are the user's own words."""
    _load_for_alice(engine)
    words = ("--annotation", "fenka.io/user=root", *DEVICE, IMAGE, "sleep", "1")
    assert engine.container(*words, user=ALICE).returncode != 0
    log = engine.run("cat", "/run/fenka/daemon.log").stdout
    assert "only root's containers count for others" in log


@FULL
def test_stranger_cannot_name_anothers_container(engine: ContainerMachine) -> None:
    """Her own hook names the first process of root's: it gets nothing, and the container keeps its slice."""
    engine.command("run", "-d", "--name", "roots", *DEVICE, IMAGE, "sleep", "1000")
    before = engine.jobs()
    (job,) = before.values()
    devices = json.loads(engine.run("cat", "/etc/cdi/fenka.json").stdout)["devices"]
    hook = devices[0]["containerEdits"]["hooks"][0]["path"]
    engine.run("tee", "/run/alice/config.json", input="{}", stdin=None)
    state = {"ociVersion": "1.0.2", "id": "hers", "pid": job["pid"], "bundle": "/run/alice"}
    done = engine.run(hook, "slice=4", user=ALICE, input=json.dumps(state), stdin=None)
    sentence = f"fenka: process {job['pid']} is no container of alice, who names it\n"
    assert (done.returncode, done.stderr) == (1, sentence)
    assert {job["id"] for job in engine.jobs().values()} == {job["id"]}


def test_engine_works_while_a_container_is_held(engine: ContainerMachine) -> None:
    """Only the container's program waits."""
    whole = ("--device", "fenka.io/slice=14")
    engine.command("run", "-d", "--name", "first", *whole, IMAGE, "sleep", "1000")
    engine.command("run", "-d", "-i", "--name", "held", *whole, IMAGE, "slice_client", "15000")
    assert engine.command("inspect", "-f", "{{.State.Status}}", "held") == "running"
    assert engine.command("exec", "held", "id", "-u") == "0"
    assert "waiting for this container's slice: place 1 of 1" in engine.logs("held")
    engine.command("stop", "-t", "0", "first")
    eventually(lambda: "1 15079 0" in engine.logs("held"))
    engine.command("run", "-d", "--name", "third", *whole, IMAGE, "slice_client", "1")
    engine.command("stop", "-t", "60", "third")
    assert engine.command("inspect", "-f", "{{.State.ExitCode}}", "third") == "143"


@FULL
def test_killed_container_is_restarted_with_a_new_lease(engine: ContainerMachine) -> None:
    """By its engine, which needs no command of fenka's."""
    engine.command(
        "run", "-d", "--restart", "always", "--name", "again", *DEVICE, IMAGE, "sleep", "1000"
    )
    (job,) = engine.jobs().values()
    os.kill(job["pid"], signal.SIGKILL)
    again = eventually(
        lambda: next((j for j in engine.jobs().values() if j["pid"] != job["pid"]), None)
    )
    assert (again["name"], again["state"]) == (job["name"], "running")
    assert again["id"] != job["id"]


@FULL
def test_containers_outlive_the_daemon(engine: ContainerMachine) -> None:
    """One that runs goes on, one that is held is granted by the next daemon, and one that starts waits."""
    most = ("--device", "fenka.io/slice=12")
    engine.command("run", "-d", "--name", "first", *most, IMAGE, "sleep", "1000")
    engine.command("run", "-d", "-i", "--name", "held", *most, IMAGE, "slice_client", "9000")
    engine.kill_daemon()
    engine.command("stop", "-t", "0", "first")
    with ThreadPoolExecutor(1) as pool:
        small = ("run", "-d", "-i", "--device", "fenka.io/slice=1", IMAGE, "slice_client", "1077")
        starting = pool.submit(engine.command, *small)
        engine.start_daemon()
        name = starting.result()
    eventually(lambda: "1 12924 0" in engine.logs("held"))
    eventually(lambda: "1 1077 0" in engine.logs(name))


def test_containers_root_cannot_change_its_limits(engine: ContainerMachine) -> None:
    """It lacks the capability, and the mounts are read-only."""
    attempts = (
        "busybox umount /run/fenka/lease; busybox mount -o remount,rw /run/fenka/lease",
        "echo x > /run/fenka/lease/control; rm -f /run/fenka/lease/control /etc/ld.so.preload",
        "unset LD_PRELOAD; exec slice_client 4309",
    )
    done = engine.container(*DEVICE, IMAGE, "sh", "-c", "; ".join(attempts))
    assert done.stdout == "1 4308 2\n", done.stderr


@FULL
def test_image_cannot_lead_the_lease_elsewhere(engine: ContainerMachine) -> None:
    """Its links are resolved in the container only, and its environment does not replace the shim."""
    hosts = sorted(os.listdir("/etc"))
    script = "busybox mkdir -p /run; rm -rf /run/fenka; ln -s /etc /run/fenka"
    engine.command("run", "--name", "links", IMAGE, "sh", "-c", script)
    environment = ("-c", "ENV LD_PRELOAD=/x.so", "-c", "ENV FENKA_PRIORITY=9")
    engine.command("commit", *environment, "links", "localhost/hostile")
    done = engine.container(*DEVICE, "localhost/hostile", "slice_client", "4309")
    assert done.stdout in ("1 4308 2\n", "")
    assert sorted(os.listdir("/etc")) == hosts


@FULL
def test_twenty_starts_leave_no_mount_of_fenkas(engine: ContainerMachine) -> None:
    """Each has ten; all are in the container's namespace, and end with it."""

    def mounts() -> list[str]:
        lines = engine.run("cat", "/proc/self/mountinfo").stdout.splitlines()
        return sorted(line.split(" ", 2)[2] for line in lines if "fenka" in line)

    before = mounts()
    for _ in range(20):
        assert engine.container(*DEVICE, IMAGE, "slice_client", "1").returncode == 0
    eventually(lambda: not engine.jobs())
    assert mounts() == before


@FULL
def test_twenty_at_once_get_their_turns(engine: ContainerMachine) -> None:
    """14 of one unit fit, and each finds its whole slice free when its turn comes."""

    def run(_: int) -> str:
        done = engine.container(
            "--device", "fenka.io/slice=1", IMAGE, "sh", "-c", "slice_client 1077 && sleep 1"
        )
        return done.stdout

    with ThreadPoolExecutor(20) as pool:
        assert [*pool.map(run, range(20))] == ["1 1077 0\n"] * 20
