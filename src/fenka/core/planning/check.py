"""The last step of planning: `evaluate` judges every placement in turn, on nodes there and new ones."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from fenka.core.evaluate import Fit, evaluate
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.planning.case import Case, CaseNode, CaseRequest, Group, HeldCard
from fenka.core.planning.problem import AnyMachine, ineligible
from fenka.core.request import Placement, Slice
from fenka.core.usage import UsageTotals


@dataclass(frozen=True, slots=True)
class PlannedPod:
    """One pod of a request and where it goes.

    Attributes:
        request: the request's name.
        node: a node there, or `new:GROUP:K`.
        cards: indices of its cards.
    """

    request: str
    node: str
    cards: tuple[int, ...]


def checked(
    case: Case, slots: Mapping[str, AnyMachine], pods: Iterable[PlannedPod]
) -> list[PlannedPod]:
    """Return the placements that are possible, in their order, without rests of gangs.

    Args:
        case: what was planned.
        slots: nodes there and new ones, by name.
        pods: the placements.
    """
    world = _World(slots)
    requests = {request.name: request for request in case.requests}
    passed = [pod for pod in pods if world.admit(requests[pod.request], pod)]
    served: dict[str, int] = {}
    zones: dict[str, set[str]] = {}
    for pod in passed:
        served[pod.request] = served.get(pod.request, 0) + 1
        gang = requests[pod.request].gang
        if gang is not None:
            zones.setdefault(gang, set()).add(slots[pod.node].zone)
    broken = {
        gang
        for gang, used in zones.items()
        if gang in case.gangs and case.gangs[gang].zone == "same" and len(used) > 1
    }
    broken |= {
        request.gang
        for request in case.requests
        if request.gang is not None and served.get(request.name, 0) < request.count
    }
    return [pod for pod in passed if requests[pod.request].gang not in broken]


class _World:
    """The virtual nodes, with what is allocated of them."""

    def __init__(self, slots: Mapping[str, AnyMachine]) -> None:
        self._slots, self._usage = slots, UsageTotals()
        self._nodes: dict[str, Node] = {}
        self._counted: dict[tuple[str, str], int] = {}
        """What is left of pods (empty name) and counted resources, by node and name."""

    def admit(self, request: CaseRequest, pod: PlannedPod) -> bool:
        """Allocate the placement if it is possible; return whether it was."""
        machine = self._slots.get(pod.node)
        if machine is None or ineligible(request, machine) or len(pod.cards) != request.cards:
            return False
        if pod.node not in self._nodes:
            self._add(pod.node, machine)
        node = self._nodes[pod.node]
        counted = {"": 1, **{name: it for name, it in request.resources.items() if it}}
        if any(it > self._counted.get((pod.node, name), 0) for name, it in counted.items()):
            return False
        placement = self._judge(request, node, pod.cards)
        if placement is None:
            return False
        self._usage.add(placement)
        for name, amount in counted.items():
            self._counted[pod.node, name] -= amount
        return True

    def _judge(self, request: CaseRequest, node: Node, cards: tuple[int, ...]) -> Placement | None:
        asked = request.card_request()
        if asked is not None:
            # Only these cards, so that the verdict is about them.
            part = replace(node, cards=tuple(card for card in node.cards if card.index in cards))
            (verdict,) = evaluate(self._usage, asked, "binpack", (part,))
            return verdict.placement if isinstance(verdict, Fit) else None
        # `evaluate` knows no requests without cards.
        cpu, memory = self._usage.host_usage(node.name)
        for amount, used, total in (
            (request.cpu_milli, cpu, node.cpu_milli),
            (request.memory_mib, memory, node.memory_mib),
        ):
            if amount and total is not None and amount > total - used:
                return None
        return Placement(node.name, (), request.cpu_milli, request.memory_mib)

    def _add(self, name: str, machine: AnyMachine) -> None:
        cards = tuple(
            Card(
                index,
                DeviceId(f"{name}/{index}"),
                card.model,
                card.memory_mib,
                cordoned=isinstance(card, HeldCard) and card.closed,
            )
            for index, card in enumerate(machine.cards)
        )
        self._nodes[name] = Node(name, cards, machine.cpu_milli, machine.memory_mib)
        self._counted[name, ""] = machine.pods
        self._counted.update({(name, key): it for key, it in machine.resources.items()})
        if isinstance(machine, Group):
            return
        self._counted[name, ""] -= machine.held.pods
        for key, amount in machine.held.resources.items():
            self._counted[name, key] = self._counted.get((name, key), 0) - amount
        for placement in _held_placements(machine, cards):
            self._usage.add(placement)


def _held_placements(node: CaseNode, cards: tuple[Card, ...]) -> Iterable[Placement]:
    """Yield what the node's holders have, as placements."""
    yield Placement(node.name, (), node.held.cpu_milli, node.held.memory_mib)
    for card, held in zip(cards, node.cards, strict=True):
        if held.held_mib or held.held_compute or held.whole:
            piece = Slice(card.index, card.uuid, held.held_mib, held.held_compute)
            yield Placement(node.name, (piece,), whole=held.whole)
