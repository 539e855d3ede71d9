"""`fenka run --gang`: members start together or not at all, and nothing leaks whatever is killed."""

import json
import os
import pty
import select
import signal
import sys
from collections.abc import Callable

import pytest

from tests.workstation.conftest import (
    HOLD,
    Program,
    Workstation,
    eventually,
    kill,
    refused,
)

SLEEP = ["sh", "-c", "echo begun; exec sleep 1000"]


def begun(program: Program, size: int) -> None:
    """Wait until all members have reported."""
    assert program.process.stdout
    lines = [program.process.stdout.readline() for _ in range(size)]
    assert sorted(lines) == [f"[{rank}] begun\n" for rank in range(size)]


def processes(station: Workstation, name: str) -> list[int]:
    """Return the first process of each member, by rank."""
    jobs = station.jobs()
    members = sorted((job["rank"], job["pid"]) for job in jobs.values() if job["gang"] == name)
    return [pid for _, pid in members]


def nothing_left(station: Workstation) -> bool:
    """Return whether no job and no lease is left."""
    return not station.jobs() and not list((station.root / "leases").iterdir())


def test_each_member_has_a_slice_and_a_rank(t4: Workstation) -> None:
    """Lines begin with the rank, each program has its own limit, and the exit code is 0 if all succeed."""
    code = "import os, json; print(json.dumps({k: v for k, v in os.environ.items() if "
    code += "k in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', "
    code += "'MASTER_PORT', 'FENKA_GANG_RANK', 'FENKA_GANG_SIZE')}))"
    text = t4.ok("run", "--gang", "3", "--gpu-mem", "4", "--", sys.executable, "-c", code)
    reports = {line[:4]: json.loads(line[4:]) for line in text.splitlines()}
    (port,) = {variables.pop("MASTER_PORT") for variables in reports.values()}
    assert 0 < int(port) < 65536
    assert reports == {
        f"[{rank}] ": {
            "RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "FENKA_GANG_RANK": str(rank),
            "FENKA_GANG_SIZE": "3",
        }
        for rank in range(3)
    }
    # 4 of 14 units are 15079 * 4 // 14 = 4308 MiB: 4000 fit, and 4000 of all three at once.
    held = t4.ok("run", "--gang", "3", "--gpu-mem", "4", "--", *HOLD, "4000")
    cards = [{"result": 0, "free": 308, "total": 4308}]
    assert [json.loads(line[4:]) for line in held.splitlines()] == [{"cards": cards}] * 3
    eventually(lambda: nothing_left(t4))


def test_gang_is_one_queue_entry_when_it_waits(t4: Workstation) -> None:
    """Two of three members would fit, so none starts. Later entries wait, too."""
    holder = t4.run("--gpu-mem", "6", "--name", "holder", "--", *HOLD, "1")
    holder.report()
    gang = t4.run("--gang", "3", "--gpu-mem", "4", "--name", "g", "--", *SLEEP)
    sentence = "no GPU fits: 1 of 1 has too little memory; 2 of the gang's 3 would fit together"
    assert gang.says() == f"fenka: waiting, position 1 of 1: {sentence}"
    behind = t4.run("--gpu-mem", "4", "--name", "behind", "--", *HOLD, "1")
    assert "position 2 of 2" in behind.says()
    (first, second) = json.loads(t4.ok("queue", "-o", "json"))
    assert (first["name"], first["asks"], first["reserved"], first["why"]) == (
        "g",
        "gang of 3: 4",
        ["0"],
        sentence,
    )
    assert (second["name"], second["position"]) == ("behind", 2)
    assert holder.end() == 0
    begun(gang, 3)
    assert sorted(name for name, job in t4.jobs().items() if job["state"] == "running") == [
        "g/0",
        "g/1",
        "g/2",
    ]


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("[ $RANK = 1 ] && exit 7; exec sleep 1000", 7),
        ("[ $RANK = 2 ] && kill -9 $$; exec sleep 1000", 128 + signal.SIGKILL),
        ("[ $RANK = 0 ] && exit 0; exit 3", 3),
        ("exec /dev/null", 126),
        # What a member leaves behind in its process group goes with it.
        ("sleep 1000 & [ $RANK = 1 ] && exit 5; exec sleep 1000", 5),
    ],
)
def test_all_members_end_when_one_fails(t4: Workstation, script: str, status: int) -> None:
    """The exit code is that of the first member that failed."""
    result = t4.fenka("run", "--gang", "3", "--gpu-mem", "4", "--", "sh", "-c", script)
    assert result.returncode == status
    eventually(lambda: nothing_left(t4))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_all_members_end_when_run_gets_a_signal(t4: Workstation, number: signal.Signals) -> None:
    """Each member gets the signal once."""
    code = "import os, signal, time\n"
    code += f"signal.signal({int(number)}, lambda *_: (print('told', flush=True), os._exit(0)))\n"
    code += "print('begun', flush=True)\ntime.sleep(1000)"
    gang = t4.run("--gang", "2", "--gpu-mem", "4", "--", sys.executable, "-c", code)
    begun(gang, 2)
    os.kill(gang.pid, number)
    assert gang.process.wait() == 128 + number
    assert gang.process.stdout
    assert sorted(gang.process.stdout.read().splitlines()) == ["[0] told", "[1] told"]
    eventually(lambda: nothing_left(t4))


