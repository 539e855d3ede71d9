"""The columnar twin of `pod_placement.PodEvaluator`: a pod against all nodes at once. Pure.

The shared nodes of a cluster as columns, which follow the cluster's state.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Generic, TypeVar

import numpy as np

from fenka.cluster import placement
from fenka.cluster.node_admission import AdmissionRule, Infeasible, admission_rule, fits_when_empty
from fenka.cluster.objects import Pod
from fenka.cluster.spot_nodes import protection_needed_s
from fenka.cluster.state import ClusterState
from fenka.core.columnar import CODES, Codes, JointJudgement, count_reasons
from fenka.core.columns import Bools, Columns, Ints
from fenka.core.evaluate import Policy
from fenka.core.gangs import NO_DEVICES, place_gang
from fenka.core.inventory import Card, DeviceId, Links, Node
from fenka.core.reasons import ReasonCode, Unschedulable, counts_sentence
from fenka.core.request import Request
from fenka.core.usage import UsageOverlay, UsageView
from fenka.dialects.base import SliceRequest

V = TypeVar("V")

MAX_SPARE_VALUES = 64
"""Values that no node has any more, of nodes whose errors or cards change; beyond that all are read again."""


class SlotValues(Generic[V]):
    """A value for each slot. Of many slots few values are different; each of these has a number.

    Attributes:
        numbers: the number of each value.
        of_slot: the number of each slot's value.
    """

    def __init__(self) -> None:
        self.numbers: dict[V, int] = {}
        self.of_slot: Ints = np.zeros(0, np.int64)

    def set(self, slot: int, value: V) -> None:
        """Set the value of a slot."""
        if slot >= self.of_slot.size:
            more = np.zeros(slot + 1, np.int64)
            self.of_slot = np.concatenate((self.of_slot, more))
        self.of_slot[slot] = self.numbers.setdefault(value, len(self.numbers))


class LiveColumns:
    """Columns that follow the cluster: an event only names its node until they are read or follow.

    Attributes:
        usage: what is used of the cards.
        version: changes whenever the columns do.
        rules: the admission rule of each slot's node.
        kinds: each slot's node as far as that decides what it could hold if nothing were allocated.
    """

    def __init__(self, cluster: ClusterState, usage: UsageOverlay | None = None) -> None:
        """usage: what is used of the cards, if that is more than the cluster's pods use."""
        self._cluster = cluster
        self.usage: UsageView = usage or cluster
        self._changed = set[str]()
        cluster.watch(self._changed)
        if usage is not None:
            usage.watch(self._changed)
        self.version = 0
        self._begin()

    def _begin(self) -> None:
        self._columns = Columns()
        self.rules, self.kinds = SlotValues[AdmissionRule](), SlotValues[Node]()
        self._changed.update(shared.node.name for shared in self._cluster.shared_nodes())

    def read(self) -> Columns:
        """Return the columns as of now."""
        while self._changed:
            names = list(self._changed)
            # A set that is emptied by pop() stays as large as it was, and each pop() looks through it.
            self._changed.clear()
            for name in names:
                self.version += 1
                self._follow(name)
            most = self._columns.count + MAX_SPARE_VALUES
            if max(len(self.rules.numbers), len(self.kinds.numbers)) > most:
                self._begin()
        return self._columns

    def follow(self) -> None:
        """Bring the columns up to date, once they have been read: between requests rather than in one."""
        if self._columns.count:
            self.read()

    def _follow(self, name: str) -> None:
        columns, shared = self._columns, self._cluster.shared_node(name)
        slot = columns.slot(name)
        if shared is None or not shared.shares_cards:
            if slot >= 0:
                columns.remove_node(name)
            return
        node = self._cluster.card_node(name)
        if slot < 0 or columns.nodes[slot] is not node:
            columns.set_node(node, self.usage)
            slot = columns.slot(name)
            self.kinds.set(slot, _kind(node))
        else:
            columns.set_usage(name, self.usage)
        self.rules.set(slot, admission_rule(self._cluster, name))


