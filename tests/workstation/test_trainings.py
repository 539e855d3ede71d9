"""`fenka submit --local`: gangs with roles, restarts, records, and nothing left whatever is killed."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fenka import procfs
from tests.workstation.conftest import PROGRAMS, Workstation, eventually, kill, refused

RING = [sys.executable, str(PROGRAMS / "ring.py")]


@pytest.fixture(autouse=True)
def without_trainings(station: Workstation) -> Iterator[None]:
    """End the trainings of a test before its daemon ends."""
    yield
    for path in (station.root / "jobs").glob("*/.fenka"):
        station.fenka("delete", "--local", path.parent.name)


def submit(station: Workstation, kind: str, name: str, *words: str) -> None:
    """Submit a training."""
    text = station.ok("submit", kind, "--local", "--name", name, *words)
    assert text.splitlines()[0] == f"The Job {name} has been submitted successfully"


def follow(
    station: Workstation, kind: str, name: str, *words: str
) -> subprocess.CompletedProcess[str]:
    """Submit a training and wait for its end."""
    return station.fenka("submit", kind, "--local", "--name", name, "--follow", *words)


def job(station: Workstation, name: str) -> dict[str, Any]:
    """Return `fenka get NAME -o json`."""
    answer: dict[str, Any] = json.loads(station.ok("get", "--local", name, "-o", "json"))
    return answer


def status(station: Workstation, name: str) -> str:
    """Return the status of a training, as recorded."""
    return str(record(station, name)["status"])


def names(station: Workstation) -> list[str]:
    """Return the names of all trainings."""
    return [row["name"] for row in json.loads(station.ok("list", "--local", "-o", "json"))]


def record(station: Workstation, name: str) -> dict[str, Any]:
    """Return a training's record."""
    text = (station.root / "jobs" / name / ".fenka" / "record.json").read_text()
    answer: dict[str, Any] = json.loads(text)
    return answer


def log(station: Workstation, name: str, instance: str) -> list[str]:
    """Return the lines that a process has printed so far."""
    path = station.root / "jobs" / name / ".fenka" / instance / "log"
    return path.read_text().splitlines() if path.exists() else []


def await_lines(station: Workstation, name: str, instance: str, number: int) -> list[str]:
    """Return the lines of a process once there are so many."""
    eventually(lambda: len(log(station, name, instance)) >= number)
    return log(station, name, instance)


def marked(mark: str) -> list[int]:
    """Return the processes that have this mark among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark in path.read_text():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


# --- frameworks -----------------------------------------------------------------------------------------


def test_workers_of_pytorch_meet_when_each_has_a_slice(t4: Workstation) -> None:
    """The screens show them until the training is deleted; then nothing of it is left."""
    done = follow(t4, "pytorch", "pt", "--workers", "3", "--gpu-mem", "4", "--", *RING)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "rank 0 of 3: 3"), done.stderr
    assert t4.ok("logs", "--local", "pt", "-i", "pt-worker-1") == "rank 2 of 3: 3\n"
    shown = job(t4, "pt")
    assert (shown["status"], shown["trainer"], shown["requestGPUs"]) == (
        "SUCCEEDED",
        "pytorchjob",
        0.9,
    )
    assert [(each["name"], each["status"]) for each in shown["instances"]] == [
        ("pt-master-0", "Completed"),
        ("pt-worker-0", "Completed"),
        ("pt-worker-1", "Completed"),
    ]
    assert t4.jobs() == {}
    assert t4.ok("delete", "--local", "pt") == "The training job pt has been deleted successfully\n"
    assert names(t4) == []
    assert list((t4.root / "jobs").iterdir()) == []


SERVE = """
import json, os, pathlib, socket, sys, time
config = json.loads(os.environ["TF_CONFIG"])
role = config["task"]["type"]
host, port = config["cluster"]["ps"][0].split(":")
leased = pathlib.Path("/run/fenka/lease/control").exists()
print(role, leased, flush=True)
if role == "ps":
    with socket.create_server((host, int(port))) as server:
        while True:
            server.accept()[0].sendall(b"x")
