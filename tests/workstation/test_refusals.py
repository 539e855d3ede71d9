"""Invalid input leads to one clear sentence and the right exit code, and changes nothing."""

import contextlib
import json
import socket

import pytest

from fenka.hardware.simulated_node import SimulatedNode
from tests.workstation.conftest import HOLD, Workstation, eventually, refused, workstation_at


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--gpu-mem", "0"], r"'0' is no amount of memory: ask for more than nothing"),
        (["--gpu-mem", "-4"], r"'-4' is no amount of memory: ask for more than nothing"),
        (["--gpu-mem", "much"], r"'much' is no size: write 4 for units of the card, or 4096MiB"),
        (["--gpu-mem", "nan"], r"'nan' is no size: write 4 for units of the card, or 4096MiB"),
        (["--gpu-mem", "1.5"], r"'1.5' is not a whole number of units: write 1536MiB"),
        (["--gpu-mem", "4GB"], r"'GB' in '4GB' is no unit: write 4GiB"),
        (
            ["--gpu-mem", "99999999"],
            r"'99999999' is no amount of memory: .* more than any card has.*",
        ),
        (
            ["--gpu-mem", "15"],
            r"no GPU fits: 1 of 1 has too little memory; the largest card has 14 units, ask for no more",
        ),
        (
            ["--gpu-mem", "16GiB"],
            r"no GPU fits: 1 of 1 has too little memory; the largest card has 15079 MiB, ask for no more",
        ),
        (
            ["--gpu-mem", "1", "--cards", "2"],
            r"no GPU fits: 1 of 1 is without enough others beside it; ask for fewer cards, .*",
        ),
        (["--gpu-mem", "1", "--cards", "0"], r"the number of cards must be 1 to 1024, not 0"),
        (
            ["--gpu-mem", "1", "--model", "H100"],
            r"no GPU fits: 1 of 1 is of another model; the models here are Tesla T4",
        ),
        (["--gpu-mem", "1", "--cards", "17"], r"one lease has at most 16 cards, not 17"),
        (["--gpus", "1", "--gpu-mem", "4"], r"--gpus takes whole cards: .*"),
        (["--gpus", "-1"], r"--gpus: '-1' is no number of whole cards: .*"),
        (["--gpu-mem", "1", "--timeout", "inf"], r"--timeout: 'inf' is no time: .*"),
        (
            [],
            r"no amount given: use --gpu-mem 4 for a slice, --gpus 1 for a card, or --mig .*",
        ),
        (["--gpu-mem", "1", "--gpu-core-mode", "soft"], r"--gpu-core-mode requires --gpu-core"),
        (
            ["--gpus", "1", "--gpu-core", "30"],
            r"--gpus takes whole cards, with all their compute: .*",
        ),
        (["--gpu-mem", "1", "--gang", "0"], r"a gang has 1 to 256 members, not 0"),
        (["--gpu-mem", "1", "--gang", "-2"], r"a gang has 1 to 256 members, not -2"),
        (["--gpu-mem", "1", "--gang", "257"], r"a gang has 1 to 256 members, not 257"),
        (
            ["--gpu-mem", "4", "--gang", "4"],
            r"3 of the gang's 4 would fit together, even if nobody else ran",
        ),
        (
            ["--gpu-mem", "15", "--gang", "2"],
            r"no GPU fits: 1 of 1 has too little memory; the largest card has 14 units, ask for no more",
        ),
        (["--gpus", "1", "--gang", "2"], r"1 of the gang's 2 would fit together, .*"),
        (
            ["--gpu-mem", "1", "--time-limit", "0"],
            r"--time-limit must be a positive number of seconds, got 0",
        ),
        (
            ["--gpu-mem", "1", "--time-limit", "inf"],
            r"--time-limit must be a positive number of seconds, got inf",
        ),
        (
            ["--gpu-mem", "1", "--time-limit", "nan"],
            r"--time-limit must be a positive number of seconds, got nan",
        ),
        (
            ["--gpu-mem", "1", "--priority", "99999999999999999999"],
            r"--priority must be from -1000000 to 1000000, not 99999999999999999999",
        ),
        (["--gpu-mem", "1", "--name", "../x"], r"invalid job name '../x': use letters, .*"),
    ],
)
def test_run_fails_when_its_options_are_invalid(
    t4: Workstation, words: list[str], sentence: str
) -> None:
    """Each error says what is wrong and what to use instead."""
    refused(t4.fenka("run", *words, "--", "true"), 2, sentence)
    assert t4.jobs() == {}


