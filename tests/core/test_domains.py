"""Gangs and topology domains: few racks and zones, one where it is required, and ranks along them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.core.backfill import Backfill, Timeline, complete
from fenka.core.columnar_placer import ColumnarPlacer
from fenka.core.columns import Columns
from fenka.core.gangs import PlacementLimits, Placer, PlainPlacer, place_all
from fenka.core.inventory import Node
from fenka.core.ledger import Ledger
from fenka.core.queue import PendingRequest
from fenka.core.reasons import Unschedulable
from fenka.core.request import Placement, Request
from fenka.core.topology.domains import DomainSearch, Proximity, Topology
from fenka.core.usage import UsageTotals, UsageView
from tests.core.builders import (
    T4_MIB,
    clusters,
    device,
    held,
    holding,
    node,
    on,
    requests,
    units,
    whole,
)

LEVELS = ("zone", "rack")
ZONE, RACK = range(2)
PLACES = {"a": "z1 r1", "b": "z1 r1", "c": "z1 r2", "d": "z1 r2", "e": "z2 r1", "f": "z2", "g": ""}
"""Node f has no rack, and g has neither label. Racks r1 of both zones are different ones."""
NODES = tuple(node(T4_MIB, T4_MIB, name=name) for name in PLACES)
"""Two T4 each, with 14 units each."""


def topology_of(places: dict[str, str]) -> Topology:
    """Return the topology of nodes, each with the values of its labels."""
    labels = {
        name: dict(zip(LEVELS, values.split(), strict=False)) for name, values in places.items()
    }
    return Topology.of(LEVELS, labels.items())


TOPOLOGY = topology_of(PLACES)


def plain(view: UsageView, nodes: Sequence[Node] = NODES) -> Placer:
    """Return the definition."""
    return PlainPlacer(nodes, view)


def columnar(view: UsageView, nodes: Sequence[Node] = NODES) -> Placer:
    """Return its twin."""
    return ColumnarPlacer(Columns(nodes, view))


both = pytest.mark.parametrize("make", [plain, columnar])


def shown(verdict: tuple[Placement, ...] | Unschedulable) -> str:
    """Return the nodes of the members, or the sentence."""
    if isinstance(verdict, Unschedulable):
        return verdict.sentence()
    return " ".join(placement.node for placement in verdict)


def full(*names: str) -> list[Placement]:
    """Return what fills both cards of these nodes."""
    return [on(card, 14, name) for name in names for card in (0, 1)]


@both
@pytest.mark.parametrize(
    ("members", "taken", "level", "expected"),
    [
        # Two of 14 units fill a node; the rack r1 of z2 has one node, r1 and r2 of z1 have two: the tightest.
        ([units(14)] * 2, [], RACK, "e e"),
        # Four need two nodes: racks z1 r1 and z1 r2 have 4 places each, and r1 is the first.
        ([units(14)] * 4, [], RACK, "a a b b"),
        # With b full, z1 r1 has 2 places, z1 r2 has 4.
        ([units(14)] * 4, full("b"), RACK, "c c d d"),
        # Six are more than a rack has. Zone z1 has 8 places, z2 has 4: racks of 4 and 2 in z1.
        ([units(14)] * 6, [], RACK, "a a b b c c"),
        # With 1 place taken on a, z1 has 3 + 4: first the rack with 4, then the other one.
        ([units(14)] * 6, [on(0, 14, "a")], RACK, "a b b c c d"),
        # Ten are more than a zone has: 8 of z1, and 2 of the tightest of z2 with 4 and g, which is alone.
        ([units(14)] * 10, [], RACK, "a a b b c c d d g g"),
        # By zones z2 (e and f, 4 places) is tighter than z1 (8 places); in it e is a rack, and f is alone.
        ([units(14)] * 3, [], ZONE, "e e f"),
        # Seven units: 4 a node, 8 a rack of z1. Of z2's 8 places both nodes are needed, of z1's one rack.
        ([units(7)] * 5, [], RACK, "a a a a b"),
        # Different members: the pair of cards needs a node, the others 2 x 7 of the other one.
        ([whole(2), units(7), units(7)], [], RACK, "a b b"),
        # If all are full but one card of three racks each, there is only the widest set.
        (
            [units(14)] * 3,
            [*full("b", "d", "f", "g"), on(0, 14, "a"), on(0, 14, "c"), on(0, 14, "e")],
            RACK,
            "a c e",
        ),
    ],
)
def test_gang_is_close_together_when_that_is_preferred(
    make: object, members: list[Request], taken: list[Placement], level: int, expected: str
) -> None:
    """Ranks follow zones, racks and names. The arithmetic is in the table."""
    assert callable(make)
    placer = make(holding(*taken))
    assert shown(place_all(placer, members, "binpack", proximity=Proximity(TOPOLOGY, level))) == (
        expected
    )
    assert placer.card_usage("b", device(0, "b")) == holding(*taken).card_usage("b", device(0, "b"))


@both
@pytest.mark.parametrize(
    ("members", "taken", "level", "beside", "expected"),
    [
        ([units(14)] * 4, full("b"), RACK, (), "c c d d"),
        # Six are in one zone, though not in one rack.
        ([units(14)] * 6, [], ZONE, (), "a a b b c c"),
        # z1 r1 and z1 r2 have 4 places each: the first of them is named.
        (
            [units(14)] * 5,
            [],
            RACK,
            (),
            "no GPU fits: 4 of 4 have too little memory; all must be in one rack, and r1 has the most room: "
            "4 of the gang's 5 would fit together",
        ),
        # With a full r1 has 2 places left, and r2 has 3.
        (
            [units(14)] * 4,
            [*full("a"), on(0, 14, "c")],
            RACK,
            (),
            "no GPU fits: 4 of 4 have too little memory; all must be in one rack, and r2 has the most room: "
            "3 of the gang's 4 would fit together",
        ),
        # A member on d: the others go to its rack, although a and b are as good.
        ([units(14)], full("d"), RACK, ("d",), "c"),
        # Two have started on c, which has no room for the third: its rack has node d.
        ([units(14)], full("c"), RACK, ("c",), "d"),
        (
            [units(14)] * 3,
            full("c"),
            RACK,
            ("c",),
            "no GPU fits: 4 of 4 have too little memory; all must be in one rack, and r2 has the most room: "
            "2 of the gang's 3 would fit together",
        ),
        # Members that have started in two racks, or without a label, have no rack in common.
        ([units(1)], [], RACK, ("a", "c"), "there is no GPU; no node for it has the label rack"),
        ([units(1)], [], RACK, ("g",), "there is no GPU; no node for it has the label rack"),
    ],
)
def test_gang_is_in_one_domain_when_that_is_required(
    make: object,
    members: list[Request],
    taken: list[Placement],
    level: int,
    beside: tuple[str, ...],
    expected: str,
) -> None:
    """Otherwise it waits, and the sentence names the domain with the most room."""
    assert callable(make)
    proximity = Proximity(TOPOLOGY, level, required=True, beside=frozenset(beside))
    placed = place_all(make(holding(*taken)), members, "binpack", proximity=proximity)
    assert shown(placed) == expected


def test_members_that_have_started_attract_others() -> None:
    """Both racks of z1 have room, and the rack of z2 is tighter; c and d are beside the others."""
    proximity = Proximity(TOPOLOGY, RACK, beside=frozenset({"c"}))
    placer = PlainPlacer(NODES, holding(on(0, 14, "c")))
    assert shown(place_all(placer, [units(14)] * 2, "binpack", proximity=proximity)) == "c d"
    # With both full the zone still counts: r1 of z1 before that of z2.
    placer = PlainPlacer(NODES, holding(*full("c", "d")))
    assert shown(place_all(placer, [units(14)] * 2, "binpack", proximity=proximity)) == "a a"


def test_reserved_cards_and_other_nodes_are_left_out() -> None:
    """Both limits hold within domains: node c is not eligible, and a's first card is reserved."""
    limits = PlacementLimits(frozenset({device(0)}), frozenset("abd"))
    for make in (plain, columnar):
        placed = place_all(
            make(UsageTotals()),
            [units(14)] * 3,
            "binpack",
            limits,
            Proximity(TOPOLOGY, RACK, required=True),
        )
        assert shown(placed) == "a b b"