while True:
    try:
        with socket.create_connection((host, int(port))) as connection:
            assert connection.recv(1) == b"x"
        break
    except ConnectionRefusedError:
        os.sched_yield()
print("served", flush=True)
if role == "worker":
    time.sleep(1000)
until = pathlib.Path(os.environ["UNTIL"])
while not until.exists():
    time.sleep(0.02)
"""


def test_parameter_server_ends_when_the_chief_has_succeeded(
    t4: Workstation, tmp_path: Path
) -> None:
    """It has no lease and no card; the chief has more than the workers."""
    end = tmp_path / "end"
    words = ("--workers", "1", "--ps", "1", "--chief", "--gpu-mem", "4", "--chief-gpu-mem", "7")
    program = (sys.executable, "-c", SERVE)
    submit(t4, "tf", "tf", *words, "--env", f"UNTIL={end}", "--", *program)
    eventually(lambda: "served" in log(t4, "tf", "tf-chief-0"))
    held = {
        name: piece["memory_mib"] for name, view in t4.jobs().items() for piece in view["slices"]
    }
    assert held == {"tf/0": 15079 * 7 // 14, "tf/1": 15079 * 4 // 14}
    shown = job(t4, "tf")
    assert {each["name"]: each["requestGPUs"] for each in shown["instances"]} == {
        "tf-chief-0": 0.5,
        "tf-worker-0": 0.3,
        "tf-ps-0": 0,
    }
    assert (shown["status"], shown["allocatedGPUs"]) == ("RUNNING", 0.8)
    assert log(t4, "tf", "tf-ps-0") == ["ps False"]
    end.touch()
    eventually(lambda: status(t4, "tf") == "SUCCEEDED")
    assert [each["name"] for each in job(t4, "tf")["instances"]] == ["tf-chief-0"]
    assert t4.jobs() == {}


# As Open MPI does: one call of the agent for each host of the list.
MPIRUN = """
import os, subprocess, sys
hosts = [line.split()[0] for line in open(os.environ["OMPI_MCA_orte_default_hostfile"])]
agent = os.environ["OMPI_MCA_plm_rsh_agent"]
script = "test -e /run/fenka/lease/control && mkdir $TMPDIR/session && "
script += "echo rank $FENKA_INDEX here; exit ${CODE-0}"
calls = [subprocess.Popen([agent, host, script]) for host in hosts]
sys.exit(max(call.wait() for call in calls))
"""


def test_launcher_starts_ranks_in_leases_when_all_agents_listen(t4: Workstation) -> None:
    """The launcher has none; its exit code is the training's. Each worker has a TMPDIR of its own."""
    words = ("--workers", "2", "--gpu-mem", "4")
    launcher = (sys.executable, "-c", MPIRUN)
    done = follow(t4, "mpi", "m", *words, "--", *launcher)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()[-2:]) == ["rank 0 here", "rank 1 here"]
    failed = follow(t4, "mpi", "f", *words, "--env", "CODE=7", "--", *launcher)
    assert failed.returncode == 7
    assert status(t4, "f") == "FAILED"
    uid = record(t4, "f")["uid"]
    assert not Path(f"/tmp/fenka-{uid}").exists()


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")
def test_ranks_of_open_mpi_run_in_leases(t4: Workstation) -> None:
    """mpirun without -np starts one rank in each worker."""
    code = "import os; leased = os.path.exists('/run/fenka/lease/control')\n"
    code += "os.write(1, b'rank %s %d\\n' % (os.environb[b'OMPI_COMM_WORLD_RANK'], leased))"
    words = ("--workers", "2", "--gpu-mem", "4", "--", "mpirun", sys.executable, "-c", code)
    done = follow(t4, "mpi", "m", *words)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank} 1\n" in done.stdout


# --- restarts and the end -------------------------------------------------------------------------------


