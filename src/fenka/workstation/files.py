"""The files of a workstation's daemon: its configuration and state, and the files of leases."""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from fenka import native
from fenka.core.errors import FenkaError
from fenka.isolation import account, proxy, sandbox, syscalls
from fenka.isolation import files as isolation_files
from fenka.isolation.access_control import restrict_to_user
from fenka.isolation.control import Limit
from fenka.isolation.files import write_atomically
from fenka.workstation.job import Job
from fenka.workstation.paths import Runtime

LDCONFIG = "/sbin/ldconfig"

SYSTEM_NATIVE = Path("/var/lib/fenka/workstation")
"""Copies of the native libraries for a system daemon, in directories named by their content."""

MAX_LOG_BYTES = 4 << 20
"""Of a background daemon."""

MAX_FILE_BYTES = 1 << 28
"""Of a file that is read. Thousands of jobs with the longest commands need less."""

Loaded = TypeVar("Loaded")


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A daemon's options, so that the next one can be started with them."""

    simulate: str = ""
    policy: str = "binpack"
    unit: str = "GiB"
    only: list[str] = []


class StateFile(msgspec.Struct, forbid_unknown_fields=True):
    """All jobs on disk. boot: distinguishes a restart of the daemon from one of the machine."""

    boot: str
    jobs: list[Job]
    version: Literal[3] = 3


class InvalidState(FenkaError):
    """A file of the daemon is invalid, or does not match the running programs."""


def boot_id() -> str:
    """Return the kernel's id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def load_config(runtime: Runtime) -> Config | None:
    """Return the last daemon's options, if it left any. Raises InvalidState."""
    return _load(runtime.config, Config)


def save_config(runtime: Runtime, config: Config) -> None:
    """Record this daemon's options."""
    write_atomically(runtime.config, msgspec.json.encode(config))


def trim_log(runtime: Runtime) -> None:
    """Keep only the end of a log that is too long. Lines written meanwhile may be lost."""
    with contextlib.suppress(FileNotFoundError), runtime.log.open("r+b") as log:
        if os.fstat(log.fileno()).st_size <= MAX_LOG_BYTES:
            return
        log.seek(-MAX_LOG_BYTES // 4, os.SEEK_END)
        kept = log.read().partition(b"\n")[2]
        log.truncate(0)
        log.seek(0)
        log.write(kept)


def load_jobs(runtime: Runtime) -> list[Job]:
    """Return the last daemon's jobs; none after a reboot. Raises InvalidState."""
    state = _load(runtime.state, StateFile)
    return state.jobs if state and state.boot == boot_id() else []


def save_jobs(runtime: Runtime, jobs: list[Job]) -> None:
    """Record all jobs."""
    write_atomically(runtime.state, msgspec.json.encode(StateFile(boot_id(), jobs)))


def _load(path: Path, kind: type[Loaded]) -> Loaded | None:
    try:
        return msgspec.json.decode(
            isolation_files.read_regular_file(path, MAX_FILE_BYTES), type=kind
        )
    except FileNotFoundError:
        return None
    except OSError as why:
        raise InvalidState(
            f"{isolation_files.describe_os_error(why)}; it records which job holds which slice: "
            "before you remove it, end the programs that hold leases"
        ) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as why:
        raise InvalidState(
            f"{path} is not understood ({why}): it was written by another version or is damaged; end the "
            "programs that hold leases, remove the file and start again"
        ) from None


def install_native(runtime: Runtime) -> Path:
    """Return a directory of the native libraries that all users of the daemon can read.

    A system daemon copies them, because it may be installed in a private home directory. Raises
    FileNotFoundError.
    """
    if runtime.system:
        return isolation_files.install_native(SYSTEM_NATIVE)
    isolation_files.require_native()
    return native.DIRECTORY


def build_linker_cache(runtime: Runtime, library_dir: Path) -> Path:
    """Build a linker cache in which `library_dir` comes first. Raises IsolationError, OSError."""
    configuration, cache = runtime.root / "ld.so.conf", runtime.root / "ld.so.cache"
    text = f"{library_dir}\ninclude /etc/ld.so.conf\n"
    isolation_files.write_atomically(configuration, text.encode())
    try:
        done = subprocess.run(
            [LDCONFIG, "-X", "-i", "-f", configuration, "-C", cache],
            check=False,
            capture_output=True,
            process_group=0,  # Ctrl-C must not interrupt it
        )
    except OSError as why:
        raise sandbox.IsolationError(
            f"{LDCONFIG} cannot be run ({why.strerror}), which makes simulated cards' libraries known inside "
            "leases: install it (in Debian's package libc-bin)"
        ) from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise sandbox.IsolationError(
            f"{LDCONFIG} cannot write {cache}: {lines[-1] if lines else f'it ended with {done.returncode}'}"
        )
    return cache


def driver_files(library_dir: Path | None) -> dict[str, tuple[Path, ...]]:
    """Return the driver's files by library: those in `library_dir` if it is simulated, else the machine's.

    NVML may have been loaded from a directory that is not in the dynamic linker's cache. Raises OSError.
    """
    if library_dir is not None:
        return {name: ((library_dir / name).resolve(),) for name in proxy.LIBRARIES}
    mapped = (line.split(None, 5) for line in Path("/proc/self/maps").read_text().splitlines())
    paths = [Path(line[5]) for line in mapped if len(line) == 6]
    return proxy.find_driver(
        {path.parent for path in paths if path.name.startswith("libnvidia-ml.so")}
    )


def create_lease(runtime: Runtime, job: Job, limits: tuple[Limit, ...], cache: Path | None) -> None:
    """Make the control page, the account and what the sandbox binds, for the job's user alone.

    The user can write below the account's directory. With a daemon for all users that is a small file
    system of its own, because others need the room in /run. Programs that root starts in a lease may become
    any user, so root's accounts are open to all who can enter the directory: by the lease's own mount.

    Args:
        runtime: The daemon's files.
        job: A job that has a placement.
        limits: What it may use of its cards.
        cache: The dynamic linker's cache inside the lease, or None for the machine's.
    """
    directory = runtime.lease(job.id)
    owner = None if job.uid == 0 else job.uid
    remove_lease(directory)
    with isolation_files.with_file_name(directory):
        directory.mkdir(mode=0o700)
        for part in ("lease", "account"):
            (directory / part).mkdir(mode=0o755)
        if runtime.system:
            # Without the right to mount, as in a container, the account stands on /run itself.
            with contextlib.suppress(PermissionError):
                syscalls.mount_small(directory / "account", account.size())
        isolation_files.create_lease(directory, job.id, limits, owner)
        sandbox.prepare(directory, cache)
        restrict_to_user(directory, job.uid)


def remove_lease(directory: Path) -> None:
    """Remove a lease's files, which no process maps any more."""
    with contextlib.suppress(OSError):
        syscalls.unmount_all(directory / "account", syscalls.unmount)
    shutil.rmtree(directory, ignore_errors=True)
