"""The dashboard's messages of a cluster: what is held, used and busy, and the sums of `fenka top node`."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.cluster.objects import Node, Pod
from fenka.cluster.queue_snapshot import SchedulerOptions
from fenka.cluster.state import ClusterSnapshot
from fenka.views import board
from fenka.views.board_sums import idle_for, total
from fenka.views.cluster_board import ClusterView, fleet, node_part, world
from fenka.views.cluster_queue import cluster_queue
from fenka.views.node_figures import CardFigures, NodeFigures, SliceFigures
from fenka.views.node_rows import cluster_nodes
from fenka.views.node_summaries import summarize_row
from tests.builders import T4_MIB, a_node, on_card
from tests.fakes.queue import START, make, pending
from tests.mig_builders import mig_node

NODE = a_node("n", T4_MIB, T4_MIB)
FOUR = 4308
"""4 of a T4's 14 units, in MiB."""


def holder(name: str, card: int, units: int, **given: Any) -> Pod:
    """Return a pod that has held units of a card of node n since START."""
    placed: dict[str, Any] = {"node": "n", "annotations": on_card(card, units)}
    return make(name, units, started=0, **placed, **given)


def view(
    pods: Sequence[Pod],
    nodes: Sequence[Node] = (NODE,),
    readings: Mapping[str, NodeFigures] | None = None,
    now: float = START + 100,
) -> ClusterView:
    """Return a view of nodes and pods, with their queue and lines."""
    snapshot = ClusterSnapshot.of(nodes, pods)
    queue = cluster_queue(snapshot, SchedulerOptions(), START + 100)
    summaries = [summarize_row(row) for row in cluster_nodes(snapshot)]
    parts = {
        node.metadata.name: node_part(
            snapshot.state, node.metadata.name, (readings or {}).get(node.metadata.name), {}, now
        )
        for node in snapshot.nodes
    }
    return ClusterView("lab", "1", parts, queue, summaries)


def cards(shown: ClusterView) -> Sequence[board.CardTile]:
    """Return the cards of node n."""
    return shown.parts["n"].tiles


def readings(pod: Pod, **given: Any) -> dict[str, NodeFigures]:
    """Return node n's readings: of both cards, and of the pod's slice of card 0."""
    figures = [
        CardFigures(card.uuid, 5000, 0.62, 49, 29.0, 70.0)
        for card in ClusterSnapshot.of([NODE], []).state.shared_nodes()[0].physical_cards
    ]
    piece = SliceFigures(pod.metadata.uid, figures[0].uuid, **given)
    return {"n": NodeFigures(START + 99, figures, [piece])}


def test_slice_shows_what_is_held_used_and_busy() -> None:
    """4 of 14 units are 4308 MiB; 4307 of them are used; the card was busy for it 40 % of the time."""
    pod = holder("notebook", 0, 4)
    shown = view([pod], readings=readings(pod, used_mib=4307, busy=0.4))
    first, second = cards(shown)
    (tile,) = first.slices
    assert (tile.name, tile.user, tile.held_mib, tile.used_mib, tile.busy) == (
        "notebook",
        "default",
        FOUR,
        4307,
        0.4,
    )
    assert (first.id, first.units, first.free_units, first.held_mib) == ("n/0", 14, 10, FOUR)
    assert (first.busy, first.temperature_c, first.power_limit_w) == (0.62, 49, 70.0)
    assert (second.free_units, second.slices) == (14, [])


def test_figures_are_unknown_and_not_zero_before_the_node_has_answered() -> None:
    """What a slice holds is known from the record; what it uses is not."""
    first, _ = cards(view([holder("a", 0, 4)]))
    assert (first.used_mib, first.busy, first.slices[0].used_mib) == (None, None, None)
    assert first.readable == "its node's program has not answered yet"
    assert first.slices[0].held_mib == FOUR


def test_waiting_pod_has_the_sentence_of_fenka_queue() -> None:
    """The page judges nothing by itself."""
    shown = view([holder("a", 0, 12), holder("b", 1, 12), pending("c", 4, 5)])
    (line,) = world(shown, START + 100).waiting
    assert (line.name, line.why, line.position) == ("c", shown.queue[0].why, 1)
    assert "no GPU fits: 2 of 2 have too little memory" in line.why


def test_people_have_sums_of_their_pods_and_requests() -> None:
    """anna holds 4 and 8 units of 14: 4308 and 8616 MiB; ben waits since 5 s after START."""
    pods = [
        holder("a", 0, 4, namespace="anna"),
        holder("b", 1, 8, namespace="anna"),
        pending("c", 12, 5, namespace="ben"),
    ]
    anna, ben = world(view(pods), START + 100).people
    assert (anna.user, anna.held_mib, anna.used_mib, anna.waiting) == ("anna", 12924, None, 0)
    assert (ben.user, ben.held_mib, ben.waiting, ben.oldest) == ("ben", 0, 1, START + 5)


