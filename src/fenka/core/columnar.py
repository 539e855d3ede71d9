"""The columnar twin of `evaluate.py`: one request against all cards of all nodes, by vector expressions.

`evaluate` is the definition. For each of its filters and policies this module has the expression over all
cards; both decide the same, which the tests check on random histories. A policy without an expression here is
scored by the definition, on the nodes that fit.

Requests that are placed together on one node, judged on all nodes at once.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from fenka.core.columns import (
    CARD_COMPUTE,
    CARD_POLICY,
    CLASS,
    COMPUTE_SUM,
    CPU,
    CPU_USED,
    FREE_COMPUTE,
    FREE_COMPUTE_SUM,
    FREE_MEMORY,
    FREE_MEMORY_SUM,
    HOLDERS,
    HOST_MEMORY,
    HOST_MEMORY_USED,
    INDEX,
    LINKS,
    MAX_INDEX,
    MEMORY_SUM,
    SLOT,
    WHOLE,
    Bools,
    CardColumns,
    Ints,
    NodeColumns,
)
from fenka.core.evaluate import (
    FILTERS,
    Fit,
    Policy,
    best_cards,
    compares_links,
    evaluate,
    links_cost,
    links_missing,
)
from fenka.core.gangs import first_refusal, request_size
from fenka.core.inventory import DeviceId
from fenka.core.policies.candidates import in_effect, target_of
from fenka.core.policies.column_keys import COLUMN_KEYS, Keys
from fenka.core.policies.node_scores import NodeScores
from fenka.core.reasons import ReasonCode
from fenka.core.request import NEVER, Request

Codes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]

REASONS = tuple(ReasonCode)
FITS = 0
"""The code of a card that fits. REASONS[code - 1] is the reason of the others."""
ALL = slice(None)
"""All cards."""
NO_CARD = len(REASONS) + 1
"""The code of a column without a card."""
CODES = {reason: np.uint8(code) for code, reason in enumerate(REASONS, 1)}

_MEMORY_BITS, _COMPUTE_BITS, _INDEX_BITS = 38, 12, MAX_INDEX.bit_length()
"""Of a sort key. No hardware has larger numbers."""
_LAST = np.iinfo(np.int64).max


# ---- filters: the twins of evaluate.FILTERS ----


def _unhealthy(on: "CardJudgement") -> Bools:
    return on.columns.unhealthy


def _cordoned(on: "CardJudgement") -> Bools:
    return on.columns.cordoned


def _divided(on: "CardJudgement") -> Bools | None:
    return None if on.request.instance else _other_kind(on)


def _instance(on: "CardJudgement") -> Bools | None:
    return _other_kind(on) if on.request.instance else None


def _other_kind(on: "CardJudgement") -> Bools | None:
    by_class = on.needs.other_kind
    # On most clusters no card is divided.
    return by_class[on.card_class] if by_class.any() else None


def _model(on: "CardJudgement") -> Bools | None:
    return on.needs.other_model[on.card_class] if on.request.models else None


def _taken_whole(on: "CardJudgement") -> Bools:
    taken: Bools = on.columns.usage[WHOLE] > 0
    return taken


def _in_use(on: "CardJudgement") -> Bools | None:
    in_use: Bools = on.columns.usage[HOLDERS] > 0
    return in_use if on.request.whole else None


def _memory(on: "CardJudgement") -> Bools:
    by_class = on.needs.memory
    # A plain number leaves the free memory in the type that it has.
    needed = by_class[on.card_class] if by_class.size > 1 else int(by_class[0])
    too_small: Bools = on.columns.usage[FREE_MEMORY] < needed
    return too_small


def _compute(on: "CardJudgement") -> Bools | None:
    if not on.request.whole and not on.request.compute:
        return None
    needed = on.columns.cards[CARD_COMPUTE] if on.request.whole else on.request.compute
    too_small: Bools = on.columns.usage[FREE_COMPUTE] < needed
    return too_small


_REJECTED: dict[ReasonCode, Callable[["CardJudgement"], Bools | None]] = {
    ReasonCode.UNHEALTHY: _unhealthy,
    ReasonCode.CORDONED: _cordoned,
    ReasonCode.DIVIDED: _divided,
    ReasonCode.INSTANCE: _instance,
    ReasonCode.MODEL: _model,
    ReasonCode.WHOLE: _taken_whole,
    ReasonCode.IN_USE: _in_use,
    ReasonCode.MEMORY: _memory,
    ReasonCode.COMPUTE: _compute,
}
"""The cards that each filter rejects, None for none."""
assert list(_REJECTED) == list(FILTERS), "each filter has one expression here, in the same order"
_CLOSED = {ReasonCode.UNHEALTHY, ReasonCode.CORDONED}
"""The filters of cards that `CardColumns.open` leaves out."""


_PREFERS_MOST = {"binpack": False, "spread": True}
"""The twins of evaluate.SCORES: whether the policy prefers the most free share, memory and compute."""


def has_expressions(columns: NodeColumns, policy: Policy) -> bool:
    """Return whether this policy, and those that nodes have of their own, are known here."""
    return {policy, *columns.card_policies} <= _PREFERS_MOST.keys()


class CardJudgement:
    """Cards judged for a request, each by itself.

    Attributes:
        fits: bool, by card.
        rejected: the cards that each filter rejects, None for none.
    """

    def __init__(
        self, columns: CardColumns, request: Request, reserved: Bools | None = None
    ) -> None:
        self.columns, self.request = columns, request
        self.needs, self.card_class = columns.needs(request), columns.cards[CLASS]
        self.rejected = {reason: rejected(self) for reason, rejected in _REJECTED.items()}
        unfit = ~columns.open
        for reason, mask in self.rejected.items():
            if mask is not None and reason not in _CLOSED:
                unfit |= mask
        if reserved is not None:
            unfit |= reserved
        self.fits: Bools = ~unfit


class Judgement:
    """A request judged on all nodes. Valid until the columns change.

    Attributes:
        fits: bool, by slot: whether the node fits.
        card_fits: bool, by card: whether the card fits by itself.
    """

    def __init__(
        self, columns: NodeColumns, request: Request, reserved: Bools | None = None
    ) -> None:
        """reserved: True for cards that are kept for other requests."""
        self.columns, self._reserved = columns, reserved
        self._replaced: list[tuple[Ints, Judgement]] = []
        self._cards = CardJudgement(columns, request, reserved)
        self.request, self.needs, self.card_fits = request, self._cards.needs, self._cards.fits
        self.fits: Bools = (
            _at_least(self.card_fits, columns.starts, request.cards)
            if request.cards
            else np.array([node is not None for node in columns.nodes], np.bool_)
        )
        self._not_linked = self._without_links()
        if self._not_linked is not None:
            self.fits &= ~self._not_linked
        self._lacks_cpu = self._lacks(CPU, CPU_USED, request.cpu_milli)
        self._lacks_memory = self._lacks(HOST_MEMORY, HOST_MEMORY_USED, request.host_memory_mib)
        for lacking in (self._lacks_cpu, self._lacks_memory):
            if lacking is not None:
                self.fits &= ~lacking

    def _lacks(self, total: int, used: int, needed: int) -> Bools | None:
        # A request for none is not rejected by an overcommitted host.
        if not needed:
            return None
        hosts = self.columns.hosts
        lacking: Bools = np.maximum(hosts[total] - hosts[used], 0) < needed
        return lacking

    def _without_links(self) -> Bools | None:
        """Return which nodes have enough cards, but too few that are linked; None if that does not matter."""
        if not (self.request.linked and self.request.by_links):
            return None
        missing = np.zeros_like(self.fits)
        for slot, distances, fitting in self._linked_cards(np.flatnonzero(self.fits)):
            missing[slot] = links_missing(self.request, distances, fitting)
        return missing

    def _linked_cards(self, slots: Ints) -> Iterator[tuple[int, bytes | None, list[int]]]:
        """Yield each slot, the distances of its cards, and the positions of those that fit."""
        columns = self.columns
        by_number = {0: None, **{number: links for links, number in columns.links.items()}}
        cards, starts = columns.columns_of(slots)
        spans = zip(starts.tolist(), columns.sizes[slots].tolist(), strict=True)
        fits, numbers = self.card_fits[cards].tolist(), columns.hosts[LINKS, slots].tolist()
        for slot, (start, size), number in zip(slots.tolist(), spans, numbers, strict=True):
            fitting = [position for position in range(size) if fits[start + position]]
            yield slot, by_number[number], fitting

    def room(self) -> Ints:
        """Return, by slot, how many such requests have room on each node that fits, at most."""
        columns, request = self.columns, self.request
        room = np.full(self.fits.shape, NEVER)
        if request.cards:
            slices = np.ones(self.card_fits.shape, np.int64)
            if not request.whole:
                memory = self.needs.memory[columns.cards[CLASS]]
                unlimited = NEVER if request.compute else 1
                by_memory = columns.usage[FREE_MEMORY] // np.maximum(memory, 1)
                slices = np.where(memory, by_memory, unlimited)
                if request.compute:
                    slices = np.minimum(slices, columns.usage[FREE_COMPUTE] // request.compute)
            room = np.add.reduceat(slices * self.card_fits, columns.starts) // request.cards
        for total, used, needed in (
            (CPU, CPU_USED, request.cpu_milli),
            (HOST_MEMORY, HOST_MEMORY_USED, request.host_memory_mib),
        ):
            if needed:
                hosts = columns.hosts
                room = np.minimum(room, np.maximum(hosts[total] - hosts[used], 0) // needed)
        return room * self.fits

    # ---- scores ----

    def replace(self, slots: Ints, judgement: "Judgement") -> None:
        """Take the scores of these slots from another judgement, of a part that has just them."""
        self._replaced.append((slots, judgement))

    def order(self, policy: Policy, slots: Ints, most: int = 0) -> Ints:
        """Return those of the slots that fit, the best first; of equal nodes the first by name.

        most: how many at most, 0 for all.
        """
        slots, policy = slots[self.fits[slots]], in_effect(policy)
        most = most or slots.size
        if policy in COLUMN_KEYS and slots.size:
            keys = self._node_keys(policy, slots)
            if compares_links(self.request):
                keys = self._costs(slots), *keys
            best_first: Ints = slots[np.lexsort((self.columns.ranks()[slots], *keys[::-1]))[:most]]
            return best_first
        if policy not in _PREFERS_MOST:
            return self._order_by_definition(policy, slots)[:most]
        share = self._share(policy)[slots]
        if compares_links(self.request):
            ranked = np.lexsort(
                (
                    self.columns.ranks()[slots],
                    self._best_cards(policy, slots),
                    share,
                    self._costs(slots),
                )
            )
            return slots[ranked[:most]]
        if most < slots.size:
            candidates = share <= np.partition(share, most - 1)[most - 1]
            slots, share = slots[candidates], share[candidates]
        best, ranks = self._best_cards(policy, slots), self.columns.ranks()[slots]
        in_order: Ints = slots[np.lexsort((ranks, best, share))[:most]]
        return in_order

    def best(self, policy: Policy, among: Bools | None = None) -> int | None:
        """Return the best slot that fits, of those that are True in `among`; None if none fits."""
        slots = np.flatnonzero(self.fits if among is None else self.fits & among)
        policy = in_effect(policy)
        if not slots.size:
            return None
        if compares_links(self.request):
            costs = self._costs(slots)
            slots = slots[costs == costs.min()]
        if policy in COLUMN_KEYS:
            among = np.ones(slots.size, np.bool_)
            for key in self._node_keys(policy, slots):
                among &= key == key[among].min()
            slots = slots[among]
            return int(slots[self.columns.ranks()[slots].argmin()])
        if policy not in _PREFERS_MOST:
            return int(self._order_by_definition(policy, slots)[0])
        share = self._share(policy)[slots]
        slots = slots[share == share.min()]
        if slots.size > 1:
            best = self._best_cards(policy, slots)
            slots = slots[best == best.min()]
        return int(slots[self.columns.ranks()[slots].argmin()])

    def _node_keys(self, policy: Policy, slots: Ints) -> Keys:
        """Return what sorts these slots, which fit: the first key decides first."""
        on = NodeScores(self.columns, self.request, self.card_fits, slots, target_of(policy))
        keys = COLUMN_KEYS[policy](on)
        for replaced, judgement in self._replaced:
            places = np.searchsorted(replaced, slots)
            places[places == replaced.size] = 0
            of_part = replaced[places] == slots
            if of_part.any():
                others = judgement._node_keys(policy, places[of_part])
                for key, other in zip(keys, others, strict=True):
                    key[of_part] = other
        return keys

    def _order_by_definition(self, policy: Policy, slots: Ints) -> Ints:
        scores = []
        for slot in slots.tolist():
            node = self.columns.nodes[slot]
            (verdict,) = evaluate(
                self.columns, self.request, policy, (node,), self.reserved_of(slot)
            )
            assert isinstance(verdict, Fit)
            scores.append((verdict.score, node.name, slot))
        return np.array([slot for *_, slot in sorted(scores)], np.int64)

    def reserved_of(self, slot: int) -> list[DeviceId]:
        """Return the cards of this slot that are kept for other requests."""
        if self._reserved is None:
            return []
        node = self.columns.nodes[slot]
        assert node is not None
        cards = node.cards
        first = self.columns.starts[slot]
        return [
            card.uuid for card, kept in zip(cards, self._reserved[first:], strict=False) if kept
        ]

    def _share(self, policy: Policy) -> Floats:
        """Return the free part of each node's open cards, negative if the policy prefers the most."""
        hosts = self.columns.hosts
        rows = (
            (FREE_COMPUTE_SUM, COMPUTE_SUM) if self._of_compute else (FREE_MEMORY_SUM, MEMORY_SUM)
        )
        free, total = (hosts[row] for row in rows)
        share: Floats = free / np.maximum(total, 1)
        if _PREFERS_MOST[policy]:
            share = -share
        for slots, judgement in self._replaced:
            share[slots] = judgement._share(policy)
        return share

    def _costs(self, slots: Ints) -> Ints:
        """Return the cost of the best cards of each of these slots, which fit."""
        costs = np.zeros(self.fits.size, np.int64)
        for slot, distances, fitting in self._linked_cards(slots):
            costs[slot] = links_cost(self.request, distances, fitting)
        for replaced, judgement in self._replaced:
            fit = np.flatnonzero(judgement.fits)
            costs[replaced[fit]] = judgement._costs(fit)
        return costs[slots]

    @property
    def _of_compute(self) -> bool:
        return self.request.memory is None and not self.request.whole

    def _card_keys(self, policy: Policy, cards: Ints | slice = slice(None)) -> Ints:
        """Return what sorts cards of a node, the smallest first; _LAST for a card that does not fit."""
        free_memory, free_compute = self.columns.usage[FREE_MEMORY:, cards]
        if _PREFERS_MOST[policy]:
            free_memory = (1 << _MEMORY_BITS) - 1 - free_memory
            free_compute = (1 << _COMPUTE_BITS) - 1 - free_compute
        if self._of_compute:
            first, second, bits = free_compute, free_memory, _MEMORY_BITS
        else:
            first, second, bits = free_memory, free_compute, _COMPUTE_BITS
        keys = (((first << bits) | second) << _INDEX_BITS) | self.columns.cards[INDEX, cards]
        return np.where(self.card_fits[cards], keys, _LAST)

    def _best_cards(self, policy: Policy, slots: Ints) -> Ints:
        """Return the smallest key of the cards of each of these slots."""
        if not self.request.cards:
            return np.zeros(slots.size, np.int64)
        of_card = self.columns.cards[SLOT]
        if slots.size > self.fits.size // 8:
            best = np.minimum.reduceat(self._card_keys(policy), self.columns.starts)
        else:
            best = np.full(self.fits.size, _LAST)
            best[slots] = 0
            cards = np.flatnonzero(best[of_card] == 0)
            if cards.size:
                starts = np.flatnonzero(np.diff(of_card[cards], prepend=-1))
                keys = np.minimum.reduceat(self._card_keys(policy, cards), starts)
                best[of_card[cards[starts]]] = keys
        for replaced, judgement in self._replaced:
            best[replaced] = judgement._best_cards(policy, np.arange(replaced.size))
        return best[slots]

    def chosen_cards(self, policy: Policy) -> Bools:
        """Return the cards that each node that fits would give, by its own policy or this one."""
        columns = self.columns
        slots, keys = columns.cards[SLOT], self._card_keys(policy)
        for own, number in columns.card_policies.items():
            is_own = (columns.hosts[CARD_POLICY] == number)[slots]
            keys = np.where(is_own, self._card_keys(own), keys)
        chosen = np.zeros(keys.shape, np.bool_)
        if self.request.by_links and columns.links:
            self._choose_linked(keys, chosen)
        for _ in range(self.request.cards):
            best = np.minimum.reduceat(keys, columns.starts)[slots]
            now = (keys == best) & (keys < _LAST)
            chosen |= now
            keys[now] = _LAST
        chosen &= self.fits[slots]
        return chosen

    def _choose_linked(self, keys: Ints, chosen: Bools) -> None:
        """Choose the cards of the nodes whose distances are known. Their keys are _LAST afterwards."""
        columns = self.columns
        slots = np.flatnonzero(self.fits & (columns.hosts[LINKS] > 0))
        for slot, distances, fitting in self._linked_cards(slots):
            first = int(columns.starts[slot])
            fitting.sort(key=lambda position: keys[first + position])
            chosen[
                [first + position for position in best_cards(self.request, distances, fitting)]
            ] = True
            keys[first : first + int(columns.sizes[slot])] = _LAST

    # ---- reasons ----

    def codes(self, cards: Ints | slice = ALL) -> Codes:
        """Return why each card does not fit, by itself or because of its node; or FITS, or NO_CARD."""
        columns = self.columns
        exists = columns.exists[cards]
        codes = np.zeros(exists.shape, np.uint8)
        if self._reserved is not None:
            np.copyto(codes, CODES[ReasonCode.RESERVED], where=self._reserved[cards])
        for reason, mask in reversed(self._cards.rejected.items()):
            if mask is not None:
                np.copyto(codes, CODES[reason], where=mask[cards])
        lacking = {ReasonCode.HOST_MEMORY: self._lacks_memory, ReasonCode.CPU: self._lacks_cpu}
        shortages = {reason: mask for reason, mask in lacking.items() if mask is not None}
        # One card that fits is enough for a request for one card, unless its node lacks something.
        if shortages or self.request.cards > 1:
            shortage = np.where(self.fits, np.uint8(FITS), CODES[ReasonCode.TOO_FEW])
            if self._not_linked is not None:
                shortage[self._not_linked] = CODES[ReasonCode.NOT_LINKED]
            for reason, mask in shortages.items():
                shortage[mask] = CODES[reason]
            # That is the reason of those of its cards that fit by themselves.
            codes = np.where(codes == FITS, shortage[columns.cards[SLOT, cards]], codes)
        codes[~exists] = NO_CARD
        return codes