def test_all_members_end_when_run_is_killed(t4: Workstation) -> None:
    """Processes that have left their member's process group end, too."""
    script = "setsid sleep 1000 & echo begun; exec sleep 1000"
    gang = t4.run("--gang", "3", "--gpu-mem", "4", "--name", "g", "--", "sh", "-c", script)
    begun(gang, 3)
    assert all(len(job["pids"]) == 2 for job in t4.jobs().values())
    kill(gang.pid)
    eventually(lambda: nothing_left(t4))


def test_pending_gang_is_removed_when_run_is_killed(t4: Workstation) -> None:
    """No member is started."""
    holder = t4.run("--gpu-mem", "14", "--", *HOLD, "1")
    holder.report()
    gang = t4.run("--gang", "2", "--gpu-mem", "4", "--name", "g", "--", *SLEEP)
    gang.says()
    kill(gang.pid)
    eventually(lambda: "g" not in t4.jobs())
    assert holder.end() == 0
    eventually(lambda: nothing_left(t4))


def test_gangs_and_their_order_are_kept_when_the_daemon_was_killed(t4: Workstation) -> None:
    """The running gang goes on, the pending one stays complete, and both end normally."""
    running = t4.run("--gang", "2", "--gpu-mem", "7", "--name", "runs", "--", *SLEEP)
    begun(running, 2)
    waiting = t4.run("--gang", "3", "--gpu-mem", "4", "--name", "waits", "--", *SLEEP)
    assert "position 1 of 1" in waiting.says()
    t4.kill_daemon()
    eventually(lambda: t4.fenka("ps").returncode == 0)
    jobs = t4.jobs()
    assert {name: job["state"] for name, job in jobs.items()} == {
        "runs/0": "running",
        "runs/1": "running",
        "waits": "waiting",
    }
    assert jobs["waits"]["size"] == 3
    kill(processes(t4, "runs")[1])
    assert running.process.wait() == 128 + signal.SIGKILL
    begun(waiting, 3)
    t4.kill_daemon()
    kill(waiting.pid)
    t4.start("--simulate", "T4")
    eventually(lambda: nothing_left(t4))


def test_whole_gang_ends_when_it_is_stopped(t4: Workstation) -> None:
    """This holds for the gang's name and a member's, running or pending."""
    for name in ("g", "g/1"):
        gang = t4.run("--gang", "2", "--gpu-mem", "7", "--name", "g", "--", *SLEEP)
        begun(gang, 2)
        waits = t4.run("--gang", "2", "--gpu-mem", "7", "--name", "w", "--", *SLEEP)
        waits.says()
        assert t4.ok("stop", "w") == "w: stopped\n"
        assert waits.process.wait() == 2
        assert t4.ok("stop", name) == "g: stopped\n"
        assert gang.process.wait() == 128 + signal.SIGTERM
        assert nothing_left(t4)


def test_gang_is_logged_by_rank_when_it_is_detached(t4: Workstation) -> None:
    """There is one log with ranks, and one for each member without."""
    words = ("run", "--gang", "2", "--gpu-mem", "7", "--name", "night", "--detach", "--")
    script = "echo begun $RANK; exec sleep 1000"
    assert t4.ok(*words, "sh", "-c", script) == "night: started, see `fenka logs night`\n"
    eventually(
        lambda: sorted(t4.ok("logs", "night").splitlines()) == ["[0] begun 0", "[1] begun 1"]
    )
    assert t4.ok("logs", "night/1") == "begun 1\n"
    refused(t4.fenka(*words, "true"), 2, "a job called night already exists: choose another .*")
    later = ("run", "--gang", "2", "--gpu-mem", "5", "--name", "later", "--detach", "--", "true")
    assert t4.ok(*later).startswith("later: waiting, position 1 of 1: ")
    # It is told of changes although nobody listens any more.
    t4.ok("run", "--gpu-mem", "4", "--name", "last", "--detach", "--", "sleep", "1000")
    assert [row["name"] for row in json.loads(t4.ok("queue", "-o", "json"))] == ["later", "last"]
    assert t4.ok("stop", "night") == "night: stopped\n"
    eventually(lambda: list(t4.jobs()) == ["last"])


def test_members_have_slices_on_two_cards_when_that_is_requested(station: Workstation) -> None:
    """Each member has a slice and half of the time of both cards: two members fit, a third never does."""
    station.start("--simulate", "T4*2")
    words = ("--gpu-mem", "4", "--cards", "2", "--gpu-core", "50")
    text = station.ok("run", "--gang", "2", *words, "--", *HOLD, "1")
    totals = [
        [card["total"] for card in json.loads(line[4:])["cards"]] for line in text.splitlines()
    ]
    assert totals == [[4308, 4308]] * 2
    gang = station.run("--gang", "2", *words, "--name", "g", "--", *SLEEP)
    begun(gang, 2)
    for member in ("g/0", "g/1"):
        slices = station.jobs()[member]["slices"]
        assert [(piece["card"], piece["compute"]) for piece in slices] == [(0, 50), (1, 50)]
    refused(
        station.fenka("run", "--gang", "3", *words, "--", "true"),
        2,
        "2 of the gang's 3 would fit together, even if nobody else ran",
    )


