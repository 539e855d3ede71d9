"""The leases of a daemon: their files, and what a client needs to enter one."""

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from fenka.core.request import Slice
from fenka.hardware.machine import Hardware
from fenka.isolation.compute_feedback import ComputeFeedback
from fenka.isolation.control import Limit
from fenka.isolation.files import account_file, card_limits, control_page
from fenka.isolation.resize import resize
from fenka.workstation import files, protocol
from fenka.workstation.job import Job
from fenka.workstation.paths import Runtime


class Leases:
    """Makes and removes leases, and registers them for compute feedback."""

    def __init__(
        self, runtime: Runtime, hardware: Hardware, native: Path, feedback: ComputeFeedback
    ) -> None:
        self._runtime, self._hardware, self._native = runtime, hardware, native
        self._feedback = feedback
        simulated = hardware.driver.simulated
        self._library_dir = runtime.simulated / "lib" if simulated else None
        self._linker_cache: Path | None = None
        self._driver_files: dict[str, tuple[Path, ...]] = {}

    def prepare(self) -> None:
        """Find the driver's files, and make simulated ones known to the linker.

        Raises IsolationError, OSError.
        """
        if self._library_dir is not None:
            self._linker_cache = files.build_linker_cache(self._runtime, self._library_dir)
        self._driver_files = files.driver_files(self._library_dir)

    def directory(self, job_id: str) -> Path:
        """Return the directory of a job's lease."""
        return self._runtime.lease(job_id)

    def accounts(self, jobs: Iterable[Job]) -> list[Path]:
        """Return the paths of the jobs' accounts."""
        return [account_file(self.directory(job.id)) for job in jobs]

    def create(self, job: Job) -> None:
        """Make the files of a job's lease, unless they exist. Raises OSError."""
        if not control_page(self.directory(job.id)).exists():
            limits = self._limits(job, job.slices)
            files.create_lease(self._runtime, job, limits, self._linker_cache)
        self.register(job)
        job.shim_inode = (self._native / "libfenka.so").stat().st_ino

    def register(self, job: Job) -> None:
        """Send compute feedback to a lease, also one that an earlier daemon made."""
        with contextlib.suppress(FileNotFoundError):  # created when its client reconnects
            self._feedback.add_lease(job.id, control_page(self.directory(job.id)))

    def set_limits(self, job: Job, slices: Sequence[Slice]) -> None:
        """Put limits in force for running programs. Raises InUse, InvalidControl, InvalidAccount, OSError."""
        directory = self.directory(job.id)
        resize(control_page(directory), account_file(directory), self._limits(job, slices))

    def _limits(self, job: Job, slices: Sequence[Slice]) -> tuple[Limit, ...]:
        return card_limits(slices, self._hardware.context_mib, job.compute_share)

    def remove(self, job_id: str) -> None:
        """Remove a lease's files."""
        self._feedback.remove_lease(job_id)
        files.remove_lease(self.directory(job_id))

    def grant(self, job: Job) -> protocol.LeaseGranted:
        """Return the message by which a client can enter the job's lease."""
        return protocol.LeaseGranted(
            job_id=job.id,
            name=job.name,
            directory=str(self.directory(job.id)),
            shim=str(self._native / "libfenka.so"),
            linker_cache=str(self._linker_cache or ""),
            library_dir=str(self._library_dir or ""),
            hidden=[str(self._runtime.leases)],
            uuids=[piece.uuid for piece in job.slices],
            proxies=str(self._native / "proxy"),
            driver={name: [*map(str, paths)] for name, paths in self._driver_files.items()},
            simulated=str(self._runtime.simulated if self._library_dir else ""),
        )