def test_processes_start_again_when_one_fails(t4: Workstation) -> None:
    """The card has room for one attempt, so the leases of the first are gone, with what it left behind."""
    script = "setsid sleep 1000 & echo attempt $FENKA_RESTARTS $RANK; "
    script += '[ "$FENKA_RESTARTS" = 1 ] && [ "$RANK" = 1 ] && exit 0; '
    script += '[ "$FENKA_RESTARTS" = 1 ] || { [ "$RANK" = 1 ] && exit 7; sleep 1000; }'
    words = ("--workers", "2", "--gpu-mem", "7", "--retry", "1")
    done = follow(t4, "pytorch", "again", *words, "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    assert log(t4, "again", "again-worker-0") == ["attempt 0 1", "attempt 1 1"]
    assert (status(t4, "again"), record(t4, "again")["restarts"]) == ("SUCCEEDED", 1)
    assert t4.jobs() == {}


def test_training_fails_when_its_restarts_are_used_up(t4: Workstation) -> None:
    """The exit code is that of the member that failed, and the screens name it."""
    words = ("--workers", "2", "--gpu-mem", "4", "--retry", "1")
    script = 'echo attempt; [ "$RANK" = 1 ] && exit 7; exec sleep 1000'
    done = follow(t4, "pytorch", "bad", *words, "--", "sh", "-c", script)
    assert done.returncode == 7
    assert log(t4, "bad", "bad-worker-0") == ["attempt"] * 2
    shown = job(t4, "bad")
    assert shown["status"] == "FAILED"
    assert [(each["name"], each["status"]) for each in shown["instances"]] == [
        ("bad-worker-0", "Error")
    ]
    assert "bad-worker-0 ended with exit code 7" in t4.ok("get", "--local", "bad", "-e")


@pytest.mark.parametrize("option", ["--time-limit", "--running-timeout"])
def test_training_ends_when_its_time_is_over(t4: Workstation, option: str) -> None:
    """It does not start again."""
    words = ("--gpu-mem", "4", option, "0.3s", "--retry", "3", "--", "sleep", "1000")
    assert follow(t4, "pytorch", "long", *words).returncode == 128 + signal.SIGTERM
    assert record(t4, "long")["reason"] == "its time limit is over"
    assert record(t4, "long")["restarts"] == 0


def test_stopped_training_does_not_start_again(t4: Workstation) -> None:
    """Its processes get SIGTERM, and its records stay."""
    script = "trap 'echo told; exit 0' TERM; echo begun; while :; do sleep 0.05; done"
    submit(t4, "pytorch", "s", "--gpu-mem", "4", "--retry", "3", "--", "sh", "-c", script)
    eventually(lambda: log(t4, "s", "s-master-0") == ["begun"])
    assert t4.ok("stop", "s") == "s: stopped\n"
    assert (status(t4, "s"), record(t4, "s")["reason"]) == ("STOPPED", "it was stopped")
    assert log(t4, "s", "s-master-0")[-1] == "told"


# A worker with a lease and a parameter server without, each with a child in another session.
TREE = 'setsid sh -c "echo left; sleep 1000; : $MARK" & echo begun; sleep 1000; : $MARK'


def tree(station: Workstation, name: str, *words: str) -> str:
    """Submit a training that leaves processes everywhere. Return their mark."""
    mark = uuid.uuid4().hex
    roles = ("--workers", "1", "--ps", "1", "--gpu-mem", "4")
    submit(station, "tf", name, *roles, *words, "--", "sh", "-c", TREE.replace("$MARK", mark))
    for instance in (f"{name}-worker-0", f"{name}-ps-0"):
        await_lines(station, name, instance, 2)
    return mark


def processes_of(station: Workstation, name: str) -> dict[str, int]:
    """Return the supervisor, the process of its group's start, and the two members of `tree`."""
    found = record(station, name)
    supervisor = found["pid"]
    members = {instance["role"]: instance["pid"] for instance in found["instances"]}
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    return {"supervisor": supervisor, "start": int(children[0]), **members}


@pytest.mark.parametrize("victim", ["supervisor", "start", "worker", "ps"])
@pytest.mark.parametrize("daemon", [True, False])
def test_nothing_is_left_when_a_process_is_killed(
    t4: Workstation, victim: str, daemon: bool
) -> None:
    """With or without a daemon: programs end, also in sessions of their own, and the record shows it."""
    mark = tree(t4, "k")
    victims = processes_of(t4, "k")
    if not daemon:
        t4.kill_daemon()
        t4.environment["FENKA_START_DAEMON"] = "never"
    kill(victims[victim])
    eventually(lambda: not marked(mark))
    eventually(lambda: job(t4, "k")["status"] == "FAILED")
    del victims[victim]
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in victims.values()))
    if daemon:
        eventually(lambda: t4.jobs() == {})
    t4.environment.pop("FENKA_START_DAEMON", None)
    assert "Running" not in {each["status"] for each in job(t4, "k")["instances"]}


