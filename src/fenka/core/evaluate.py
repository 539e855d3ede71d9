"""The one decision: judge every node for a request. Placing is taking the best verdict.

The scheduler, the workstation's daemon, what-ifs and the simulator all call `evaluate`; nobody else
knows what fits.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.reasons import NodeRejection, Reason, ReasonCode, Unschedulable, hint
from fenka.core.request import Placement, Request, Slice
from fenka.core.usage import CardUsage, EmptyUsage, UsageView


@dataclass(frozen=True, slots=True)
class Candidate:
    """A card that is being judged: what is held of it, and what the request wants of it."""

    card: Card
    usage: CardUsage
    requested_mib: int | None
    """None if the card has fewer units than requested; 0 for a request of compute alone."""
    nominal_mib: int = 0
    """What the request means on any card of the node, for reasons."""

    @property
    def free_mib(self) -> int:
        """Never negative: an overcommitted card has nothing free."""
        return max(self.card.memory_mib - self.usage.memory_mib, 0)

    @property
    def free_compute(self) -> int:
        """Percent, never negative."""
        return max(self.card.compute - self.usage.compute, 0)

    @property
    def free(self) -> tuple[int, int]:
        """Memory then compute; for a slice of compute alone the other way round."""
        if self.requested_mib == 0:
            return self.free_compute, self.free_mib
        return self.free_mib, self.free_compute


@dataclass(frozen=True, slots=True)
class Fit:
    """A node that fits; the smallest score is the best.

    cards: all its cards that fit, of which the placement takes the first by policy.
    """

    node: str
    score: tuple[float, ...]
    placement: Placement
    cards: tuple[Card, ...]


Verdict = Fit | NodeRejection

Filter = Callable[[Candidate, Request], Reason | None]


class NodeCandidate(NamedTuple):
    """A node that is being scored: the request, and all its cards with what is allocated of them."""

    node: Node
    request: Request
    cards: Sequence[Candidate]
    free_share: float
    """The free part of the cards that take slices, in memory; in compute for a request of compute alone."""


ScoreFunction = Callable[[NodeCandidate, Candidate], tuple[float, ...]]
"""Return what sorts nodes, and the cards of a node: the smallest is the best."""


def _unhealthy(it: Candidate, _: Request) -> Reason | None:
    return None if it.card.healthy else Reason(ReasonCode.UNHEALTHY, it.card.index)


def _cordoned(it: Candidate, _: Request) -> Reason | None:
    return Reason(ReasonCode.CORDONED, it.card.index) if it.card.cordoned else None


def _model(it: Candidate, request: Request) -> Reason | None:
    wrong = request.models and it.card.model not in request.models
    return Reason(ReasonCode.MODEL, it.card.index) if wrong else None


def _taken_whole(it: Candidate, _: Request) -> Reason | None:
    return Reason(ReasonCode.WHOLE, it.card.index) if it.usage.whole else None


def _in_use(it: Candidate, request: Request) -> Reason | None:
    return Reason(ReasonCode.IN_USE, it.card.index) if request.whole and it.usage.holders else None


def _memory(it: Candidate, _: Request) -> Reason | None:
    if it.requested_mib is not None and it.requested_mib <= it.free_mib:
        return None
    return Reason(ReasonCode.MEMORY, it.card.index, it.requested_mib or it.nominal_mib, it.free_mib)


def _compute(it: Candidate, request: Request) -> Reason | None:
    needed = it.card.compute if request.whole else request.compute
    if needed <= it.free_compute:
        return None
    return Reason(ReasonCode.COMPUTE, it.card.index, needed, it.free_compute)


FILTERS: tuple[Filter, ...] = (
    _unhealthy,
    _cordoned,
    _model,
    _taken_whole,
    _in_use,
    _memory,
    _compute,
)
"""One predicate, one reason. The first that fails is the card's reason."""


def _binpack(on: NodeCandidate, card: Candidate) -> tuple[float, ...]:
    return on.free_share, *card.free, card.card.index


def _spread(on: NodeCandidate, card: Candidate) -> tuple[float, ...]:
    first, second = card.free
    return -on.free_share, -first, -second, card.card.index


SCORES: dict[str, ScoreFunction] = {"binpack": _binpack, "spread": _spread}
"""binpack: the fullest node, and on it gpushare's card, the one with the smallest sufficient free memory;
ties go to less free compute, then to the lowest index. spread: the reverse, ties to the lowest index."""

Policy = str


def evaluate(
    view: UsageView,
    request: Request,
    policy: Policy,
    nodes: Iterable[Node],
    reserved: Collection[DeviceId] = (),
) -> list[Verdict]:
    """Judge every node, in the order given. Cards in `reserved` (UUIDs) are kept for others.

    Raises KeyError for an unknown policy.
    """
    score = SCORES[policy]
    return [_judge(view, request, score, node, reserved) for node in nodes]