@dataclass(frozen=True, slots=True)
class ReasonCounts:
    """How many cards of each node have which reason.

    Attributes:
        distinct: the different counts, each by a number.
        of_slot: for each slot, the number of its counts.
    """

    distinct: dict[int, Counter[ReasonCode]]
    of_slot: Ints


def count_reasons(codes: Codes, starts: Ints, most_cards: int) -> ReasonCounts:
    """Count the reasons on each slot.

    Args:
        codes: of the cards.
        starts: the first card of each slot.
        most_cards: the most that a slot has.
    """
    bits = most_cards.bit_length()
    present = tuple(range(1, NO_CARD))
    if bits * NO_CARD >= 63:
        # Hardly any cluster has all reasons at once.
        occurring = np.bincount(codes, minlength=NO_CARD)[1:NO_CARD]
        present = tuple((np.flatnonzero(occurring) + 1).tolist())
    if bits * (len(present) + 1) < 63:
        # The counts of a node are the digits of one number.
        of_slot = np.add.reduceat(_digits(bits, present).take(codes), starts)
        counts = {number: _read_digits(number, bits, present) for number in set(of_slot.tolist())}
    else:
        rows = np.stack([_sum_by_slot(codes == code, starts) for code in CODES.values()])
        distinct, of_slot = np.unique(rows, axis=1, return_inverse=True)
        counts = dict(enumerate(distinct.T.tolist()))
    return ReasonCounts(
        {number: _counter(slot_counts) for number, slot_counts in counts.items()}, of_slot
    )


