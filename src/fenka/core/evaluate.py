"""The one decision: judge every node for a request. Placing is taking the best verdict.

The scheduler, the workstation's daemon, what-ifs and the simulator all call `evaluate`; nobody else
knows what fits.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from fenka.core.cards import Card, Node
from fenka.core.reasons import Reason, Rejected, Rejection, Why
from fenka.core.requests import Placement, Request, Slice


@dataclass(frozen=True, slots=True)
class Used:
    """What is held of a card: memory in MiB, compute in percent, by so many placements."""

    memory_mib: int = 0
    compute: int = 0
    holders: int = 0
    whole: bool = False


NOTHING = Used()


class View(Protocol):
    """What is held now. Read-only, so that a snapshot and an index serve the same code."""

    def used(self, node: str, card: int) -> Used:
        """What is held of this card; NOTHING for a card that nobody knows."""

    def host_used(self, node: str) -> tuple[int, int]:
        """CPU (thousandths of a core) and host memory (MiB) held on this node."""


class Empty:
    """A view in which nothing is held."""

    def used(self, node: str, card: int) -> Used:  # noqa: ARG002
        """Nothing."""
        return NOTHING

    def host_used(self, node: str) -> tuple[int, int]:  # noqa: ARG002
        """Nothing."""
        return 0, 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A card that is being judged: what is held of it, and what the request wants of it."""

    card: Card
    used: Used
    want_mib: int | None
    """None: more than the card has; 0: compute alone."""

    @property
    def free_mib(self) -> int:
        """Never negative: an overcommitted card has nothing free."""
        return max(self.card.memory_mib - self.used.memory_mib, 0)

    @property
    def free_compute(self) -> int:
        """Percent, never negative."""
        return max(self.card.compute - self.used.compute, 0)

    @property
    def free(self) -> tuple[int, int]:
        """Memory then compute; for a slice of compute alone the other way round."""
        if self.want_mib == 0:
            return self.free_compute, self.free_mib
        return self.free_mib, self.free_compute


@dataclass(frozen=True, slots=True)
class Fit:
    """A node that fits; the smallest score is the best."""

    node: str
    score: tuple[float, ...]
    placement: Placement


Verdict = Fit | Rejection

Predicate = Callable[[Candidate, Request], Reason | None]
Key = Callable[[Candidate], tuple[float, ...]]


def _unhealthy(it: Candidate, _: Request) -> Reason | None:
    return None if it.card.healthy else Reason(Why.UNHEALTHY, it.card.index)


def _cordoned(it: Candidate, _: Request) -> Reason | None:
    return Reason(Why.CORDONED, it.card.index) if it.card.cordoned else None


def _model(it: Candidate, request: Request) -> Reason | None:
    wrong = request.models and it.card.model not in request.models
    return Reason(Why.MODEL, it.card.index) if wrong else None


def _taken_whole(it: Candidate, _: Request) -> Reason | None:
    return Reason(Why.WHOLE, it.card.index) if it.used.whole else None


def _in_use(it: Candidate, request: Request) -> Reason | None:
    return Reason(Why.IN_USE, it.card.index) if request.whole and it.used.holders else None


def _memory(it: Candidate, _: Request) -> Reason | None:
    if it.want_mib is not None and it.want_mib <= it.free_mib:
        return None
    needed = it.want_mib if it.want_mib is not None else it.card.memory_mib + 1
    return Reason(Why.MEMORY, it.card.index, needed, it.free_mib)


def _compute(it: Candidate, request: Request) -> Reason | None:
    needed = it.card.compute if request.whole else request.compute
    if needed <= it.free_compute:
        return None
    return Reason(Why.COMPUTE, it.card.index, needed, it.free_compute)


PREDICATES: tuple[Predicate, ...] = (
    _unhealthy,
    _cordoned,
    _model,
    _taken_whole,
    _in_use,
    _memory,
    _compute,
)
"""One predicate, one reason. The first that fails is the card's reason."""


def _fullest(it: Candidate) -> tuple[float, ...]:
    return *it.free, it.card.index


def _emptiest(it: Candidate) -> tuple[float, ...]:
    first, second = it.free
    return -first, -second, it.card.index


POLICIES: dict[str, Key] = {"binpack": _fullest, "spread": _emptiest}
"""Which card comes first, of those that fit: binpack is gpushare's (the smallest sufficient free memory,
ties to the lowest index), spread the reverse. Nodes follow their best card, then their name."""

Policy = str