def test_run_fails_when_the_program_does_not_exist(t4: Workstation) -> None:
    """The error comes before a slice is requested."""
    refused(
        t4.fenka("run", "--gpu-mem", "1", "--", "no-such-program"),
        127,
        "there is no program called no-such-program",
    )


def test_run_fails_when_the_name_is_in_use(t4: Workstation) -> None:
    """Names identify jobs, so they are unique."""
    t4.run("--gpu-mem", "1", "--name", "twin", "--", *HOLD, "1").report()
    refused(
        t4.fenka("run", "--gpu-mem", "1", "--name", "twin", "--", "true"),
        2,
        "a job called twin already exists: choose another --name",
    )


def test_log_is_kept_when_its_name_is_requested_again(t4: Workstation) -> None:
    """The second job of a name is refused before it changes the first one's log."""
    detach = ("run", "--gpu-mem", "1", "--name", "night", "--detach", "--")
    t4.ok(*detach, "sh", "-c", "echo begun; exec sleep 1000")
    eventually(lambda: t4.ok("logs", "night") == "begun\n")
    sentence = "a job called night already exists: choose another --name"
    refused(t4.fenka(*detach, "true"), 2, sentence)
    refused(t4.fenka("notebook", "--gpu-mem", "1", "--name", "night", "--detach"), 2, sentence)
    assert t4.ok("logs", "night") == "begun\n"


def test_stop_fails_when_the_job_is_unknown(t4: Workstation) -> None:
    """stop and logs name the unknown job."""
    refused(t4.fenka("stop", "ghost"), 1, "no job is called ghost: `fenka ps` lists them")
    refused(t4.fenka("why", "ghost"), 1, "no job is called ghost: `fenka ps -a` lists jobs")
    refused(
        t4.fenka("logs", "ghost"),
        1,
        "job or service ghost not found on this machine: `fenka ps -a` lists all",
    )


def test_daemon_fails_when_there_is_no_driver(station: Workstation) -> None:
    """Without a driver, the error says how to simulate cards."""
    station.environment["LD_LIBRARY_PATH"] = ""
    result = station.fenka("run", "--gpu-mem", "1", "--", "true")
    if result.returncode == 0:
        pytest.skip("there is a GPU here")
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert "`fenka daemon --background --simulate T4`" in last


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--simulate", "T5"], r".*T5.*T4.*"),
        (["--simulate", "/no/such/file.toml"], r".*/no/such/file.toml.*"),
        (
            ["--simulate", "T4", "--unit", "KiB"],
            r"'KiB' is no unit: use GiB, MiB, or a number of them as 256MiB",
        ),
        (
            ["--simulate", "T4", "--policy", "x"],
            r"no policy is called x: choose one of binpack, spread, random, dotprod, clustering, .*",
        ),
        (["--simulate", "T4", "--only", "7"], r"no card is called 7: here are 0 \(GPU-.*\)"),
    ],
)
def test_daemon_fails_when_its_options_are_invalid(
    station: Workstation, options: list[str], sentence: str
) -> None:
    """One sentence names the valid values."""
    refused(station.fenka("daemon", *options), 2, sentence)


def test_daemon_fails_when_another_serves_the_directory(t4: Workstation) -> None:
    """The second daemon names the first one's process."""
    refused(
        t4.fenka("daemon", "--simulate", "T4"),
        1,
        rf"a fenka daemon is already running here \(process {t4.daemon_pid()}\)",
    )


