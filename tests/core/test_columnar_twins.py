"""The columnar twins decide as the definitions do, on random histories of random clusters."""

from collections import Counter
from dataclasses import replace
from math import inf

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.core.backfill import Backfill, Timeline, complete
from fenka.core.columnar import JointJudgement, Judgement, count_reasons
from fenka.core.columnar_placer import ColumnarPlacer
from fenka.core.columnar_timeline import SPARE, CardStates, ColumnarTimeline
from fenka.core.columns import Columns
from fenka.core.evaluate import Fit, evaluate
from fenka.core.gangs import PlacementLimits, Placer, PlainPlacer, place_all, place_gang
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.policies.candidates import TargetPolicy
from fenka.core.policies.scores import TARGET_POLICIES
from fenka.core.policies.target import ExpectedWorkload
from fenka.core.policies.workload import Typical
from fenka.core.queue import NO_HISTORY, Allocation, Fairness, PendingRequest, queue_order
from fenka.core.reasons import NodeRejection, Unschedulable
from fenka.core.request import Memory, Placement, Request, Slice
from fenka.core.usage import UsageTotals
from tests.core.builders import clusters, requests

EXPECTED = (Typical(Request(Memory(5000)), 3), Typical(Request(cards=2, whole=True), 1))
POLICIES = st.sampled_from(
    ["binpack", "spread"] * 2
    + ["bestfit", *(TargetPolicy(name, ExpectedWorkload(EXPECTED)) for name in TARGET_POLICIES)]
)


def devices(nodes: tuple[Node, ...]) -> list[DeviceId]:
    """The ids of all cards."""
    return sorted(card.uuid for node in nodes for card in node.cards)


def reserved_cards(nodes: tuple[Node, ...]) -> st.SearchStrategy[frozenset[DeviceId]]:
    """Often none."""
    some = st.frozensets(st.sampled_from(devices(nodes)), max_size=3)
    return st.just(frozenset[DeviceId]()) | some


def eligible(nodes: tuple[Node, ...]) -> st.SearchStrategy[frozenset[str] | None]:
    """All nodes, or some of them and one that does not exist."""
    some = st.frozensets(st.sampled_from([*(node.name for node in nodes), "gone"]))
    return st.none() | some


def outcome(verdict: object) -> object:
    """A verdict without the order of nodes, with what people see of it."""
    if not isinstance(verdict, Unschedulable):
        return verdict
    return set(verdict.rejections), verdict.counts(), verdict.sentence()


class World:
    """The same usage in totals and in columns, with nodes that come, change and go."""

    def __init__(self, nodes: tuple[Node, ...], data: st.DataObject) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.away: dict[str, Node] = {}
        self.totals = UsageTotals()
        self.changed = set(self.nodes)
        self.totals.watch(self.changed)
        self.columns = Columns()
        self.held: list[Placement] = []
        self._draw = data.draw

    def change(self, request: Request, policy: str) -> None:
        """Place the request, release something, or change a node."""
        kind = self._draw(st.sampled_from(["place", "place", "place", "release", "health", "node"]))
        if kind == "place" and self.nodes:
            verdict = PlainPlacer(self.nodes.values(), self.totals).place(request, policy)
            if isinstance(verdict, Placement):
                self.totals.add(verdict)
                self.held.append(verdict)
        elif kind == "release" and self.held:
            self.totals.remove(self.held.pop(self._draw(st.integers(0, len(self.held) - 1))))
        elif kind == "health" and self.nodes:
            node = self.nodes[self._draw(st.sampled_from(sorted(self.nodes)))]
            card, *others = node.cards
            drawn_mib = self._draw(st.sampled_from([0, 0, 600]))
            card = replace(
                card,
                healthy=self._draw(st.booleans()),
                cordoned=self._draw(st.booleans()),
                unleased_mib=drawn_mib + self._draw(st.sampled_from([0, 0, 4000, 20000])),
                drawn_mib=drawn_mib,
            )
            policy_of_node = self._draw(st.sampled_from([None, "binpack", "spread"]))
            self.nodes[node.name] = replace(node, cards=(card, *others), card_policy=policy_of_node)
            self.changed.add(node.name)
        elif kind == "node":
            here, there = self.nodes, self.away
            if self.away and (len(self.nodes) < 2 or self._draw(st.booleans())):
                here, there = self.away, self.nodes
            name = self._draw(st.sampled_from(sorted(here)))
            there[name] = here.pop(name)
            self.changed.add(name)
        self.follow()

    def follow(self) -> None:
        """Bring the columns up to date, one node after the other."""
        while self.changed:
            name = self.changed.pop()
            known = self.columns.slot(name) >= 0
            if name in self.nodes:
                if not known or self.columns.nodes[self.columns.slot(name)] != self.nodes[name]:
                    self.columns.set_node(self.nodes[name], self.totals)
                else:
                    self.columns.set_usage(name, self.totals)
            elif known:
                self.columns.remove_node(name)

    def placers(self) -> tuple[Placer, Placer]:
        """The definition and its twin."""
        plain = PlainPlacer(self.nodes.values(), self.totals)
        return plain, ColumnarPlacer(self.columns.copy())


