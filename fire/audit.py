"""The arithmetic of slices and what follows from it, written a second time on purpose.

An audit that shared code with fenka would share its mistakes. The rules are those of the documents: a card of
15079 MiB has 14 units of 1 GiB, and n units are 15079 * n // 14 MiB.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

CARD_MIB = 15079
UNITS = 14
CONTEXT_MIB = 512
"""More than a simulated context takes on a T4: what a process may hold beside its slice."""


def units_to_mib(units: int) -> int:
    """MiB of so many units. 4 of a T4: 15079 * 4 // 14 = 4308."""
    return CARD_MIB * units // UNITS


@dataclass(frozen=True)
class Allocation:
    """What one tenant was promised of one card, and which processes are its own."""

    name: str
    uuid: str
    mib: int
    pids: frozenset[int]


Truth = Mapping[str, Mapping[str, object]]


def overcommitted(allocations: Iterable[Allocation]) -> list[str]:
    """Cards of which more was promised than they have."""
    promised: dict[str, int] = {}
    for allocation in allocations:
        promised[allocation.uuid] = promised.get(allocation.uuid, 0) + allocation.mib
    return [
        f"{mib} MiB of {uuid} are promised, it has {CARD_MIB}"
        for uuid, mib in promised.items()
        if mib > CARD_MIB
    ]


def over_limit(
    allocations: Iterable[Allocation], used: Mapping[str, Mapping[int, int]]
) -> list[str]:
    """Tenants that hold more of a card than they were promised. used: MiB by card and process."""
    violations = []
    for allocation in allocations:
        processes = used.get(allocation.uuid, {})
        held = sum(processes.get(pid, 0) for pid in allocation.pids)
        contexts = CONTEXT_MIB * len(allocation.pids & processes.keys())
        if held > allocation.mib + contexts:
            violations.append(
                f"{allocation.name} holds {held} MiB of {allocation.uuid}, it was promised {allocation.mib}"
            )
    return violations


def unleased_processes(
    allocations: Iterable[Allocation], used: Mapping[str, Mapping[int, int]]
) -> list[str]:
    """Processes that use a card of which they were promised nothing."""
    known: dict[str, set[int]] = {}
    for allocation in allocations:
        known.setdefault(allocation.uuid, set()).update(allocation.pids)
    return [
        f"process {pid} uses {mib} MiB of {uuid} and was promised nothing of it"
        for uuid, processes in used.items()
        for pid, mib in processes.items()
        if pid not in known.get(uuid, set())
    ]
