"""Instances as cards of a node, and where new ones are created while requests are placed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from fenka.core.errors import listed
from fenka.core.evaluate import Policy, never_fits
from fenka.core.gangs import NO_LIMITS, PlacementLimits, PlainPlacer
from fenka.core.inventory import Card, DeviceId, InstanceId, Node
from fenka.core.mig.geometry import Geometry, Place, Profile, SliceSize
from fenka.core.mig.layouts import Layout, best_place, capacity, filled, flexibility_lost
from fenka.core.reasons import NodeRejection, Unschedulable
from fenka.core.request import ANY_INSTANCE, Placement, Request
from fenka.core.usage import UsageView

RESERVING = 4
"""Pending requests for whose instance a place is kept free."""

MAX_NAMED = 4
"""Instances that a reason names at most."""

GANG_IN_INSTANCES = "the members of a gang cannot be in MIG instances: CUDA connects no two of them"


@dataclass(frozen=True, slots=True)
class Division:
    """The state of a node's divided cards, beside the instances in its inventory.

    Attributes:
        geometries: what each divided card can be divided into.
        taken: places that are taken by instances outside of the inventory, and why: `is an administrator's`.
        fixed: divided cards on which no instance is created on demand.
    """

    geometries: Mapping[DeviceId, Geometry] = field(default_factory=dict)
    taken: Mapping[DeviceId, Mapping[Place, str]] = field(default_factory=dict)
    fixed: frozenset[DeviceId] = frozenset()


NO_DIVISION = Division()


def instance_card(parent: Card, geometry: Geometry, place: Place, uuid: str = "") -> Card:
    """Return an instance as a card. uuid: the device's; empty if it does not exist yet."""
    return replace(
        parent,
        uuid=DeviceId(uuid) if uuid else place.on(parent.uuid).device,
        memory_mib=place.profile.memory_mib,
        compute=geometry.compute_percent(place.profile),
        parent=parent.uuid,
        profile=place.profile.name,
        start=place.start,
        divided=False,
        unleased_mib=0,
        drawn_mib=0,
    )


def usable_mib(card: Card, division: Division) -> int:
    """Return the memory of a card; of a divided one what its largest instance has."""
    geometry = division.geometries.get(card.uuid)
    if geometry is None or not card.divided:
        return card.memory_mib
    return max(profile.memory_mib for profile in geometry.profiles)


def is_planned(device: DeviceId) -> bool:
    """Return whether this is the id of an instance that does not exist yet."""
    return InstanceId.parse(device) is not None


def layout_of(node: Node, division: Division, card: DeviceId) -> Layout:
    """Return the places that are taken on a divided card."""
    by_name = division.geometries[card].by_name
    own = (
        Place(by_name[instance.profile], instance.start)
        for instance in node.cards
        if instance.parent == card and instance.profile in by_name
    )
    return frozenset(own) | frozenset(division.taken.get(card, ()))


class NoInstance(Unschedulable):
    """No instance fits, and none can be created."""

    def __init__(self, rejections: tuple[NodeRejection, ...], reason: str, hint: str = "") -> None:
        super().__init__(rejections, hint)
        self.reason = reason

    def sentence(self) -> str:
        """Return the reason, then the hint."""
        return f"{self.reason}; {self.hint}" if self.hint else self.reason


@dataclass(frozen=True, slots=True)
class InstanceOption:
    """An instance that a request may have, alone.

    Attributes:
        card: the instance.
        lost: the flexibility that is lost when it is in use.
        filled: the slices of its card's memory axis that are taken before.
    """

    card: Card
    lost: Fraction
    filled: int


def option_at(parent: Card, geometry: Geometry, layout: Layout, place: Place) -> InstanceOption:
    """Return the instance at a free place beside a layout."""
    return InstanceOption(
        instance_card(parent, geometry, place),
        flexibility_lost(geometry, layout, place),
        filled(layout),
    )