@cache
def _digits(bits: int, present: tuple[int, ...]) -> Ints:
    """Return what each code adds to a number whose digits of so many bits count the present codes."""
    digits = np.zeros(NO_CARD + 1, np.int64)
    digits[list(present)] = 1 << bits * np.arange(len(present))
    return digits


def _read_digits(number: int, bits: int, present: tuple[int, ...]) -> list[int]:
    """Return how often each of REASONS is counted in a number."""
    counts = [0] * len(REASONS)
    for place, code in enumerate(present):
        counts[code - 1] = (number >> bits * place) & ((1 << bits) - 1)
    return counts


def count_all(codes: Codes) -> Counter[ReasonCode]:
    """Return how many of these cards have which reason."""
    return _counter(np.bincount(codes, minlength=NO_CARD)[1:NO_CARD].tolist())


def _counter(counts: Sequence[int]) -> Counter[ReasonCode]:
    """counts: of each of REASONS."""
    return Counter({reason: count for reason, count in zip(REASONS, counts, strict=True) if count})


def _at_least(flags: Bools, starts: Ints, count: int) -> Bools:
    """Return which slots have at least so many True cards."""
    enough: Bools = (
        np.logical_or.reduceat(flags, starts)
        if count == 1
        else _sum_by_slot(flags, starts) >= count
    )
    return enough


