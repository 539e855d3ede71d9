"""What a pod asks for, in one shape for all dialects; and what a dialect is."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from fenka.core.cards import Node
from fenka.core.requests import BadRequest, Memory, Placement, Request, Slice
from fenka.dialects.gpushare import CARDS, Ask, Kind, Share, Unreadable, quantity

VISIBLE = "NVIDIA_VISIBLE_DEVICES"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """A container and its limits, extended resources among them."""

    name: str
    resources: Mapping[str, str | int]
    kind: Kind = Kind.APP

    def of(self, resource: str) -> int:
        """A whole number, 0 for none. Raises Unreadable."""
        if resource not in self.resources:
            return 0
        amount = quantity(self.resources[resource])
        if amount < 0:
            raise Unreadable(f"container {self.name} asks for {amount} of {resource}")
        return amount


@dataclass(frozen=True, slots=True)
class Manifest:
    """What of a pod tells its wishes. Init containers come first and in their order, as they run."""

    containers: tuple[Limits, ...]
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def apps(self) -> list[Limits]:
        """Those of `spec.containers`: records number them so."""
        return [it for it in self.containers if it.kind is Kind.APP]

    def names(self, resources: Iterable[str]) -> list[str]:
        """Those of these resources of which some container asks for more than nothing. Raises Unreadable."""
        return [name for name in resources if any(it.of(name) for it in self.containers)]

    def asks(self, resource: str) -> list[Ask]:
        """Container by container. Raises Unreadable."""
        return [Ask(it.name, it.of(resource), it.kind) for it in self.containers]


@dataclass(frozen=True, slots=True)
class Part:
    """What some of a pod's containers hold together: one request of the core.

    ceiling: percent of compute up to which it may use what is idle; None: never more than it asks for.
    by_label: its whole cards are another plugin's business on nodes that share, unless their labels say
    otherwise.
    """

    containers: tuple[str, ...]
    request: Request
    ceiling: int | None = None
    by_label: bool = False


class Dialect(Protocol):
    """Names that users write, to requests and back. Pure; each dialect is a module with these functions.

    The parts of a pod all go to one node. Placements are one for each part, in its order. Functions that
    read raise Unreadable, with one sentence that says what to write instead.
    """

    NAME: str
    RESOURCES: tuple[str, ...]
    """The extended resources that are asked for in it."""
    RECORDS: tuple[str, ...]
    """The annotations that `write` makes of a pod, which nobody else is to write. One that ends in `-` stands
    for all that begin so."""
    LEASED: str
    """The one whose allocation by the kubelet brings the lease; the others are only counted."""

    def speaks(self, pod: Manifest) -> bool:
        """Whether the pod asks for something by these names."""

    def demand(self, pod: Manifest, unit_mib: int) -> tuple[Part, ...]:
        """What it asks for on nodes of this unit (which only dialects without their own look at)."""

    def write(
        self, pod: Manifest, share: Share, placements: Sequence[Placement], now_ns: int
    ) -> dict[str, str]:
        """The annotations of a pod with these placements on that node. now_ns: since 1970."""

    def read(self, pod: Manifest, share: Share) -> tuple[Placement, ...] | None:
        """Where its annotations say that it is; None if they say nothing."""

    def held(
        self, pod: Manifest, share: Share, placements: Sequence[Placement], container: str, /
    ) -> tuple[Slice, ...]:
        """What of it is this container's own, by the pod's record; empty for one that has no card."""

    def environment(
        self, pod: Manifest, share: Share, placements: Sequence[Placement], container: str, /
    ) -> dict[str, str]:
        """What a container finds in its environment; nothing for one that has no card."""

    def advertised(self, share: Share) -> dict[str, int]:
        """What the node has, by resource."""


# ---- what dialects have in common ----


def asked(make: Callable[[], Request]) -> Request:
    """The core's own refusals are sentences too. Raises Unreadable."""
    try:
        return make()
    except BadRequest as why:
        raise Unreadable(str(why)) from None


def sized(amount: int, unit_mib: int, compute: int, cards: int = 1) -> Request:
    """So many units, and so many percent, on each of these cards. Raises Unreadable."""
    return asked(lambda: Request(Memory(amount, unit_mib), compute=compute, cards=cards))


def whole_cards(cards: int) -> Request:
    """Raises Unreadable."""
    return asked(lambda: Request(whole=True, cards=cards))


def each_container(
    pod: Manifest, want: Callable[[Limits], Request | None], ceiling: int | None = None
) -> tuple[Part, ...]:
    """A part for each container that wants something. Raises Unreadable.

    An init container has ended when the others start: it uses the cards of one of them, which must do.
    """
    found: dict[str, tuple[list[str], Request]] = {}
    for it in pod.containers:
        request = want(it) if it.kind is not Kind.INIT else None
        if request is not None:
            found[it.name] = [it.name], request
    for it in pod.containers:
        request = want(it) if it.kind is Kind.INIT else None
        if request is None:
            continue
        hosts = (names for names, larger in found.values() if _covers(larger, request))
        names = next(hosts, None)
        if names is None:
            raise Unreadable(
                f"its init container {it.name} asks for more than any container beside it: "
                "let it ask for no more than one of those"
            )
        names.append(it.name)
    return tuple(
        Part(tuple(names), request, None if request.whole else ceiling)
        for names, request in found.values()
    )