def evaluate(
    view: View,
    request: Request,
    policy: Policy,
    nodes: Iterable[Node],
    reserved: Collection[str] = (),
) -> list[Verdict]:
    """Judge every node, in the order given. Cards in `reserved` (UUIDs) are kept for others.

    Raises KeyError for an unknown policy.
    """
    key = POLICIES[policy]
    return [_judge(view, request, key, node, reserved) for node in nodes]


def place(
    view: View,
    request: Request,
    policy: Policy,
    nodes: Iterable[Node],
    reserved: Collection[str] = (),
) -> Placement | Rejected:
    """The best placement, or why there is none. Equal nodes: the first by name, so that it is certain."""
    verdicts = evaluate(view, request, policy, nodes, reserved)
    fits = [verdict for verdict in verdicts if isinstance(verdict, Fit)]
    if fits:
        return min(fits, key=lambda fit: (fit.score, fit.node)).placement
    return Rejected(tuple(verdict for verdict in verdicts if isinstance(verdict, Rejection)))


def never_fits(request: Request, nodes: Collection[Node]) -> Rejected | None:
    """Why the request could not be placed even if nothing were held; None if it could."""
    verdict = place(Empty(), request, "binpack", nodes)
    if isinstance(verdict, Placement):
        return None
    return Rejected(verdict.rejections, _hint(request, verdict, nodes))


def usable(request: Request, nodes: Iterable[Node]) -> set[str]:
    """UUIDs of the cards that one of the request's slices could be on, were nothing held."""
    return {
        card.uuid
        for node in nodes
        for card in node.cards
        if _first_reason(Candidate(card, NOTHING, _want(request, card)), request, ()) is None
    }


def _hint(request: Request, rejected: Rejected, nodes: Collection[Node]) -> str:
    whys = {reason.why for reason in rejected.reasons}
    if Why.MEMORY in whys and request.memory is not None:
        largest = max(card.memory_mib for node in nodes for card in node.cards)
        if request.memory.unit_mib == 1:
            return f"the largest card has {largest} MiB, ask for no more"
        return f"the largest card has {largest // request.memory.unit_mib} units, ask for no more"
    if Why.TOO_FEW in whys:
        most = max(len(node.cards) for node in nodes)
        return f"ask for fewer cards, no node has more than {most} that fit"
    if Why.MODEL in whys:
        models = sorted({card.model for node in nodes for card in node.cards})
        return f"the models here are {', '.join(models)}"
    return ""


def _judge(
    view: View, request: Request, key: Key, node: Node, reserved: Collection[str]
) -> Verdict:
    fitting: list[Candidate] = []
    reasons: list[Reason] = []
    for card in node.cards:
        it = Candidate(card, view.used(node.name, card.index), _want(request, card))
        reason = _first_reason(it, request, reserved)
        if reason is None:
            fitting.append(it)
        else:
            reasons.append(reason)
    host = _host_reason(view, request, node)
    if host is None and len(fitting) >= request.cards:
        chosen = sorted(fitting, key=key)[: request.cards]
        return Fit(node.name, key(chosen[0]), _placement(request, node, chosen))
    left_over = host or Why.TOO_FEW
    reasons += [Reason(left_over, it.card.index) for it in fitting]
    return Rejection(node.name, tuple(sorted(reasons, key=lambda reason: reason.card)))


def _want(request: Request, card: Card) -> int | None:
    if request.whole:
        return card.memory_mib
    return request.memory.on(card.memory_mib) if request.memory else 0


def _first_reason(it: Candidate, request: Request, reserved: Collection[str]) -> Reason | None:
    for predicate in PREDICATES:
        reason = predicate(it, request)
        if reason is not None:
            return reason
    # Last: that others wait for a card is the reason only if it would fit without them.
    return Reason(Why.RESERVED, it.card.index) if it.card.uuid in reserved else None


def _host_reason(view: View, request: Request, node: Node) -> Why | None:
    cpu, memory = view.host_used(node.name)
    if node.cpu_milli is not None and cpu + request.cpu_milli > node.cpu_milli:
        return Why.CPU
    if node.memory_mib is not None and memory + request.host_memory_mib > node.memory_mib:
        return Why.HOST_MEMORY
    return None


def _placement(request: Request, node: Node, chosen: list[Candidate]) -> Placement:
    slices = tuple(
        Slice(
            it.card.index,
            it.card.uuid,
            it.want_mib or 0,
            it.card.compute if request.whole else request.compute,
        )
        for it in sorted(chosen, key=lambda it: it.card.index)
    )
    return Placement(
        node.name, slices, request.cpu_milli, request.host_memory_mib, whole=request.whole
    )
