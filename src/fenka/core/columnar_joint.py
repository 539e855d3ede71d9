"""Requests that are placed together on one node, judged on all nodes at once."""

from collections.abc import Iterator, Sequence

import numpy as np

from fenka.core.card_columns import CLASS, FREE_COMPUTE, FREE_MEMORY, SLOT, Bools, Ints
from fenka.core.columnar import Codes, Judgement, has_expressions
from fenka.core.columns import NodeColumns
from fenka.core.evaluate import Policy
from fenka.core.gangs import request_size
from fenka.core.request import Request


class JointJudgement:
    """Requests that are placed together on one node, judged on all nodes. Valid until the columns change.

    `gangs.place_gang` on each node is the definition. It begins by placing the requests one after the other,
    which is done here for all nodes at once. Where that fails although each request alone fits, `place_gang`
    itself decides.

    Attributes:
        first: the judgement of the first request, by which nodes are ordered.
        fits: bool, by slot: whether the requests certainly fit together.
        possible: bool, by slot: whether they may fit together; True wherever `fits` is.
    """

    def __init__(
        self,
        columns: NodeColumns,
        requests: Sequence[Request],
        policy: Policy,
        reserved: Bools | None = None,
    ) -> None:
        self.columns = columns
        self.first = Judgement(columns, requests[0], reserved)
        self._in_turn = [self.first]
        """The judgement of each request on what those before it leave."""
        self.fits: Bools = self.first.fits
        self.possible: Bools = self.first.fits
        if len(requests) == 1:
            return
        if not has_expressions(columns, policy):
            self.fits = np.zeros_like(self.fits)
            return
        self._in_turn = list(_judgements(columns, requests, policy, reserved, self.first))
        self.fits = np.logical_and.reduce([judgement.fits for judgement in self._in_turn])
        self.possible = self.fits.copy()
        uncertain = np.flatnonzero(self.first.fits & ~self.fits)
        if uncertain.size:
            uncertain = uncertain[self._possible(requests, reserved, uncertain)]
        if not uncertain.size:
            return
        self.possible[uncertain] = True
        part = columns.part(uncertain)
        kept = None if reserved is None else reserved[part.columns]
        by_size = tuple(sorted(requests, key=request_size, reverse=True))
        for order, by in dict.fromkeys(((by_size, policy), (by_size, "binpack"))):
            if (order, by) != (tuple(requests), policy):
                in_turn = _judgements(part, order, by, kept)
                fits = np.logical_and.reduce([judgement.fits for judgement in in_turn])
                self.fits[uncertain] |= fits

    def codes(self, slots: Ints) -> tuple[Codes, Ints]:
        """Return why cards of these slots do not fit the first request without room beside those before it.

        Returns:
            The codes of the cards of these slots, and where among them those of each slot start.
        """
        cards, starts = self.columns.columns_of(slots)
        if len(self._in_turn) == 1:
            return self.first.codes(cards), starts
        codes = np.zeros(cards.shape, np.uint8)
        fits = np.ones(slots.shape, np.bool_)
        for judgement in self._in_turn:
            failed = fits & ~judgement.fits[slots]
            if failed.any():
                of_failed = failed.repeat(self.columns.sizes[slots])
                codes[of_failed] = judgement.codes(cards[of_failed])
            fits &= ~failed
        return codes, starts

    def _possible(self, requests: Sequence[Request], reserved: Bools | None, slots: Ints) -> Bools:
        """Return on which of these slots each request fits alone, with room for the sum of all slices."""
        columns, (first, *others) = self.columns, dict.fromkeys(requests)
        judgements = {first: self.first}
        judgements |= {request: Judgement(columns, request, reserved) for request in others}
        possible: Bools = np.logical_and.reduce([it.fits[slots] for it in judgements.values()])
        if any(request.whole or request.cards > 1 for request in judgements):
            return possible
        cards, starts = columns.columns_of(slots)
        usable = np.logical_or.reduce([it.card_fits[cards] for it in judgements.values()])
        by_class, count = columns.cards[CLASS, cards], len(requests)
        for row, amounts in ((FREE_MEMORY, "memory"), (FREE_COMPUTE, "compute")):
            needs = {it: getattr(judgement.needs, amounts) for it, judgement in judgements.items()}
            free = np.where(usable, columns.usage[row, cards], 0)
            smallest = np.minimum.reduce(list(needs.values()))[by_class]
            slices = np.where(smallest > 0, free // np.maximum(smallest, 1), count * usable)
            possible &= np.add.reduceat(np.minimum(slices, count), starts) >= count
            least = sum(int(needs[request].min()) for request in requests)
            possible &= np.add.reduceat(free, starts) >= least
        return possible


def _judgements(
    columns: NodeColumns,
    requests: Sequence[Request],
    policy: Policy,
    reserved: Bools | None,
    first: Judgement | None = None,
) -> Iterator[Judgement]:
    """Yield the judgement of each request on what those before it leave. first: that of the first request."""
    judgement = first or Judgement(columns, requests[0], reserved)
    fits = judgement.fits
    yield judgement
    left = columns.copy()
    for request in requests[1:]:
        chosen = judgement.chosen_cards(policy) & fits[columns.cards[SLOT]]
        left.take(np.flatnonzero(chosen), judgement.request, judgement.needs)
        judgement = Judgement(left, request, reserved)
        fits = fits & judgement.fits
        yield judgement
