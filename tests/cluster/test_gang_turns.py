"""Which of many waiting gangs a pass over the queue tries to place."""

from hypothesis import given
from hypothesis import strategies as st

from fenka.cluster.pending_queue import GANGS_IN_ORDER, GANGS_IN_TURN, GangTurns, NotTried
from tests.builders import T4_MIB, gang_labels, node_json
from tests.fakes.extender import ExtenderHarness
from tests.fakes.queue import pending

MOST = GANGS_IN_ORDER + GANGS_IN_TURN


@given(
    st.lists(st.sampled_from(["a", "b", "c"]), max_size=200),
    st.lists(st.integers(0, 199), max_size=5),
)
def test_gangs_all_have_a_turn_and_are_bounded_when_many_wait(
    namespaces: list[str], held: list[int]
) -> None:
    """The first of each namespace are tried in each pass, as those with cards; the others in some of them."""
    gangs = [(namespace, f"{namespace}/{number}") for number, namespace in enumerate(namespaces)]
    kept = {gangs[number][1] for number in held if number < len(gangs)}
    turns, seen = GangTurns(), set[str]()
    for _ in range(1 + len(gangs) // GANGS_IN_TURN):
        turns.keep(kept)
        chosen = turns.choose(gangs)
        assert len(chosen) <= MOST + len(kept)
        assert kept <= chosen
        for first in "abc":
            mine = [key for namespace, key in gangs if namespace == first]
            assert set(mine[: GANGS_IN_ORDER // 3]) <= chosen
        seen |= chosen
    assert seen == {key for _, key in gangs}


def test_gang_of_another_namespace_is_tried_at_once_when_one_has_hundreds() -> None:
    """A tenant's number of gangs must not be what others wait for, nor what a pass costs."""
    world = ExtenderHarness([node_json("n", T4_MIB)])
    for gang in range(2 * MOST):
        for number in range(2):
            labels = gang_labels(f"g{gang}", 2)
            world.put(pending(f"{gang}-{number}", 14, gang, namespace="many", labels=labels))
    for number in range(2):
        labels = gang_labels("s", 2)
        world.put(pending(f"s-{number}", 2, 3 * MOST, namespace="other", labels=labels))
    entries = world.queue.refreshed(0.0).entries()
    not_tried = [entry for entry in entries if isinstance(entry.unschedulable, NotTried)]
    assert [entry.pending.id for entry in entries if entry.placements] == ["other/s"]
    assert len(not_tried) == 2 * MOST + 1 - MOST
    assert not_tried[0].why.startswith(f"{MOST} other gangs are tried first")
