"""The options, mounts and directories of this machine's trainings and services; starts and ends supervisors.

No process is left, whichever process of a training or service is killed. Orphans among the descendants of a
group's start become its children (subreaper), which it ends. If it is killed, they become the supervisor's,
which ends them. If the supervisor is killed, the start gets SIGTERM, and a service's guard ends the orphans.
None ever ends a process that is not its own child: the supervisor's parent is init, whose children are
everybody's. The daemon does the same for programs in leases; this is for those without, and for the time
without a daemon.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from fenka import procfs
from fenka.core.errors import FAILURE, FenkaError
from fenka.core.request import InvalidRequest
from fenka.jobs.processes import ErrorReporter, JobNotStarted, Notify, start_in_background
from fenka.jobs.workload import RoleSpec, WorkloadSpec
from fenka.workstation import client, paths

NO_CARDS = {"CUDA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": "void"}
"""For processes outside of leases, which could use every card of the machine."""

_REFUSED = {
    "data": "use --data-dir DIRECTORY",
    "checkpoint": "use --data-dir DIRECTORY",
    "toleration": "leave it out",
    "device": "leave it out",
    "queue": "use --priority N",
    "scaler": "leave it out",
    "ttl_after_finished_s": "use fenka prune",
}
"""Options that mean something only on a cluster, and what to do instead."""

_ROLE_REFUSED = {
    "selector": "leave it out",
    "cpu": "no limit of processors is enforced here, so leave it out",
    "memory": "no limit of memory is enforced here, so leave it out",
}

_IGNORED = (
    "image",
    "sync_image",
    "tensorboard_image",
    "image_pull_secret",
    "image_pull_policy",
    "share_memory",
    "scheduler",
    "annotation",
    "label",
    "clean_task_policy",
    "mounts_on_launcher",
    "gang",
    "interruptible",
    "security",
    "run_as",
)


def refuse_cluster_options(spec: WorkloadSpec, roles: Mapping[str, RoleSpec]) -> None:
    """Raise InvalidRequest for an option that a workstation cannot provide.

    Args:
        spec: The training, or the version of a service.
        roles: The parts that have options of their own, by the prefix of these.
    """
    given = [(_option(field), advice) for field, advice in _REFUSED.items() if _given(spec, field)]
    given += [
        (prefix + field, advice)
        for prefix, part in {"": spec, **roles}.items()
        for field, advice in _ROLE_REFUSED.items()
        if getattr(part, field)
    ]
    for option, advice in given:
        raise InvalidRequest(f"--{option} requires a cluster: {advice}")


def announce_ignored(spec: WorkloadSpec, announce: Notify) -> None:
    """Name the options that have no effect on a workstation."""
    ignored = [
        f"--{'no-' if field == 'gang' else ''}{_option(field)}"
        for field in _IGNORED
        if _given(spec, field)
    ]
    if ignored:
        have = "have" if len(ignored) > 1 else "has"
        announce(f"{', '.join(ignored)} {have} no effect on a workstation")


def _given(spec: WorkloadSpec, field: str) -> bool:
    return field in spec.__struct_fields__ and getattr(spec, field) != getattr(type(spec)(), field)


def _option(field: str) -> str:
    return field.removesuffix("_s").replace("_", "-")


def parse_priority(text: str) -> int:
    """Return the number of `--priority`. Raises InvalidRequest."""
    try:
        return int(text or "0")
    except ValueError:
        raise InvalidRequest(
            f"invalid --priority {text[:40]!r}: on a workstation it is a number, larger ones are served first"
        ) from None


# --- directories ----------------------------------------------------------------------------------------


def working_directory(spec: WorkloadSpec) -> str:
    """Return the directory that is named, else the current one. Raises InvalidRequest."""
    if not _given(spec, "working_dir"):
        return str(Path.cwd())
    if not Path(spec.working_dir).is_dir():
        raise InvalidRequest(
            f"--working-dir {spec.working_dir} is not a directory on this machine: leave it out for the "
            "current one"
        )
    return spec.working_dir


def change_directory(directory: str) -> None:
    """Enter a program's working directory. Raises JobNotStarted."""
    try:
        os.chdir(directory)
    except OSError as why:
        raise JobNotStarted(
            f"the working directory {directory} cannot be entered: {why.strerror}", FAILURE
        ) from None


def check_mounts(spec: WorkloadSpec) -> None:
    """Check that what programs see in another place exists, here and there. Raises InvalidRequest."""
    for option, kind, exists, pairs in (
        ("data-dir", "directory", Path.is_dir, spec.host_mounts),
        ("config-file", "file", Path.is_file, spec.config_files),
    ):
        for source, target in pairs:
            if not exists(Path(source)):
                raise InvalidRequest(f"--{option} {source} is not a {kind} on this machine")
            if not exists(Path(target)):
                raise InvalidRequest(
                    f"--{option} {source}:{target} requires a {kind} {target} to be covered for the "
                    f"programs: create it, or use {source} itself"
                )