class InstancePlacer(PlainPlacer):
    """Places requests on one node, and adds the instances to it that they need.

    A place is kept free for the first requests that no instance can be created for, so that a stream of small
    instances does not starve a large one.

    Attributes:
        node: the node with the instances that were added.
    """

    def __init__(
        self,
        node: Node,
        view: UsageView,
        division: Division,
        holders: Mapping[DeviceId, Sequence[str]] | None = None,
        kept_free: Mapping[DeviceId, int] | None = None,
    ) -> None:
        """Args:
        node: the cards, with the instances that are in use.
        view: what is allocated of them.
        division: the rest of what is known of them.
        holders: names of all that hold an instance, for reasons.
        kept_free: slices of cards' memory axes, as bits, on which no instance is created.
        """
        super().__init__((node,), view)
        self._holders = holders or {}
        self.node, self._division = node, division
        self._kept_free = dict(kept_free or {})
        self._reserving = 0

    def place(
        self, request: Request, policy: Policy, limits: PlacementLimits = NO_LIMITS
    ) -> Placement | Unschedulable:
        """Place a request on instances that exist, else on new ones."""
        verdict = super().place(request, policy, limits)
        if not request.instance or isinstance(verdict, Placement):
            return verdict
        before = self.node
        for _ in range(request.cards):
            option = self.best_instance(request)
            if option is None:
                break
            self._set_node(replace(self.node, cards=(*self.node.cards, option.card)))
            created = super().place(request, policy, limits)
            if isinstance(created, Placement):
                return created
        self._set_node(before)
        self._keep_free(request)
        return NoInstance(verdict.rejections, self.reason(request, verdict))

    def _set_node(self, node: Node) -> None:
        self.node, self._nodes = node, (node,)

    def _cards(self) -> list[tuple[Card, Geometry, Layout]]:
        """Return the cards on which instances may be created."""
        division = self._division
        return [
            (card, division.geometries[card.uuid], layout_of(self.node, division, card.uuid))
            for card in self.node.cards
            if card.divided
            and card.healthy
            and not card.cordoned
            and card.uuid in division.geometries
            and card.uuid not in division.fixed
        ]

    def best_instance(self, request: Request) -> InstanceOption | None:
        """Return the new instance that leaves the most possible; None if none can be created."""
        cards = self._cards()
        usable = [
            (card, geometry, layout)
            for card, geometry, layout in cards
            if not request.models or card.model in request.models
        ]
        kept_free = [self._kept_free.get(card.uuid, 0) for card, _, _ in usable]
        best: tuple[Fraction, int, InstanceOption] | None = None
        for name in profiles_for(request, [geometry for _, geometry, _ in cards], self.node):
            choice = best_place([entry[1:] for entry in usable], name, kept_free)
            if choice is not None:
                card, geometry, layout = usable[choice.card]
                place = Place(geometry.by_name[name], choice.start)
                option = option_at(card, geometry, layout, place)
                ranked = (option.lost, -place.profile.compute, option)
                best = ranked if best is None or ranked[:2] < best[:2] else best
        return best and best[2]

    def _keep_free(self, request: Request) -> None:
        if self._reserving < RESERVING and self.keep_free(request) is not None:
            self._reserving += 1

    def keep_free(self, request: Request) -> tuple[tuple[int, ...], Card] | None:
        """Keep the place free of which the least is taken.

        Return a cost, the smaller the better, and the instance that will be created there; None if every
        place is kept free already, or taken by an instance that is for no request.
        """
        cards = self._cards()
        options = [
            (
                (
                    _taken_slices(layout, place),
                    -place.profile.compute,
                    card.rank,
                    place.start,
                ),
                card,
                geometry,
                place,
            )
            for name in profiles_for(request, [geometry for _, geometry, _ in cards], self.node)
            for card, geometry, layout in cards
            if name in geometry.by_name and (not request.models or card.model in request.models)
            for start in geometry.by_name[name].starts
            for place in [Place(geometry.by_name[name], start)]
            if not place.mask & self._kept_free.get(card.uuid, 0)
            and not any(
                taken.mask & place.mask for taken in self._division.taken.get(card.uuid, ())
            )
        ]
        if not options:
            return None
        cost, card, geometry, place = min(options, key=lambda option: option[0])
        self._kept_free[card.uuid] = self._kept_free.get(card.uuid, 0) | place.mask
        return cost, instance_card(card, geometry, place)

    def reason(self, request: Request, verdict: Unschedulable) -> str:
        """Return why no instance fits. verdict: of the instances that exist."""
        if request.instance == ANY_INSTANCE:
            return f"{verdict.sentence()}, and no further instance can be created"
        offering = [card for card in self._cards() if request.instance in card[1].by_name]
        numbers = [
            _slices_for(geometry, layout, request.instance) for _, geometry, layout in offering
        ]
        free = [option for option, number in zip(offering, numbers, strict=True) if number]
        if sum(numbers) < request.cards:
            free = []
        named = [self.held(card) for card, _, _ in (free or offering)[:MAX_NAMED]]
        held = "; ".join(filter(None, named))
        if not free:
            return f"no card has room for {request.instance}: {held or verdict.sentence()}"
        verb = "has" if len(free) == 1 else "have"
        return (
            f"{len(free)} of {len(offering)} cards {verb} room for {request.instance}, none in one piece"
            f"{': ' * bool(held)}{held}"
        )

    def held(self, card: Card) -> str:
        """Return the instances of a card and who holds them, MAX_NAMED of them by name."""
        states = {
            instance.start: f"{instance.profile} {self._state(instance)}"
            for instance in self.node.cards
            if instance.parent == card.uuid
        }
        for place, why in self._division.taken.get(card.uuid, {}).items():
            states[place.start] = f"{place.profile.name} {why}"
        named = [f"{card.index}/{start} {states[start]}" for start in sorted(states)]
        more = [f"{len(named) - MAX_NAMED} more"] * (len(named) > MAX_NAMED)
        return ", ".join([*named[:MAX_NAMED], *more])

    def _state(self, instance: Card) -> str:
        holders = self._holders.get(instance.uuid, ())
        if not holders and not instance.healthy:
            return "is unhealthy"
        return f"is held by {listed(holders, 1) or 'nobody'}"


