"""The expected workload, with the fragments and prices that policies compute from it."""

from fenka.core.columns import NodeColumns
from fenka.core.policies.fragments import Fragments
from fenka.core.policies.prices import FIRST_STEPS, BidPrices
from fenka.core.policies.workload import Workload

PRICED_EVERY = 20
"""Prices are corrected after this number of requests."""


class ExpectedWorkload:
    """The expected workload, and what is computed from it.

    Attributes:
        turn: the number of the request that is placed, from which the random policy draws.
    """

    def __init__(self, workload: Workload, seed: int = 0) -> None:
        """seed: of the random policy."""
        self.turn, self.seed, self.workload = 0, seed, workload
        self.fragments, self.prices = Fragments(workload), BidPrices(workload)

    def expect(self, workload: Workload) -> None:
        """Expect another workload from now on. Prices begin with those known."""
        if workload != self.workload:
            self.workload = workload
            self.fragments, self.prices = Fragments(workload), BidPrices(workload, self.prices)

    def next(self, columns: NodeColumns, policy: str) -> None:
        """Prepare for the next request, which this policy places on these nodes."""
        if policy == "bid-price" and self.turn % PRICED_EVERY == 0:
            self.prices.improve(columns, steps=1 if self.turn else FIRST_STEPS)
        self.turn += 1