def test_daemon_fails_when_another_owns_the_card(t4: Workstation) -> None:
    """A second daemon on the same cards names the first one's process."""
    with workstation_at([]) as other:
        other.environment["LD_LIBRARY_PATH"] = str(t4.root / "simulated" / "lib")
        refused(
            other.fenka("daemon"),
            1,
            rf"card 0 \(Tesla T4, GPU-\S+\) is owned by process {t4.daemon_pid()} of user \S+: "
            rf"stop that program .*",
        )


def test_daemon_starts_when_a_stale_socket_exists(station: Workstation) -> None:
    """A socket without a daemon is replaced."""
    station.root.mkdir(exist_ok=True)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(station.root / "daemon.sock"))
    station.start("--simulate", "T4")
    assert station.jobs() == {}


def test_commands_report_it_when_no_daemon_runs(station: Workstation) -> None:
    """ps does not start a daemon, and reports that none runs."""
    refused(station.fenka("ps"), 1, r"no fenka daemon answers at \S+ \(.*\): start one with .*")


def test_daemon_fails_when_its_state_is_damaged(t4: Workstation) -> None:
    """A state file that cannot be read stops the daemon with the file's name."""
    t4.kill_daemon()
    (t4.root / "state.json").write_text('{"boot": 7')
    refused(
        t4.fenka("daemon", "--simulate", "T4"), 1, r"\S+/state.json is not understood \(.*\): .*"
    )
    (t4.root / "state.json").unlink()


def test_daemon_fails_when_a_slice_is_held_and_not_recorded(t4: Workstation) -> None:
    """With its state removed, a daemon finds the program in its lease and does not start."""
    program = t4.run("--gpu-mem", "14", "--", *HOLD, "14000")
    program.report()
    t4.kill_daemon()
    (t4.root / "state.json").unlink()
    refused(
        t4.fenka("daemon", "--simulate", "T4"),
        1,
        rf"processes \[{program.pid}\] hold a slice that \S+/state.json does not record: .*",
    )
    assert SimulatedNode(t4.root / "simulated").running, "the program still computes on its card"
    assert program.end() == 0
    t4.start("--simulate", "T4")
    assert list((t4.root / "leases").iterdir()) == []


def test_run_fails_when_the_lease_cannot_be_written(t4: Workstation) -> None:
    """With the directory removed, run prints one sentence, and no slice is held."""
    (t4.root / "leases").rmdir()
    result = t4.fenka("run", "--gpu-mem", "4", "--", "true")
    assert result.returncode != 0
    assert "leases" in result.stderr.splitlines()[-1]
    (t4.root / "leases").mkdir()
    assert t4.ok("run", "--gpu-mem", "14", "--no-wait", "--", "echo", "free") == "free\n"


def test_client_fails_when_the_directory_is_another_user_s(station: Workstation) -> None:
    """A runtime directory that others can write is not trusted."""
    station.root.chmod(0o777)
    refused(station.fenka("daemon", "--simulate", "T4"), 1, r"\S+ belongs to user \d+ or is .*")
    station.root.chmod(0o700)


def test_daemon_fails_when_the_path_is_too_long(station: Workstation) -> None:
    """The error names the path's length."""
    station.environment["FENKA_RUNTIME"] = str(station.root / ("x" * 120))
    refused(station.fenka("daemon", "--simulate", "T4"), 1, r"\S+ is too long a path .*")


def test_daemon_goes_on_when_messages_are_invalid(t4: Workstation) -> None:
    """Invalid messages are answered or dropped, and the daemon goes on."""
    for garbage in (
        b"\xff\xfe\n",
        b"{}\n",
        b'{"type":"hello","protocol":1,"version":"x"}\n{"a":1}\n',
    ):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(t4.root / "daemon.sock"))
            client.sendall(garbage)
            client.shutdown(socket.SHUT_WR)
            # Reset, where the daemon closes it before it has read all.
            with contextlib.suppress(ConnectionError):
                while client.recv(65536):
                    pass
    assert json.loads(t4.ok("ps", "-o", "json")) == []
