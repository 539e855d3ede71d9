"""The daemon and the commands, as users see them, on simulated cards."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from fenka.hardware.peer_credentials import peer
from tests.workstation.conftest import HOLD, Workstation, eventually, kill

CAP = 4308
"""4 units of a T4: 15079 * 4 // 14 MiB."""


def test_fourth_program_waits_when_three_share_the_card(t4: Workstation) -> None:
    """Three programs of 4 units fit; the fourth waits."""
    running = [t4.run("--gpu-mem", "4", "--name", f"n{i}", "--", *HOLD, "100") for i in range(3)]
    for program in running:
        assert program.report() == {"cards": [{"result": 0, "free": CAP - 100, "total": CAP}]}
    fourth = t4.run("--gpu-mem", "4", "--name", "n3", "--", *HOLD, "100")
    assert fourth.says() == (
        "fenka: waiting, position 1 of 1: no GPU fits: 1 of 1 has too little memory"
    )
    assert t4.ok("top", "node", "-s").splitlines()[-1] == "12/14 (GiB) (85%)"
    assert running[1].end() == 0
    assert fourth.report()["cards"][0]["total"] == CAP


def test_allocation_fails_when_it_exceeds_the_slice(t4: Workstation) -> None:
    """CUDA_ERROR_OUT_OF_MEMORY is 2; the neighbour keeps what it has."""
    neighbour = t4.run("--gpu-mem", "4", "--", *HOLD, "4000")
    assert neighbour.report()["cards"][0]["result"] == 0
    greedy = t4.run("--gpu-mem", "4", "--", *HOLD, "4400")
    assert greedy.report() == {"cards": [{"result": 2, "free": CAP, "total": CAP}]}


def test_limit_holds_when_the_environment_is_empty(t4: Workstation) -> None:
    """Programs started with env -i or a login shell find the card, and have its limit."""
    program = t4.run("--gpu-mem", "4", "--", "env", "-i", *HOLD, "4400")
    assert program.report() == {"cards": [{"result": 2, "free": CAP, "total": CAP}]}


def test_run_has_the_program_s_pid_output_and_exit_code(t4: Workstation) -> None:
    """Input, output and exit code are those of the program."""
    result = t4.fenka(
        "run", "--gpu-mem", "1", "--", "sh", "-c", "cat; echo err >&2; exit 7", input="hello"
    )
    assert (result.returncode, result.stdout, result.stderr) == (7, "hello", "err\n")


def test_program_gets_signals_when_they_are_sent_to_run(t4: Workstation) -> None:
    """`fenka run` and the program are the same process."""
    code = "import signal, sys; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(9)); "
    code += "print('\"ready\"', flush=True); signal.pause()"
    program = t4.run("--gpu-mem", "1", "--", sys.executable, "-c", code)
    assert program.report() == "ready"
    os.kill(program.pid, signal.SIGUSR1)
    assert program.process.wait() == 9


def test_slice_is_free_when_its_program_was_killed(t4: Workstation) -> None:
    """SIGKILL of the program releases its slice."""
    program = t4.run("--gpu-mem", "14", "--name", "all", "--", *HOLD, "14000")
    assert program.report()["cards"][0]["result"] == 0
    os.kill(program.pid, signal.SIGKILL)
    eventually(lambda: not t4.jobs())
    again = t4.run("--gpu-mem", "14", "--", *HOLD, "14000")
    assert again.report()["cards"][0]["result"] == 0
    assert not (t4.root / "leases" / "all").exists()


def test_slice_is_kept_when_a_detached_child_runs(t4: Workstation) -> None:
    """A daemonised grandchild without open descriptors keeps the slice until it ends."""
    code = (
        "import os, signal, sys\n"
        "if os.fork():\n"
        "    sys.exit()\n"
        "os.setsid()\n"
        "if os.fork():\n"
        "    os._exit(0)\n"
        "print(os.getpid(), flush=True)\n"
        "os.closerange(0, 1024)\n"
        "signal.pause()\n"
    )
    program = t4.run("--gpu-mem", "14", "--name", "tree", "--", sys.executable, "-c", code)
    child = program.report()
    assert program.process.wait() == 0
    assert t4.jobs()["tree"]["pids"] == [child]
    waiting = t4.run("--gpu-mem", "1", "--", *HOLD, "1")
    assert "waiting, position 1" in waiting.says()
    os.kill(child, signal.SIGKILL)
    assert waiting.report()["cards"][0]["result"] == 0


