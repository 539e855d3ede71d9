"""The processes on the cards, as the driver reports them, sorted by lease."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fenka.hardware.nvml import GpuProcess, Reading
from fenka.procfs import real_uid, start_ticks


@dataclass(frozen=True, slots=True)
class UnleasedProcess:
    """A process that uses a card and is in no lease. start: as `start_ticks` returns it."""

    process: GpuProcess
    uid: int
    start: int


@dataclass(frozen=True, slots=True)
class GpuProcesses:
    """The processes on the cards at one moment."""

    by_lease: Mapping[str, Sequence[GpuProcess]] = field(default_factory=dict)
    unleased: Sequence[UnleasedProcess] = ()

    def used_mib(self, lease: str, uuid: str) -> int | None:
        """Return the memory that a lease holds of a card; None if the driver does not report it."""
        processes = self.by_lease.get(lease, ())
        return _total_mib([process for process in processes if process.uuid == uuid])


@dataclass(frozen=True, slots=True)
class UsageSample:
    """What the driver reports at one moment. violations: sentences by job id."""

    readings: Mapping[str, Reading]
    processes: GpuProcesses
    violations: Mapping[str, list[str]]


def group_by_lease(
    processes: Iterable[GpuProcess], lease_of: Callable[[int], str | None]
) -> GpuProcesses:
    """Sort the driver's processes by lease. Those that have ended meanwhile are left out."""
    by_lease: dict[str, list[GpuProcess]] = {}
    unleased = []
    for process in processes:
        lease, start = lease_of(process.pid), start_ticks(process.pid)
        if lease is not None:
            by_lease.setdefault(lease, []).append(process)
        elif start is not None and (uid := real_uid(process.pid)) is not None:
            unleased.append(UnleasedProcess(process, uid, start))
    return GpuProcesses(by_lease, unleased)


def unattributed_mib(
    uuid: str, readings: Mapping[str, Reading], processes: GpuProcesses
) -> int | None:
    """Return the used memory of a card that belongs to no process; None if the driver does not report it."""
    everything = [unleased.process for unleased in processes.unleased]
    for leased in processes.by_lease.values():
        everything += leased
    attributed_mib = _total_mib([process for process in everything if process.uuid == uuid])
    if uuid not in readings or attributed_mib is None:
        return None
    return readings[uuid].used_mib - attributed_mib


def _total_mib(processes: Sequence[GpuProcess]) -> int | None:
    sizes = [process.used_mib for process in processes]
    return None if None in sizes else sum(size or 0 for size in sizes)
