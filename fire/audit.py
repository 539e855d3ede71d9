"""Check the invariants of slices with an independent implementation of their arithmetic.

An audit that shared code with fenka would share its errors. The rules are those of the documents: a card of
15079 MiB has 14 units of 1 GiB, and n units are 15079 * n // 14 MiB.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

CARD_MIB = 15079
UNITS = 14
CONTEXT_MIB = 512
"""An upper bound of a simulated context's size on a T4, which a process may use beside its slice."""


def units_to_mib(units: int) -> int:
    """Return the MiB of a number of units. 4 units of a T4: 15079 * 4 // 14 = 4308."""
    return CARD_MIB * units // UNITS


@dataclass(frozen=True)
class Allocation:
    """The memory of one card that a tenant was given, and the tenant's processes."""

    name: str
    uuid: str
    mib: int
    pids: frozenset[int]


Truth = Mapping[str, Mapping[str, object]]


def overcommitted(allocations: Iterable[Allocation]) -> list[str]:
    """Return one sentence for each card of which more memory was allocated than it has."""
    allocated: dict[str, int] = {}
    for allocation in allocations:
        allocated[allocation.uuid] = allocated.get(allocation.uuid, 0) + allocation.mib
    return [
        f"{mib} MiB of {uuid} are allocated, it has {CARD_MIB}"
        for uuid, mib in allocated.items()
        if mib > CARD_MIB
    ]


def over_limit(
    allocations: Iterable[Allocation], used: Mapping[str, Mapping[int, int]]
) -> list[str]:
    """Return one sentence for each tenant that uses more of a card than it was given.

    Args:
        allocations: the memory of all tenants.
        used: the used MiB by card and process.
    """
    violations = []
    for allocation in allocations:
        processes = used.get(allocation.uuid, {})
        total = sum(processes.get(pid, 0) for pid in allocation.pids)
        contexts = CONTEXT_MIB * len(allocation.pids & processes.keys())
        if total > allocation.mib + contexts:
            violations.append(
                f"{allocation.name} uses {total} MiB of {allocation.uuid}, its limit is {allocation.mib}"
            )
    return violations


def unleased_processes(
    allocations: Iterable[Allocation], used: Mapping[str, Mapping[int, int]]
) -> list[str]:
    """Return one sentence for each process that uses a card without an allocation of it."""
    known: dict[str, set[int]] = {}
    for allocation in allocations:
        known.setdefault(allocation.uuid, set()).update(allocation.pids)
    return [
        f"process {pid} uses {mib} MiB of {uuid} without an allocation"
        for uuid, processes in used.items()
        for pid, mib in processes.items()
        if pid not in known.get(uuid, set())
    ]