def _kind(node: Node) -> Node:
    """Return a node that holds the same when empty, and is equal for all such nodes."""
    usable = sorted((card for card in node.cards if card.open), key=_size)
    cards = tuple(
        Card(
            *(index, DeviceId(str(index)), card.model, card.memory_mib, card.compute),
            profile=card.profile,
            unleased_mib=card.unleased_mib,
            drawn_mib=card.drawn_mib,
        )
        for index, card in enumerate(usable)
    )
    distances = replace(node, cards=tuple(usable)).distances
    links = Links(tuple(card.uuid for card in cards), distances) if distances else None
    return replace(node, name="", cards=cards, links=links)


def _size(card: Card) -> tuple[int, int, int, int, str, str]:
    return (
        *(card.memory_mib, card.unleased_mib, card.drawn_mib, card.compute),
        *(card.model, card.profile),
    )


_FITS = placement.Feasible((), ())


@dataclass(frozen=True, slots=True)
class _Constrained:
    """The nodes that fit a pod and that the queue's constraints are about: the judgement of them under these.

    Attributes:
        slots: of these nodes, in ascending order.
        judgement: of these nodes alone.
    """

    slots: Ints
    judgement: JointJudgement


@dataclass(frozen=True, slots=True)
class _Verdicts:
    """The verdicts on nodes. Valid until the columns change.

    Attributes:
        judgement: of all nodes, without the queue's constraints.
        constrained: of some nodes under the constraints, None if these are about no node that fits.
        asked: bool, by slot: for which nodes the verdict was asked.
        fits: bool, by slot; False for nodes that were not asked for.
        waits: bool, by slot: whether only entries before the pod keep it from the node.
        excluded: why each admission rule excludes the pod, None if it does not or no node asked for has it.
    """

    judgement: JointJudgement
    constrained: _Constrained | None
    asked: Bools
    fits: Bools
    waits: Bools
    excluded: list[Infeasible | None]

    def order(self, policy: Policy, slots: Ints, most: int = 0) -> Ints:
        """Return those of the slots that fit, the best first. most: how many at most, 0 for all."""
        among = np.zeros_like(self.fits)
        among[slots] = True
        return self.judgement.first.order(policy, np.flatnonzero(self.fits & among), most)

    def codes(self, slots: Ints) -> tuple[Codes, Ints]:
        """Return why the cards of these slots do not fit, and where among them those of each slot start."""
        codes, starts = self.judgement.codes(slots)
        waits = self.waits[slots]
        if self.constrained is not None and waits.any():
            of_waiting = waits.repeat(self.judgement.columns.sizes[slots])
            cards, _ = self.judgement.columns.columns_of(slots[waits])
            positions = np.searchsorted(self.constrained.slots, slots[waits])
            of_others, _ = self.constrained.judgement.codes(positions)
            # Cards that fit without the constraints are kept for others.
            fits = self.judgement.first.card_fits[cards]
            codes[of_waiting] = np.where(fits, CODES[ReasonCode.RESERVED], of_others)
        return codes, starts


