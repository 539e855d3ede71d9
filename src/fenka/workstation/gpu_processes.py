"""The processes on the cards, as the driver reports them, sorted by lease."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fenka.core.inventory import Card
from fenka.hardware.nvml import GpuProcess, Reading
from fenka.isolation.unleased_memory import UnleasedMemory, UnleasedProgram, measure
from fenka.procfs import process_name, real_uid


@dataclass(frozen=True, slots=True)
class UnleasedProcess:
    """A process that uses a card and is in no lease."""

    process: GpuProcess
    uid: int


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
    """What the driver reports at one moment.

    Attributes:
        violations: sentences by job id.
        unleased: what is in use by no lease, by card UUID.
    """

    readings: Mapping[str, Reading]
    processes: GpuProcesses
    violations: Mapping[str, list[str]]
    unleased: Mapping[str, UnleasedMemory]


def group_by_lease(
    processes: Iterable[GpuProcess], lease_of: Callable[[int], str | None]
) -> GpuProcesses:
    """Sort the driver's processes by lease. Those that have ended meanwhile are left out."""
    by_lease: dict[str, list[GpuProcess]] = {}
    unleased = []
    for process in processes:
        lease, uid = lease_of(process.pid), real_uid(process.pid)
        if lease is not None:
            by_lease.setdefault(lease, []).append(process)
        elif uid is not None:
            unleased.append(UnleasedProcess(process, uid))
    return GpuProcesses(by_lease, unleased)


def unleased_memory(
    card: Card, used_mib: int, slices_mib: int, processes: GpuProcesses, *, names_all: bool
) -> UnleasedMemory:
    """Return the memory of a card that is in use by no lease. The arguments are as `measure` has them."""
    leased_mib = [
        process.used_mib
        for in_lease in processes.by_lease.values()
        for process in in_lease
        if process.uuid == card.uuid
    ]
    programs = [
        UnleasedProgram(
            process_name(outside.process.pid),
            outside.process.used_mib,
            outside.process.graphics,
        )
        for outside in processes.unleased
        if outside.process.uuid == card.uuid
    ]
    return measure(card.memory_mib, used_mib, leased_mib, slices_mib, programs, names_all=names_all)


def _total_mib(processes: Sequence[GpuProcess]) -> int | None:
    sizes = [process.used_mib for process in processes]
    return None if None in sizes else sum(size or 0 for size in sizes)
