"""What is left of jobs that have ended: their exit codes, why they ended, and their logs."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fenka import procfs
from fenka.jobs import exit_keeper
from fenka.workstation import files as histories
from fenka.workstation.files import MAX_JOBS_PER_USER, REFRESH_S, History, RunningJobs
from fenka.workstation.protocol import EndedJob
from tests.workstation.conftest import HOLD, Workstation, eventually, kill, refused


def ended(station: Workstation) -> dict[str, Any]:
    """Return the ended jobs of `fenka ps -a` by name and run."""
    jobs = json.loads(station.ok("ps", "-a", "-o", "json"))["ended"]
    return {f"{job['name']}/{job['run']}": job for job in jobs}


def in_background(
    station: Workstation, name: str, *words: str, options: tuple[str, ...] = ()
) -> None:
    """Start a program with a slice in the background."""
    station.ok("run", "--gpu-mem", "1", "--name", name, "-d", *options, "--", *words)


def test_exit_code_is_known_when_a_program_ended_in_the_background(t4: Workstation) -> None:
    """`fenka wait` has it, as `fenka logs` and `fenka ps -a` do."""
    in_background(t4, "night", "sh", "-c", "echo done; exit 5")
    assert t4.fenka("wait", "night").returncode == 5
    shown = t4.fenka("logs", "-f", "night")
    assert shown.stdout == "done\n"
    assert "night (run 1) ended at" in shown.stderr
    assert shown.stderr.endswith(": exit code 5\n")
    job = ended(t4)["night/1"]
    assert (job["exit_code"], job["signal"], job["cause"]) == (5, None, "exit")
    assert job["requested_at"] <= job["started_at"] <= job["ended_at"]


def test_exit_code_is_known_when_a_program_ended_in_the_terminal(t4: Workstation) -> None:
    """The daemon is not its parent. Kernels before 6.15 do not tell it then, and the daemon says so."""
    assert (
        t4.fenka("run", "--gpu-mem", "1", "--name", "a", "--", "sh", "-c", "exit 3").returncode == 3
    )
    job = eventually(lambda: ended(t4).get("a/0"))
    release = tuple(map(int, os.uname().release.split(".")[:2]))
    if release >= exit_keeper.TOLD_SINCE:
        assert job["exit_code"] == 3
    else:
        assert job["exit_code"] in (3, None)


def test_who_stopped_a_program_is_known(t4: Workstation) -> None:
    """The signal was fenka's, so the user who asked for it is named."""
    in_background(t4, "night", "sleep", "1000")
    t4.ok("stop", "night")
    job = ended(t4)["night/1"]
    assert (job["signal"], job["cause"], job["stopped_by"]) == ("SIGTERM", "stopped", job["user"])
    assert t4.fenka("wait", "night").returncode == 128 + signal.SIGTERM


def test_time_limit_is_known_as_the_cause(t4: Workstation) -> None:
    """The daemon ended it."""
    in_background(t4, "short", "sleep", "1000", options=("--time-limit", "1"))
    assert t4.fenka("wait", "short").returncode == 128 + signal.SIGTERM
    assert ended(t4)["short/1"]["cause"] == "time-limit"


def test_killed_program_is_no_ones_doing_when_fenka_sent_no_signal(t4: Workstation) -> None:
    """It may have been the kernel's, for want of memory."""
    program = t4.run("--gpu-mem", "1", "--name", "a", "--", *HOLD, "1")
    program.report()
    kill(program.pid)
    job = eventually(lambda: ended(t4).get("a/0"))
    # Not reaped by its parent yet, so that every kernel tells.
    assert (job["signal"], job["cause"], job["why"]) == ("SIGKILL", "exit", "SIGKILL")


def test_peak_and_refusals_are_known_when_memory_was_short(t4: Workstation) -> None:
    """A slice of 1077 MiB: 512 MiB fit, 4000 do not."""
    fits = t4.run("--gpu-mem", "1", "--name", "fits", "--", *HOLD, "512")
    fits.report()
    fits.end()
    large = t4.run("--gpu-mem", "1", "--name", "large", "--", *HOLD, "4000")
    large.report()
    large.end()
    jobs = eventually(lambda: len(ended(t4)) == 2 and ended(t4))
    assert (jobs["fits/0"]["refused"], jobs["large/0"]["refused"]) == (0, 1)
    assert jobs["fits/0"]["peak_mib"][0] >= 512
    assert "memory beyond its slice was refused once" in jobs["large/0"]["why"]


