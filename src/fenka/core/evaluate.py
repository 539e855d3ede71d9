"""The one decision: evaluate every node for a request. To place a request is to take the best verdict.

The scheduler, the workstation's daemon, what-ifs and the simulator all call `evaluate`. No other module
decides whether a request fits. To add a rule, write a filter and add it to FILTERS; to add a policy, write a
score function and add it to `policies.scores.SCORES`.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.policies.candidates import (
    NO_CARD,
    Candidate,
    NodeCandidate,
    in_effect,
    target_of,
)
from fenka.core.policies.scores import CARD_SCORES, SCORES
from fenka.core.reasons import NodeRejection, Reason, ReasonCode, Unschedulable, hint
from fenka.core.request import Placement, Request, Slice
from fenka.core.usage import CardUsage, EmptyUsage, UsageView


@dataclass(frozen=True, slots=True)
class Fit:
    """A node that fits.

    Attributes:
        score: the smallest is the best.
        placement: on the best of its cards.
        cards: all its cards that fit.
    """

    node: str
    score: tuple[float, ...]
    placement: Placement
    cards: tuple[Card, ...]


Verdict = Fit | NodeRejection

Filter = Callable[[Candidate, Request], Reason | None]
"""Returns why a card does not fit, None if it does."""


def _unhealthy(candidate: Candidate, _: Request) -> Reason | None:
    return None if candidate.card.healthy else Reason(ReasonCode.UNHEALTHY, candidate.card.index)


def _cordoned(candidate: Candidate, _: Request) -> Reason | None:
    return Reason(ReasonCode.CORDONED, candidate.card.index) if candidate.card.cordoned else None


def _divided(candidate: Candidate, request: Request) -> Reason | None:
    if request.instance or _is_kind(candidate.card, request):
        return None
    return Reason(ReasonCode.DIVIDED, candidate.card.index)


def _instance(candidate: Candidate, request: Request) -> Reason | None:
    if not request.instance or _is_kind(candidate.card, request):
        return None
    return Reason(ReasonCode.INSTANCE, candidate.card.index)


def _is_kind(card: Card, request: Request) -> bool:
    return request.is_for(card.profile, divided=card.divided)


def _model(candidate: Candidate, request: Request) -> Reason | None:
    wrong = request.models and candidate.card.model not in request.models
    return Reason(ReasonCode.MODEL, candidate.card.index) if wrong else None


def _taken_whole(candidate: Candidate, _: Request) -> Reason | None:
    return Reason(ReasonCode.WHOLE, candidate.card.index) if candidate.usage.whole else None


def _in_use(candidate: Candidate, request: Request) -> Reason | None:
    return (
        Reason(ReasonCode.IN_USE, candidate.card.index)
        if request.whole and candidate.usage.holders
        else None
    )


def _memory(candidate: Candidate, _: Request) -> Reason | None:
    if candidate.requested_mib is not None and candidate.requested_mib <= candidate.free_mib:
        return None
    return Reason(
        ReasonCode.MEMORY,
        candidate.card.index,
        candidate.requested_mib or candidate.nominal_mib,
        candidate.free_mib,
    )


def _compute(candidate: Candidate, request: Request) -> Reason | None:
    needed = candidate.card.compute if request.whole else request.compute
    if needed <= candidate.free_compute:
        return None
    return Reason(ReasonCode.COMPUTE, candidate.card.index, needed, candidate.free_compute)


FILTERS: dict[ReasonCode, Filter] = {
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
"""By their reason. The first that rejects a card gives the card's reason."""


Policy = str


def evaluate(
    view: UsageView,
    request: Request,
    policy: Policy,
    nodes: Iterable[Node],
    reserved: Collection[DeviceId] = (),
) -> list[Verdict]:
    """Return a verdict for every node, in their order.

    Args:
        view: what is allocated now.
        request: what to place.
        policy: a name in SCORES.
        nodes: those to evaluate.
        reserved: cards that are kept for other requests.

    Raises:
        KeyError: for an unknown policy.
    """
    if policy not in SCORES:
        raise KeyError(policy)
    return [_evaluate_node(view, request, policy, node, reserved) for node in nodes]


def place(
    view: UsageView,
    request: Request,
    policy: Policy,
    nodes: Iterable[Node],
    reserved: Collection[DeviceId] = (),
) -> Placement | Unschedulable:
    """Return the best placement, or why there is none. Of equal nodes the first by name is taken."""
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


