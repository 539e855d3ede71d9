"""The leases of a daemon: their files, and what a client needs to enter one."""

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from fenka.core.request import Slice
from fenka.hardware import driver_places, unlimited_drivers
from fenka.hardware.nvml import Hardware
from fenka.isolation import account, lease_files, proxy_install, sandbox
from fenka.isolation.compute_feedback import ComputeFeedback, requested_compute
from fenka.isolation.lease_control import Limit
from fenka.isolation.limit_changes import resize
from fenka.isolation.sandbox import restrict_to_user
from fenka.workstation import protocol
from fenka.workstation.job import Job
from fenka.workstation.paths import Runtime

LDCONFIG = "/sbin/ldconfig"


class Leases:
    """Makes and removes leases, and registers them for compute feedback."""

    def __init__(
        self,
        runtime: Runtime,
        hardware: Hardware,
        native: Path,
        feedback: ComputeFeedback,
        compute_of: Callable[[str], int],
        capabilities_of: Callable[[str], Sequence[Path]] = lambda _: (),
    ) -> None:
        """Args:
        runtime: The daemon's.
        hardware: The driver.
        native: The directory of the native libraries.
        feedback: Where leases are registered.
        compute_of: Returns the compute of a card or instance, in percent of the whole card.
        capabilities_of: Returns the device files of an instance; none for a card.
        """
        self._runtime, self._hardware, self._native = runtime, hardware, native
        self._compute_of, self._capabilities_of = compute_of, capabilities_of
        self._feedback = feedback
        simulated = hardware.driver.simulated
        self._library_dir = runtime.simulated / "lib" if simulated else None
        self._linker_cache: Path | None = None
        self._driver_files: dict[str, tuple[Path, ...]] = {}
        self.node_server: Path | None = None
        """The socket that gives clients their cards' device nodes; None where all users have them."""

    def prepare(self) -> None:
        """Find the driver's files, and make simulated ones known to the linker.

        Raises IsolationError, InvalidDriverRoot, OSError.
        """
        if self._library_dir is not None:
            self._linker_cache = _build_linker_cache(self._runtime, self._library_dir)
        self._driver_files = _driver_files(self._library_dir, self._hardware.driver.root)

    def create(self, job: Job) -> None:
        """Make the files of a job's lease, unless they exist. Raises OSError."""
        directory = self._runtime.lease(job.id)
        if not self.intact(job.id):
            if not lease_files.pending_file(directory).exists():
                self._create_files(job)
            near = lease_files.near_cpus(job.slices, self._hardware.near_cpus)
            lease_files.cpus_file(directory).write_text(near)
            lease_files.grant_lease(directory, job.id, self._limits(job, job.slices))
        self.register(job)
        job.shim_inode = (self._native / "libfenka.so").stat().st_ino

    def create_pending(self, job: Job, reason: str) -> None:
        """Make all files of a container's lease but its limits, unless they exist. Raises OSError.

        reason: why it waits, which its log then says.
        """
        pending = lease_files.pending_file(self._runtime.lease(job.id))
        if not pending.exists():
            self._create_files(job)
            lease_files.write_atomically(pending, reason.encode(errors="replace"))

    def _create_files(self, job: Job) -> None:
        """Make the account and what the sandbox binds, for the job's user alone; a container's for root.

        The user can write below the account's directory. With a daemon for all users that is a small file
        system of its own, because others need the room in /run. Programs that root starts in a lease may
        become any user, as may a container's. So their accounts are open to all who can enter the directory:
        by the lease's own mount.
        """
        directory = self._runtime.lease(job.id)
        _remove_files(directory)
        with lease_files.with_file_name(directory):
            directory.mkdir(mode=0o700)
            for part in ("lease", "account"):
                (directory / part).mkdir(mode=0o755)
            if self._runtime.system:
                # Without the right to mount, as in a container, the account stands on /run itself.
                with contextlib.suppress(PermissionError):
                    sandbox.mount_small(directory / "account", account.size())
            uid = 0 if job.in_container else job.uid
            lease_files.prepare_lease(directory, uid or None)
            sandbox.prepare(directory, None if job.in_container else self._linker_cache)
            restrict_to_user(directory, uid)

    def register(self, job: Job) -> None:
        """Send compute feedback to a lease, also one that an earlier daemon made."""
        with contextlib.suppress(FileNotFoundError):  # created when its client reconnects
            self._add_feedback(job, job.slices)

    def set_limits(self, job: Job, slices: Sequence[Slice]) -> None:
        """Put limits in force for running programs. Raises InUse, InvalidControl, InvalidAccount, OSError."""
        account_file = lease_files.account_file(self._runtime.lease(job.id))
        resize(self._page(job), account_file, self._limits(job, slices))
        self._add_feedback(job, slices)

    def _add_feedback(self, job: Job, slices: Sequence[Slice]) -> None:
        requested = requested_compute(slices)
        self._feedback.add_lease(job.id, self._page(job), requested=requested)

    def _limits(self, job: Job, slices: Sequence[Slice]) -> tuple[Limit, ...]:
        return lease_files.card_limits(
            slices, self._hardware.context_mib, job.compute_share, self._compute_of
        )

    def intact(self, lease: str) -> bool:
        """Return whether a lease has its files."""
        return lease_files.control_page(self._runtime.lease(lease)).exists()

    def _page(self, job: Job) -> Path:
        return lease_files.control_page(self._runtime.lease(job.id))

    def remove(self, lease: str) -> None:
        """Remove a lease's files, which no process maps any more."""
        self._feedback.remove_lease(lease)
        _remove_files(self._runtime.lease(lease))

    def grant(self, job: Job) -> protocol.LeaseGranted:
        """Return the message by which a client can enter the job's lease."""
        return protocol.LeaseGranted(
            job_id=job.id,
            uuids=[piece.uuid for piece in job.slices],
            mounts=sandbox.LeaseMounts(
                directory=self._runtime.lease(job.id),
                shim=self._native / "libfenka.so",
                hidden=(self._runtime.leases,),
                linker_cache=self._linker_cache,
                proxies=self._native / "proxy",
                driver=self._driver_files,
                node=self._runtime.simulated if self._library_dir else None,
                user_namespaces=job.spec.allow_user_namespaces,
                capabilities=tuple(
                    file for piece in job.slices for file in self._capabilities_of(piece.uuid)
                ),
                node_server=self.node_server,
                **self._hidden_drivers(job),
            ),
            library_dir=self._library_dir,
        )

    def _hidden_drivers(self, job: Job) -> dict[str, tuple[Path, ...]]:
        """Return the fields of LeaseMounts that hide the parts of the driver that the shim cannot limit.

        Whole cards and instances have no neighbours, and nothing is hidden from them.
        """
        shared = not (job.request.whole or job.spec.gpu.mig)
        if not shared or job.spec.allow_unlimited_drivers:
            return {}
        beside = {file.parent for files in self._driver_files.values() for file in files}
        if (
            self._library_dir is not None
        ):  # A real driver of this machine is none of the lease's cards.
            beside.add(self._library_dir)
            return {"blocked": tuple(unlimited_drivers.libraries(sorted(beside), None))}
        return {
            "blocked": tuple(unlimited_drivers.libraries(sorted(beside))),
            "unlisted": tuple(unlimited_drivers.vendor_files()),
        }


