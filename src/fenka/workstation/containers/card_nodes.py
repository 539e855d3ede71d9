"""Keeps containers from the device nodes of cards that are not their leases'.

A container has the nodes of all cards, since its card is chosen when the engine has made them. While its
slice is pending it may open none of them. Simulated cards have nodes only in their host tree.
"""

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from fenka import procfs
from fenka.core.errors import FenkaError
from fenka.hardware import host_tree
from fenka.hardware.nvml import Hardware
from fenka.isolation import device_access
from fenka.isolation.closed_nodes import CARD
from fenka.isolation.device_access import CardAccess, ContainerGroup, DeviceAccessError
from fenka.isolation.lease_files import describe_os_error
from fenka.workstation import protocol
from fenka.workstation.files import DaemonConfig
from fenka.workstation.job import Job
from fenka.workstation.lifetime import log
from fenka.workstation.paths import Runtime


def node_directory(runtime: Runtime, *, simulated: bool) -> Path:
    """Return where the machine's device nodes are."""
    return runtime.simulated / host_tree.LINK / "dev" if simulated else Path("/dev")


class CardNodes:
    """The device nodes of one daemon's machine."""

    def __init__(self, runtime: Runtime, hardware: Hardware, config: DaemonConfig) -> None:
        self._runtime, self._hardware, self._config = runtime, hardware, config
        self._reported: dict[str, str] = {}
        """The last logged reason of each job."""

    def restrict(self, job: Job) -> None:
        """Let a container open the nodes of its slices' cards only. Raises DeviceAccessError."""
        container = job.in_container
        if not container:
            return
        alone = not container.started
        group = ContainerGroup(container.cgroup, job.pid, alone, container.cgroup_inode)
        try:
            majors = {os.major(number) for number in self._devices()}
            if len(majors) > 1:
                raise DeviceAccessError("the cards' nodes have several major numbers")
            driver = self._hardware.driver
            for major in majors:
                minors = frozenset(driver.minor(piece.card_uuid) for piece in job.slices)
                device_access.restrict(group, CardAccess(major, minors))
        except (FenkaError, OSError) as why:
            reason = describe_os_error(why) if isinstance(why, OSError) else str(why)
            reason = (
                f"the container cannot be kept from other cards' device nodes: {reason}; `fenka daemon "
                "--shim-only` starts it all the same"
            )
            if not self._config.shim_only:
                raise DeviceAccessError(reason) from None
            self._report(job, reason)

    def describe(self) -> protocol.DeviceAccessRead:
        """Return whether containers can be kept from nodes here."""
        version, problem = 0, ""
        try:
            version = device_access.probe()
        except DeviceAccessError as why:
            problem = str(why)
        except OSError as why:
            problem = describe_os_error(why)
        return protocol.DeviceAccessRead(
            version, problem, self._config.shim_only, closed=self._config.closed
        )

    def renew(self, jobs: Iterable[Job]) -> None:
        """Restrict containers again.

        Their engine may have changed their groups, or an earlier daemon may have ended before it did.
        """
        jobs = [job for job in jobs if job.in_container and job.started]
        self._reported = {job.id: self._reported.get(job.id, "") for job in jobs}
        for job in jobs:
            try:
                self.restrict(job)
            except DeviceAccessError as why:
                if procfs.lives(job.pid, job.start_ticks):
                    self._report(job, str(why))

    def _report(self, job: Job, reason: str) -> None:
        if self._reported.get(job.id) != reason:
            self._reported[job.id] = reason
            log(f"{job.name}: {reason}")

    def _devices(self) -> Iterator[int]:
        """Yield the device numbers of all cards' nodes."""
        directory = node_directory(self._runtime, simulated=self._hardware.driver.simulated)
        try:
            names = os.listdir(directory)
        except OSError:
            return
        for name in filter(CARD.fullmatch, names):
            status = (directory / name).stat()
            if stat.S_ISCHR(status.st_mode):
                yield status.st_rdev