@pytest.fixture
def bystander() -> Iterator[int]:
    """Provide a process whose parent has ended: init's child, or that of the nearest subreaper."""
    started = subprocess.run(
        ["sh", "-c", "sleep 1000 >/dev/null & echo $!"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    pid = int(started.stdout)
    yield pid
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("victim", ["supervisor", "start"])
def test_other_programs_live_when_a_process_is_killed(
    t4: Workstation, bystander: int, victim: str
) -> None:
    """The supervisor's parent is init, whose children are everybody's."""
    tree(t4, "k")
    kill(processes_of(t4, "k")[victim])
    eventually(lambda: job(t4, "k")["status"] == "FAILED")
    os.kill(bystander, 0)


def test_training_goes_on_when_the_daemon_is_killed(t4: Workstation) -> None:
    """The next daemon serves the next attempt."""
    script = 'echo attempt; [ "$FENKA_RESTARTS" = 1 ] && exit 0; '
    script += "while [ ! -e $GO ]; do sleep 0.05; done; exit 1"
    go = t4.root / "go"
    words = ("--gpu-mem", "4", "--retry", "1", "--env", f"GO={go}", "--", "sh", "-c", script)
    submit(t4, "pytorch", "d", *words)
    eventually(lambda: log(t4, "d", "d-master-0") == ["attempt"])
    t4.kill_daemon()
    go.touch()
    eventually(lambda: status(t4, "d") == "SUCCEEDED")
    assert t4.jobs() == {}


def test_pending_training_is_shown_and_deleted(t4: Workstation) -> None:
    """It starts nothing, and its place in the queue is free again."""
    submit(t4, "pytorch", "first", "--gpu-mem", "14", "--", "sleep", "1000")
    words = ("--workers", "2", "--gpu-mem", "7", "--", "true")
    result = t4.fenka("submit", "pytorch", "--local", "--name", "second", *words)
    assert "waiting, position 1 of 1: " in result.stderr
    shown = job(t4, "second")
    assert (shown["status"], shown["allocatedGPUs"], shown["requestGPUs"]) == ("PENDING", 0, 1.0)
    assert {each["status"] for each in shown["instances"]} == {"Pending"}
    t4.ok("delete", "--local", "second")
    assert sorted(t4.jobs()) == ["first/0"]
    t4.ok("delete", "--local", "first")
    assert t4.jobs() == {}


def test_nothing_is_created_when_the_request_can_never_be_granted(t4: Workstation) -> None:
    """One sentence says why."""
    result = t4.fenka(
        "submit", "pytorch", "--local", "--name", "big", "--gpu-mem", "15", "--", "true"
    )
    refused(
        result, 2, "no GPU fits: 1 of 1 has too little memory; the largest card has 14 units, .*"
    )
    assert names(t4) == []
    assert list((t4.root / "jobs").iterdir()) == []


def test_name_is_taken_when_another_job_has_it(t4: Workstation) -> None:
    """Jobs of `fenka run` and trainings share their names; a finished training keeps its own."""
    t4.ok("run", "--detach", "--name", "a", "--gpu-mem", "4", "--", "sleep", "1000")
    result = t4.fenka("submit", "pytorch", "--local", "--name", "a", "--", "true")
    refused(result, 2, "a job called a already exists: choose another --name")
    assert follow(t4, "pytorch", "b", "--", "true").returncode == 0
    sentence = r"job b already exists on this machine: delete it \(fenka delete b\) or choose another --name"
    for words in (
        ("run", "--name", "b", "--gpu-mem", "4", "--", "true"),
        ("run", "--detach", "--name", "b", "--gpu-mem", "4", "--", "true"),
        ("submit", "pytorch", "--local", "--name", "b", "--", "true"),
    ):
        refused(t4.fenka(*words), 2, sentence)


# --- code and files -------------------------------------------------------------------------------------


def git(directory: Path, *words: str) -> str:
    """Run git, and return its output."""
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    command = ["git", *identity, "-C", str(directory), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_code_is_cloned_to_the_working_directory(station: Workstation, tmp_path: Path) -> None:
    """GIT_SYNC_BRANCH chooses the branch; the directory is the job's."""
    source = tmp_path / "tools.git"
    source.mkdir()
    git(source, "init", "-q", "-b", "main")
    for branch in ("main", "other"):
        git(source, "checkout", "-q", "-B", branch)
        (source / "run.sh").write_text(f"echo {branch}; pwd")
        git(source, "add", ".")
        git(source, "commit", "-q", "-m", branch)
    words = ("--sync-mode", "git", "--sync-source", str(source), "--env", "GIT_SYNC_BRANCH=main")
    done = follow(station, "pytorch", "c", *words, "--", "sh code/tools/run.sh")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["main", str(station.root / "jobs" / "c")]
    commit = git(source, "rev-parse", "main")
    assert station.ok("logs", "--local", "c", "-c", "init-code").splitlines()[-1] == commit
    missing = ("--sync-mode", "git", "--sync-source", str(tmp_path / "nothing"), "--", "true")
    submit = ("submit", "pytorch", "--local", "--name", "n", *missing)
    sentence = "git cannot fetch .*nothing: fatal: .* does not appear to be .*"
    refused(station.fenka(*submit), 1, sentence)
    # Only a terminal shows that it takes time.
    shown, terminal = os.openpty()
    station.fenka(*submit, stderr=terminal, capture_output=False)
    os.close(terminal)
    first, second = os.read(shown, 1 << 16).decode().splitlines()
    os.close(shown)
    assert first == "fenka: fetching the code of n …"
    assert re.fullmatch(f"fenka: {sentence}", second)
    assert names(station) == ["c"]


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_code_is_copied_without_ignored_files(station: Workstation, tmp_path: Path) -> None:
    """Changes after the submission do not matter."""
    (tmp_path / ".gitignore").write_text("*.bin\n")
    (tmp_path / "big.bin").write_text("x")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "run.sh").write_text("ls code code/sub")
    done = follow(station, "pytorch", "c", "--code", str(tmp_path), "--", "sh code/sub/run.sh")
    assert done.returncode == 0, done.stderr
    assert "big.bin" not in done.stdout
    assert "run.sh" in done.stdout


def test_directory_is_seen_elsewhere_when_it_is_mounted(t4: Workstation, tmp_path: Path) -> None:
    """In leases and outside of them; the path must exist, and no lease's files may be covered."""
    data, place, file = tmp_path / "data", tmp_path / "place", tmp_path / "settings"
    data.mkdir()
    place.mkdir()
    file.write_text("own")
    (data / "x").write_text("here")
    (tmp_path / "given").write_text("given")
    words = ("--workers", "1", "--ps", "1", "--gpu-mem", "4", "--data-dir", f"{data}:{place}")
    config = ("--config-file", f"{tmp_path / 'given'}:{file}")
    script = f"cat {place}/x {file}; echo; echo x >> {place}/y; exec sleep 1000"
    submit(t4, "tf", "b", *words, *config, "--", "sh", "-c", script)
    for instance in ("b-worker-0", "b-ps-0"):
        assert await_lines(t4, "b", instance, 1) == ["heregiven"]
    assert not (place / "x").exists()
    written = data / "y"
    eventually(lambda: written.exists() and written.read_text() == "x\n" * 2)
    missing = ("--gpu-mem", "4", "--data-dir", f"{data}:{tmp_path / 'no'}", "--", "true")
    result = t4.fenka("submit", "pytorch", "--local", "--name", "n", *missing)
    refused(result, 2, f"--data-dir {data}:{tmp_path / 'no'} requires a directory .* create it.*")
    covers = ("--gpu-mem", "4", "--data-dir", f"{data}:/run", "--", "true")
    result = t4.fenka("submit", "pytorch", "--local", "--name", "n", *covers)
    assert result.returncode != 0
    assert "/run cannot be another directory: it has files of the lease" in result.stderr
    assert names(t4) == ["b"]


def test_tensorboard_runs_as_long_as_the_training(station: Workstation, tmp_path: Path) -> None:
    """`get` shows its address; without the program the option is refused."""
    words = ("submit", "pytorch", "--local", "--name", "tb", "--tensorboard", "--logdir", "/logs")
    station.environment["PATH"] = f"{tmp_path}:/usr/bin:/bin"
    program = tmp_path / "tensorboard"
    if shutil.which("tensorboard", path=station.environment["PATH"]) is None:
        refused(station.fenka(*words, "--", "true"), 2, "--tensorboard requires the program .*")
    program.write_text(f"#!{sys.executable}\nimport signal\nsignal.pause()\n")
    program.chmod(0o755)
    station.ok(*words, "--", "sleep", "1000")
    url = job(station, "tb")["tensorboard"]
    assert re.fullmatch(r"http://[0-9a-f]{32}\.localhost:\d+", url)
    started = marked(f"--port={url.rpartition(':')[2]}")
    assert len(started) == 1
    assert url in station.ok("get", "--local", "tb")
    station.ok("stop", "tb")
    assert job(station, "tb")["tensorboard"] == ""
    assert not marked(str(program))


# --- looking --------------------------------------------------------------------------------------------


def test_command_runs_in_the_lease_when_it_is_attached(t4: Workstation) -> None:
    """It has the process's environment and directory, and its exit code is the command's."""
    submit(t4, "pytorch", "a", "--gpu-mem", "4", "--env", "LR=0.1", "--", "sleep", "1000")
    script = "test -e /run/fenka/lease/control && echo $LR $RANK $PWD; exit 3"
    result = t4.fenka("attach", "--local", "a", "--", "sh", "-c", script)
    assert (result.returncode, result.stdout) == (3, f"0.1 0 {Path.cwd()}\n"), result.stderr
    refused(
        t4.fenka("attach", "--local", "a", "-i", "a-worker-7"),
        1,
        "job a has no instance a-worker-7: .*",
    )
    t4.ok("stop", "a")
    refused(t4.fenka("attach", "--local", "a"), 1, "a-master-0 is not running")


def test_logs_end_with_the_last_lines_when_a_number_is_given(station: Workstation) -> None:
    """An unknown instance is refused."""
    follow(station, "pytorch", "l", "--workers", "2", "--", "seq", "5")
    assert station.ok("logs", "--local", "l", "--tail", "2") == "4\n5\n"
    assert station.ok("logs", "--local", "l", "-i", "l-worker-0", "-f") == "1\n2\n3\n4\n5\n"
    refused(
        station.fenka("logs", "--local", "l", "-i", "l-worker-9"),
        1,
        "job l has no instance l-worker-9: its instances are l-master-0, l-worker-0",
    )


def test_logs_have_times_when_they_are_a_trainings(station: Workstation) -> None:
    """Those of the clone, and of jobs in the background, have none."""
    follow(station, "pytorch", "l", "--", "seq", "2")
    lines = station.ok("logs", "--local", "l", "--timestamps").splitlines()
    assert [line.split(" ")[1:] for line in lines] == [["1"], ["2"]]
    assert station.ok("logs", "--local", "l", "--since", "1h") == "1\n2\n"
    assert station.ok("logs", "--local", "l", "--since", "0s") == ""


def test_record_is_not_believed_when_its_supervisor_is_gone(station: Workstation) -> None:
    """A machine that was switched off leaves such records. A damaged one can be deleted."""
    follow(station, "pytorch", "old", "--", "true")
    path = station.root / "jobs" / "old" / ".fenka" / "record.json"
    running = record(station, "old") | {"status": "RUNNING", "ended_at": None, "exit_code": None}
    eventually(lambda: not procfs.lives(running["pid"], running["start_ticks"]))
    path.write_text(json.dumps(running))
    assert job(station, "old")["status"] == "FAILED"
    path.write_text(json.dumps(running | {"pid": os.getpid(), "start_ticks": 1, "boot": "x"}))
    assert job(station, "old")["status"] == "FAILED"
    for content in (b"\xff{", b"[" * 100_000, json.dumps(running | {"colour": 1}).encode()):
        path.write_bytes(content)
        assert names(station) == ["old"]
        assert "is not understood" in station.ok("get", "--local", "old")
    # Its age is that of its directory.
    assert station.ok("prune", "--local", "--since", "1h") == "no job has ended more than 1h ago\n"
    assert station.ok("prune", "--local", "--since", "1s").startswith("The training job old has")
    assert names(station) == []


@pytest.mark.parametrize("cards", [("--gpu-mem", "4"), ()])
def test_running_training_is_deleted_when_its_record_is_damaged(
    t4: Workstation, cards: tuple[str, ...]
) -> None:
    """At the first try, and nothing is left of it: it would start again, with or without leases."""
    mark = uuid.uuid4().hex
    script = f"echo begun; sleep 1000; : {mark}"
    submit(t4, "pytorch", "d", *cards, "--retry", "100", "--", "sh", "-c", script)
    await_lines(t4, "d", "d-master-0", 1)
    (t4.root / "jobs" / "d" / ".fenka" / "record.json").write_text("{}")
    assert t4.ok("delete", "--local", "d") == "The training job d has been deleted successfully\n"
    assert not marked(mark)
    assert list((t4.root / "jobs").iterdir()) == []
    assert t4.jobs() == {}


def test_training_is_deleted_once_when_several_commands_delete_it(t4: Workstation) -> None:
    """Those that come too late are told that there is none; no file that another has removed is named."""
    submit(t4, "pytorch", "d", "--workers", "3", "--gpu-mem", "2", "--", "sleep", "1000")
    with ThreadPoolExecutor(4) as pool:
        results = [*pool.map(lambda _: t4.fenka("delete", "--local", "d"), range(4))]
    assert 0 in {result.returncode for result in results}
    for result in results:
        assert result.returncode == 0 or "d not found" in result.stderr, result.stderr
    assert list((t4.root / "jobs").iterdir()) == []
    assert t4.jobs() == {}


def test_option_is_refused_when_it_requires_a_cluster(station: Workstation) -> None:
    """Others have no effect, which is reported."""
    words = ("submit", "pytorch", "--local", "--name", "x")
    refused(
        station.fenka(*words, "--data", "a:/b", "--", "true"),
        2,
        "--data requires a cluster: use --data-dir DIRECTORY",
    )
    result = station.fenka(*words, "--image", "a", "--", "true")
    assert result.returncode == 0
    assert result.stderr == "fenka: --image has no effect on a workstation\n"


def test_training_starts_again_with_other_ports_when_one_is_taken(
    t4: Workstation, tmp_path: Path
) -> None:
    """Another program binds MASTER_PORT before rank 0 does. That needs no --retry."""
    program = [sys.executable, str(PROGRAMS / "leaves_port.py"), str(tmp_path)]
    submit(t4, "pytorch", "a", "--gpu-mem", "2", "--", *program)
    port = tmp_path / "port"
    first = int(eventually(lambda: port.exists() and port.read_text()))
    with socket.create_server(("127.0.0.1", first)):
        (tmp_path / "go").touch()
        eventually(lambda: status(t4, "a") in ("SUCCEEDED", "FAILED"))
    assert (status(t4, "a"), record(t4, "a")["restarts"]) == ("SUCCEEDED", 0)
    assert int(port.read_text()) != first


def test_gang_names_its_port_when_another_program_has_taken_it(
    t4: Workstation, tmp_path: Path
) -> None:
    """`fenka run --gang` says what failed, and that the next try takes another port."""
    program = [sys.executable, str(PROGRAMS / "leaves_port.py"), str(tmp_path)]
    gang = t4.run("--gang", "1", "--name", "g", "--gpu-mem", "2", "--", *program)
    port = tmp_path / "port"
    taken = int(eventually(lambda: port.exists() and port.read_text()))
    with socket.create_server(("127.0.0.1", taken)):
        (tmp_path / "go").touch()
        _, said = gang.process.communicate()
    assert gang.process.returncode == 1
    assert f"another program took g's MASTER_PORT {taken}: run it again" in said