def test_search_finds_the_distribution_in_a_domain() -> None:
    """9 + 9 + 5 + 5 + 5 + 5 on four cards of 14: 9 + 5 twice and 5 + 5; no order of one by one fails here.

    As in `test_gangs`, 7,000 and 11,000 MiB take 6 + 5 + 3 + 2 + 2 thousand only as 5 + 2 and 6 + 3 + 2.
    """
    nodes = [node(7000, 11000), node(7000, 11000, name="b")]
    proximity = Proximity(topology_of({"a": "z1 r1", "b": "z1 r2"}), RACK, required=True)
    members = [Request(memory=replace(units(1).memory, amount=mib, unit_mib=1)) for mib in _SIZES]  # type: ignore[type-var]
    for make in (plain, columnar):
        placed = place_all(make(UsageTotals(), nodes), members, "binpack", proximity=proximity)
        assert shown(placed) == "a a a a a"


_SIZES = (6000, 5000, 3000, 2000, 2000)


def test_only_some_of_many_domains_are_tried() -> None:
    """Of 100 racks with room by the bound, 16 of the least and 16 of the most room are tried."""
    names = [f"n{number:03}" for number in range(100)]
    topology = topology_of({name: f"z r{name}" for name in names})
    rooms = {name: number + 1 for number, name in enumerate(names)}
    search = DomainSearch(Proximity(topology, RACK, required=True), {whole(): 1}, {whole(): rooms})
    tried = [min(candidate) for candidate in search.candidates()]
    assert tried == [*names[:16], *names[84:]]