def never_fits_instance(request: Request, node: Node, division: Division) -> str:
    """Return why a request for instances could not be served even if nothing were held; empty if it could."""
    cards = [
        (card, division.geometries[card.uuid])
        for card in node.cards
        if card.uuid in division.geometries
        and card.divided
        and (not request.models or card.model in request.models)
    ]
    if not cards:
        return "no card here is divided into instances"
    profiles = {profile.name: None for _, geometry in cards for profile in geometry.profiles}
    if request.instance not in (ANY_INSTANCE, *profiles):
        offered = "; ".join(
            dict.fromkeys(
                f"{card.model} has {', '.join(geometry.by_name)}" for card, geometry in cards
            )
        )
        return f"no card has a profile {request.instance}: {offered}"
    if request.whole:
        most = sum(
            capacity(geometry, (), geometry.by_name[request.instance])
            for _, geometry in cards
            if request.instance in geometry.by_name
        )
        cause = f"the cards here have at most {most} instances {request.instance}, ask for no more"
        return cause if most < request.cards else ""
    examples = tuple(
        instance_card(card, geometry, place)
        for card, geometry in cards
        for place in geometry.places
        if place.profile.name == request.instance
        or (request.instance == ANY_INSTANCE and place.profile.plain)
    )
    rejected = never_fits(request, (replace(node, cards=examples),))
    if rejected is None:
        return ""
    return (
        f"no instance here is large enough: {rejected.hint}"
        if rejected.hint
        else rejected.sentence()
    )


def profiles_for(request: Request, geometries: list[Geometry], node: Node) -> list[str]:
    """Return the names of the profiles that a new instance for the request may have.

    A slice in any instance gets half a card, or a whole one if it is larger than that.
    """
    if request.instance != ANY_INSTANCE:
        return [request.instance]
    names: dict[str, None] = {}
    for geometry in geometries:
        enough = [
            profile
            for profile in geometry.profiles
            if profile.plain and _fits(request, profile, geometry, node)
        ]
        halves = [profile for profile in enough if 2 * profile.size == geometry.axis]
        wholes = [profile for profile in enough if profile.size == geometry.axis]
        names |= dict.fromkeys(profile.name for profile in halves or wholes)
    return list(names)


def _fits(request: Request, profile: Profile, geometry: Geometry, node: Node) -> bool:
    size = geometry.largest_slice(profile)
    memory = request.memory.mib_on(size.memory_mib, node.unit_mib) if request.memory else 0
    return memory is not None and size.holds(SliceSize(memory, request.compute))


def _taken_slices(layout: Layout, place: Place) -> int:
    return sum((taken.mask & place.mask).bit_count() for taken in layout)


def _slices_for(geometry: Geometry, layout: Layout, name: str) -> int:
    """Return for how many instances enough slices of memory and compute are free, wherever they are."""
    profile = geometry.by_name[name]
    memory = geometry.axis - filled(layout)
    compute = geometry.compute - sum(taken.profile.compute for taken in layout)
    return max(min(memory // profile.size, compute // profile.compute), 0)
