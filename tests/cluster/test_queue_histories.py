"""The queue under random events, and beside a kube-scheduler that backs off."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.cluster.objects import Pod
from fenka.cluster.queue_state import queue_state
from fenka.scheduler.extender import Extender
from fenka.scheduler.queue_controller import QueueController
from tests.builders import T4_MIB, node_json
from tests.fakes.extender import ExtenderHarness
from tests.fakes.queue import START, make

EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("come"),
            st.integers(1, 14),
            st.none() | st.integers(1, 30),
            st.integers(0, 1),
        ),
        st.tuples(st.just("ask"), st.integers(0, 20)),
        st.tuples(st.just("end"), st.integers(0, 20)),
        st.tuples(st.just("time"), st.integers(1, 5)),
    ),
    min_size=5,
    max_size=40,
)


def units_on(cluster: ExtenderHarness) -> Iterable[int]:
    """MiB held of each card."""
    for share in cluster.state.shared_nodes():
        for card in share.node.cards:
            yield cluster.state.card_usage(share.node.name, card.uuid).memory_mib


@settings(deadline=None, max_examples=150)
@given(events=EVENTS)
def test_entry_is_not_bypassed_on_its_cards_when_events_are_random(
    events: list[tuple[Any, ...]],
) -> None:
    """But by who proves to end before; and no card is overcommitted. Whatever comes, in whatever order."""
    cluster = ExtenderHarness([node_json("a", T4_MIB), node_json("b", T4_MIB, T4_MIB)])
    pods: dict[str, Pod] = {}
    running = ["h0", "h1", "h2"]
    cluster.holds("h0", 0, 8, "a", runs=20, started=0)
    cluster.holds("h1", 0, 8, "b")
    cluster.holds("h2", 1, 11, "b", runs=30, started=0)
    for event in events:
        kind, value = event[:2]
        if kind == "come":
            name = f"p{len(pods):03}"
            pods[name] = make(name, value, cluster.now, runs=event[2], priority=event[3])
            cluster.set(pods[name])
        elif kind == "time":
            cluster.now += value
        elif kind == "end" and running:
            gone = running.pop(value % len(running))
            cluster.gone(gone)
        elif kind == "ask" and (
            open_ := [it for it in pods if cluster.state.allocation(it) is None]
        ):
            pod = pods[open_[value % len(open_)]]
            if pod.metadata.name not in cluster.queue.state._open:
                continue
            # The line may not have been served since one of them was given a card.
            places = cluster.queue.refreshed().entries()
            before = [it for it in places if cluster.state.allocation(it.pending.id) is None]
            got = cluster.start(pod)
            if "/" not in got or "GPUs" in got:
                continue
            holding = cluster.state.allocation(pod.metadata.uid)
            assert holding is not None
            running.append(pod.metadata.uid)
            mine = -(pod.spec.priority or 0), pod.metadata.creation_timestamp, pod.metadata.uid
            runs = pod.spec.active_deadline_seconds
            deadline = None if runs is None else START + cluster.now + runs
            for place in before:
                head = place.pending.pods[0]
                theirs = (
                    -(head.spec.priority or 0),
                    head.metadata.creation_timestamp,
                    head.metadata.uid,
                )
                if theirs < mine and place.reservation and place.reservation.blocks(deadline):
                    assert {it.uuid for it in holding.slices}.isdisjoint(place.reservation.cards)
        assert all(used <= T4_MIB for used in units_on(cluster))


@dataclass
class KubeScheduler:
    """As far as it matters here: one pod at a time by priority and time, and who is refused rests.

    Doubling from 1 s to 10 s; then it is tried again once a pod has ended since it was refused.
    """

    cluster: ExtenderHarness
    resting: dict[str, tuple[Pod, float, float, int]] = field(default_factory=dict)
    """Until when at least, how long the next time, and how many had ended when it was refused."""
    ended: int = 0

    def turn(self, new: list[Pod]) -> dict[str, str]:
        """All that are to be tried now; who starts, and where."""
        now = self.cluster.now
        woken = [
            it
            for it, until, _, ended in self.resting.values()
            if until <= now and ended < self.ended
        ]
        started = {}
        for pod in sorted(
            [*new, *woken],
            key=lambda it: (-(it.spec.priority or 0), it.metadata.creation_timestamp),
        ):
            uid = pod.metadata.uid
            got = self.cluster.start(pod)
            if got[1:2] == "/":
                started[uid] = got
                self.resting.pop(uid, None)
            else:
                _, _, rest, _ = self.resting.get(uid, (pod, 0, 1, 0))
                self.resting[uid] = pod, now + rest, min(2 * rest, 10), self.ended
        return started


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [True, False])
def test_large_pod_starts_when_small_pods_keep_coming(ordered: bool) -> None:
    """Each second one of 4 units comes and runs for 20 s, with no deadline; the large one wants 14 of 14.

    Four cards hold 12 of 4 units at most, and 20 at once are wanted: some always wait. 18 wait before the
    large one, who all have begun at 51 (12 at 20 to 31, the others from 40 on); 20 s later they have ended.
    Without an order it never starts, because whatever ends is used again at once.
    """
    cluster = ExtenderHarness([node_json("n", T4_MIB, T4_MIB), node_json("m", T4_MIB, T4_MIB)])
    kube, running = KubeScheduler(cluster), dict[str, float]()
    if not ordered:
        nobody_pending = QueueController(queue_state(cluster.state))
        cluster.extender = Extender(
            dict, nobody_pending, cluster.evaluator, cluster.gangs, cluster.preemption
        )
    begun: dict[str, int] = {}
    for second in range(300):
        cluster.now = second
        for name in [name for name, ends in running.items() if ends <= second]:
            cluster.gone(name)
            del running[name]
            kube.ended += 1
        new = [make(f"s{second:03}", 4, second)]
        if second == 30:
            new.append(make("large", 14, second))
        cluster.set(*new)
        for uid in kube.turn(new):
            begun[uid] = second
            running[uid] = second + 20
    assert 51 <= begun.get("large", 999) <= 71 if ordered else "large" not in begun