def test_leases_and_order_are_kept_when_the_daemon_was_killed(t4: Workstation) -> None:
    """Programs go on. Pending clients start a new daemon and keep their places."""
    holder = t4.run("--gpu-mem", "14", "--name", "holder", "--", *HOLD, "10000")
    assert holder.report()["cards"][0]["result"] == 0
    waiting = []
    for name in ("first", "second", "third"):
        waiting.append(t4.run("--gpu-mem", "8", "--name", name, "--", *HOLD, "8000"))
        assert f"position {len(waiting)} of" in waiting[-1].says()
    t4.kill_daemon()
    eventually(lambda: t4.fenka("ps").returncode == 0)
    states = {name: (job["state"], job["position"]) for name, job in t4.jobs().items()}
    assert states == {
        "holder": ("running", None),
        "first": ("waiting", 1),
        "second": ("waiting", 2),
        "third": ("waiting", 3),
    }
    assert holder.end() == 0
    assert waiting[0].report()["cards"][0]["result"] == 0
    assert t4.jobs()["second"]["state"] == "waiting"
    assert waiting[0].end() == 0
    assert waiting[1].report()["cards"][0]["result"] == 0


def test_slice_is_free_when_its_program_ended_without_a_daemon(t4: Workstation) -> None:
    """The next daemon notices what ended while no daemon ran."""
    program = t4.run("--gpu-mem", "14", "--", *HOLD, "1")
    program.report()
    t4.kill_daemon()
    assert program.end() == 0
    # It may wait: a look at the processes is incomplete while others of the machine come and go.
    assert t4.ok("run", "--gpu-mem", "14", "--", "echo", "free") == "free\n"


def test_run_reports_the_reason_when_it_does_not_wait(t4: Workstation) -> None:
    """Exit code 75, one sentence, and no place in the queue left behind."""
    program = t4.run("--gpu-mem", "14", "--name", "holder", "--", *HOLD, "1")
    program.report()
    refused = t4.fenka("run", "--gpu-mem", "4", "--no-wait", "--", "true")
    assert (refused.returncode, refused.stderr) == (
        75,
        "fenka: no GPU fits: 1 of 1 has too little memory\n",
    )
    late = t4.fenka("run", "--gpu-mem", "4", "--timeout", "0.2", "--", "true")
    assert late.returncode == 75
    # On a busy machine the time may be over before the daemon has answered.
    assert late.stderr.splitlines()[-1] in (
        "fenka: gave up waiting: no GPU fits: 1 of 1 has too little memory",
        "fenka: gave up waiting: the daemon has not answered yet",
    )
    assert list(eventually(lambda: len(t4.jobs()) == 1 and t4.jobs())) == ["holder"]


def test_program_is_listed_logged_and_stopped_when_it_is_detached(t4: Workstation) -> None:
    """--detach gives the prompt back; ps, logs and stop find it by name."""
    words = ("run", "--gpu-mem", "14", "--name", "night", "--detach", "--")
    started = t4.ok(*words, "sh", "-c", "echo begun; exec sleep 1000")
    assert started == "night: started, see `fenka logs night`\n"
    waits = t4.ok("run", "--gpu-mem", "4", "--name", "next", "--detach", "--", "sleep", "1000")
    assert waits == (
        "next: waiting, position 1 of 1: no GPU fits: 1 of 1 has too little memory; it starts by itself\n"
    )
    eventually(lambda: t4.ok("logs", "night") == "begun\n")
    assert t4.ok("stop", "night") == "night: stopped\n"
    eventually(lambda: t4.jobs()["next"]["state"] == "running")
    assert t4.ok("stop", "next") == "next: stopped\n"
    assert t4.jobs() == {}


