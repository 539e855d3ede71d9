"""Policies of the literature that know no workload, and the two simple ones that gpushare's users know.

Sources: the descriptions in Weng et al., USENIX ATC 2023, whose simulator has all but `spread`. Amounts are
compared with the largest node of their trace, as there.
"""

from zlib import crc32

from fenka.core.policies import levels
from fenka.core.policies.candidates import FULL, Candidate, NodeCandidate, PolicyTarget, Score
from fenka.core.request import CardClass

LARGEST_CPU, LARGEST_CARDS = 128_000, 8 * FULL
POINTS = 100
"""The scores of these policies are whole numbers up to this one."""


def tightest_card(_: NodeCandidate, card: Candidate) -> Score:
    """Order the cards of a node by what is free, the least first."""
    return (card.level,)


def _needed(on: NodeCandidate) -> int:
    """Return what the request takes of the node's cards: of its first card's class, times their number."""
    if not on.request.cards:
        return 0
    first = on.cards[on.fitting[0]]
    return on.request.cards * levels.need(CardClass.of(on.node, first.card), on.request)


def best_fit(on: NodeCandidate, _: Candidate) -> Score:
    """The node on which the least CPU and cards stay free."""
    cpu = (levels.free_cpu(on) - on.request.cpu_milli) / LARGEST_CPU
    free = (on.free_cards - _needed(on)) / LARGEST_CARDS
    return (-int(POINTS * (1 - (0.5 * cpu + 0.5 * free)) // 1),)


def dot_product(on: NodeCandidate, _: Candidate) -> Score:
    """The node whose free amounts are the least similar to the request (DotProd, after Tetris)."""
    cpu = levels.free_cpu(on) / LARGEST_CPU * (on.request.cpu_milli / LARGEST_CPU)
    free = on.free_cards
    cards = free / LARGEST_CARDS * (_needed(on) / LARGEST_CARDS)
    return (-int(POINTS * (1 - (cpu + cards) / 2) // 1),)


def packing(on: NodeCandidate, card: Candidate) -> Score:
    """Cards in use first, then idle cards of nodes in use, then idle nodes (GpuPacking)."""
    if not on.request.cards:
        return (0,)
    idle = sum(level == FULL for _, level in on.levels)
    if card.usage.holders:
        return (-(100 - card.level * 10 // FULL),)
    return (-(50 - idle if any(other.usage.holders for other in on.cards) else 33 - idle),)


def clustering(on: NodeCandidate, _: Candidate) -> Score:
    """Nodes that hold the same kind, slices or whole cards, first; then mixed, empty and others."""
    if not on.request.cards:
        return (0,)
    whole = sum(other.usage.whole > 0 for other in on.cards)
    slices = sum(other.usage.holders > 0 for other in on.cards) - whole
    same, other = (whole, slices) if on.request.whole else (slices, whole)
    free = on.free_cards
    tier = (75 if not other else 50) if same else (0 if other else 25)
    return (-(tier + 25 * (LARGEST_CARDS - free) // LARGEST_CARDS),)


def random(on: NodeCandidate, _: Candidate) -> Score:
    """A node, and a card of it, drawn by the number of the request and the target's seed."""
    return (drawn(on.node.name, on.target),)


def random_card(on: NodeCandidate, card: Candidate) -> Score:
    """Order the cards of a node at random."""
    return (drawn(card.card.uuid, on.target),)


def drawn(name: str, target: PolicyTarget | None) -> int:
    """Return the number that is drawn for a name, by the number of the request and the seed."""
    turn = (target.seed, target.turn) if target else (0, 0)
    return crc32(f"{name} {turn[0]} {turn[1]}".encode())


def binpack(on: NodeCandidate, card: Candidate) -> Score:
    """The fullest node, and on it gpushare's card: the one with the smallest sufficient free memory."""
    return on.free_share, *card.free, card.card.rank


def spread(on: NodeCandidate, card: Candidate) -> Score:
    """The reverse of binpack; ties go to the lowest index, too."""
    first, second = card.free
    return -on.free_share, -first, -second, card.card.rank
