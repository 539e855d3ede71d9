"""The columnar twin of `gangs.PlainPlacer`."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from fenka.core.columnar import JointJudgement, Judgement, count_all
from fenka.core.columns import CLASS, FREE_COMPUTE, FREE_MEMORY, SLOT, WHOLE, Bools, Columns
from fenka.core.evaluate import Fit, Policy, evaluate, place_on
from fenka.core.gangs import NO_LIMITS, PlacementLimits, first_refusal, place_gang
from fenka.core.inventory import WHOLE_COMPUTE, DeviceId, Node
from fenka.core.reasons import NodeRejection, ReasonCode, Unschedulable
from fenka.core.request import NEVER, Placement, Request
from fenka.core.usage import CardUsage


class _State:
    """A state of a placer: one change more than in the state before it.

    Attributes:
        before: the state before it; None for the one in which nothing had changed.
        number: how many changes lead to it.
        placement: what was changed.
        added: whether it was allocated; otherwise it was released.
    """

    __slots__ = ("added", "before", "number", "placement")

    def __init__(self, before: "_State | None", placement: Placement, *, added: bool) -> None:
        self.before, self.placement, self.added = before, placement, added
        self.number: int = 1 if before is None else before.number + 1


class ColumnarPlacer:
    """Decides as `PlainPlacer` does, over columns of its own.

    Reasons are computed when they are read: few of many rejections are ever shown. For that each state of the
    placer remembers the one that it was made of, and the placer goes back to the one in which it rejected.
    """

    def __init__(self, columns: Columns) -> None:
        """columns: they belong to the placer from now on."""
        self._columns = columns
        self._state: _State | None = None
        """The last state; None while nothing has changed."""
        self._masks: dict[frozenset[str], Bools] = {}
        """By reserved cards, or by eligible nodes."""
        self._frontiers: dict[PlacementLimits, tuple[_State | None, list[list[int]]]] = {}
        """With the state in which it was computed."""
        self._most_on: list[int] = []
        """The memory that some node has free on one card, on each of two cards, and so on."""

    # ---- a UsageView ----

    def card_usage(self, node: str, device: DeviceId) -> CardUsage:
        """Return what is allocated of this card."""
        return self._columns.card_usage(node, device)

    def host_usage(self, node: str) -> tuple[int, int]:
        """Return the CPU (thousandths of a core) and host memory (MiB) allocated on this node."""
        return self._columns.host_usage(node)

    # ---- placing ----

    def place(
        self, request: Request, policy: Policy, limits: PlacementLimits = NO_LIMITS
    ) -> Placement | Unschedulable:
        """Return the best placement, or why there is none."""
        if self._may_fit(request, limits):
            judgement = Judgement(self._columns, request, self.reserved_mask(limits.reserved))
            eligible = None if limits.among is None else self.among_mask(limits.among)
            slot = judgement.best(policy, eligible)
            if slot is not None:
                return place_on(self, request, policy, self._node(slot), limits.reserved)
        return _Rejected(self, (request,), policy, limits)

    def place_on_one_node(
        self, requests: Sequence[Request], policy: Policy, limits: PlacementLimits = NO_LIMITS
    ) -> tuple[Placement, ...] | Unschedulable:
        """Return placements of all requests on one node: the best one for the first request that fits all."""
        if all(self._may_fit(request, limits) for request in dict.fromkeys(requests)):
            judgement = self.judge_together(requests, policy, limits.reserved)
            possible = judgement.possible
            if limits.among is not None:
                possible = possible & self.among_mask(limits.among)
            for slot in judgement.first.order(policy, np.flatnonzero(possible)).tolist():
                placed = place_gang(self, requests, policy, (self._node(slot),), limits.reserved)
                if not isinstance(placed, Unschedulable):
                    return placed
        return _Rejected(self, requests, policy, limits)

    def fits(
        self, request: Request, limits: PlacementLimits = NO_LIMITS
    ) -> Iterator[tuple[Node, Fit]]:
        """Yield the nodes that fit, by name."""
        fits = Judgement(self._columns, request, self.reserved_mask(limits.reserved)).fits
        if limits.among is not None:
            fits = fits & self.among_mask(limits.among)
        slots = np.flatnonzero(fits)
        for slot in slots[self._columns.ranks()[slots].argsort()].tolist():
            node = self._node(slot)
            (verdict,) = evaluate(self, request, "binpack", (node,), limits.reserved)
            assert isinstance(verdict, Fit)
            yield node, verdict

    def room(self, request: Request, limits: PlacementLimits = NO_LIMITS) -> dict[str, int]:
        """Return, for each node that fits, how many such requests have room on it at most."""
        room = Judgement(self._columns, request, self.reserved_mask(limits.reserved)).room()
        if limits.among is not None:
            room = room * self.among_mask(limits.among)
        slots = np.flatnonzero(room)
        names = (self._node(slot).name for slot in slots.tolist())
        return dict(zip(names, room[slots].tolist(), strict=True))

    def judge_together(
        self, requests: Sequence[Request], policy: Policy, reserved: frozenset[DeviceId]
    ) -> JointJudgement:
        """Return the judgement of all nodes for these requests, now."""
        return JointJudgement(self._columns, requests, policy, self.reserved_mask(reserved))

    def add(self, placement: Placement) -> None:
        """Allocate a placement."""
        self._columns.add(placement)
        self._state = _State(self._state, placement, added=True)

    def remove(self, placement: Placement) -> None:
        """Release a placement."""
        self._columns.remove(placement)
        last = self._state
        if last is not None and last.added and last.placement == placement:
            # It was only tried. No later state is one change further from the first because of it.
            self._state = last.before
        else:
            self._state = _State(last, placement, added=False)
        self._frontiers.clear()
        self._most_on.clear()

    def emptied(self) -> "ColumnarPlacer":
        """Return a placer of the same nodes on which nothing is allocated."""
        return ColumnarPlacer(self._columns.emptied())

    def node_named(self, name: str) -> Node:
        """Return one of the nodes."""
        return self._node(self._columns.slot(name))

    @property
    def state(self) -> "_State | None":
        """Return the state that the columns are in."""
        return self._state

    @contextmanager
    def as_of(self, state: "_State | None") -> Iterator[Columns]:
        """Go back to a state, and forward again."""
        last = self._state
        self.go_to(state)
        try:
            yield self._columns
        finally:
            self.go_to(last)

    def go_to(self, state: "_State | None") -> None:
        """Change the columns to what they were in a state, by the changes that lie between."""
        for placement, added in _path(self._state, state):
            (self._columns.add if added else self._columns.remove)(placement)
        self._state = state

    def twin(self) -> "ColumnarPlacer":
        """Return another placer in the same state, which changes by itself."""
        twin = ColumnarPlacer(self._columns.copy())
        twin._state, twin._masks = self._state, self._masks
        return twin

    def reserved_mask(self, devices: frozenset[DeviceId]) -> Bools | None:
        """Return an array that is True for these cards, None for none."""
        if not devices:
            return None
        if devices not in self._masks:
            self._masks[devices] = self._columns.mask_of(devices)
        return self._masks[devices]

    def among_mask(self, names: frozenset[str] | None) -> Bools:
        """Return an array that is True for the slots of these nodes, None for all."""
        if names is None:
            return np.array([node is not None for node in self._columns.nodes], np.bool_)
        if names not in self._masks:
            mask = np.zeros(len(self._columns.nodes), np.bool_)
            slots = self._columns.slots(names)
            mask[slots[slots >= 0]] = True
            self._masks[names] = mask
        return self._masks[names]

    def _node(self, slot: int) -> Node:
        node = self._columns.nodes[slot]
        assert node is not None
        return node

    # ---- requests that certainly do not fit ----

    def _may_fit(self, request: Request, limits: PlacementLimits) -> bool:
        """Return whether a card has room for the request. True if that is not known.

        Most requests of a long queue fit no card at all. Placements only take room, so an older frontier errs
        on the side of True; a release removes all frontiers.
        """
        if request.whole or not request.cards:
            return True
        if request.cards > 1 and not self._enough_on_one_node(request):
            return False
        known = self._frontiers.get(limits)
        if known is not None and not self._below(known[1], request):
            return False
        if known is None or known[0] is not self._state:
            known = self._state, self._frontier(limits)
            self._frontiers[limits] = known
        return self._below(known[1], request)

    def _frontier(self, limits: PlacementLimits) -> list[list[int]]:
        """Return the most free memory of any open card, by its least free compute and its class."""
        columns = self._columns
        usable = columns.open & (columns.usage[WHOLE] == 0)
        mask = self.reserved_mask(limits.reserved)
        if mask is not None:
            usable &= ~mask
        if limits.among is not None:
            usable &= self.among_mask(limits.among)[columns.cards[SLOT]]
        cards = np.flatnonzero(usable)
        most = np.full((len(columns.classes), WHOLE_COMPUTE + 1), -1, np.int64)
        compute = np.minimum(columns.usage[FREE_COMPUTE, cards], WHOLE_COMPUTE)
        np.maximum.at(
            most, (columns.cards[CLASS, cards], compute), columns.usage[FREE_MEMORY, cards]
        )
        by_class = np.maximum.accumulate(most[:, ::-1], axis=1)[:, ::-1]
        by_compute: list[list[int]] = by_class.T.tolist()
        return by_compute

    def _enough_on_one_node(self, request: Request) -> bool:
        """Return whether a node has that much memory on that many cards, whatever else they lack."""
        if not self._most_on:
            columns = self._columns
            free = np.where(columns.open, columns.usage[FREE_MEMORY], -1)
            for _ in range(columns.most_cards):
                largest = np.maximum.reduceat(free, columns.starts)
                self._most_on.append(int(largest.max()))
                # Of equal cards one is left out.
                which = np.flatnonzero(free == largest[columns.cards[SLOT]])
                slots = columns.cards[SLOT, which]
                free[which[np.flatnonzero(np.diff(slots, prepend=-1))]] = -1
        needed = min((class_.needs(request)[0] for class_ in self._columns.classes), default=NEVER)
        return request.cards <= len(self._most_on) and needed <= self._most_on[request.cards - 1]

    def _below(self, frontier: list[list[int]], request: Request) -> bool:
        most = frontier[request.compute]
        for number, card_class in enumerate(self._columns.classes):
            memory, _, other_model, other_kind = card_class.needs(request)
            if memory <= most[number] and not other_model and not other_kind:
                return True
        return False


class _Rejected(Unschedulable):
    """A rejection by a `ColumnarPlacer`, with reasons that are computed when they are read."""

    def __init__(
        self,
        placer: ColumnarPlacer,
        requests: Sequence[Request],
        policy: Policy,
        limits: PlacementLimits,
    ) -> None:
        super().__init__()
        self._placer, self._requests, self._policy = placer, requests, policy
        self._limits, self._state = limits, placer.state
        self._counts: Counter[ReasonCode] | None = None
        """How many cards have which reason, once that is counted."""

    @property
    def rejections(self) -> tuple[NodeRejection, ...]:
        """Return one for each node, by name."""
        reserved, among = self._limits
        rejections = []
        with self._placer.as_of(self._state) as columns:
            slots = np.flatnonzero(self._placer.among_mask(among))
            for slot in slots[columns.ranks()[slots].argsort()].tolist():
                node = columns.nodes[slot]
                assert node is not None
                refusal = first_refusal(columns, self._requests, self._policy, node, reserved)
                # By what its policy has learned since, a request for which a search gave up may have room.
                if refusal is not None:
                    rejections.append(refusal)
        return tuple(rejections)

    def counts(self) -> Counter[ReasonCode]:
        """Return how many cards have which reason."""
        if self._counts is None:
            with self._placer.as_of(self._state):
                self._counts = self._count_on(self._placer)
        return self._counts

    @property
    def placer(self) -> ColumnarPlacer | None:
        """Return the placer that has to be asked for the reasons; None if they are counted."""
        return self._placer if self._counts is None else None

    def count_on(self, twin: ColumnarPlacer) -> None:
        """Count the reasons with a twin of the placer, which stays in the state of the rejection."""
        twin.go_to(self._state)
        self._counts = self._count_on(twin)

    def _count_on(self, placer: ColumnarPlacer) -> Counter[ReasonCode]:
        reserved, among = self._limits
        slots = np.flatnonzero(placer.among_mask(among))
        codes, _ = placer.judge_together(self._requests, self._policy, reserved).codes(slots)
        return count_all(codes)


def count_reasons(rejections: Sequence[Unschedulable]) -> Iterator[None]:
    """Count the reasons of rejections in steps, so that their sentences cost nothing more.

    A pass rejects in order. Its states are gone through once, from the last to the first, on a copy: in
    between the placer may be used.

    Args:
        rejections: of one pass over a queue, in the order in which they were made.
    """
    known: ColumnarPlacer | None = None
    twin: ColumnarPlacer | None = None
    for rejection in reversed(rejections):
        placer = rejection.placer if isinstance(rejection, _Rejected) else None
        if placer is None:
            continue
        if twin is None or known is not placer:
            known, twin = placer, placer.twin()
        assert isinstance(rejection, _Rejected)
        rejection.count_on(twin)
        yield


def _path(start: _State | None, end: _State | None) -> list[tuple[Placement, bool]]:
    """Return the changes from one state to another; a change is a placement, and whether it is added."""
    back, forth = list[tuple[Placement, bool]](), list[tuple[Placement, bool]]()
    while start is not end:
        if end is None or (start is not None and start.number >= end.number):
            assert start is not None
            back.append((start.placement, not start.added))
            start = start.before
        else:
            forth.append((end.placement, end.added))
            end = end.before
    return back + forth[::-1]
