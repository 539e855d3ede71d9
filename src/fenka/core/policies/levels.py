"""Cards and requests in thousandths of a card, the scarcer of memory and compute: what policies compare."""

import numpy as np

from fenka.core.columns import (
    CARD_COMPUTE,
    CLASS,
    CPU,
    CPU_USED,
    FREE_COMPUTE,
    FREE_MEMORY,
    HOLDERS,
    NEVER,
    CardClass,
    Ints,
    NodeColumns,
)
from fenka.core.policies.candidates import FULL, Candidate, NodeCandidate
from fenka.core.request import Request

UNUSABLE = FULL + 1
"""The need on a card that can never serve the request."""
MANY_CPU = 1 << 40
"""Thousandths of a core of a host whose CPU is not counted."""


def need(card_class: CardClass, request: Request) -> int:
    """Return what a request takes of a card of this class, in thousandths; UNUSABLE if it cannot."""
    if not request.cards:
        return 0
    memory, compute, other_model, other_kind = card_class.needs(request)
    if other_model or other_kind or memory > max(card_class.memory_mib, 0):
        return UNUSABLE
    if request.whole:
        return FULL
    of_memory = -(-memory * FULL // max(card_class.memory_mib, 1))
    of_compute = -(-compute * FULL // max(card_class.compute, 1))
    return min(max(of_memory, of_compute), FULL)


def free_cpu(on: NodeCandidate) -> int:
    """Return the free CPU of a node."""
    return MANY_CPU if on.cpu_milli is None else on.cpu_milli


def changed(on: NodeCandidate, card: Candidate) -> list[tuple[CardClass, int]]:
    """Return the levels after placing: on this card, or on the first that fit for several cards."""
    request, after = on.request, on.levels.copy()
    taken = on.fitting[: request.cards]
    if on.one_card:
        taken = [position for position in on.fitting if on.cards[position] is card]
    for position in taken:
        card_class, free = after[position]
        after[position] = card_class, max(free - need(card_class, request), 0)
    return after


def column_levels(columns: NodeColumns) -> Ints:
    """Return the level of each card."""
    usage = columns.usage
    memory_mib = np.array([card_class.memory_mib for card_class in columns.classes] or [0])
    total = memory_mib[columns.cards[CLASS]]
    # Rounded down, these quotients of numbers below 2**53 are exact, and faster than integers.
    memory = usage[FREE_MEMORY] * FULL / np.maximum(total, 1)
    memory[total == 0] = FULL
    compute = usage[FREE_COMPUTE] * FULL / np.maximum(columns.cards[CARD_COMPUTE], 1)
    free = np.minimum(np.minimum(memory, compute), FULL - (usage[HOLDERS] > 0))
    found: Ints = (free * columns.open).astype(np.int64)
    return found


def host_cpu(columns: NodeColumns) -> Ints:
    """Return the free CPU of each slot's node."""
    total, used = columns.hosts[CPU], columns.hosts[CPU_USED]
    free: Ints = np.where(total >= NEVER, MANY_CPU, np.maximum(total - used, 0))
    return free