def place(
    view: UsageView,
    request: Request,
    policy: Policy,
    nodes: Iterable[Node],
    reserved: Collection[DeviceId] = (),
) -> Placement | Unschedulable:
    """The best placement, or why there is none. Equal nodes: the first by name, so that it is certain."""
    verdicts = evaluate(view, request, policy, nodes, reserved)
    fits = [verdict for verdict in verdicts if isinstance(verdict, Fit)]
    if fits:
        return min(fits, key=lambda fit: (fit.score, fit.node)).placement
    return Unschedulable(
        tuple(verdict for verdict in verdicts if isinstance(verdict, NodeRejection))
    )


def fits_card(request: Request, node: Node, card: Card, usage: CardUsage) -> bool:
    """Return whether this card of the node fits with that usage, which may be that of another time."""
    return _first_reason(_candidate(request, node, card, usage), request, ()) is None


def _candidate(request: Request, node: Node, card: Card, usage: CardUsage) -> Candidate:
    requested: int | None = card.memory_mib if request.whole else 0
    nominal = 0
    if request.memory is not None:
        requested = request.memory.mib_on(card.memory_mib, node.unit_mib)
        nominal = request.memory.nominal_mib(node.unit_mib)
    return Candidate(card, usage, requested, nominal)


def never_fits(request: Request, nodes: Collection[Node]) -> Unschedulable | None:
    """Why the request could not be placed even if nothing were held; None if it could.

    Health and cordons pass: a request that only they keep out may wait.
    """
    rejections: list[NodeRejection] = []
    for node in nodes:
        (verdict,) = evaluate(EmptyUsage(), request, "binpack", (_restored(node),))
        if isinstance(verdict, Fit):
            return None
        rejections.append(verdict)
    return Unschedulable(tuple(rejections), hint(request, rejections, nodes))


def _restored(node: Node) -> Node:
    if all(card.healthy and not card.cordoned for card in node.cards):
        return node
    cards = (replace(card, healthy=True, cordoned=False) for card in node.cards)
    return replace(node, cards=tuple(cards))


def _judge(
    view: UsageView,
    request: Request,
    score: ScoreFunction,
    node: Node,
    reserved: Collection[DeviceId],
) -> Verdict:
    judged = [
        _candidate(request, node, card, view.card_usage(node.name, card.uuid))
        for card in node.cards
    ]
    reasons = [_first_reason(it, request, reserved) for it in judged]
    fitting = [it for it, reason in zip(judged, reasons, strict=True) if reason is None]
    shortage = _shortage(view, request, node, len(fitting))
    if shortage is not None:
        whys = [
            reason or Reason(shortage[0], it.card.index, *shortage[1:])
            for it, reason in zip(judged, reasons, strict=True)
        ]
        return NodeRejection(node.name, tuple(whys))
    on = NodeCandidate(node, request, judged, _free_share(judged))
    card_score = SCORES[node.card_policy] if node.card_policy else score
    fitting.sort(key=lambda card: card_score(on, card))
    return Fit(
        node.name,
        min(score(on, card) for card in fitting) if node.card_policy else score(on, fitting[0]),
        _placement(request, node, fitting[: request.cards]),
        tuple(it.card for it in fitting),
    )


def _free_share(judged: list[Candidate]) -> float:
    """Of the node's cards that admit anybody, in what is asked for: memory, or compute alone."""
    admitting = [it for it in judged if it.card.healthy and not it.card.cordoned]
    of_compute = admitting[0].requested_mib == 0
    total = sum(it.card.compute if of_compute else it.card.memory_mib for it in admitting)
    return sum(it.free[0] for it in admitting) / total


def _first_reason(it: Candidate, request: Request, reserved: Collection[DeviceId]) -> Reason | None:
    for predicate in FILTERS:
        reason = predicate(it, request)
        if reason is not None:
            return reason
    # Last: that others wait for a card is the reason only if it would fit without them.
    return Reason(ReasonCode.RESERVED, it.card.index) if it.card.uuid in reserved else None


def _shortage(
    view: UsageView, request: Request, node: Node, fitting: int
) -> tuple[ReasonCode, int, int] | None:
    """What the node as a whole lacks, needed and available: the reason of each card that fits by itself."""
    cpu, memory = view.host_usage(node.name)
    for why, needed, used, total in (
        (ReasonCode.CPU, request.cpu_milli, cpu, node.cpu_milli),
        (ReasonCode.HOST_MEMORY, request.host_memory_mib, memory, node.memory_mib),
        (ReasonCode.TOO_FEW, request.cards, 0, fitting),
    ):
        # A request that needs none is not kept out by a host that is already overcommitted.
        if total is not None and needed > max(total - used, 0):
            return why, needed, max(total - used, 0)
    return None


def _placement(request: Request, node: Node, chosen: list[Candidate]) -> Placement:
    slices = tuple(
        Slice(
            it.card.index,
            it.card.uuid,
            it.requested_mib or 0,
            it.card.compute if request.whole else request.compute,
        )
        for it in sorted(chosen, key=lambda it: it.card.index)
    )
    return Placement(
        node.name, slices, request.cpu_milli, request.host_memory_mib, whole=request.whole
    )