def _sum_by_slot(flags: Bools, starts: Ints) -> Ints:
    """Return the number of True cards of each slot."""
    sums: Ints = np.add.reduceat(flags, starts, dtype=np.int64)
    return sums


class JointJudgement:
    """Requests that are placed together on one node, judged on all nodes. Valid until the columns change.

    `gangs.place_gang` on each node is the definition. It begins by placing the requests one after the other,
    which is done here for all nodes at once. Where that fails although each request alone fits, `place_gang`
    itself decides. With a policy that has no expression for the choice of cards, only `place_gang`'s
    attempt by binpack is done here.

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
        self.columns, self._requests, self._policy = columns, requests, policy
        self.first = Judgement(columns, requests[0], reserved)
        self._in_turn = [self.first]
        """The judgement of each request on what those before it leave, if there are expressions for that."""
        self.fits: Bools = self.first.fits
        self.possible: Bools = self.first.fits
        if len(requests) == 1:
            return
        if has_expressions(columns, policy):
            self._in_turn = list(_judgements(columns, requests, policy, reserved, self.first))
            self.fits = np.logical_and.reduce([judgement.fits for judgement in self._in_turn])
        else:
            self.fits = np.zeros_like(self.fits)
        self.possible = self.fits.copy()
        uncertain = np.flatnonzero(self.first.fits & ~self.fits)
        if uncertain.size:
            uncertain = uncertain[self._possible(requests, reserved, uncertain)]
        self.possible[uncertain] = True
        if not uncertain.size:
            return
        part = columns.part(uncertain)
        kept = None if reserved is None else reserved[part.columns]
        by_size = tuple(sorted(requests, key=request_size, reverse=True))
        for order, by in dict.fromkeys(((by_size, policy), (by_size, "binpack"))):
            if has_expressions(columns, by) and (order, by) != (tuple(requests), policy):
                in_turn = _judgements(part, order, by, kept)
                fits = np.logical_and.reduce([judgement.fits for judgement in in_turn])
                self.fits[uncertain] |= fits

    def codes(self, slots: Ints) -> tuple[Codes, Ints]:
        """Return why cards of these slots do not fit the first request without room beside those before it.

        Returns:
            The codes of the cards of these slots, and where among them those of each slot start.
        """
        cards, starts = self.columns.columns_of(slots)
        if len(self._in_turn) < len(self._requests):
            return self._codes_by_definition(slots, starts, self.first.codes(cards)), starts
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

    def _codes_by_definition(self, slots: Ints, starts: Ints, codes: Codes) -> Codes:
        """codes: of the first request, right where that does not fit."""
        for slot, start in zip(slots.tolist(), starts.tolist(), strict=True):
            node = self.columns.nodes[slot]
            if node is not None and self.first.fits[slot]:
                reserved = self.first.reserved_of(slot)
                refusal = first_refusal(self.columns, self._requests, self._policy, node, reserved)
                if refusal is not None:
                    reasons = [CODES[reason.code] for reason in refusal.reasons]
                    codes[start : start + len(reasons)] = reasons
        return codes

    def _possible(self, requests: Sequence[Request], reserved: Bools | None, slots: Ints) -> Bools:
        """Return on which of these slots each request fits alone, with room for the sum of all slices."""
        columns, (first, *others) = self.columns, dict.fromkeys(requests)
        judgements = {first: self.first}
        judgements |= {request: Judgement(columns, request, reserved) for request in others}
        possible: Bools = np.logical_and.reduce(
            [judgement.fits[slots] for judgement in judgements.values()]
        )
        if any(request.whole or request.cards > 1 for request in judgements):
            return possible
        cards, starts = columns.columns_of(slots)
        usable = np.logical_or.reduce(
            [judgement.card_fits[cards] for judgement in judgements.values()]
        )
        by_class, count = columns.cards[CLASS, cards], len(requests)
        for row, amounts in ((FREE_MEMORY, "memory"), (FREE_COMPUTE, "compute")):
            needs = {
                name: getattr(judgement.needs, amounts) for name, judgement in judgements.items()
            }
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