def test_job_is_recorded_when_it_ended_while_no_daemon_ran(t4: Workstation) -> None:
    """Its keeper has the exit code."""
    in_background(t4, "night", "sleep", "1000")
    pid = t4.jobs()["night"]["pid"]
    keeper = procfs.parent_pid(pid)
    assert keeper
    started = procfs.start_ticks(keeper)
    assert started
    t4.kill_daemon()
    kill(pid)
    # It is in the lease, too: as long as it lives, the job has not ended.
    eventually(lambda: not procfs.lives(keeper, started))
    t4.start("--simulate", "T4")
    # The daemon looks again if it could not read a process that ended meanwhile.
    job = eventually(lambda: ended(t4).get("night/1"))
    assert (job["signal"], job["cause"]) == ("SIGKILL", "unobserved")


def test_job_is_unobserved_when_another_process_has_its_namespaces_number(t4: Workstation) -> None:
    """The kernel gives numbers of ended namespaces again, so that process may be taken for the job's."""
    in_background(t4, "night", "sleep", "1000")
    pid = t4.jobs()["night"]["pid"]
    keeper = procfs.parent_pid(pid)
    assert keeper
    started = procfs.start_ticks(keeper)
    assert started
    number = procfs.namespace_inode(pid, "user")
    t4.kill_daemon()
    kill(pid)
    eventually(lambda: not procfs.lives(keeper, started))
    own = procfs.namespace_inode("self", "user")
    with subprocess.Popen(["unshare", "--user", "sleep", "1000"]) as other:
        eventually(lambda: procfs.namespace_inode(other.pid, "user") != own)
        # Which number the kernel gives next cannot be chosen.
        state = t4.root / "state.json"
        reused = str(procfs.namespace_inode(other.pid, "user"))
        assert str(number) in state.read_text()
        state.write_text(state.read_text().replace(str(number), reused))
        t4.start("--simulate", "T4")
        other.kill()
    job = eventually(lambda: ended(t4).get("night/1"))
    assert (job["signal"], job["cause"]) == ("SIGKILL", "unobserved")


def test_job_is_recorded_when_the_machine_lost_power(t4: Workstation) -> None:
    """A power loss, to the daemon: it was killed, nothing is left of /run, and the boot is another one."""
    in_background(t4, "night", "sleep", "1000")
    pid = t4.jobs()["night"]["pid"]
    (running,) = eventually(lambda: list(t4.root.glob("running-*.json")))
    t4.kill_daemon()
    (t4.root / "state.json").unlink()
    kill(pid)
    recorded = json.loads(running.read_text())
    running.write_text(json.dumps({**recorded, "boot": "an earlier one"}))
    t4.start("--simulate", "T4")
    job = ended(t4)["night/1"]
    assert (job["cause"], "the machine restarted" in job["why"]) == ("unobserved", True)
    assert job["ended_at"] == recorded["jobs"][0]["ended_at"]
    assert t4.fenka("logs", "night").stderr.endswith("; the machine restarted\n")
    eventually(lambda: not running.exists())


def test_pending_job_is_recorded_when_the_machine_lost_power(t4: Workstation) -> None:
    """Nothing starts a request in the background again after a reboot, and its user reads so."""
    t4.ok("run", "--gpus", "1", "--name", "night", "-d", "--", "sleep", "1000")
    t4.ok("run", "--gpus", "1", "--name", "later", "-d", "--", "sleep", "1000")
    pids = [t4.jobs()[name]["pid"] for name in ("night", "later")]

    def recorded() -> Any:
        (running,) = t4.root.glob("running-*.json")
        return {job["name"] for job in json.loads(running.read_text())["jobs"]} == {
            "night",
            "later",
        }

    eventually(lambda: list(t4.root.glob("running-*.json")))
    eventually(recorded)
    t4.kill_daemon()
    (t4.root / "state.json").unlink()
    for pid in pids:
        kill(pid)
    (running,) = t4.root.glob("running-*.json")
    running.write_text(json.dumps({**json.loads(running.read_text()), "boot": "an earlier one"}))
    t4.start("--simulate", "T4")
    assert "never started; the machine restarted" in t4.ok("ps", "-a")
    assert ended(t4)["later/1"]["started_at"] is None


@pytest.mark.parametrize("content", ["", "{", '{"boot":"x","at":0,"jobs":[{}]}', "[" * 9999])
def test_running_jobs_are_forgotten_when_their_file_is_damaged(
    tmp_path: Path, content: str
) -> None:
    """As by a power loss."""
    (tmp_path / f"running-{os.uname().nodename}.json").write_text(content)
    assert RunningJobs(tmp_path).lost() == []


