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


def cap(units: int) -> int:
    """MiB of so many units. 4 of a T4: 15079 * 4 // 14 = 4308."""
    return CARD_MIB * units // UNITS


@dataclass(frozen=True)
class Holding:
    """What one tenant was promised of one card, and which processes are its own."""

    name: str
    uuid: str
    mib: int
    pids: frozenset[int]


Truth = Mapping[str, Mapping[str, object]]


def overcommitted(holdings: Iterable[Holding]) -> list[str]:
    """Cards of which more was promised than they have."""
    promised: dict[str, int] = {}
    for holding in holdings:
        promised[holding.uuid] = promised.get(holding.uuid, 0) + holding.mib
    return [
        f"{mib} MiB of {uuid} are promised, it has {CARD_MIB}"
        for uuid, mib in promised.items()
        if mib > CARD_MIB
    ]


def beyond(holdings: Iterable[Holding], used: Mapping[str, Mapping[int, int]]) -> list[str]:
    """Tenants that hold more of a card than they were promised. used: MiB by card and process."""
    violations = []
    for holding in holdings:
        processes = used.get(holding.uuid, {})
        held = sum(processes.get(pid, 0) for pid in holding.pids)
        contexts = CONTEXT_MIB * len(holding.pids & processes.keys())
        if held > holding.mib + contexts:
            violations.append(
                f"{holding.name} holds {held} MiB of {holding.uuid}, it was promised {holding.mib}"
            )
    return violations


def strangers(holdings: Iterable[Holding], used: Mapping[str, Mapping[int, int]]) -> list[str]:
    """Processes that use a card of which they were promised nothing."""
    known: dict[str, set[int]] = {}
    for holding in holdings:
        known.setdefault(holding.uuid, set()).update(holding.pids)
    return [
        f"process {pid} uses {mib} MiB of {uuid} and was promised nothing of it"
        for uuid, processes in used.items()
        for pid, mib in processes.items()
        if pid not in known.get(uuid, set())
    ]