def slices_on(request: Request, node: Node, card: Card, usage: CardUsage) -> int:
    """Return how many slices of this size a card that fits has room for."""
    if request.whole:
        return 1
    candidate = _candidate(request, node, card, usage)
    counts = [candidate.free_mib // candidate.requested_mib] if candidate.requested_mib else []
    counts += [candidate.free_compute // request.compute] if request.compute else []
    return min(counts, default=1)


def _candidate(request: Request, node: Node, card: Card, usage: CardUsage) -> Candidate:
    memory = request.memory
    if memory is None:
        return Candidate(card, usage, card.whole_mib if request.whole else 0)
    requested = memory.mib_on(card.memory_mib, node.unit_mib)
    # Only a reason for a card with too few units states the nominal amount.
    nominal = memory.nominal_mib(node.unit_mib) if requested is None else 0
    return Candidate(card, usage, requested, nominal)


def never_fits(request: Request, nodes: Collection[Node]) -> Unschedulable | None:
    """Return why the request could not be placed even if nothing were allocated; None if it could.

    Cards count as healthy, not cordoned and used by leases only: a request that only needs that may wait.
    """
    rejections: list[NodeRejection] = []
    for node in nodes:
        (verdict,) = evaluate(EmptyUsage(), request, "binpack", (restored(node),))
        if isinstance(verdict, Fit):
            return None
        rejections.append(verdict)
    return Unschedulable(tuple(rejections), hint(request, rejections, nodes))


def restored(node: Node) -> Node:
    """Return the node with all its cards healthy, open and used by leases only."""
    if all(card.healthy and not card.cordoned and not card.unleased_mib for card in node.cards):
        return node
    cards = (
        replace(card, healthy=True, cordoned=False, unleased_mib=0, drawn_mib=0)
        for card in node.cards
    )
    return replace(node, cards=tuple(cards))


def place_on(
    view: UsageView,
    request: Request,
    policy: Policy,
    node: Node,
    reserved: Collection[DeviceId] = (),
) -> Placement:
    """Return the placement that `evaluate` gives on a node that fits, without comparing it with others."""
    fitting = _fitting_cards(view, request, policy, node, reserved)
    assert isinstance(fitting, _FittingCards), "the node fits"
    return fitting.placement()


def _evaluate_node(
    view: UsageView,
    request: Request,
    policy: Policy,
    node: Node,
    reserved: Collection[DeviceId],
) -> Verdict:
    fitting = _fitting_cards(view, request, policy, node, reserved)
    if isinstance(fitting, NodeRejection):
        return fitting
    on, score = fitting.on, SCORES[in_effect(policy)]
    cards = [on.cards[position] for position in fitting.in_order] if request.cards else [NO_CARD]
    best = min(score(on, card) for card in cards) if node.card_policy else score(on, cards[0])
    if compares_links(request):
        best = (links_cost(request, fitting.distances, on.fitting), *best)
    return Fit(
        node.name,
        best,
        fitting.placement(),
        tuple(card.card for card in cards[: len(on.fitting)]),
    )


@dataclass(frozen=True, slots=True)
class _FittingCards:
    """A node that fits. in_order: the positions of the cards that fit, the best first."""

    on: NodeCandidate
    in_order: Sequence[int]
    distances: bytes | None

    def placement(self) -> Placement:
        """Return the placement on the best cards."""
        request = self.on.request
        chosen = best_cards(request, self.distances, self.in_order)
        return _placement(request, self.on.node, [self.on.cards[position] for position in chosen])


def _fitting_cards(
    view: UsageView,
    request: Request,
    policy: Policy,
    node: Node,
    reserved: Collection[DeviceId],
) -> _FittingCards | NodeRejection:
    candidates = [
        _candidate(request, node, card, view.card_usage(node.name, card.uuid))
        for card in node.cards
    ]
    reasons = [_first_reason(candidate, request, reserved) for candidate in candidates]
    positions = [position for position, reason in enumerate(reasons) if reason is None]
    distances = node.distances if request.by_links else None
    shortage = _shortage(view, request, node, len(positions)) or _missing_links(
        request, distances, positions
    )
    if shortage is not None:
        reasons_of_all = [
            reason or Reason(shortage[0], candidate.card.index, *shortage[1:])
            for candidate, reason in zip(candidates, reasons, strict=True)
        ]
        return NodeRejection(node.name, tuple(reasons_of_all))
    on = NodeCandidate(
        *(node, request, candidates, _free_share(request, candidates), positions),
        None if node.cpu_milli is None else max(node.cpu_milli - view.host_usage(node.name)[0], 0),
        target_of(policy),
    )
    name = in_effect(
        policy if node.card_policy in {None, "", policy} else node.card_policy or policy
    )
    own = CARD_SCORES.get(name) or SCORES[name]
    in_order = positions
    if len(positions) > 1 and request.cards:
        in_order = sorted(
            positions,
            key=lambda position: (own(on, candidates[position]), candidates[position].card.rank),
        )
    return _FittingCards(on, in_order, distances)


def best_cards(request: Request, distances: bytes | None, fitting: Sequence[int]) -> Sequence[int]:
    """Return the cards of a node that fits which the request gets: the first that belong together most.

    Args:
        request: the request.
        distances: of all cards of the node; None if they are not known.
        fitting: the positions of those that fit, the best first.
    """
    if distances is None or not request.by_links:
        return fitting[: request.cards]
    from fenka.core.topology.card_links import choose

    chosen = choose(distances, tuple(fitting), request.cards, linked=request.linked)
    assert chosen is not None, "the node fits"
    return chosen


def _missing_links(
    request: Request, distances: bytes | None, fitting: Sequence[int]
) -> tuple[ReasonCode, int, int] | None:
    """Return how many linked cards the request needs, and how many fit; None if enough do."""
    if not links_missing(request, distances, fitting):
        return None
    from fenka.core.topology.card_links import most_linked

    most = most_linked(distances, tuple(fitting), request.cards) if distances else 0
    return ReasonCode.NOT_LINKED, request.cards, most


def compares_links(request: Request) -> bool:
    """Return whether the connections of cards decide between nodes, before the policy."""
    # All sets that NVLink connects cost the same.
    return request.near and request.by_links and not request.linked


def links_cost(request: Request, distances: bytes | None, fitting: Sequence[int]) -> int:
    """Return the cost of the best cards of a node that fits.

    The arguments are as `best_cards` has them; the positions ascend.
    """
    from fenka.core.topology.card_links import least_cost, unknown_cost

    if distances is None:
        return unknown_cost(request.cards)
    return least_cost(distances, tuple(fitting), request.cards)


def links_missing(request: Request, distances: bytes | None, fitting: Sequence[int]) -> bool:
    """Return whether the request needs linked cards, and too few of those that fit are.

    The arguments are as `best_cards` has them. At least as many cards fit as are requested.
    """
    if not (request.linked and request.by_links):
        return False
    from fenka.core.topology.card_links import choose

    return (
        distances is None or choose(distances, tuple(fitting), request.cards, linked=True) is None
    )


def _free_share(request: Request, candidates: list[Candidate]) -> float:
    """Return the free part of the cards that take slices, in memory; in compute for compute alone."""
    admitting = [candidate for candidate in candidates if candidate.card.open]
    of_compute = request.memory is None and not request.whole
    total = sum(
        candidate.card.compute if of_compute else candidate.card.available_mib
        for candidate in admitting
    )
    free = sum(
        candidate.free_compute if of_compute else candidate.free_mib for candidate in admitting
    )
    # A card may report no memory.
    return free / max(total, 1)


def _first_reason(
    candidate: Candidate, request: Request, reserved: Collection[DeviceId]
) -> Reason | None:
    for rule in FILTERS.values():
        reason = rule(candidate, request)
        if reason is not None:
            return reason
    # A reservation is the reason only of a card that would fit without candidate.
    return (
        Reason(ReasonCode.RESERVED, candidate.card.index)
        if candidate.card.uuid in reserved
        else None
    )


def _shortage(
    view: UsageView, request: Request, node: Node, fitting: int
) -> tuple[ReasonCode, int, int] | None:
    """Return what the node lacks, needed and available: the reason of each card that fits by itself."""
    cpu, memory = view.host_usage(node.name)
    for code, needed, used, total in (
        (ReasonCode.CPU, request.cpu_milli, cpu, node.cpu_milli),
        (ReasonCode.HOST_MEMORY, request.host_memory_mib, memory, node.memory_mib),
        (ReasonCode.TOO_FEW, request.cards, 0, fitting),
    ):
        # A request for none is not rejected by an overcommitted host.
        if total is not None and needed > max(total - used, 0):
            return code, needed, max(total - used, 0)
    return None


def _placement(request: Request, node: Node, chosen: list[Candidate]) -> Placement:
    slices = tuple(
        Slice(
            candidate.card.index,
            candidate.card.uuid,
            candidate.requested_mib or 0,
            candidate.card.compute if request.whole else request.compute,
        )
        for candidate in sorted(chosen, key=lambda candidate: candidate.card.rank)
    )
    return Placement(
        node.name, slices, request.cpu_milli, request.host_memory_mib, whole=request.whole
    )
