"""Pods are placed in MIG instances where a legal layout serves them, and nowhere else."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.cluster.placement import (
    NO_HOLDERS,
    InstanceFit,
    InstanceHolders,
    instances_fit_when_empty,
    never_fits_instances,
    place_in_instances,
    reserve_instances,
)
from fenka.core.inventory import Card, DeviceId, InstanceId, Node
from fenka.core.mig.geometry import TABLES, Geometry, Place
from fenka.core.request import ANY_INSTANCE, Memory, Placement, Request, Slice
from fenka.core.usage import UsageTotals
from fenka.dialects.base import SharedNode
from fenka.dialects.mig_records import DividedCard, InstanceState, with_division, with_instances

A100, A30, T4 = TABLES["A100-40G"], TABLES["A30"], None
MIB = {"A100": 40448, "A30": 24576, "T4": 15079}
INDEX = {geometry: name for name, geometry in (("A100", A100), ("A30", A30))}


def node(
    *geometries: Geometry | None,
    on_demand: bool = True,
    **there: dict[tuple[str, int], InstanceState],
) -> SharedNode:
    """A node with a card for each geometry, None for a T4.

    there: what is on the cards: `c0={("1g.5gb", 0): "own"}`.
    """
    cards, divided = list[Card](), list[DividedCard]()
    for index, geometry in enumerate(geometries):
        model = INDEX[geometry] if geometry else "T4"
        cards.append(Card(index, DeviceId(f"GPU-{index}"), model, MIB[model]))
        if geometry is not None:
            present = {
                Place(geometry.by_name[name], start): state
                for (name, start), state in there.get(f"c{index}", {}).items()
            }
            divided.append(DividedCard(DeviceId(f"GPU-{index}"), geometry, on_demand, present))
    return with_division(SharedNode(Node("n", tuple(cards))), divided)


def whole(name: str, count: int = 1) -> Request:
    """Return a request for whole instances."""
    return Request(whole=True, cards=count, instance=name)


def inside(mib: int, instance: str = ANY_INSTANCE) -> Request:
    """Return a request for a slice in an instance."""
    return Request(Memory(mib), instance=instance)


class World:
    """A node on which pods are placed one after the other."""

    def __init__(self, shared: SharedNode, *, shared_tenancy: bool = False) -> None:
        self.published, self.tenancy = shared, shared_tenancy
        self.usage = UsageTotals()
        self.pods: dict[str, tuple[Placement, ...]] = {}

    @property
    def shared(self) -> SharedNode:
        """The node with what pods hold."""
        held = sorted(device for devices in self.devices.values() for device in devices)
        return with_instances(self.published, held)

    @property
    def devices(self) -> dict[str, set[DeviceId]]:
        """The instances of each pod."""
        return {
            name: {piece.uuid for placement in placements for piece in placement.slices}
            for name, placements in self.pods.items()
        }

    @property
    def holders(self) -> InstanceHolders:
        """Pods are called `namespace/name`."""
        names: dict[DeviceId, list[str]] = {}
        namespaces: dict[DeviceId, set[str]] = {}
        for pod, devices in self.devices.items():
            for device in devices:
                names.setdefault(device, []).append(pod)
                namespaces.setdefault(device, set()).add(pod.partition("/")[0])
        return InstanceHolders(names, namespaces, self.tenancy)

    def place(self, pod: str, *requests: Request) -> list[str] | str:
        """Place a pod; return its instances as `card/start profile`, or why there are none."""
        fit = place_in_instances(
            self.shared,
            self.usage,
            requests,
            "binpack",
            self.holders,
            pod.partition("/")[0],
        )
        if not isinstance(fit, InstanceFit):
            return fit.sentence()
        self.pods[pod] = fit.placements
        for placement in fit.placements:
            self.usage.add(placement)
        return [shown(piece.uuid) for placement in fit.placements for piece in placement.slices]

    def end(self, pod: str) -> None:
        """The pod has ended."""
        for placement in self.pods.pop(pod):
            self.usage.remove(placement)


def shown(device: DeviceId) -> str:
    """Return `card/start profile`."""
    instance = InstanceId.parse(device)
    assert instance is not None
    return f"{instance.card.removeprefix('GPU-')}/{instance.start} {instance.profile}"


def test_instance_is_created_where_it_leaves_the_most_possible() -> None:
    """A 3g in the upper half, where no 4g fits; then the 1g on the second card, the first is full."""
    world = World(node(A100, A100))
    assert world.place("ns/a", whole("3g.20gb")) == ["0/4 3g.20gb"]
    assert world.place("ns/b", whole("4g.20gb")) == ["0/0 4g.20gb"]
    assert world.place("ns/c", whole("1g.5gb")) == ["1/6 1g.5gb"]


def test_idle_instance_of_the_profile_is_used_before_another_is_created() -> None:
    """Although 1g at 0 leaves less possible than 1g at 6 does."""
    world = World(node(A100, c0={("1g.5gb", 0): "own"}))
    assert world.place("ns/a", whole("1g.5gb")) == ["0/0 1g.5gb"]
    # Slices 0 and 1 are one place of 2g.10gb: nothing more is lost.
    assert world.place("ns/b", whole("1g.5gb")) == ["0/1 1g.5gb"]


def test_idle_instances_of_other_profiles_count_as_free() -> None:
    """The node destroys them."""
    world = World(node(A100, c0={("1g.5gb", 0): "own", ("3g.20gb", 4): "own"}))
    assert world.place("ns/a", whole("7g.40gb")) == ["0/0 7g.40gb"]


def test_idle_instance_that_leaves_the_most_possible_is_used_first() -> None:
    """1g at 6 leaves the place of 4g free, 1g at 0 does not."""
    there: dict[tuple[str, int], InstanceState] = {("1g.5gb", 0): "own", ("1g.5gb", 6): "own"}
    world = World(node(A100, c0=there))
    assert world.place("ns/a", whole("1g.5gb")) == ["0/6 1g.5gb"]


@pytest.mark.parametrize("state", ["foreign", "leaving"])
def test_instances_of_others_are_never_used_and_keep_their_place(state: InstanceState) -> None:
    """The reason names them."""
    world = World(node(A100, c0={("3g.20gb", 0): state}))
    why = "is an administrator's" if state == "foreign" else "is being destroyed"
    assert world.place("ns/a", whole("4g.20gb")) == (
        f"1 of 1 cards has room for 4g.20gb, none in one piece: 0/0 3g.20gb {why}"
    )
    assert world.place("ns/a", whole("3g.20gb")) == ["0/4 3g.20gb"]


def test_unhealthy_instance_is_not_used_and_keeps_its_place() -> None:
    """Until the node has destroyed it."""
    world = World(node(A100, c0={("3g.20gb", 4): "unhealthy"}))
    assert world.place("ns/a", whole("3g.20gb")) == ["0/0 3g.20gb"]
    assert world.place("ns/b", inside(1000)) == (
        "no instance has room for the slice, and none can be created: 0/0 3g.20gb is held by ns/a, "
        "0/4 3g.20gb is unhealthy"
    )


def test_reason_names_the_pods_that_hold_the_place() -> None:
    """By namespace and name."""
    world = World(node(A100, A100))
    world.place("ns/a", whole("1g.5gb"))
    world.place("ns/b", whole("7g.40gb"))
    assert world.place("ns/c", whole("7g.40gb")) == (
        "no card has room for 7g.40gb: 0/6 1g.5gb is held by ns/a; 1/0 7g.40gb is held by ns/b"
    )


def test_no_instance_is_created_where_layouts_are_fixed() -> None:
    """The instances that are there are used."""
    world = World(node(A100, on_demand=False, c0={("3g.20gb", 0): "own"}))
    assert world.place("ns/a", whole("3g.20gb")) == ["0/0 3g.20gb"]
    assert world.place("ns/b", whole("3g.20gb")) == (
        "no card has room for 3g.20gb: no GPU fits: 1 of 2 is taken whole, 1 has no such instance"
    )


def test_slices_share_an_instance_within_their_namespace_only() -> None:
    """Half a card each: 3g, then 4g for the other namespace."""
    world = World(node(A100))
    assert world.place("x/a", inside(4000)) == ["0/4 3g.20gb"]
    assert world.place("y/a", inside(4000)) == ["0/0 4g.20gb"]
    assert world.place("x/b", inside(4000)) == ["0/4 3g.20gb"]
    assert world.place("z/a", inside(4000)) == (
        "no instance has room for the slice, and none can be created: 0/0 4g.20gb is held by y/a, "
        "0/4 3g.20gb is held by x/a and 1 more; instances with room hold slices of other namespaces"
    )


def test_slices_of_several_namespaces_share_an_instance_where_the_node_allows_it() -> None:
    """An instance of the own namespace comes first, whatever others have free."""
    world = World(node(A100), shared_tenancy=True)
    assert world.place("x/a", inside(4000)) == ["0/4 3g.20gb"]
    assert world.place("y/a", inside(17000)) == ["0/0 4g.20gb"]
    # 20096 - 17000 are left of the fuller one
    assert world.place("x/b", inside(3000)) == ["0/4 3g.20gb"]
    assert world.place("z/a", inside(3000)) == ["0/0 4g.20gb"]


def test_containers_of_a_pod_share_an_instance_where_it_has_room_for_both() -> None:
    """Else they are in two instances."""
    world = World(node(A100))
    assert world.place("y/a", inside(2000), inside(2000)) == ["0/4 3g.20gb", "0/4 3g.20gb"]
    assert world.place("y/b", inside(9000), inside(15000)) == ["0/0 4g.20gb", "0/4 3g.20gb"]


def test_whole_instances_and_slices_never_share() -> None:
    """Neither way."""
    world = World(node(A30))
    assert world.place("x/a", whole("2g.12gb")) == ["0/2 2g.12gb"]
    assert world.place("x/b", inside(1000, instance="2g.12gb")) == ["0/0 2g.12gb"]
    assert str(world.place("x/c", whole("2g.12gb"))).startswith("no card has room for 2g.12gb: ")


def test_cards_that_are_not_divided_serve_nobody() -> None:
    """And the sentence says so."""
    assert never_fits_instances(node(T4), [whole("1g.5gb")]) == (
        "no card here is divided into instances"
    )
    assert never_fits_instances(node(T4, A30), [whole("1g.5gb")]).startswith(
        "no card has a profile 1g.5gb: A30 has 1g.6gb, "
    )


def test_foreign_instances_stay_when_nothing_is_held() -> None:
    """So evicting pods does not help; one that is leaving will be gone."""
    assert not instances_fit_when_empty(
        node(A100, c0={("1g.5gb", 0): "foreign"}), [whole("7g.40gb")]
    )
    assert instances_fit_when_empty(node(A100, c0={("1g.5gb", 0): "leaving"}), [whole("7g.40gb")])


def test_reserved_places_are_used_by_nobody_else() -> None:
    """The least taken place is reserved: card 1 has one slice less in use."""
    world = World(node(A100, A100))
    for pod, name in (("a", "2g.10gb"), ("b", "3g.20gb"), ("c", "3g.20gb"), ("d", "1g.5gb")):
        assert isinstance(world.place(f"ns/{pod}", whole(name)), list)
    reserved = reserve_instances(world.shared, world.usage, [whole("7g.40gb")], ())
    assert reserved is not None
    (device,) = reserved[1]
    card = shown(device).partition("/")[0]
    fit = place_in_instances(
        world.shared, world.usage, [whole("1g.5gb")], "binpack", NO_HOLDERS, "ns", reserved[1]
    )
    if isinstance(fit, InstanceFit):
        assert shown(fit.placements[0].slices[0].uuid).partition("/")[0] != card


def test_idle_instance_is_not_used_where_its_place_is_for_others() -> None:
    """Reserved for a pod before, or held by one whose instance does not exist yet."""
    world = World(node(A100, c0={("3g.20gb", 4): "own"}))
    reserved = DeviceId("GPU-0/4/2g.10gb")

    def place(usage: UsageTotals, shared: SharedNode, *kept: DeviceId) -> str:
        fit = place_in_instances(
            shared, usage, [whole("3g.20gb")], "binpack", NO_HOLDERS, "ns", kept
        )
        assert isinstance(fit, InstanceFit)
        return shown(fit.placements[0].slices[0].uuid)

    assert place(world.usage, world.shared) == "0/4 3g.20gb"
    assert place(world.usage, world.shared, reserved) == "0/0 3g.20gb"
    world.usage.add(Placement("n", (Slice(0, reserved, 9984, 25),), whole=True))
    assert place(world.usage, with_instances(world.shared, [reserved])) == "0/0 3g.20gb"


def test_instances_with_media_engines_are_placed_first_where_the_order_by_size_fails() -> None:
    """A 2g beside the 1g would leave both 1g+me to the second card, which has one set of engines."""
    world = World(node(A30, A30))
    assert world.place("ns/a", whole("1g.6gb", 2)) == ["0/2 1g.6gb", "0/3 1g.6gb"]
    assert world.place("ns/b", whole("1g.6gb+me", 2), whole("2g.12gb")) == [
        "0/1 1g.6gb+me",
        "1/3 1g.6gb+me",
        "1/0 2g.12gb",
    ]


# ---- any pods ----

NAMES = {
    "A100": ("1g.5gb", "1g.5gb+me", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"),
    "A30": ("1g.6gb", "1g.6gb+me", "2g.12gb", "4g.24gb"),
}
GEOMETRIES = {"A100": A100, "A30": A30}


def legal(geometry: Geometry, places: Sequence[Place]) -> bool:
    """Return whether a card can have these instances, whatever their order."""
    return all(not geometry.conflict(places[:number], it) for number, it in enumerate(places))


def layouts(world: World) -> list[list[Place]]:
    """What is on each card that has to stay: pods' instances, and those of others."""
    division = world.published.division
    found = []
    for card, geometry in division.geometries.items():
        places = list(division.taken.get(card, {}))
        for devices in world.devices.values():
            for device in devices:
                instance = InstanceId.parse(device)
                if instance is not None and instance.card == card:
                    place = geometry.place_of(instance)
                    assert place is not None
                    places += [place] if place not in places else []
        found.append(places)
    return found