@pytest.mark.parametrize(
    ("kinds", "tried"),
    [(0, 0), (1, 32), (2, 16), (3, 10), (16, 2), (64, 2)],  # 16 // kinds, at least 1, of either end
)
def test_fewer_domains_are_tried_for_more_different_requests(kinds: int, tried: int) -> None:
    """Each different request costs time in each domain."""
    places = {f"n{number}": f"z r{number}" for number in range(40)}
    wanted = [replace(units(1), cpu_milli=kind) for kind in range(kinds)]
    rooms = {request: dict.fromkeys(places, 1) for request in wanted}
    search = DomainSearch(Proximity(topology_of(places), RACK), dict.fromkeys(wanted, 1), rooms)
    assert len(search.required_domains()) == tried


def test_reservation_is_in_the_domain_that_is_free_first() -> None:
    """r1 is free at 300 and 100, r2 at 200 and 200: r2, all of it at 200. Nothing is free now."""
    nodes = [node(T4_MIB, name=name) for name in "abcd"]
    ends = {"a": 300.0, "b": 100.0, "c": 200.0, "d": 200.0}
    allocations = {name: [held(0, 14, at, name)] for name, at in ends.items()}
    taken = holding(*(there.placement for one in allocations.values() for there in one))
    gang = PendingRequest(
        "gang", (units(14),) * 2, 0.0, proximity=Proximity(TOPOLOGY, RACK, required=True)
    )
    result = complete(
        Backfill("binpack").serve(
            [gang], PlainPlacer(nodes, taken), Timeline(nodes, allocations, 0.0), 0.0
        )
    )
    reservation = result.pending[0].reservation
    assert reservation is not None
    assert reservation.cards == {device(0, "c"), device(0, "d")}
    assert reservation.starts_by == 200
    # Without the requirement the first cards of all are reserved.
    result = complete(
        Backfill("binpack").serve(
            [replace(gang, proximity=None)],
            PlainPlacer(nodes, taken),
            Timeline(nodes, allocations, 0.0),
            0.0,
        )
    )
    assert result.pending[0].reservation is not None
    assert result.pending[0].reservation.cards == {device(0, "b"), device(0, "c")}


def test_gang_larger_than_every_domain_reserves_nothing() -> None:
    """Five whole cards, and no rack has more than four: it would block others for ever."""
    gang = PendingRequest(
        "gang", (whole(),) * 5, 0.0, proximity=Proximity(TOPOLOGY, RACK, required=True)
    )
    result = complete(
        Backfill("binpack").serve(
            [gang], PlainPlacer(NODES, UsageTotals()), Timeline(NODES, {}, 0.0), 0.0
        )
    )
    assert result.pending[0].reservation is None