def _remove_files(directory: Path) -> None:
    with contextlib.suppress(OSError):
        sandbox.unmount_all(directory / "account", sandbox.unmount)
    shutil.rmtree(directory, ignore_errors=True)


def _build_linker_cache(runtime: Runtime, library_dir: Path) -> Path:
    """Build a linker cache in which `library_dir` comes first. Raises IsolationError, OSError."""
    text = f"{library_dir}\ninclude /etc/ld.so.conf\n"
    lease_files.write_atomically(runtime.linker_configuration, text.encode())
    cache = runtime.linker_cache
    try:
        done = subprocess.run(
            [LDCONFIG, "-X", "-i", "-f", runtime.linker_configuration, "-C", cache],
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


def _driver_files(library_dir: Path | None, configured: str) -> dict[str, tuple[Path, ...]]:
    """Return the driver's files by library: those in `library_dir` if it is simulated, else the machine's.

    NVML may have been loaded from a directory that is not in the dynamic linker's cache. Raises OSError,
    InvalidDriverRoot.
    """
    if library_dir is not None:
        return {name: ((library_dir / name).resolve(),) for name in proxy_install.LIBRARIES}
    mapped = (line.split(None, 5) for line in Path("/proc/self/maps").read_text().splitlines())
    paths = [Path(line[5]) for line in mapped if len(line) == 6]
    loaded = {path.parent for path in paths if path.name.startswith("libnvidia-ml.so")}
    return driver_places.libraries(sorted(loaded), configured)