def only_apps(pod: Manifest, resources: Sequence[str]) -> None:
    """Raises Unreadable where others than the plain containers ask: some records have no place for them."""
    for it in pod.containers:
        if it.kind is not Kind.APP and (names := [name for name in resources if it.of(name)]):
            raise Unreadable(
                f"its init container {it.name} asks for {names[0]}: only its containers can"
            )


def _covers(larger: Request, request: Request) -> bool:
    if larger.whole:
        return larger.cards >= request.cards
    return larger == request


def placed_on(node: Node, request: Request, indexes: Sequence[int]) -> Placement:
    """The request on these cards of the node. Raises Unreadable for cards that are not there."""
    cards = {card.index: card for card in node.cards}
    slices = []
    for index in sorted(set(indexes)):
        card = cards.get(index)
        if card is None:
            raise Unreadable(f"the pod's card {index} is not one of the {len(cards)} of its node")
        if request.whole:
            slices.append(Slice(index, card.uuid, card.memory_mib, card.compute))
            continue
        # Another's record is counted as it stands, also on a card that has not so much.
        mib = nominal_mib(request, card.memory_mib)
        slices.append(Slice(index, card.uuid, mib, request.compute))
    if len(slices) != request.cards or len(slices) != len(indexes):
        raise Unreadable(
            f"the pod's record names the cards {','.join(map(str, indexes)) or 'none'}, "
            f"it asks for {request.cards} different ones"
        )
    return Placement(node.name, tuple(slices), whole=request.whole)


def unplaced(share: Share, parts: Iterable[Part]) -> tuple[Placement, ...]:
    """What counts for a pod of which nobody knows the cards: what it asks for, once, on the first ones.

    Its owner can write its record. To count it on every card would let them keep the whole node from others.
    """
    placements, first = list[Placement](), 0
    for part in parts:
        request = part.request
        cards = share.node.cards[first : first + request.cards]
        if request.whole:
            first += len(cards)
        slices = (
            Slice(
                card.index,
                card.uuid,
                min(nominal_mib(request, card.memory_mib), card.memory_mib),
                card.compute if request.whole else request.compute,
            )
            for card in cards
        )
        placements.append(Placement(share.node.name, tuple(slices), whole=request.whole))
    return tuple(placements)


def nominal_mib(request: Request, card_mib: int) -> int:
    """MiB of each card that a request takes; also of a card that has not so much."""
    if request.whole:
        return card_mib
    if request.memory is None:
        return 0
    mib = request.memory.on(card_mib)
    return request.memory.nominal_mib if mib is None else mib


def write_uuids(placements: Iterable[Placement]) -> str:
    """`fenka.io/cards` of a pod: by index, so that an exchanged card is noticed."""
    uuids = {str(it.card): it.uuid for placement in placements for it in placement.slices}
    return json.dumps(uuids, separators=(",", ":"))


def check_uuids(annotations: Mapping[str, str], placements: Iterable[Placement]) -> None:
    """Raises Unreadable where a card of the pod is not the one that it was given."""
    try:
        uuids = dict(json.loads(annotations.get(CARDS, "{}")).items())
    except (ValueError, AttributeError, RecursionError) as why:
        raise Unreadable(f"annotation {CARDS} of the pod is not understood: {why}") from None
    for it in (piece for placement in placements for piece in placement.slices):
        was = uuids.get(str(it.card), it.uuid)
        if it.uuid and was != it.uuid:
            raise Unreadable(f"the pod's card {it.card} was {was} and is now {it.uuid}")


def counted(value: object) -> int:
    """A number of a JSON record. Raises ValueError for what is not whole, or below 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no number")
    return value


def of_container(
    parts: Sequence[Part], placements: Sequence[Placement], container: str
) -> tuple[Part, Placement] | None:
    """What a container holds; None if it holds nothing."""
    pairs = zip(parts, placements, strict=True)
    return next((pair for pair in pairs if container in pair[0].containers), None)


Demand = Callable[[Manifest, int], tuple[Part, ...]]
OfContainer = Callable[[Manifest, Share, Sequence[Placement], str], T]


def own_slices(demand: Demand) -> OfContainer[tuple[Slice, ...]]:
    """`held` of a dialect in which a part's containers have it one after the other, each all of it."""

    def held(
        pod: Manifest, share: Share, placements: Sequence[Placement], container: str
    ) -> tuple[Slice, ...]:
        found = of_container(demand(pod, share.unit_mib), placements, container)
        return found[1].slices if found else ()

    return held


def which_cards(demand: Demand) -> OfContainer[dict[str, str]]:
    """`environment` of a dialect that tells containers which cards they have and nothing else."""

    def environment(
        pod: Manifest, share: Share, placements: Sequence[Placement], container: str
    ) -> dict[str, str]:
        found = of_container(demand(pod, share.unit_mib), placements, container)
        return visible(found[1]) if found else {}

    return environment


def visible(placement: Placement) -> dict[str, str]:
    """The environment that says which cards."""
    return {VISIBLE: ",".join(piece.uuid for piece in placement.slices)}