@st.composite
def places(draw: st.DrawFn, names: Sequence[str]) -> Topology:
    """Return up to two zones with up to two racks, and nodes without labels."""
    labels = st.sampled_from(["z1 r1", "z1 r2", "z2 r1", "z2", ""])
    return topology_of({name: draw(labels) for name in names})


@settings(deadline=None, max_examples=200)
@given(data=st.data(), nodes=clusters(most_nodes=5, most_cards=3))
def test_gangs_are_placed_close_together_and_never_beyond_cards(
    data: st.DataObject, nodes: tuple[Node, ...]
) -> None:
    """A preferred domain never refuses a gang that fits; in a required one is all of it, or it does not fit.

    The ledger is the judge of the amounts. Both placers decide alike.
    """
    topology = data.draw(places([each.name for each in nodes]))
    ledger = Ledger(nodes)
    for number, request in enumerate(data.draw(st.lists(requests(), max_size=5))):
        there = place_all(PlainPlacer(nodes, ledger), [request], "spread")
        if not isinstance(there, Unschedulable):
            ledger.assume(f"held{number}", there[0], 1)
    members = data.draw(st.lists(requests(), min_size=1, max_size=4))
    policy = data.draw(st.sampled_from(["binpack", "spread"]))
    started = data.draw(st.sets(st.sampled_from([each.name for each in nodes]), max_size=1))
    level, required = data.draw(st.sampled_from([ZONE, RACK])), data.draw(st.booleans())
    proximity = Proximity(topology, level, required, frozenset(started))
    placed = place_all(PlainPlacer(nodes, ledger), members, policy, proximity=proximity)
    twin = ColumnarPlacer(Columns(nodes, ledger))
    again = place_all(twin, members, policy, proximity=proximity)
    assert shown(again) == shown(placed)
    assert again == placed
    if required:
        own = {topology.domain(name, level) for name in started}
        domains = {domain for each in nodes if (domain := topology.domain(each.name, level))}
        fitting = [
            domain
            for domain in domains
            if own <= {domain}
            and not isinstance(
                place_all(
                    PlainPlacer(nodes, ledger),
                    members,
                    policy,
                    PlacementLimits(among=topology.nodes_of(domain)),
                ),
                Unschedulable,
            )
        ]
        assert isinstance(placed, tuple) == bool(fitting)
    else:
        anywhere = place_all(PlainPlacer(nodes, ledger), members, policy)
        assert isinstance(placed, tuple) == isinstance(anywhere, tuple)
    if isinstance(placed, tuple):
        used = {topology.domain(each.node, level) for each in placed}
        assert not required or (len(used) == 1 and None not in used)
        assert [len(each.slices) for each in placed] == [member.cards for member in members]
        for number, each in enumerate(placed):
            ledger.assume(f"member{number}", each, 1)


@settings(deadline=None, max_examples=200)
@given(
    nodes=clusters(), request=requests(), others=st.lists(requests(), max_size=4), data=st.data()
)
def test_room_of_a_node_bounds_what_it_takes(
    nodes: tuple[Node, ...], request: Request, others: list[Request], data: st.DataObject
) -> None:
    """Both placers count alike; of requests for one card the node takes just that number."""
    view = UsageTotals()
    for other in others:
        there = PlainPlacer(nodes, view).place(other, "spread")
        if isinstance(there, Placement):
            view.add(there)
    devices = [card.uuid for each in nodes for card in each.cards]
    reserved = frozenset(
        data.draw(st.sets(st.sampled_from(devices), max_size=2)) if devices else ()
    )
    limits = PlacementLimits(reserved)
    room = PlainPlacer(nodes, view).room(request, limits)
    assert ColumnarPlacer(Columns(nodes, view)).room(request, limits) == room
    for each in nodes:
        placer, taken = PlainPlacer(nodes, view), 0
        alone = PlacementLimits(reserved, frozenset({each.name}))
        while taken < 300 and isinstance(
            there := placer.place(request, "binpack", alone), Placement
        ):
            placer.add(there)
            taken += 1
        bound = room.get(each.name, 0)
        assert taken == min(bound, 300) if request.cards == 1 else taken <= bound
        assert bool(taken) == bool(bound)