class ColumnarPodEvaluator(placement.PodEvaluator):
    """Decides as `PodEvaluator` does, on all nodes at once."""

    min_nodes = 24
    """For fewer nodes the definition is faster, and says where on them the pod would be."""

    def __init__(
        self,
        cluster: ClusterState,
        policy: Policy,
        live: LiveColumns | None = None,
        max_nodes: int = 0,
    ) -> None:
        """live: the nodes, and what is used of the cards, if that is more than the cluster's pods use."""
        self._live = live or LiveColumns(cluster)
        self._last: tuple[object, placement.QueueConstraints | None, _Verdicts | None] = (
            None,
            None,
            None,
        )
        """The verdicts of the last call, and what they are of."""
        super().__init__(cluster, policy, self._live.usage, max_nodes)

    def filter(
        self,
        pod: Pod,
        names: Iterable[str],
        constraints: placement.QueueConstraints = placement.NO_CONSTRAINTS,
    ) -> placement.FilterResult:
        """Return which of the nodes fit the pod. Nothing is reserved."""
        names, parts = list(names), self._columnar_parts(pod)
        columns, max_nodes = self._live.read(), self._max_nodes
        slots = columns.slots(names)
        if parts is None or len(names) < self.min_nodes or slots.min(initial=0) < 0:
            return super().filter(pod, names, constraints)
        if self._cluster.instance_nodes(pod, names):
            return super().filter(pod, names, constraints)
        if self._planned_node(pod, names, constraints) is not None:
            return super().filter(pod, names, constraints)
        verdicts = self._verdicts(pod, parts, slots, constraints)
        fits = verdicts.fits[slots]
        if 0 < max_nodes < np.count_nonzero(fits):
            return placement.FilterResult(
                self._names(verdicts.order(self._policy, slots, max_nodes))
            )
        if fits.all():
            return placement.FilterResult(names)
        result = placement.FilterResult(list(compress(names, fits.tolist())))
        places = np.flatnonzero(~fits)
        rejected = [names[place] for place in places.tolist()]
        numbers, reasons, _ = self._reasons(verdicts, parts, slots[places])
        sentences = {number: why.sentence for number, why in reasons.items()}
        result.failed.update(zip(rejected, map(sentences.__getitem__, numbers), strict=True))
        never = {number for number, why in reasons.items() if why.unresolvable}
        for name in compress(rejected, map(never.__contains__, numbers)) if never else ():
            result.unresolvable[name] = result.failed.pop(name)
        return placement.with_position(result, constraints)

    def prioritize(
        self,
        pod: Pod,
        names: Sequence[str],
        constraints: placement.QueueConstraints = placement.NO_CONSTRAINTS,
    ) -> list[tuple[str, int]]:
        """Return a score for each node, in the order given."""
        parts, columns = self._columnar_parts(pod), self._live.read()
        slots = columns.slots(names)
        few = len(names) < self.min_nodes
        if self._planned_node(pod, names, constraints) is not None:
            return super().prioritize(pod, names, constraints)
        if self._cluster.instance_nodes(pod, names):
            return super().prioritize(pod, names, constraints)
        if parts is None or (few and self._known(pod, parts, slots, constraints) is None):
            return super().prioritize(pod, names, constraints)
        order = self._order(pod, parts, slots, constraints)
        # The last one is that of unknown nodes, whose slot is -1.
        scores = np.zeros(len(columns.nodes) + 1, np.int64)
        scores[order] = placement.REST * np.arange(order.size)[::-1] // max(order.size - 2, 1)
        scores[order[:1]] = placement.BEST
        return list(zip(names, scores[slots].tolist(), strict=True))

    def evaluate(
        self,
        pod: Pod,
        names: Iterable[str],
        constraints: placement.QueueConstraints = placement.NO_CONSTRAINTS,
    ) -> list[tuple[str, placement.Verdict | None]]:
        """Return the verdict on each node, for several nodes without score and placements."""
        names = list(names)
        # Columns that are not read need not follow the cluster yet.
        parts = None if len(names) < self.min_nodes else self._columnar_parts(pod)
        if parts is None or self._planned_node(pod, names, constraints) is not None:
            return super().evaluate(pod, names, constraints)
        if inside := self._cluster.instance_nodes(pod, names):
            others = [name for name in names if name not in inside]
            verdicts_of = dict(self.evaluate(pod, others, constraints))
            verdicts_of.update(super().evaluate(pod, inside, constraints))
            return [(name, verdicts_of[name]) for name in names]
        demand = pod.demand(self._cluster.dialects)
        slots = self._live.read().slots(names)
        shared = slots[slots >= 0]
        verdicts = self._verdicts(pod, parts, shared, constraints)
        fits = verdicts.fits[shared]
        numbers, reasons, _ = self._reasons(verdicts, parts, shared[~fits])
        rejections = map(reasons.__getitem__, numbers)
        of_shared = iter(fits.tolist())
        return [
            (name, self._without_cards(pod, demand, name))
            if slot < 0
            else (name, _FITS if next(of_shared) else next(rejections))
            for name, slot in zip(names, slots.tolist(), strict=True)
        ]

    def ranked(
        self,
        pod: Pod,
        names: Sequence[str],
        constraints: placement.QueueConstraints = placement.NO_CONSTRAINTS,
    ) -> list[str]:
        """Return those of the nodes that fit the pod and share cards, the best first."""
        parts = self._columnar_parts(pod)
        few = len(names) < self.min_nodes
        if parts is None or few or self._planned_node(pod, names, constraints) is not None:
            return super().ranked(pod, names, constraints)
        if inside := self._cluster.instance_nodes(pod, names):
            others = [name for name in names if name not in inside]
            of_instances = super().ranked(pod, sorted(inside), constraints)
            return self.ranked(pod, others, constraints) + of_instances
        slots = self._live.read().slots(names)
        return self._names(self._order(pod, parts, slots, constraints))

    def _explain_cards(self, pod: Pod, names: Sequence[str]) -> str | None:
        """Return one sentence over nodes on which the pod's slices are on cards; None if one fits."""
        parts, columns = self._columnar_parts(pod), self._live.read()
        if parts is None:
            return super()._explain_cards(pod, names)
        slots = columns.slots(names)
        verdicts = self._verdicts(pod, parts, slots, placement.NO_CONSTRAINTS)
        if verdicts.fits[slots].any():
            return None
        excluded = self._excluded(verdicts, slots)
        if excluded.all() and slots.size:
            why = verdicts.excluded[self._live.rules.of_slot[slots[0]]]
            return why.sentence if why else None
        numbers, reasons, counts = self._reasons(verdicts, parts, slots)
        hint = self._hint(pod) if all(why.unresolvable for why in reasons.values()) else ""
        total = Counter[ReasonCode]()
        for number, nodes in Counter(numbers).items():
            for reason, cards in counts.get(number, {}).items():
                total[reason] += nodes * cards
        text = counts_sentence(total)
        return f"{text}; {hint}" if hint else text

    # ---- inside ----

    def _columnar_parts(self, pod: Pod) -> tuple[SliceRequest, ...] | None:
        """Return what the pod requests of cards; None if the definition has to decide."""
        demand = pod.demand(self._cluster.dialects)
        known = demand.invalid is None and demand.dialect is not None and not demand.in_instances
        return demand.parts if known else None

    def _names(self, slots: Ints) -> list[str]:
        nodes = self._live.read().nodes
        return [node.name for slot in slots.tolist() if (node := nodes[slot]) is not None]

    def _order(
        self,
        pod: Pod,
        parts: tuple[SliceRequest, ...],
        slots: Ints,
        constraints: placement.QueueConstraints,
    ) -> Ints:
        """Return those of the slots that fit, the best first; without those of unknown nodes, -1."""
        slots = slots[slots >= 0]
        return self._verdicts(pod, parts, slots, constraints).order(self._policy, slots)

    def _verdicts(
        self,
        pod: Pod,
        parts: tuple[SliceRequest, ...],
        slots: Ints,
        constraints: placement.QueueConstraints,
    ) -> _Verdicts:
        """Return the verdicts on these nodes.

        One evaluation serves `filter` and `prioritize` of a pod, between which seldom anything changes.
        """
        known = self._known(pod, parts, slots, constraints)
        if known is None:
            columns = self._live.read()
            known = self._judge(columns, pod, parts, slots, constraints)
            self._last = self._key(pod, parts), constraints, known
        return known

    def _known(
        self,
        pod: Pod,
        parts: tuple[SliceRequest, ...],
        slots: Ints,
        constraints: placement.QueueConstraints,
    ) -> _Verdicts | None:
        """Return the last verdicts, if they are of this pod and these nodes, and nothing has changed."""
        key, known_constraints, known = self._last
        same = key == self._key(pod, parts)
        if known is None or not same or known_constraints is not constraints:
            return None
        return known if known.asked[slots[slots >= 0]].all() else None

    def _key(self, pod: Pod, parts: tuple[SliceRequest, ...]) -> object:
        """Return what verdicts depend on, beside the queue's constraints and the seconds that pass."""
        return pod.metadata.uid, parts, protection_needed_s(pod), self._live.version

    def _judge(
        self,
        columns: Columns,
        pod: Pod,
        parts: tuple[SliceRequest, ...],
        slots: Ints,
        constraints: placement.QueueConstraints,
    ) -> _Verdicts:
        """Judge all nodes. Where that is not certain, the definition decides, for these slots only."""
        requests, rules = tuple(part.request for part in parts), self._live.rules
        now = self._cluster.spot.now
        rule_of_slot = rules.of_slot[slots]
        # Nodes that admit nothing may each have a rule of their own: only those that are asked count.
        used = np.bincount(rule_of_slot, minlength=len(rules.numbers)).tolist()
        excluded = [
            rule.rejection_of(pod, parts, now) if used[number] else None
            for rule, number in rules.numbers.items()
        ]
        asked = np.zeros(len(columns.nodes), np.bool_)
        asked[slots] = True
        admitted = asked
        if any(excluded):
            admits = np.array([why is None for why in excluded], np.bool_)
            admitted = np.zeros_like(asked)
            admitted[slots] = admits[rule_of_slot]
        judgement = JointJudgement(columns, requests, self._policy)
        fits = self._decide(judgement, requests, admitted, NO_DEVICES)
        waits = np.zeros(fits.shape, np.bool_)
        limits = [slot for name in constraints.nodes if (slot := columns.slot(name)) >= 0]
        limited = np.array(sorted(slot for slot in limits if fits[slot]), np.int64)
        if not limited.size:
            return _Verdicts(judgement, None, asked, fits, waits, excluded)
        left = columns.part(limited)
        left.add(*(hold.placement for on_node in constraints.held.values() for hold in on_node))
        reserved = columns.mask_of(constraints.reserved)[left.columns]
        constrained = JointJudgement(left, requests, self._policy, reserved)
        every = np.ones(limited.size, np.bool_)
        waits[limited] = ~self._decide(constrained, requests, every, constraints.reserved)
        judgement.first.replace(limited, constrained.first)
        return _Verdicts(
            judgement,
            _Constrained(limited, constrained),
            asked,
            fits & ~waits,
            waits,
            excluded,
        )

    def _decide(
        self,
        judgement: JointJudgement,
        requests: Sequence[Request],
        asked: Bools,
        reserved: frozenset[DeviceId],
    ) -> Bools:
        """Return which of the slots fit. Where the judgement does not know, the definition decides."""
        fits = judgement.fits & asked
        if judgement.possible is judgement.fits:
            return fits
        for slot in np.flatnonzero(judgement.possible & ~judgement.fits & asked).tolist():
            node = judgement.columns.nodes[slot]
            assert node is not None
            placed = place_gang(judgement.columns, requests, self._policy, (node,), reserved)
            fits[slot] = not isinstance(placed, Unschedulable)
        return fits

    def _excluded(self, verdicts: _Verdicts, slots: Ints) -> Bools:
        """Return whether the admission rule of each of these slots excludes the pod."""
        excludes = np.array([why is not None for why in verdicts.excluded], np.bool_)
        return excludes[self._live.rules.of_slot[slots]]

    def _reasons(
        self, verdicts: _Verdicts, parts: tuple[SliceRequest, ...], slots: Ints
    ) -> tuple[list[int], dict[int, Infeasible], dict[int, Counter[ReasonCode]]]:
        """Return why the pod does not fit these slots.

        Returns:
            A number for each slot; the reason of each number; its counts, where cards are the reason.
        """
        live = self._live
        numbers = -1 - live.rules.of_slot[slots]
        by_rule = self._excluded(verdicts, slots)
        by_cards = slots[~by_rule]
        distinct: dict[int, Counter[ReasonCode]] = {}
        if by_cards.size:
            requests, kinds = tuple(part.request for part in parts), live.kinds.of_slot[by_cards]
            # Where it fits a node, it fits all nodes of that kind if nothing is allocated.
            could = np.zeros(len(live.kinds.numbers), np.bool_)
            could[live.kinds.of_slot[np.flatnonzero(verdicts.fits)]] = True
            unknown = set(kinds[~could[kinds]].tolist())
            for node, number in live.kinds.numbers.items() if unknown else ():
                could[number] |= number in unknown and fits_when_empty(requests, node)
            codes, starts = verdicts.codes(by_cards)
            counts = count_reasons(codes, starts, live.read().most_cards)
            distinct = counts.distinct
            numbers[~by_rule] = 2 * counts.of_slot + (could[kinds] | verdicts.waits[by_cards])
        of_slot: list[int] = numbers.tolist()
        counts_of = {number: distinct[number // 2] for number in set(of_slot) if number >= 0}
        reasons = {
            number: Infeasible(placement.sentence_of_counts(counted), unresolvable=number % 2 == 0)
            for number, counted in counts_of.items()
        }
        for number in set(of_slot) - counts_of.keys():
            why = verdicts.excluded[-1 - number]
            assert why is not None
            reasons[number] = why
        return of_slot, reasons, counts_of