def test_all_jobs_of_a_user_end_when_all_are_stopped(t4: Workstation) -> None:
    """What runs and what waits, without their names."""
    assert t4.ok("stop", "--all") == "you have no jobs on this machine\n"
    t4.ok("run", "--gpu-mem", "14", "--detach", "--name", "first", "--", "sleep", "600")
    waiting = t4.run("--gpu-mem", "4", "--name", "second", "--", "true")
    waiting.says()
    stopped = t4.ok("stop", "--all", "--grace", "1m").splitlines()
    assert sorted(stopped) == ["first: stopped", "second: stopped"]
    assert t4.jobs() == {}


def test_pending_job_is_removed_when_it_is_stopped(t4: Workstation) -> None:
    """The job leaves the queue, and its command reports the reason."""
    t4.ok("run", "--gpu-mem", "14", "--detach", "--name", "all", "--", "sleep", "1000")
    waiting = t4.run("--gpu-mem", "4", "--name", "waits", "--", "true")
    waiting.says()
    assert t4.ok("stop", "waits") == "waits: stopped\n"
    assert waiting.process.wait() == 2
    assert waiting.says() == "fenka: stopped while it waited"
    assert list(t4.jobs()) == ["all"]


def test_program_ends_when_its_time_limit_is_over(t4: Workstation) -> None:
    """The program gets SIGTERM, and its slice is released."""
    program = t4.run("--gpu-mem", "4", "--time-limit", "0.1", "--", "sleep", "1000")
    assert program.process.wait() == -signal.SIGTERM
    eventually(lambda: not t4.jobs())


def test_program_ends_when_its_time_limit_is_over_at_the_daemon_s_restart(t4: Workstation) -> None:
    """The deadline is recorded. Instead of waiting for it, the test moves it into the past."""
    program = t4.run("--gpu-mem", "4", "--time-limit", "3600", "--name", "long", "--", *HOLD, "1")
    program.report()
    job = t4.jobs()["long"]
    assert job["requested_at"] + 3600 <= job["deadline"] <= job["started_at"] + 3600
    t4.kill_daemon()
    state = json.loads((t4.root / "state.json").read_text())
    state["jobs"][0]["deadline"] = job["started_at"]
    (t4.root / "state.json").write_text(json.dumps(state))
    t4.start("--simulate", "T4")
    assert program.process.wait() == -signal.SIGTERM
    eventually(lambda: not t4.jobs())


def test_job_is_backfilled_when_it_ends_before_the_reservation(t4: Workstation) -> None:
    """A job of 2 units starts if its time limit ends before the reservation of the card."""
    t4.run("--gpu-mem", "12", "--time-limit", "600", "--name", "long", "--", *HOLD, "1").report()
    t4.run("--gpu-mem", "14", "--name", "all", "--", *HOLD, "1").says()
    late = t4.fenka("run", "--gpu-mem", "2", "--time-limit", "700", "--no-wait", "--", "true")
    assert (late.returncode, late.stderr) == (
        75,
        "fenka: no GPU fits: 1 of 1 is reserved for requests before it\n",
    )
    t4.ok("run", "--gpu-mem", "2", "--time-limit", "60", "--no-wait", "--", "true")
    refused = t4.fenka("run", "--gpu-mem", "2", "--no-wait", "--", "true")
    assert refused.returncode == 75
    # Whoever is more important than who waits need not care.
    t4.ok("run", "--gpu-mem", "2", "--priority", "1", "--no-wait", "--", "true")


def test_simulated_driver_is_reopened_when_the_card_server_was_killed(t4: Workstation) -> None:
    """A crash of the simulated driver ends the programs on it, but neither the daemon nor later programs."""
    on_it = t4.run("--gpu-mem", "4", "--name", "on-it", "--", *HOLD, "4000")
    assert on_it.report()["cards"][0]["result"] == 0
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(t4.root / "simulated" / "server.sock"))
        kill(peer(line).pid)
    again = t4.run("--gpu-mem", "10", "--", *HOLD, "10000")
    assert again.report()["cards"][0]["result"] == 0
    assert next(iter(t4.jobs())) == "on-it"