def servable(
    geometries: Sequence[Geometry], found: list[list[Place]], names: Sequence[str]
) -> bool:
    """Return whether instances of these names can be added, tried exhaustively."""
    if not names:
        return True
    for geometry, places in zip(geometries, found, strict=True):
        profile = geometry.by_name.get(names[0])
        for start in profile.starts if profile else ():
            assert profile is not None
            place = Place(profile, start)
            if geometry.conflict(places, place):
                continue
            places.append(place)
            rest = servable(geometries, found, names[1:])
            places.pop()
            if rest:
                return True
    return False


operations = st.lists(
    st.tuples(
        st.sampled_from(["place", "place", "place", "inside", "end"]),
        st.lists(st.tuples(st.integers(0, 6), st.integers(1, 3)), min_size=1, max_size=3),
        st.integers(0, 30),
    ),
    max_size=30,
)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([("A100",), ("A30",), ("A100", "A100"), ("A30", "A30")]),
    st.integers(0, 3),
    operations,
)
def test_pods_get_instances_wherever_a_legal_layout_serves_them(
    models: tuple[str, ...],
    foreign: int,
    actions: list[tuple[str, list[tuple[int, int]], int]],
) -> None:
    """No two overlap, nothing is on an administrator's, and what ends leaves nothing behind."""
    geometries, names = [GEOMETRIES[model] for model in models], NAMES[models[0]]
    there: dict[tuple[str, int], InstanceState] = {(names[0], 1): "foreign"} if foreign else {}
    if foreign == 2:
        there[names[0], 2] = "own"
    world = World(node(*geometries, c0=there))
    for number, (action, parts, which) in enumerate(actions):
        if action == "end":
            if world.pods:
                world.end(sorted(world.pods)[which % len(world.pods)])
        elif action == "inside":
            mib = 500 + parts[0][0] * 2500
            world.place(f"ns{which % 2}/{number}", inside(mib))
        else:
            asked = [(names[which_name % len(names)], count) for which_name, count in parts]
            every = [name for name, count in asked for _ in range(count)]
            before = layouts(world)
            placed = world.place(f"ns/{number}", *(whole(name, count) for name, count in asked))
            if len(every) < 5:
                assert isinstance(placed, list) == servable(geometries, before, every), placed
            if isinstance(placed, list):
                assert [it.partition(" ")[2] for it in placed] == every
        for geometry, places in zip(geometries, layouts(world), strict=True):
            assert legal(geometry, places)
    for pod in list(world.pods):
        world.end(pod)
    assert all(
        not world.usage.card_usage("n", card.uuid).holders for card in world.shared.node.cards
    )
