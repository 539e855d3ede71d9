"""Requests that are placed together on one node, judged on all nodes at once."""

from collections.abc import Iterator, Sequence

import numpy as np

from fenka.core.card_columns import CLASS, FREE_COMPUTE, FREE_MEMORY, SLOT, Bools, Ints
from fenka.core.columnar import Codes, Judgement, has_expressions
from fenka.core.columns import NodeColumns
from fenka.core.evaluate import Policy
from fenka.core.gangs import request_size
from fenka.core.request import Request

FEW = 8
"""Of this part of all slots, at most, reasons cost less by judging them again."""


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
        self.columns, self._requests = columns, requests
        self._policy, self._reserved = policy, reserved
        self.first = Judgement(columns, requests[0], reserved)
        self.fits: Bools = self.first.fits
        self.possible: Bools = self.first.fits
        if len(requests) == 1:
            return
        if not has_expressions(columns, policy):
            self.fits = np.zeros_like(self.fits)
            return
        self.fits = _one_by_one(columns, requests, policy, reserved, self.first)
        self.possible = self.fits.copy()
        uncertain = np.flatnonzero(self.first.fits & ~self.fits)
        if uncertain.size:
            part = columns.part(uncertain)
            kept = None if reserved is None else reserved[part.columns]
            self.possible[uncertain] = _possible(part, requests, kept)
            by_size = tuple(sorted(requests, key=request_size, reverse=True))
            for order, by in dict.fromkeys(((by_size, policy), (by_size, "binpack"))):
                if (order, by) != (tuple(requests), policy):
                    self.fits[uncertain] |= _one_by_one(part, order, by, kept)

    def codes(self, slots: Ints) -> tuple[Codes, Ints, Ints]:
        """Return why cards of these slots do not fit the first request without room beside those before it.

        Returns:
            The codes of the cards, the cards, and where among them those of each slot start.
        """
        cards, starts = self.columns.columns_of(slots)
        if len(self._requests) == 1 or not has_expressions(self.columns, self._policy):
            return self.first.codes(cards), cards, starts
        if slots.size > self.fits.size // FEW:
            return self._joint_codes()[cards], cards, starts
        kept = None if self._reserved is None else self._reserved[cards]
        part = JointJudgement(self.columns.part(slots), self._requests, self._policy, kept)
        return part._joint_codes(), cards, starts

    def _joint_codes(self) -> Codes:
        codes = np.zeros(self.columns.exists.shape, np.uint8)
        fits = np.ones(self.fits.shape, np.bool_)
        judgements = _judgements(
            self.columns, self._requests, self._policy, self._reserved, self.first
        )
        for judgement in judgements:
            failed = fits & ~judgement.fits
            if failed.any():
                failed_cards = failed[self.columns.cards[SLOT]]
                np.copyto(codes, judgement.codes(), where=failed_cards)
            fits &= judgement.fits
        return codes


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


def _one_by_one(
    columns: NodeColumns,
    requests: Sequence[Request],
    policy: Policy,
    reserved: Bools | None,
    first: Judgement | None = None,
) -> Bools:
    """Return which slots fit the requests one after the other."""
    fits = np.ones(columns.starts.shape, np.bool_)
    for judgement in _judgements(columns, requests, policy, reserved, first):
        fits &= judgement.fits
    return fits


def _possible(columns: NodeColumns, requests: Sequence[Request], reserved: Bools | None) -> Bools:
    """Return the slots on which each request fits alone, with room for the sum of all slices."""
    judgements = {it: Judgement(columns, it, reserved) for it in dict.fromkeys(requests)}
    possible: Bools = np.logical_and.reduce([judgement.fits for judgement in judgements.values()])
    if any(request.whole or request.cards > 1 for request in judgements):
        return possible
    usable = np.logical_or.reduce([judgement.card_fits for judgement in judgements.values()])
    by_class, count = columns.cards[CLASS], len(requests)
    for row, amounts in ((FREE_MEMORY, "memory"), (FREE_COMPUTE, "compute")):
        needs = {it: getattr(judgement.needs, amounts) for it, judgement in judgements.items()}
        free = np.where(usable, columns.usage[row], 0)
        smallest = np.minimum.reduce(list(needs.values()))[by_class]
        slices = np.where(smallest > 0, free // np.maximum(smallest, 1), count * usable)
        possible &= np.add.reduceat(np.minimum(slices, count), columns.starts) >= count
        least = sum(int(needs[request].min()) for request in requests)
        possible &= np.add.reduceat(free, columns.starts) >= least
    return possible