def test_card_is_not_leased_when_it_is_lost(station: Workstation) -> None:
    """Programs on the other card go on. A request for the lost card is granted when it recovers."""
    station.start("--simulate", "T4*2")
    other = station.run("--gpu-mem", "14", "--name", "other", "--", *HOLD, "14000")
    assert other.report()["cards"][0]["result"] == 0
    assert station.jobs()["other"]["slices"][0]["card"] == 0
    station.ok("sim", "card", "1", "--lose")
    assert "it has fallen off the bus" in station.fenka("doctor").stdout
    refused = station.fenka("run", "--gpu-mem", "4", "--no-wait", "--", "true")
    assert refused.stderr == (
        "fenka: no GPU fits: 1 of 2 has too little memory, 1 is unhealthy; card 1: it has fallen off the "
        "bus\n"
    )
    waiting = station.run("--gpu-mem", "4", "--", *HOLD, "100")
    assert "1 is unhealthy" in waiting.says()
    station.ok("sim", "card", "1", "--recover")
    assert waiting.report()["cards"][0]["result"] == 0
    assert other.end() == 0


def test_context_is_charged_to_the_slice(station: Workstation) -> None:
    """The driver's context overhead is part of the slice, so full slices fit the card."""
    spec = station.root / "cards.toml"
    spec.write_text('version = 1\n[[card]]\nmodel = "T4"\ncontext_mib = 300\n')
    station.start("--simulate", str(spec))
    # 7 of 14 units are 15079 * 7 // 14 = 7539 MiB, of which 300 go to the context. Pages have 2 MiB.
    program = station.run("--gpu-mem", "7", "--", *HOLD, "7238")
    assert program.report() == {"cards": [{"result": 0, "free": 1, "total": 7539}]}
    assert "context 300 MiB a process" in station.ok("doctor")
    neighbour = station.run("--gpu-mem", "7", "--", *HOLD, "7240")
    assert neighbour.report() == {"cards": [{"result": 2, "free": 7239, "total": 7539}]}


def test_units_are_per_card_when_cards_differ(station: Workstation) -> None:
    """With --cards 2 the program sees two cards, each with its own limit."""
    station.start("--simulate", "T4,P4")
    program = station.run("--gpu-mem", "4", "--cards", "2", "--", *HOLD, "100")
    # P4: 7611 MiB are 7 units, 4 of them 7611 * 4 // 7 = 4349 MiB.
    assert [card["total"] for card in program.report()["cards"]] == [4308, 4349]
    assert station.ok("top", "node", "-s").splitlines()[-1] == "8/21 (GiB) (38%)"


def test_program_sees_only_the_second_card_when_its_slice_is_there(station: Workstation) -> None:
    """The program sees one card, the second, as its card 0."""
    station.start("--simulate", "T4,P4")
    program = station.run("--gpu-mem", "4", "--model", "Tesla P4", "--", *HOLD, "100")
    assert [card["total"] for card in program.report()["cards"]] == [4349]


def test_card_is_exclusive_when_it_is_requested_whole(station: Workstation) -> None:
    """--gpus takes unused cards and shares them with no other job."""
    station.start("--simulate", "T4*2")
    shared = station.run("--gpu-mem", "1", "--", *HOLD, "1")
    shared.report()
    whole = station.run("--gpus", "1", "--name", "whole", "--", *HOLD, "15000")
    assert whole.report()["cards"][0] == {"result": 0, "free": 79, "total": 15079}
    refused = station.fenka("run", "--gpus", "1", "--no-wait", "--", "true")
    assert refused.stderr == "fenka: no GPU fits: 1 of 2 is in use, 1 is taken whole\n"
    assert station.ok("top", "node").splitlines()[-1] == "1/2 (50%)"


def test_cooperative_isolation_is_used_only_when_it_is_requested(t4: Workstation) -> None:
    """The limit holds for a program that does not undo it, and doctor lists such jobs."""
    program = t4.run(
        "--gpu-mem", "4", "--isolation", "cooperative", "--name", "loose", "--", *HOLD, "4400"
    )
    assert program.report() == {"cards": [{"result": 2, "free": CAP, "total": CAP}]}
    assert "these programs could undo their limits: loose" in t4.ok("doctor")
    assert program.end() == 0
    eventually(lambda: not t4.jobs())


