"""Cards and requests in thousandths of a card, the scarcer of memory and compute: what policies compare."""

from fenka.core.policies.candidates import FULL, Candidate, NodeCandidate
from fenka.core.request import CardClass, Request

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
    if request.of_one_card:
        taken = [position for position in on.fitting if on.cards[position] is card]
    for position in taken:
        card_class, free = after[position]
        after[position] = card_class, max(free - need(card_class, request), 0)
    return after