def test_one_member_changes_when_it_is_resized(t4: Workstation) -> None:
    """A gang's name alone does not say which."""
    begun(t4.run("--gang", "2", "--gpu-mem", "4", "--name", "g", "--", *SLEEP), 2)
    assert t4.ok("resize", "g/1", "--gpu-mem", "6") == "g/1: resized\n"
    refused(
        t4.fenka("resize", "g", "--gpu-mem", "6"),
        1,
        "g is a gang: resize its members one by one, beginning with g/0",
    )


def test_gang_ends_when_its_time_limit_is_over(t4: Workstation) -> None:
    """--time-limit counts for all of it."""
    gang = t4.run("--gang", "2", "--gpu-mem", "4", "--time-limit", "0.5", "--", *SLEEP)
    # On a busy machine the limit may end a member before it has reported.
    assert gang.process.wait() == 128 + signal.SIGTERM
    eventually(lambda: nothing_left(t4))


def test_gang_runs_when_isolation_is_cooperative(t4: Workstation) -> None:
    """By environment alone; and what is left is found and ended by it."""
    words = ("--gang", "2", "--gpu-mem", "4", "--isolation", "cooperative", "--")
    held = t4.ok("run", *words, *HOLD, "4400")
    assert [json.loads(line[4:])["cards"][0]["result"] for line in held.splitlines()] == [2, 2]
    gang = t4.run(*words, "sh", "-c", "setsid sleep 1000 & echo begun; exec sleep 1000")
    begun(gang, 2)
    kill(gang.pid)
    eventually(lambda: nothing_left(t4))


# The first prints without end, the others nothing; none heeds the signals that ask politely.
TALK = """
trap '' HUP TERM
echo begun
while [ "$RANK" = 0 ]; do echo on; sleep 0.01; done
exec sleep 1000
"""


def on_a_terminal(station: Workstation, *words: str) -> tuple[int, int]:
    """`fenka run WORDS` as what a terminal was opened for: its process, and the terminal's other end."""
    pid, terminal = pty.fork()
    if pid == 0:
        command = [*station.prefix, sys.executable, "-m", "fenka", "run", *words]
        os.execvpe(command[0], command, station.environment)
    return pid, terminal


def read_until(terminal: int, count: int, word: bytes) -> None:
    """As many lines with the word as that."""
    output = b""
    while output.count(word) < count:
        output += os.read(terminal, 4096)


@pytest.mark.parametrize("daemon_first", [True, False])
def test_gang_ends_when_daemon_and_terminal_are_gone(t4: Workstation, daemon_first: bool) -> None:
    """In whichever order; nobody else would end it."""
    words = ("--gang", "2", "--gpu-mem", "4", "--name", "g", "--", "sh", "-c", TALK)
    supervisor, terminal = on_a_terminal(t4, *words)
    read_until(terminal, 2, b"begun")
    members = processes(t4, "g")
    gone = [os.pidfd_open(pid) for pid in members]
    losses: list[Callable[[], None]] = [t4.kill_daemon, lambda: os.close(terminal)]
    for lose in losses if daemon_first else reversed(losses):
        lose()
    os.waitpid(supervisor, 0)
    for descriptor in gone:
        assert select.select([descriptor], [], [])[0]
        os.close(descriptor)


def test_members_end_when_run_is_killed_without_a_daemon(
    t4: Workstation,
) -> None:
    """Without anybody to tell them."""
    program = t4.run("--gang", "2", "--gpu-mem", "4", "--name", "g", "--", *SLEEP)
    begun(program, 2)
    gone = [os.pidfd_open(pid) for pid in processes(t4, "g")]
    t4.kill_daemon()
    kill(program.pid)
    for descriptor in gone:
        assert select.select([descriptor], [], [])[0]
        os.close(descriptor)


def test_gang_goes_on_when_it_ignores_hang_ups(t4: Workstation) -> None:
    """As nohup has it."""
    words = ("--gang", "2", "--gpu-mem", "4", "--name", "g", "--", "sh", "-c")
    t4.prefix = ["env", "--ignore-signal=HUP"]
    script = "echo begun; until [ -e $FENKA_RUNTIME/end ]; do sleep 0.05; done"
    supervisor, terminal = on_a_terminal(t4, *words, script)
    read_until(terminal, 2, b"begun")
    os.close(terminal)
    os.kill(supervisor, signal.SIGHUP)
    assert len(processes(t4, "g")) == 2
    (t4.root / "end").touch()
    assert os.waitstatus_to_exitcode(os.waitpid(supervisor, 0)[1]) == 0
