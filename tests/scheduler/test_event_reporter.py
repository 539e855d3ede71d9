"""When events about pods are posted: in the background, unless something better is known of them by then."""

from collections.abc import Callable

import pytest

from fenka.cluster.objects import Condition, Node, OwnerReference, Pod
from fenka.cluster.placement import PodEvaluator
from fenka.cluster.state import ClusterState
from fenka.scheduler.event_reporter import EventReporter
from tests.builders import T4_MIB, a_node, on_card
from tests.fakes.queue import UNSCHEDULABLE, make


class StopReporting(Exception):
    """Ends the reporter's task."""


class ReporterHarness:
    """A reporter of a full node.

    Attributes:
        notes: what was posted, by the name of the pod.
        settled, leading: what the reporter is told.
    """

    def __init__(self) -> None:
        held = make("held", 14, node="n", annotations=on_card(0, 14))
        self.cluster = ClusterState([a_node("n", T4_MIB)], [held])
        self.notes: dict[str, str] = {}
        self.settled = self.leading = True
        self.turns = 0
        self.reporter = EventReporter(
            self.cluster,
            PodEvaluator(self.cluster, "binpack"),
            self,
            lambda: self.leading,
            position=lambda pod: f"; {pod.metadata.name}",
            is_settled=lambda: self.settled,
            sleep=self.sleep,
        )

    def record_on_pod(self, pod: Pod, reason: str, note: str) -> None:
        """Keep what is posted."""
        self.notes[pod.metadata.name] = f"{reason}: {note}"

    def record_on_node(self, node: Node, reason: str, note: str) -> None:
        """Keep what is posted."""
        self.notes[node.metadata.name] = f"{reason}: {note}"

    async def sleep(self, _: float) -> None:
        """Let the task have so many turns as are left."""
        self.turns -= 1
        if self.turns < 0:
            raise StopReporting

    async def run(self, turns: int) -> list[str]:
        """Return the names of the pods about which events have been posted after these turns."""
        self.turns = turns
        with pytest.raises(StopReporting):
            await self.reporter.run()
        return list(self.notes)


async def test_pods_are_explained_one_at_a_time_when_many_are_unschedulable() -> None:
    """An evaluation of all nodes for each of them at once would keep everything else waiting."""
    harness = ReporterHarness()
    for name in "abc":
        harness.reporter.pod(make(name, 4, said=UNSCHEDULABLE))
    assert harness.notes == {}
    assert await harness.run(2) == ["a", "b"]
    harness.settled = False
    assert await harness.run(2) == ["a", "b"]
    harness.settled = True
    assert await harness.run(3) == ["a", "b", "c"]
    text = "FenkaUnschedulable: fenka: no GPU fits: 1 of 1 has too little memory"
    assert harness.notes == {name: f"{text}; {name}" for name in "abc"}


@pytest.mark.parametrize(
    "change",
    [
        lambda harness: harness.reporter.filtered(make("a", 4)),
        lambda harness: harness.reporter.forget("a"),
        lambda harness: harness.reporter.pod(make("a", 4, node="n")),
        lambda harness: setattr(harness, "leading", False),
    ],
    ids=["kube-scheduler has asked", "deleted", "bound", "another leads"],
)
async def test_pod_is_not_explained_when_that_is_no_longer_due(
    change: Callable[[ReporterHarness], None],
) -> None:
    """The next pod is."""
    harness = ReporterHarness()
    harness.reporter.pod(make("a", 4, said=UNSCHEDULABLE))
    change(harness)
    assert await harness.run(1) == []
    harness.leading = True
    harness.reporter.pod(make("b", 4, said=UNSCHEDULABLE))
    assert await harness.run(1) == ["b"]


async def test_pod_is_explained_once_and_as_last_seen_when_it_changes() -> None:
    """Of two sizes, the later one."""
    harness = ReporterHarness()
    harness.reporter.pod(make("a", 4, said=UNSCHEDULABLE))
    harness.reporter.pod(make("a", 20, said=UNSCHEDULABLE))
    assert await harness.run(3) == ["a"]
    assert "the largest card has 14 units" in harness.notes["a"]


def test_victim_hears_for_which_pod_it_was_evicted_when_kube_scheduler_evicts_it() -> None:
    """kube-scheduler's own event has a UID only. Nothing is said of a pod that was just a candidate."""
    harness = ReporterHarness()
    new = make("bert-v1-x", 4, namespace="team-b", priority=1000)
    new.spec.priority_class_name = "fenka-serving"
    new.metadata.owner_references = (
        OwnerReference(kind="ReplicaSet", name="bert-v1", controller=True),
    )
    harness.reporter.preempted(new, ["held", "other"])
    harness.reporter.pod(make("other", 4, node="n"))
    assert harness.notes == {}
    evicted = Condition(type="DisruptionTarget", status="True", reason="PreemptionByScheduler")
    victim = make("held", 14, node="n")
    victim.status.conditions = (evicted,)
    harness.reporter.pod(victim)
    assert harness.notes == {
        "held": "FenkaPreempted: fenka: evicted for pod team-b/bert-v1-x of ReplicaSet bert-v1, whose "
        "priority 1000 is higher (PriorityClass fenka-serving)"
    }
    harness.notes.clear()
    harness.reporter.pod(victim)
    assert harness.notes == {}