def test_running_jobs_are_written_when_they_change_or_a_minute_is_over(tmp_path: Path) -> None:
    """A disk that sleeps is not woken every five seconds."""
    now = [100.0]
    running = RunningJobs(tmp_path / "state", lambda: now[0])
    assert running.outdated(frozenset())
    running.record([])
    assert not running.outdated(frozenset())
    assert running.outdated(frozenset({"a"}))
    job = EndedJob("a", "night", "alice", 7, "run", 1, [], "", 1.0, 2.0, 3.0, restarted=True)
    running.record([job])
    assert not running.outdated(frozenset({"a"}))
    assert running.outdated(frozenset())
    now[0] += REFRESH_S
    assert running.outdated(frozenset({"a"}))
    assert RunningJobs(tmp_path / "state").lost() == []  # This boot's are not lost.
    running.record([])
    assert list((tmp_path / "state").iterdir()) == []


def test_records_are_kept_when_the_daemon_is_killed(t4: Workstation) -> None:
    """They stand in a file."""
    in_background(t4, "night", "true")
    assert t4.fenka("wait", "night").returncode == 0
    t4.kill_daemon()
    t4.start("--simulate", "T4")
    assert list(ended(t4)) == ["night/1"]


def test_pending_job_is_recorded_when_it_is_stopped(t4: Workstation) -> None:
    """It never started."""
    in_background(t4, "first", "sleep", "1000", options=("--gpus", "1", "--gpu-mem", ""))
    in_background(t4, "second", "sleep", "1000")
    t4.ok("stop", "second")
    job = ended(t4)["second/1"]
    assert (job["started_at"], job["cause"]) == (None, "stopped")


def test_waiting_for_an_unknown_job_is_refused(t4: Workstation) -> None:
    """The sentence says where to look."""
    refused(
        t4.fenka("wait", "ghost"), 1, "a job called ghost is not known: `fenka ps -a` lists jobs"
    )


def test_wait_gives_up_when_its_time_is_over(t4: Workstation) -> None:
    """The job goes on."""
    in_background(t4, "night", "sleep", "1000")
    refused(t4.fenka("wait", "--timeout", "0", "night"), 75, "night has not ended yet")
    assert "night" in t4.jobs()


def test_each_run_keeps_its_log_when_a_name_is_used_again(t4: Workstation) -> None:
    """`fenka logs NAME` shows the last, `--run` an earlier one."""
    for text in ("one", "two", "three"):
        in_background(t4, "night", "echo", text)
        assert t4.fenka("wait", "night").returncode == 0
    assert t4.ok("logs", "night") == "three\n"
    assert [t4.ok("logs", "night", "--run", str(run)) for run in (1, 2, 3)] == [
        "one\n",
        "two\n",
        "three\n",
    ]
    refused(
        t4.fenka("logs", "night", "--run", "4"), 1, "run 4 of night has no log any more: .* 1, 2, 3"
    )
    assert sorted(ended(t4)) == ["night/1", "night/2", "night/3"]


