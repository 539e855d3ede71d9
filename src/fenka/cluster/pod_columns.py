"""The columnar twin of `pod_placement.PodEvaluator`: a pod against all nodes at once. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np

from fenka.cluster.live_columns import LiveColumns
from fenka.cluster.node_admission import Infeasible
from fenka.cluster.objects import Pod
from fenka.cluster.pod_placement import (
    Feasible,
    FilterResult,
    PodEvaluator,
    Verdict,
    sentence_of_counts,
    with_position,
)
from fenka.cluster.queue_constraints import NO_CONSTRAINTS, QueueConstraints
from fenka.cluster.state import ClusterState
from fenka.core.columnar import (
    CODES,
    Codes,
    JointJudgement,
    count_all,
    count_reasons,
    has_expressions,
)
from fenka.core.columns import SLOT, Bools, Ints
from fenka.core.evaluate import Policy
from fenka.core.gangs import NO_DEVICES, place_gang
from fenka.core.inventory import DeviceId
from fenka.core.reasons import ReasonCode, Unschedulable, counts_sentence
from fenka.core.request import Request
from fenka.dialects.base import SliceRequest

_FITS = Feasible((), ())


@dataclass(frozen=True, slots=True)
class _Verdicts:
    """The verdicts on the nodes of all slots.

    Attributes:
        fits: bool, by slot.
        codes: by card, why it does not fit.
        waits: bool, by slot: whether only entries before the pod keep it from the node.
        excluded: why each admission rule excludes the pod, None if it does not.
        rules: the number of each slot's rule.
    """

    fits: Bools
    codes: Codes
    waits: Bools
    excluded: list[Infeasible | None]
    rules: Ints


class ColumnarPodEvaluator(PodEvaluator):
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
        super().__init__(cluster, policy, self._live.usage, max_nodes)

    def filter(
        self, pod: Pod, names: Iterable[str], constraints: QueueConstraints = NO_CONSTRAINTS
    ) -> FilterResult:
        """Return which of the nodes fit the pod. Nothing is reserved."""
        names, parts = list(names), self._columnar_parts(pod)
        slots = self._live.read().slots(names)
        if parts is None or len(names) < self.min_nodes or not (slots >= 0).all():
            return super().filter(pod, names, constraints)
        max_nodes = self._max_nodes
        order = list[int]() if max_nodes else None
        verdicts = self._judge(parts, slots, constraints, order)
        if order and max_nodes < len(order):
            nodes = (self._live.read().nodes[slot] for slot in order[:max_nodes])
            return FilterResult([node.name for node in nodes if node is not None])
        fits = verdicts.fits[slots]
        result = FilterResult(list(compress(names, fits.tolist())))
        reasons = self._infeasible_on(verdicts, parts, slots[~fits])
        for name, why in zip(compress(names, (~fits).tolist()), reasons, strict=True):
            (result.unresolvable if why.unresolvable else result.failed)[name] = why.sentence
        return with_position(result, constraints)

    def evaluate(
        self, pod: Pod, names: Iterable[str], constraints: QueueConstraints = NO_CONSTRAINTS
    ) -> list[tuple[str, Verdict | None]]:
        """Return the verdict on each node, for several nodes without score and placements."""
        names = list(names)
        parts, demand = self._columnar_parts(pod), pod.demand(self._cluster.dialects)
        if parts is None or len(names) < self.min_nodes:
            return super().evaluate(pod, names, constraints)
        slots = self._live.read().slots(names)
        shared = slots[slots >= 0]
        verdicts = self._judge(parts, shared, constraints)
        fits = verdicts.fits[shared]
        reasons = iter(self._infeasible_on(verdicts, parts, shared[~fits]))
        of_shared = iter(fits.tolist())
        return [
            (name, self._without_cards(demand, name))
            if slot < 0
            else (name, _FITS if next(of_shared) else next(reasons))
            for name, slot in zip(names, slots.tolist(), strict=True)
        ]

    def ranked(
        self, pod: Pod, names: Sequence[str], constraints: QueueConstraints = NO_CONSTRAINTS
    ) -> list[str]:
        """Return those of the nodes that fit the pod and share cards, the best first."""
        parts = self._columnar_parts(pod)
        if parts is None or len(names) < self.min_nodes:
            return super().ranked(pod, names, constraints)
        columns = self._live.read()
        slots = columns.slots(names)
        order = list[int]()
        self._judge(parts, slots[slots >= 0], constraints, order)
        nodes = (columns.nodes[slot] for slot in order)
        return [node.name for node in nodes if node is not None]

    def explain(self, pod: Pod) -> str | None:
        """Return one sentence over all nodes that share cards, for a pending pod; None if a node fits."""
        parts, columns = self._columnar_parts(pod), self._live.read()
        if parts is None:
            return super().explain(pod)
        slots = columns.slots(shared.node.name for shared in self._cluster.shared_nodes())
        verdicts = self._judge(parts, slots, NO_CONSTRAINTS)
        if verdicts.fits[slots].any():
            return None
        excludes = np.array([why is not None for why in verdicts.excluded], np.bool_)
        excluded = excludes[verdicts.rules[slots]]
        if excluded.all() and slots.size:
            why = verdicts.excluded[verdicts.rules[slots[0]]]
            return why.sentence if why else None
        of_cards = verdicts.codes[np.isin(columns.cards[SLOT], slots[~excluded])]
        infeasible = self._infeasible_on(verdicts, parts, slots)
        hint = self._hint(pod) if all(why.unresolvable for why in infeasible) else ""
        text = counts_sentence(count_all(of_cards))
        return f"{text}; {hint}" if hint else text

    # ---- inside ----

    def _columnar_parts(self, pod: Pod) -> tuple[SliceRequest, ...] | None:
        """Return what the pod requests of cards; None if the definition has to decide."""
        demand = pod.demand(self._cluster.dialects)
        known = demand.invalid is None and demand.dialect is not None
        columnar = known and has_expressions(self._live.read(), self._policy)
        return demand.parts if columnar else None

    def _judge(
        self,
        parts: tuple[SliceRequest, ...],
        slots: Ints,
        constraints: QueueConstraints,
        order: list[int] | None = None,
    ) -> _Verdicts:
        """Judge all nodes. Where that is not certain, the definition decides, for these slots only.

        order: is filled with the slots that fit, the best first.
        """
        columns, requests = self._live.read(), tuple(part.request for part in parts)
        numbers, rules = self._live.rules()
        # Nodes that admit nothing may each have a rule of their own: only those that are asked count.
        used = set(rules[slots].tolist())
        excluded = [
            rule.rejection(parts) if number in used else None for rule, number in numbers.items()
        ]
        admitted = np.array([why is None for why in excluded], np.bool_)[
            rules[: len(columns.nodes)]
        ]
        asked = np.zeros(len(columns.nodes), np.bool_)
        asked[slots] = admitted[slots]
        judgement = JointJudgement(columns, requests, self._policy)
        fits = self._decide(judgement, requests, asked, NO_DEVICES)
        waits = np.zeros_like(fits)
        rejects = (asked & ~fits).any() or bool(constraints.nodes)
        codes = judgement.codes() if rejects else np.zeros(columns.exists.shape, np.uint8)
        if not constraints.nodes:
            if order is not None:
                order += judgement.first.order(self._policy, np.flatnonzero(fits))
            return _Verdicts(fits, codes, waits, excluded, rules)
        limits = columns.slots(constraints.nodes)
        limited = np.zeros_like(fits)
        limited[limits[limits >= 0]] = True
        held = [it.placement for on_node in constraints.held.values() for it in on_node]
        with columns.added(held):
            under = JointJudgement(
                columns, requests, self._policy, columns.mask_of(constraints.reserved)
            )
            waits = fits & limited
            waits &= ~self._decide(under, requests, waits, constraints.reserved)
            fits &= ~waits
            if order is not None:
                order += under.first.order(self._policy, np.flatnonzero(fits))
            # A card that would fit without the constraints is kept for others.
            of_others = np.where(
                judgement.first.card_fits, CODES[ReasonCode.RESERVED], under.codes()
            )
        codes = np.where(waits[columns.cards[SLOT]] & columns.exists, of_others, codes)
        return _Verdicts(fits, codes, waits, excluded, rules)

    def _decide(
        self,
        judgement: JointJudgement,
        requests: Sequence[Request],
        asked: Bools,
        reserved: frozenset[DeviceId],
    ) -> Bools:
        """Return which of the slots fit. Where the judgement does not know, the definition decides."""
        fits = judgement.fits & asked
        for slot in np.flatnonzero(judgement.possible & ~judgement.fits & asked).tolist():
            node = judgement.columns.nodes[slot]
            assert node is not None
            placed = place_gang(judgement.columns, requests, self._policy, (node,), reserved)
            fits[slot] = not isinstance(placed, Unschedulable)
        return fits

    def _infeasible_on(
        self, verdicts: _Verdicts, parts: tuple[SliceRequest, ...], slots: Ints
    ) -> list[Infeasible]:
        """Return why the pod does not fit each of these slots."""
        rules = verdicts.rules[slots]
        by_mode = np.array([why is not None for why in verdicts.excluded], np.bool_)[rules]
        reasons: list[Infeasible | None] = []
        reason_of = np.empty(slots.size, np.int64)
        by_cards = slots[~by_mode]
        if by_cards.size:
            columns, requests = self._live.read(), tuple(part.request for part in parts)
            asked = np.zeros(len(columns.nodes), np.bool_)
            asked[by_cards] = True
            empty = JointJudgement(columns.emptied(), requests, "binpack")
            could = self._decide(empty, requests, asked, NO_DEVICES) | verdicts.waits
            counts = count_reasons(columns, verdicts.codes, by_cards)
            for each in counts.distinct:
                sentence = sentence_of_counts(each)
                reasons += (
                    Infeasible(sentence, unresolvable=True),
                    Infeasible(sentence, unresolvable=False),
                )
            reason_of[~by_mode] = 2 * counts.of_slot + could[by_cards]
        reason_of[by_mode] = len(reasons) + rules[by_mode]
        reasons += verdicts.excluded
        chosen = (reasons[number] for number in reason_of.tolist())
        return [why for why in chosen if why is not None]
