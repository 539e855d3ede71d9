"""The policies that place for an expected workload: they read what `fragments` and `prices` compute."""

from fenka.core.policies import levels
from fenka.core.policies.candidates import FULL, Candidate, NodeCandidate, Score, by_level

SCALE = 1000
"""Values are in thousandths of a thousandth of a card, so that sums are exact."""
RANK_CPU, RANK_CARD = 128_000, 8 * FULL
"""Of equal nodes the fuller one is taken; CPU and cards are compared with the largest nodes'."""


@by_level
def fgd(on: NodeCandidate, card: Candidate) -> Score:
    """Return the negative of FGD's score of placing on this card; without a workload, what is free."""
    if on.target is None or not on.target.workload:
        return (on.free_cards,)
    fragments = on.target.fragments
    before = on.levels
    cpu = levels.free_cpu(on)
    after = levels.changed(on, card)
    gained = fragments.fragment(cpu, before) - fragments.fragment(
        max(cpu - on.request.cpu_milli, 0), after
    )
    return (-fragments.score(gained),)


@by_level
def bid_price(on: NodeCandidate, card: Candidate) -> Score:
    """Return what the node loses in value, in thousandths of a card, then how empty it is."""
    cpu, before = levels.free_cpu(on), on.levels
    free = cpu / RANK_CPU + on.free_cards / RANK_CARD
    if on.target is None or not on.target.prices.classes:
        return 0, free
    prices = on.target.prices
    after = levels.changed(on, card)
    lost = prices.value(cpu, before) - prices.value(max(cpu - on.request.cpu_milli, 0), after)
    return (lost + SCALE // 2) // SCALE, free