def provide_files(spec: WorkloadSpec, directory: Path) -> list[tuple[str, str]]:
    """Return what programs see in other places. Files are copied to a directory: they may change."""
    binds = [pair for pair in spec.host_mounts if pair[0] != pair[1]]
    for number, (source, target) in enumerate(spec.config_files):
        copy = directory / f"file-{number}"
        shutil.copyfile(source, copy)
        binds.append((str(copy), target))
    return binds


# --- supervisors ----------------------------------------------------------------------------------------

STARTED = "started"
"""The status line of a supervisor after which its processes run, or clients can connect."""

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of all descendants whose parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_orphans(kept: Collection[int] = ()) -> None:
    """Kill and reap this process's children, and what they leave behind, also in sessions of their own.

    Args:
        kept: Children that are no orphans.
    """
    me = os.getpid()
    while orphans := [pid for pid in procfs.children(me) if pid not in kept and _is_orphan(pid)]:
        for pid in orphans:
            # PermissionError: it has become root since.
            with contextlib.suppress(ProcessLookupError, ChildProcessError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    for pid in procfs.children(me):
        if pid not in kept:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _is_orphan(pid: int) -> bool:
    """Return whether a process lives, may be killed, and is no daemon that was started meanwhile."""
    try:
        os.kill(pid, 0)
        lives = procfs.start_ticks(pid) is not None
    except OSError:
        # It has ended, or it is of another user: a program that has become root.
        return False
    environment = b""
    # Programs may forbid their own user to read it. Daemons do not.
    with contextlib.suppress(OSError):
        environment = (procfs.PROC / str(pid) / "environ").read_bytes()
    return lives and f"{client.DAEMON_MARK}=1".encode() not in environment.split(b"\0")


def start_supervisor(
    name: str,
    body: Callable[[Notify, Callable[[], None]], object],
    log: Path,
    announce: Notify,
    report_errors: ErrorReporter,
) -> None:
    """Start a supervisor in the background. Return when it reports that it has started, or waits.

    Args:
        name: The job that it supervises.
        body: What replaces its process; see `start_in_background`.
        log: The file that receives its output.
        announce: Receives its other reports.
        report_errors: The command's reporter of errors.

    Raises:
        JobNotStarted: It could not be started.
    """
    with start_in_background(body, log, report_errors) as process:
        if process.room:
            announce(process.room)
        for line in process.status_lines():
            if line == STARTED:
                return
            announce(line)
            if line.startswith("waiting"):
                return
    raise JobNotStarted(f"the supervisor of {name} ended while it started: see {log}", FAILURE)


def end_leases(name: str) -> None:
    """Have the daemon end what runs, waits or is left in the leases of a name. Raises RequestFailed."""
    with contextlib.suppress(client.DaemonUnavailable, paths.UnsafeDirectory):
        runtime = paths.current()
        if client.jobs_called(runtime, name):
            client.stop_jobs(runtime, [name])


END_TIMEOUT_S = 30.0
"""Beyond the grace period, for a supervisor to end its processes and itself."""


class JobNotEnded(FenkaError):
    """A supervisor does not end."""


def end_process(pid: int, is_meant: Callable[[], bool], name: str, grace_s: float) -> None:
    """End a supervisor, or its guard, with all its processes, and wait for its end. Raises JobNotEnded.

    Args:
        pid: The process. Another one may have taken the PID by now.
        is_meant: Returns whether the current process of the PID is the one to end.
        name: What it supervises.
        grace_s: How long its programs may take.
    """
    try:
        ending = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with contextlib.closing(os.fdopen(ending, "rb", buffering=0)):
        if not is_meant():
            return
        signal.pidfd_send_signal(ending, signal.SIGTERM)
        if not select.select([ending], [], [], grace_s + END_TIMEOUT_S)[0]:
            raise JobNotEnded(f"{name} does not end: see whether process {pid} can be killed")


def end_writers(log: Path, name: str, grace_s: float) -> None:
    """End the supervisor whose output is this file, for which no readable record names it."""
    pids = writers(log)
    # The guard forwards the signal. A second one would kill the programs at once.
    for pid in [pid for pid in pids if procfs.parent_pid(pid) not in pids]:
        end_process(pid, lambda pid=pid: pid in writers(log), name, grace_s)  # type: ignore[misc]


def writers(log: Path) -> set[int]:
    """Return the processes whose output is this file."""
    path, pids = str(log.parent.resolve() / log.name), set[int]()
    for pid in procfs.pids():
        # Those of other users cannot be read, and others may have ended.
        with contextlib.suppress(OSError):
            if os.readlink(procfs.PROC / str(pid) / "fd" / "1").removesuffix(" (deleted)") == path:
                pids.add(pid)
    return pids