@settings(deadline=None)
@given(
    nodes=clusters(),
    asked=st.lists(requests(), min_size=1, max_size=10),
    policy=POLICIES,
    data=st.data(),
)
def test_judgement_equals_evaluate_on_every_history(
    nodes: tuple[Node, ...], asked: list[Request], policy: str, data: st.DataObject
) -> None:
    """Fits, order, best node and the reason of each card."""
    world = World(nodes, data)
    for request in asked:
        world.change(request, policy)
        reserved = data.draw(reserved_cards(nodes))
        columns, names = world.columns, sorted(world.nodes)
        verdicts = dict(
            zip(
                names,
                evaluate(
                    world.totals, request, policy, [world.nodes[name] for name in names], reserved
                ),
                strict=True,
            )
        )
        judgement = Judgement(columns, request, columns.mask_of(reserved))
        slots = columns.slots(names)
        fits = {name: verdict for name, verdict in verdicts.items() if isinstance(verdict, Fit)}
        in_order = sorted(fits, key=lambda name: (fits[name].score, name))

        assert [n for n, fit in zip(names, judgement.fits[slots], strict=True) if fit] == sorted(
            fits
        )
        assert [columns.nodes[slot].name for slot in judgement.order(policy, slots)] == in_order
        best = judgement.best(policy)
        assert (best is None) == (not in_order)
        assert best is None or columns.nodes[best].name == in_order[0]  # type: ignore[union-attr]
        rejected = {n: v for n, v in verdicts.items() if isinstance(v, NodeRejection)}
        cards, starts = columns.columns_of(columns.slots(rejected))
        codes = judgement.codes(cards)
        assert codes.tolist() == judgement.codes()[cards].tolist()
        counts = count_reasons(codes, starts, columns.most_cards)
        for number, verdict in zip(counts.of_slot.tolist(), rejected.values(), strict=True):
            assert counts.distinct[number] == Counter(reason.code for reason in verdict.reasons)


@settings(deadline=None)
@given(
    nodes=clusters(),
    asked=st.lists(st.lists(requests(), min_size=1, max_size=3), min_size=1, max_size=6),
    policy=POLICIES,
    data=st.data(),
)
def test_columnar_placer_equals_plain_placer_on_every_history(
    nodes: tuple[Node, ...], asked: list[list[Request]], policy: str, data: st.DataObject
) -> None:
    """One request, several on one node, and gangs; reasons are read at the end of each pass."""
    world = World(nodes, data)
    for several in asked:
        world.change(several[0], policy)
        if not world.nodes:
            continue
        plain, columnar = world.placers()
        verdicts = list[tuple[object, object]]()
        for _ in range(2):
            limits = PlacementLimits(data.draw(reserved_cards(nodes)), data.draw(eligible(nodes)))
            expected = plain.place(several[0], policy, limits)
            verdicts.append((expected, columnar.place(several[0], policy, limits)))
            if isinstance(expected, Placement):
                plain.add(expected)
                columnar.add(expected)
            verdicts.append(
                (
                    plain.place_on_one_node(several, policy, limits),
                    columnar.place_on_one_node(several, policy, limits),
                )
            )
            verdicts.append(
                (
                    place_all(plain, several, policy, limits),
                    place_all(columnar, several, policy, limits),
                )
            )
            verdicts.append(
                (
                    plain.emptied().place(several[-1], policy),
                    columnar.emptied().place(several[-1], policy),
                )
            )
        for expected_verdict, verdict in verdicts:
            assert outcome(verdict) == outcome(expected_verdict)


