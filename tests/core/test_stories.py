"""Days of small clusters, step by step: ledger, queue, gangs, cordons and preemption together."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from fenka.core.evaluate import never_fits, place
from fenka.core.gangs import GangReservation, GangReservations, PlainPlacer
from fenka.core.inventory import Node
from fenka.core.ledger import Conflict, EntryState, Ledger
from fenka.core.preemption import Preemptor, VictimCandidate, cheapest_victims
from fenka.core.queue import Allocation, Fairness, PendingRequest, SchedulingResult, UsageHistory
from fenka.core.reasons import Unschedulable
from fenka.core.request import Placement, Request
from fenka.core.units import format_units, mib_to_units, percent
from tests.core.builders import (
    GIB,
    P4_MIB,
    T4_MIB,
    NodesBackfill,
    card,
    device,
    exact,
    node,
    units,
    whole,
)


class Cluster:
    """Nodes with a ledger of what runs and a queue of what waits."""

    def __init__(self, *nodes: Node) -> None:
        self.nodes, self.ledger, self.now = tuple(nodes), Ledger(nodes), 0.0
        self.queue: list[PendingRequest] = []
        self._deadlines: dict[str, float | None] = {}
        self._backfill = NodesBackfill(nodes, "binpack")
        self._uses = UsageHistory(Fairness())

    def change(self, *nodes: Node) -> None:
        """Replace the nodes. What runs on cards that still exist goes on."""
        entries = self.ledger.entries
        self.nodes, self.ledger = tuple(nodes), Ledger(nodes)
        self._backfill.set_nodes(nodes)
        for name, entry in entries.items():
            self.ledger.adopt(name, entry.placement, entry.expires_at)

    def submit(
        self,
        name: str,
        *requests: Request,
        user: str = "",
        limit: float | None = None,
        rank: int = 0,
    ) -> None:
        """Add a request, or a gang, to the queue."""
        self.queue.append(PendingRequest(name, requests, self.now, rank, user, limit))

    def serve(self, now: float) -> SchedulingResult:
        """Let time pass, end what is over, and serve the queue once."""
        self.now = now
        for name, until in list(self._deadlines.items()):
            if until is not None and until <= now:
                self.end(name)
        running = [
            Allocation(entry.placement, self._deadlines[name])
            for name, entry in self.ledger.entries.items()
        ]
        result = self._backfill.serve(self.queue, running, now, self.ledger, self._uses)
        pending = {it.id: it for it in self.queue}
        for name, placements in result.placed:
            limit, user = pending[name].time_limit_s, pending[name].user
            for number, placement in enumerate(placements):
                entry = name if len(placements) == 1 else f"{name}/{number}"
                self.ledger.assume(entry, placement, now + 30)
                self.ledger.confirm(entry)
                self._deadlines[entry] = None if limit is None else now + limit
                self._uses.start(entry, user, 1, pending[name].requested_at, now, now)
        placed = dict(result.placed)
        self.queue = [it for it in self.queue if it.id not in placed]
        return result

    def end(self, name: str) -> None:
        """End what runs."""
        self.ledger.release(name)
        self._uses.stop(name, self.now, self.now)
        del self._deadlines[name]

    def units(self, name: str, index: int = 0) -> str:
        """Return the units that are held of a card, as a screen shows them."""
        (host,) = (each for each in self.nodes if each.name == name)
        (size,) = (each.memory_mib for each in host.cards if each.index == index)
        held = self.ledger.card_usage(name, device(index, name)).memory_mib
        return format_units(mib_to_units(held, size, GIB))


def where(result: SchedulingResult) -> dict[str, str]:
    """Return the cards of what was placed: a0 is card 0 of node a."""
    return {
        name: " ".join(f"{it.node}{part.card}" for it in placements for part in it.slices)
        for name, placements in result.placed
    }


def waits(result: SchedulingResult) -> dict[str, tuple[str, float | None] | None]:
    """Return what waits, with the cards that it reserves and when they are free."""
    return {
        it.id: (" ".join(sorted(it.reservation.cards)), it.reservation.starts_by)
        if it.reservation
        else None
        for it in result.pending
    }


def test_day_of_a_workstation_with_two_cards() -> None:
    """Notebooks of 4 units share a card, a training takes the other, and a long queue is served in order."""
    desk = Cluster(node(T4_MIB, T4_MIB))
    for number in range(3):
        desk.submit(f"notebook{number}", units(4))
    desk.submit("training", units(14), limit=600)
    # 3 * 4 = 12 of 14 units on card 0
    assert where(desk.serve(0)) == {
        "notebook0": "a0",
        "notebook1": "a0",
        "notebook2": "a0",
        "training": "a1",
    }
    assert (desk.units("a", 0), desk.units("a", 1)) == ("12", "14")
    used = sum(desk.ledger.card_usage("a", device(it)).memory_mib for it in (0, 1))
    # 12924 + 15079 = 28003 of 30158: 92.85
    assert percent(used, 2 * T4_MIB) == 92
    # A fourth notebook waits for the training, which ends at 600; a small one fits beside the three.
    desk.submit("notebook3", units(4))
    desk.submit("small", units(2))
    result = desk.serve(60)
    assert where(result) == {"small": "a0"}
    assert waits(result) == {"notebook3": ("GPU-a-1", 600)}
    assert result.pending[0].reason == "no GPU fits: 2 of 2 have too little memory"
    # One notebook ends early.
    desk.end("notebook1")
    assert where(desk.serve(120)) == {"notebook3": "a0"}
    # A whole card is free when the training has ended, and not before.
    desk.submit("whole", whole())
    assert waits(desk.serve(599)) == {"whole": ("GPU-a-1", 600)}
    assert where(desk.serve(600)) == {"whole": "a1"}
    assert desk.ledger.card_usage("a", device(1)).whole == 1
    # Everything ends.
    for name in list(desk.ledger.entries):
        desk.end(name)
    assert (desk.units("a", 0), desk.units("a", 1)) == ("0", "0")


def test_day_with_a_cordon_and_a_sick_card() -> None:
    """A card is cordoned under its jobs, the other falls ill, and a request waits for either."""
    desk = Cluster(node(T4_MIB, T4_MIB))
    desk.submit("long", units(8))
    assert where(desk.serve(0)) == {"long": "a0"}
    closed = Node("a", (card(0, cordoned=True), card(1)))
    desk.change(closed)
    desk.submit("next", units(4))
    # card 0 has 6 of 14 units left, and takes nothing new
    assert where(desk.serve(10)) == {"next": "a1"}
    desk.change(replace(closed, cards=(closed.cards[0], card(1, healthy=False))))
    desk.submit("third", units(4))
    desk.submit("huge", units(15))
    result = desk.serve(20)
    assert where(result) == {}
    # Nobody knows when a card comes back: nothing is reserved for it.
    assert waits(result) == {"third": None, "huge": None}
    assert [it.reason for it in result.pending] == [
        "no GPU fits: 1 of 2 is unhealthy, 1 is cordoned"
    ] * 2
    # But the one could fit one day and the other never.
    assert never_fits(units(4), desk.nodes) is None
    never = never_fits(units(15), desk.nodes)
    assert never is not None
    assert never.sentence() == (
        "no GPU fits: 2 of 2 have too little memory; the largest card has 14 units, ask for no more"
    )
    # Jobs on closed cards go on, and end as any other.
    assert desk.ledger.state("long") is EntryState.CONFIRMED
    desk.end("long")
    desk.change(Node("a", (card(0), card(1, healthy=False))))
    assert where(desk.serve(30)) == {"third": "a0"}
    desk.change(Node("a", (card(0), card(1))))
    assert (desk.units("a", 0), desk.units("a", 1)) == ("4", "4")


def test_card_that_is_exchanged_takes_its_records_along() -> None:
    """The new card has the same index, and another id: a record of the old one is refused by name."""
    before = node(T4_MIB)
    ledger = Ledger([before])
    placed = place(ledger, units(8), "binpack", [before])
    assert isinstance(placed, Placement)
    after = Node("a", (card(0, P4_MIB, node="new", model="Tesla P4"),))
    fresh = Ledger([after])
    with pytest.raises(Conflict, match=r"^there is no card 0 \(GPU-a-0\) on a$"):
        fresh.adopt("old", placed)
    # 7611 MiB have 7 units
    assert isinstance(place(fresh, units(8), "binpack", [after]), Unschedulable)
    assert isinstance(place(fresh, units(7), "binpack", [after]), Placement)


def test_day_of_two_users_one_of_whom_submits_all_at_once() -> None:
    """Ann submits four jobs of a whole card, Bob one later: he is second, not fifth."""
    desk = Cluster(node(T4_MIB))
    for number in range(4):
        desk.submit(f"ann{number}", units(14), user="ann", limit=100)
    desk.now = 5
    desk.submit("bob", units(14), user="bob", limit=100)
    order = []
    for turn in range(5):
        result = desk.serve(10 + 100 * turn)
        order += list(where(result))
        assert [it.position for it in result.pending] == list(range(1, 5 - turn))
    # ann0 has a share of 0 like bob's and is earlier; when it has ended, ann has had 100 card-seconds
    assert order[:2] == ["ann0", "bob"]
    assert order[2:] == ["ann1", "ann2", "ann3"]


def test_large_job_is_not_starved_by_a_stream_of_small_ones() -> None:
    """Small jobs of 20 s come every 10 s; those that would end too late stay off the reserved card."""
    desk = Cluster(node(T4_MIB))
    desk.submit("first", units(7), limit=50)
    assert where(desk.serve(0)) == {"first": "a0"}
    desk.submit("large", units(14), limit=30)
    started = {}
    for now in range(10, 100, 10):
        desk.submit(f"small{now}", units(7), limit=20)
        result = desk.serve(now)
        started.update(dict.fromkeys(where(result), now))
        if now < 50:
            assert waits(result)["large"] == ("GPU-a-0", 50)
    # Beside first there is room for one. small10 ends at 30, small20 takes its place until 50; from 30
    # on 30 + 20 = 50 would be in time for small30, but there is no room, and large ends at 80.
    assert {name: started[name] for name in ("small10", "large")} == {"small10": 10, "large": 50}
    assert started["small20"] == 30
    assert started["small30"] == started["small40"] == 80


def test_gang_waits_for_two_nodes_and_is_placed_as_a_whole() -> None:
    """Four members of 8 units on three free cards of four, until the fourth is free."""
    cluster = Cluster(node(T4_MIB, T4_MIB), node(T4_MIB, T4_MIB, name="b"))
    cluster.submit("single", units(8), limit=100)
    assert where(cluster.serve(0)) == {"single": "a0"}
    cluster.submit("gang", *[units(8)] * 4)
    cluster.now = 1
    cluster.submit("short", units(6), limit=99)
    cluster.now = 2
    cluster.submit("late", units(8), limit=101)
    result = cluster.serve(1)
    # 8 of the gang on each card from 100 on: what ends by then may use them, what ends later may not
    assert where(result) == {"short": "a0"}
    reserved = "GPU-a-0 GPU-a-1 GPU-b-0 GPU-b-1"
    assert waits(result)["gang"] == (reserved, 100)
    assert [it.reason for it in result.pending] == [
        "no GPU fits: 4 of 4 have too little memory; 3 of the gang's 4 would fit together",
        "no GPU fits: 3 of 4 are reserved for requests before it, 1 has too little memory",
    ]
    # 6 + 8 = 14: short is beside single, and ends at 100 too
    result = cluster.serve(100)
    assert where(result) == {"gang": "a0 a1 b0 b1"}
    assert waits(result) == {"late": ("GPU-a-0", None)}
    cluster.end("gang/2")
    assert where(cluster.serve(200)) == {"late": "b0"}


def test_gang_is_reserved_while_single_requests_come() -> None:
    """Its three members hold their cards from the start; one never comes, and all is given back."""
    nodes = node(T4_MIB, T4_MIB), node(T4_MIB, name="b")
    ledger = Ledger(nodes)
    gangs = GangReservations(ledger)
    placer = PlainPlacer(nodes, gangs.usage)
    members = {f"m{it}": units(10) for it in range(3)}
    plan = gangs.reserve("g", members, "binpack", placer, 300)
    assert isinstance(plan, GangReservation)
    # 14 - 10 = 4 units are left of each card
    assert isinstance(placer.place(units(5), "binpack"), Unschedulable)
    beside = placer.place(units(4), "binpack")
    assert isinstance(beside, Placement)
    ledger.adopt("beside", beside)
    for member in ("m0", "m2"):
        ledger.adopt(f"g/{member}", plan.placements[member])
        gangs.mark_started("g", member)
    held = {each.name: gangs.usage.card_usage(each.name, each.cards[0].uuid) for each in nodes}
    # 15079 * 10 // 14 = 10770 and 4308 beside it
    assert held["a"].memory_mib == 15078
    assert held["b"].memory_mib == 10770
    assert gangs.overdue(300) == ["g"]
    gangs.release("g")
    for member in ("m0", "m2"):
        ledger.release(f"g/{member}")
    assert isinstance(placer.place(whole(), "binpack"), Placement)
    assert list(ledger.entries) == ["beside"]


def victims_of(
    ledger: Ledger, nodes: Sequence[Node], request: Request, ranks: dict[str, int], rank: int
) -> tuple[str, ...] | None:
    """Return whom a request of this rank evicts."""
    candidates = [
        VictimCandidate(name, entry.placement, ranks[name])
        for name, entry in ledger.entries.items()
    ]
    victims = cheapest_victims(ledger, candidates, Preemptor((request,), rank), nodes)
    return None if victims is None else victims.ids


def test_urgent_request_evicts_as_little_as_it_must() -> None:
    """Then the evicted wait again, behind it, and the least important are evicted first."""
    cluster = Cluster(node(T4_MIB), node(P4_MIB, name="b"))
    ranks = {"low": 1, "middle": 5, "high": 9}
    for name, amount in (("high", 7), ("middle", 4), ("low", 7)):
        cluster.submit(name, units(amount), rank=ranks[name])
    # the P4's 7 units are the tightest for high; the others are on the T4
    assert where(cluster.serve(0)) == {"high": "b0", "middle": "a0", "low": "a0"}
    assert victims_of(cluster.ledger, cluster.nodes, units(3), ranks, 0) == ()
    assert victims_of(cluster.ledger, cluster.nodes, units(4), ranks, 1) is None
    assert victims_of(cluster.ledger, cluster.nodes, units(4), ranks, 2) == ("low",)
    # 14 - 4 = 10: without low there are 10 units
    assert victims_of(cluster.ledger, cluster.nodes, units(10), ranks, 6) == ("low",)
    assert victims_of(cluster.ledger, cluster.nodes, units(11), ranks, 5) is None
    assert victims_of(cluster.ledger, cluster.nodes, units(11), ranks, 6) == ("low", "middle")
    # two cards of one node are nowhere, whoever goes
    assert victims_of(cluster.ledger, cluster.nodes, units(1, cards=2), ranks, 99) is None
    cluster.end("low")
    cluster.submit("low", units(7), rank=1)
    cluster.submit("urgent", units(10), rank=6)
    result = cluster.serve(10)
    assert where(result) == {"urgent": "a0"}
    assert waits(result) == {"low": ("GPU-a-0", None)}


def test_assumed_grant_expires_and_the_next_in_line_is_served() -> None:
    """A client that never confirms holds its slice for 30 s, like anybody else."""
    host = node(T4_MIB)
    ledger = Ledger([host])
    first = place(ledger, exact(10_000), "binpack", [host])
    assert isinstance(first, Placement)
    ledger.assume("silent", first, 30)
    refused = place(ledger, exact(5_080), "binpack", [host])
    assert isinstance(refused, Unschedulable)
    # 15079 - 10000 = 5079
    assert [(it.needed, it.available) for it in refused.reasons] == [(5_080, 5_079)]
    assert ledger.expire(29.999) == []
    assert ledger.expire(30) == ["silent"]
    second = place(ledger, exact(5_080), "binpack", [host])
    assert isinstance(second, Placement)
    ledger.assume("prompt", second, 60)
    ledger.confirm("prompt")
    with pytest.raises(Conflict, match=r"^cannot confirm silent: it is not held$"):
        ledger.confirm("silent")
    assert ledger.expire(1e9) == []