def test_doctor_lists_processes_that_have_no_lease(t4: Workstation) -> None:
    """A program that was not started by fenka has no lease."""
    environment = t4.environment | {"LD_LIBRARY_PATH": str(t4.root / "simulated" / "lib")}
    with subprocess.Popen(
        [*HOLD, "1000"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as outside:
        assert outside.stdin
        assert outside.stdout
        outside.stdout.readline()
        named = f"programs without a lease use it: process {outside.pid} of "
        assert named in t4.ok("doctor")
        assert ", 1000 MiB): start them with `fenka run`" in t4.ok("doctor")
        outside.stdin.close()


def test_run_fails_when_it_is_inside_a_lease(t4: Workstation) -> None:
    """`fenka run` inside a lease is refused."""
    fenka = (sys.executable, "-m", "fenka")
    result = t4.fenka("run", "--gpu-mem", "1", "--", *fenka, "run", "--gpu-mem", "1", "--", "true")
    assert (result.returncode, result.stderr) == (
        2,
        "fenka: this shell is inside a lease already: leave it to ask for another one\n",
    )


def test_emptiest_card_is_used_when_the_policy_is_spread(station: Workstation) -> None:
    """--policy spread puts the second program on the second card, binpack on the first."""
    station.start("--simulate", "T4*2", "--policy", "spread")
    for name in ("a", "b"):
        station.run("--gpu-mem", "2", "--name", name, "--", *HOLD, "1").report()
    assert sorted(job["slices"][0]["card"] for job in station.jobs().values()) == [0, 1]


def test_sizes_are_in_mib_when_the_unit_is_mib(station: Workstation) -> None:
    """With --unit MiB, numbers without a unit are MiB, also on the screens."""
    station.start("--simulate", "T4", "--unit", "MiB")
    program = station.run("--gpu-mem", "512", "--", *HOLD, "1")
    assert program.report()["cards"][0]["total"] == 512
    assert station.ok("top", "node", "-s").splitlines()[-1] == "512/15079 (MiB) (3%)"


def test_ps_shows_used_memory(t4: Workstation) -> None:
    """`fenka ps` shows the memory that each program uses."""
    t4.run("--gpu-mem", "4", "--name", "user", "--", *HOLD, "1000").report()
    line = t4.ok("ps").splitlines()[1].split()
    assert line[:2] + line[3:8] == ["user", "run", "running", "0", f"{CAP}MiB", "-", "1000MiB"]


def test_no_files_are_left_when_the_daemon_was_stopped(station: Workstation) -> None:
    """After --stop no process, socket or state file is left, but the history."""
    station.start("--simulate", "T4")
    node = station.root / "simulated"
    assert station.ok("daemon", "--stop") == "the fenka daemon has ended\n"
    left = {path.name for path in station.root.iterdir()}
    history = f"history-{os.uname().nodename}.db"
    assert left <= {"daemon.lock", "daemon.log", "leases", "jobs", history}
    assert not node.exists()


def test_daemon_does_not_stop_when_programs_run(t4: Workstation) -> None:
    """--stop is refused while programs run; --force leaves them running."""
    program = t4.run("--gpu-mem", "4", "--name", "busy", "--", *HOLD, "1")
    program.report()
    refused = t4.fenka("daemon", "--stop")
    assert refused.returncode == 1
    assert refused.stderr == (
        "fenka: 1 jobs are still here (busy): stop them first, or add --force to leave them "
        "running without a daemon\n"
    )
    assert t4.ok("daemon", "--stop", "--force")
    assert program.process.poll() is None
    t4.start("--simulate", "T4")
    assert list(t4.jobs()) == ["busy"]


@pytest.mark.parametrize("output", ["json", "yaml"])
def test_screens_are_json_when_that_is_requested(t4: Workstation, output: str) -> None:
    """All screens print their data as JSON, too."""
    for command in (("ps",), ("top", "node"), ("doctor",)):
        text = t4.ok(*command, "-o", output)
        if output == "json":
            json.loads(text)
        else:
            import yaml

            yaml.safe_load(text)


def test_daemon_imports_no_numpy() -> None:
    """One machine's cards are judged one by one: arrays would cost more memory and start than they save."""
    program = "import sys, fenka.workstation.main; print('numpy' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout == "False\n"