@settings(deadline=None)
@given(
    nodes=clusters(),
    asked=st.lists(requests(), min_size=2, max_size=4),
    policy=POLICIES,
    data=st.data(),
)
def test_joint_judgement_never_contradicts_place_gang(
    nodes: tuple[Node, ...], asked: list[Request], policy: str, data: st.DataObject
) -> None:
    """Where it says that requests fit one node they do; where it says that they cannot, they do not."""
    world = World(nodes, data)
    for request in asked:
        world.change(request, policy)
    judgement = JointJudgement(world.columns, asked, policy)
    for name, node in world.nodes.items():
        slot = world.columns.slot(name)
        placed = place_gang(world.totals, asked, policy, (node,))
        assert not judgement.fits[slot] or not isinstance(placed, Unschedulable)
        assert judgement.possible[slot] or isinstance(placed, Unschedulable)
        if isinstance(placed, Unschedulable):
            codes, starts = judgement.codes(np.array([slot]))
            counts = count_reasons(codes, starts, world.columns.most_cards)
            (reasons,) = counts.distinct.values()
            assert reasons == Counter(it.code for it in placed.rejections[0].reasons)


@st.composite
def pending(draw: st.DrawFn, nodes: tuple[Node, ...]) -> list[PendingRequest]:
    """Single requests, pods of several containers, and gangs; some for some nodes only."""
    made = []
    for number in range(draw(st.integers(1, 6))):
        several = tuple(draw(st.lists(requests(), min_size=1, max_size=3)))
        made.append(
            PendingRequest(
                f"w{number}",
                several,
                float(number),
                time_limit_s=draw(st.none() | st.sampled_from([5.0, 50.0, 500.0])),
                nodes=draw(eligible(nodes)),
                same_node=draw(st.booleans()),
            )
        )
    return made


@settings(deadline=None)
@given(nodes=clusters(), policy=POLICIES, data=st.data())
def test_pass_over_the_queue_is_the_same_with_columns(
    nodes: tuple[Node, ...], policy: str, data: st.DataObject
) -> None:
    """What is placed where, what is reserved from when, and every sentence; over several passes."""
    states, held = CardStates(), list[Allocation]()
    by_time = Fairness(penalty_per_request_s=0)
    for now in (0.0, 10.0, 20.0):
        waiting = data.draw(pending(nodes))
        columns, totals = Columns(nodes), UsageTotals()
        by_node: dict[str, list[Allocation]] = {}
        for allocation in held:
            totals.add(allocation.placement)
            columns.add(allocation.placement)
            by_node.setdefault(allocation.placement.node, []).append(allocation)

        expected, result = (
            complete(
                Backfill(policy, 2).serve(
                    queue_order(waiting, lambda _: NO_HISTORY, by_time, now), placer, timeline, now
                )
            )
            for placer, timeline in (
                (PlainPlacer(nodes, totals), Timeline(nodes, by_node, now)),
                (ColumnarPlacer(columns), ColumnarTimeline(nodes, by_node, now, states)),
            )
        )
        assert result.placed == expected.placed
        assert [(it.id, it.reservation) for it in result.pending] == [
            (it.id, it.reservation) for it in expected.pending
        ]
        assert [outcome(it.unschedulable) for it in result.pending] == [
            outcome(it.unschedulable) for it in expected.pending
        ]
        limits = {it.id: it.time_limit_s for it in waiting}
        for name, placements in result.placed:
            limit = limits[name]
            deadline = data.draw(st.sampled_from([None, inf if limit is None else now + limit]))
            held += [Allocation(placement, deadline) for placement in placements]
        held = [it for it in held if it.deadline is None or it.deadline > now + 10]


@settings(deadline=None)
@given(data=st.data())
def test_kept_states_equal_the_definition_when_nodes_and_allocations_change(
    data: st.DataObject,
) -> None:
    """Also where a node has more states than its place in the table has room for."""
    states = CardStates()
    every = [
        Node(name, tuple(Card(i, DeviceId(f"{name}{i}"), "", 100) for i in range(cards)))
        for name, cards in (("a", 0), ("a", 1), ("b", 1), ("b", 2), ("c", 1))
    ]
    pieces = st.lists(
        st.tuples(st.integers(0, 1), st.integers(1, 9), st.sampled_from([None, 5.0, 9.0])),
        max_size=2 * SPARE,
    )
    for _ in range(4):
        nodes = data.draw(st.lists(st.sampled_from(every), unique_by=lambda node: node.name))
        allocations = {
            node.name: [
                Allocation(
                    Placement(
                        node.name, (Slice(0, node.cards[card % len(node.cards)].uuid, mib, 0),)
                    ),
                    deadline,
                )
                for card, mib, deadline in data.draw(pieces)
            ]
            for node in nodes
            if node.cards
        }
        plain = Timeline(nodes, allocations, 0.0)
        columnar = ColumnarTimeline(nodes, allocations, 0.0, states)
        for mib in (30, 95):
            for cards in (1, 2):
                request = Request(Memory(mib), cards=cards)
                assert columnar.earliest(request) == plain.earliest(request)
                assert columnar.by_start([request]) == plain.by_start([request])