@pytest.mark.parametrize(
    ("quiet_s", "held_s", "expected"),
    [
        ([1800.0], 1800.0, 1800.0),
        ([1799.0], 1800.0, None),
        ([1800.0], 599.0, None),
        ([1900.0, 20.0], 3600.0, None),  # one of its cards works
        ([1900.0, None], 3600.0, None),  # nobody knows of the other
        ([], 3600.0, None),
        ([3600.0], None, None),
    ],
)
def test_program_is_idle_when_all_its_cards_are(
    quiet_s: list[float | None], held_s: float | None, expected: float | None
) -> None:
    """After 30 minutes without card time, of a slice that is held for 10 minutes at least."""
    assert idle_for(quiet_s, held_s) == expected


def test_idle_pod_is_listed_and_marked() -> None:
    """It holds card 0 and has had none of its time for an hour."""
    pod = holder("a", 0, 4)
    now = START + 4000
    shown = view([pod], readings=readings(pod, used_mib=10, busy=0.0, idle_s=3600), now=now)
    assert [line.idle_s for line in world(shown, now).programs] == [3600]
    assert world(shown, now).people[0].idle_mib == FOUR
    assert [flags & 4 for flags in fleet(shown.parts, now).cards[2::3]] == [4, 0]


def test_fleet_has_three_bytes_a_card() -> None:
    """4308 of 15079 MiB are 0.2857 of 254: 73. 62 % busy: 157. Without an answer: 255."""
    pod = holder("a", 0, 4)
    known = fleet(view([pod], readings=readings(pod, used_mib=1, busy=0.1)).parts, START)
    assert (known.nodes, known.counts, [*known.cards]) == (["n"], [2], [73, 157, 0, 0, 157, 0])
    assert [*fleet(view([pod]).parts, START).cards] == [73, 255, 0, 0, 255, 0]


def test_cards_of_many_nodes_are_a_fleet_and_no_tiles() -> None:
    """Of 65 cards none is listed; the programs are counted."""
    nodes = [a_node(f"n{number}", T4_MIB) for number in range(65)]
    pod = make("a", 4, started=0, node="n7", annotations=on_card(0, 4))
    shown = world(view([pod], nodes), START)
    assert (shown.cards, shown.programs, shown.programs_total, len(shown.nodes)) == ([], [], 1, 65)
    assert shown.largest_mib == T4_MIB


def test_divided_card_shows_its_instances() -> None:
    """It takes nothing by itself, and says why."""
    (card,) = cards(view([], [mig_node("n", "A100")]))
    assert (card.free_units, card.note) == (0, "divided into MIG instances")


def test_nodes_line_is_that_of_fenka_top() -> None:
    """10 of 28 units are free with 18 held."""
    (line,) = world(view([holder("a", 0, 14), holder("b", 1, 4)]), START).nodes
    assert (line.name, line.cards, line.units, line.free_units) == ("n", 2, 28, 10)


Held = list[tuple[int, int]]
"""Card and units."""


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 14)), max_size=8))
def test_sums_equal_those_of_fenka_top_node(held: Held) -> None:
    """In random worlds: units held of each card, what is free, and the largest slice that starts."""
    room, pods = [14, 14], []
    for number, (card, units) in enumerate(held):
        if room[card] >= units:
            room[card] -= units
            pods.append(holder(f"p{number}", card, units))
    shown = view(pods)
    (row,) = cluster_nodes(ClusterSnapshot.of([NODE], pods))
    seen = world(shown, START)
    assert [tile.free_units for tile in seen.cards] == room
    assert [14 - tile.free_units for tile in seen.cards] == [card.allocated for card in row.cards]
    assert seen.largest_mib == max(units * T4_MIB // 14 for units in room)
    assert sum(line.held_mib for line in seen.people) == sum(
        line.held_mib for line in seen.programs
    )
    assert sum(len(tile.slices) for tile in seen.cards) == len(pods)


def test_total_is_unknown_when_one_part_is() -> None:
    """Never a sum of what happens to be known."""
    assert total([1, 2]) == 3
    assert total([1, None]) is None
    assert total([]) == 0


def test_messages_survive_the_way_to_the_page() -> None:
    """Bytes of a fleet are base64 in JSON."""
    shown = fleet(view([holder("a", 0, 4)]).parts, START)
    assert msgspec.json.decode(msgspec.json.encode(shown), type=board.Fleet) == shown