def test_programs_are_known_to_the_commands_about_jobs(t4: Workstation) -> None:
    """One runs, one has failed: list, get, attach and delete."""
    in_background(t4, "night", "sleep", "1000")
    in_background(t4, "bad", "sh", "-c", "exit 4")
    assert t4.fenka("wait", "bad").returncode == 4
    jobs = {job["name"]: job for job in json.loads(t4.ok("list", "--local", "-o", "json"))}
    assert {name: (job["status"], job["trainer"]) for name, job in jobs.items()} == {
        "night": ("RUNNING", "run"),
        "bad": ("FAILED", "run"),
    }
    assert jobs["bad"]["note"] == "exit code 4"
    in_background(t4, "off", "sleep", "1000")
    t4.ok("stop", "off")
    rows = [line.split()[:2] for line in t4.ok("list", "--local").splitlines()]
    assert ["off", "STOPPED"] in rows
    t4.ok("delete", "--local", "off")
    assert "[Ended] exit code 4" in t4.ok("get", "--local", "bad", "-e")
    visible = ("sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    assert t4.ok("attach", "--local", "night", "--", *visible) == "0\n"
    refused(t4.fenka("attach", "--local", "bad"), 1, "bad is not running")
    t4.ok("delete", "--local", "night", "bad")
    assert json.loads(t4.ok("list", "--local", "-o", "json")) == []
    assert (ended(t4), t4.jobs()) == ({}, {})


# --- the file -------------------------------------------------------------------------------------------


def job(number: int, **fields: Any) -> EndedJob:
    """Return a job that ended at second `number`."""
    made = EndedJob(str(number), f"j{number}", "ann", 7, "run", 0, ["x"], "1", 0, 0, number)
    return msgspec.structs.replace(made, **fields)


def test_oldest_of_a_user_are_dropped_when_they_are_many(tmp_path: Path) -> None:
    """Another user's stay."""
    kept = History(tmp_path / "ended", clock=lambda: 0)
    kept.add(job(0, uid=8, id="other"))
    for number in range(MAX_JOBS_PER_USER + 5):
        kept.add(job(number))
    again = History(tmp_path / "ended", clock=lambda: 0)
    again.load()
    for read in (kept, again):
        ids = [each.id for each in read.jobs()]
        assert ids[:2] == ["other", "5"]
        assert len(ids) == MAX_JOBS_PER_USER + 1


def test_user_with_the_most_loses_jobs_when_all_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has few keeps them."""
    monkeypatch.setattr(histories, "MAX_JOBS", 3)
    kept = History(tmp_path / "ended", clock=lambda: 0)
    for number, uid in enumerate((8, 7, 7, 7, 7)):
        kept.add(job(number, uid=uid))
    assert [each.id for each in kept.jobs()] == ["0", "3", "4"]


def test_old_jobs_are_dropped(tmp_path: Path) -> None:
    """After 30 days."""
    now = [0.0]
    kept = History(tmp_path / "ended", clock=lambda: now[0])
    kept.add(job(1))
    now[0] = 31 * 86400.0
    assert kept.jobs() == []


def test_file_is_rewritten_when_it_has_many_dropped_lines(tmp_path: Path) -> None:
    """It does not grow with the number of jobs."""
    kept = History(tmp_path / "ended", clock=lambda: 0)
    for number in range(2000):
        kept.add(job(number))
    assert len((tmp_path / "ended").read_bytes().splitlines()) < 1000


def test_damaged_lines_are_dropped(tmp_path: Path) -> None:
    """A full disk leaves a part of a line; the others are read."""
    file = tmp_path / "ended"
    kept = History(file)
    kept.add(job(1, ended_at=kept._clock()))
    file.write_bytes(b'{"id": 7\n\xff\n' + b"[" * 100_000 + b"\n" + file.read_bytes())
    again = History(file)
    again.load()
    assert [each.id for each in again.jobs()] == ["1"]


def test_jobs_are_kept_in_memory_when_the_disk_is_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The daemon goes on, and says it once."""
    (tmp_path / "ended").mkdir()
    kept = History(tmp_path / "ended", clock=lambda: 0)
    kept.load()
    kept.add(job(1))
    kept.add(job(2))
    assert [each.id for each in kept.jobs()] == ["1", "2"]
    assert capsys.readouterr().err.count("ended jobs are not recorded") == 1


# --- exit codes -----------------------------------------------------------------------------------------


def test_status_is_known_while_a_process_is_a_zombie() -> None:
    """On every kernel."""
    with subprocess.Popen(["sh", "-c", "exit 7"]) as child:
        started = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
        descriptor = os.pidfd_open(child.pid)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert procfs.exit_status(descriptor, child.pid, started) == 7 << 8
        assert procfs.exit_status(descriptor, child.pid, started + 1) is None
        os.close(descriptor)


def test_keeper_records_a_signal_and_returns_the_code_of_a_shell(tmp_path: Path) -> None:
    """128 + the signal's number."""
    child = subprocess.Popen(["sh", "-c", "kill -9 $$"])
    assert exit_keeper.keep(child.pid, str(tmp_path / "end"), 0) == 128 + signal.SIGKILL
    assert json.loads((tmp_path / "end").read_text())["status"] == signal.SIGKILL
    child.returncode = 0


def test_keeper_imports_nothing_of_fenka() -> None:
    """It stays small: one runs beside each program in the background."""
    code = f"import runpy, sys; runpy.run_path({exit_keeper.__file__!r}); print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    assert not {"fenka", "msgspec", "asyncio"} & set(result.stdout.split())


def test_training_that_has_ended_is_shown_with_all(t4: Workstation) -> None:
    """It has no lease any more. Logs of other programs are no workloads."""
    words = ("submit", "pytorch", "--local", "--name", "t", "--gpu-mem", "1", "--retry", "0")
    t4.ok("run", "--gpu-mem", "1", "--detach", "--name", "logged", "--", "true")
    assert t4.fenka("wait", "logged").returncode == 0
    t4.ok(*words, "--", "false")
    assert t4.fenka("wait", "t").returncode == 1
    eventually(lambda: json.loads(t4.ok("ps", "-o", "json")) == [])
    (row,) = json.loads(t4.ok("ps", "-a", "-o", "json"))["jobs"]
    assert (row["name"], row["kind"], row["state"]) == ("t", "training", "failed")
    assert t4.ok("ps", "-a").splitlines()[1].split()[:2] == ["t", "training"]
