"""The scheduler learns the expected workload from the pods that have run."""

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from fenka.cluster.objects import Pod
from fenka.cluster.pod_columns import LiveColumns
from fenka.cluster.state import ClusterState
from fenka.core.columnar_placer import ColumnarPlacer
from fenka.core.policies.candidates import TargetPolicy, in_effect
from fenka.core.policies.target import ExpectedWorkload
from fenka.core.policies.workload import (
    KINDS_A_STEP,
    MAX_KINDS,
    MAX_NAMESPACES,
    LearnedWorkload,
    Workload,
)
from fenka.core.request import Memory, Request
from fenka.scheduler.workload_learner import (
    KNOWN_PODS,
    MIN_RUN_S,
    RELEARN_PODS,
    WorkloadLearner,
    learning_policy,
)
from tests.builders import T4_MIB, a_node, on_card, pod_json

STARTED = "2026-01-01T00:00:00Z"
NOW = datetime(2026, 1, 1, tzinfo=UTC).timestamp() + MIN_RUN_S


class Learner:
    """A learner over a node of cards of 56 units, on which pods of 4 units are not too small to count."""

    def __init__(self, name: str = "bid-price") -> None:
        self.cluster = ClusterState([a_node("n", *[4 * T4_MIB] * 8)])
        self.pods: dict[str, Pod] = {}
        policy = learning_policy(name)
        assert isinstance(policy, TargetPolicy)
        self.policy, self.now, self.live = policy, NOW, LiveColumns(self.cluster)
        self.learner = WorkloadLearner(
            policy, self.cluster, self.live, lambda: self.pods, now=lambda: self.now
        )

    def runs(self, count: int, units: int, namespace: str = "default", **status: Any) -> None:
        """Let pods run since STARTED."""
        for _ in range(count):
            name = f"{namespace}-{len(self.pods)}"
            made = pod_json(name, units, node="n", uid=name, annotations=on_card(0, units))
            made["metadata"]["namespace"] = namespace
            made["status"] |= {"phase": "Running", "startTime": STARTED, **status}
            pod = self.pods[name] = msgspec.convert(made, Pod)
            self.cluster.set_pod(pod)
        self.live.follow()

    def learn(self) -> int:
        """Learn once, and return the number of steps."""
        return sum(1 for _ in self.learner.learn())

    @property
    def weights(self) -> dict[int, float]:
        """The expected workload, by units."""
        return by_units(self.policy.target.workload)


def by_units(workload: Workload) -> dict[int, float]:
    """Return how often each size comes."""
    return {
        typical.request.memory.amount: typical.weight / 1_000_000
        for typical in workload
        if typical.request.memory
    }


def test_policy_without_a_workload_stays_a_plain_name() -> None:
    """Only fgd and bid-price expect one."""
    assert not isinstance(learning_policy("binpack"), TargetPolicy)


def test_pods_count_once_when_they_stay() -> None:
    """Three quarters of the pods have 4 units, the others 8; they are seen twice."""
    world = Learner("fgd")
    world.runs(3 * KNOWN_PODS // 4, 4)
    world.runs(KNOWN_PODS // 4, 8)
    world.learn()
    world.learn()
    assert set(world.weights) == {4, 8}
    assert 2.5 < world.weights[4] / world.weights[8] < 3.5


@pytest.mark.parametrize(
    "status",
    [
        {"phase": "Pending"},
        {"phase": "Failed"},
        {"phase": "Succeeded"},
        {"startTime": None},
        {"startTime": "2026-01-01T00:00:01Z"},
    ],
)
def test_pods_do_not_count_when_they_have_not_run(status: dict[str, Any]) -> None:
    """A tenant can create any number of pods that never start, or end at once."""
    world = Learner()
    given = {key: value for key, value in status.items() if value is not None}
    world.runs(2 * KNOWN_PODS, 4, **given)
    if "startTime" in status and not given:
        world.pods = {
            uid: replace(pod, status=replace(pod.status, start_time=""))
            for uid, pod in world.pods.items()
        }
    world.learn()
    assert not world.policy.target.workload
    # They count as soon as they have.
    world.now += 2
    world.learn()
    assert bool(world.policy.target.workload) == ("startTime" in given)


def test_policy_is_binpack_until_a_workload_is_known() -> None:
    """Few pods say little about what is expected, and binpack is what such clusters have had."""
    world = Learner()
    assert in_effect("bid-price") == in_effect(world.policy) == "binpack"
    world.runs(KNOWN_PODS - 1, 4)
    world.learn()
    assert in_effect(world.policy) == "binpack"
    world.runs(1, 4)
    world.learn()
    assert in_effect(world.policy) is world.policy


def test_placements_are_those_of_binpack_when_no_workload_is_known() -> None:
    """Both by columns and by the definition, on cards that are in use differently."""
    world = Learner()
    world.runs(3, 40)
    request = Request(Memory(4))
    placed = [
        ColumnarPlacer(world.live.read().copy()).place(request, policy)
        for policy in ("binpack", "bid-price", TargetPolicy("bid-price", ExpectedWorkload(())))
    ]
    assert placed[0] == placed[1] == placed[2]


def test_prices_are_kept_when_the_workload_changes() -> None:
    """A further kind of pod leaves the price of the first kind near what it was."""
    world = Learner()
    world.runs(KNOWN_PODS, 4)
    for _ in range(30):
        world.learn()
    (before,) = world.policy.target.prices.host_prices
    world.runs(RELEARN_PODS, 8)
    world.learn()
    prices = world.policy.target.prices
    after = dict(zip(by_units(prices.workload), prices.host_prices.tolist(), strict=True))
    assert set(after) == {4, 8}
    assert before > 0
    assert abs(after[4] - before) < 0.2 * before


def test_learning_is_done_in_steps_when_there_are_many_new_pods() -> None:
    """The event loop answers in between."""
    world = Learner()
    first = world.learn()
    world.pods = {str(number): Pod() for number in range(5000)}
    assert world.learn() >= first + 5


def test_workload_is_that_of_the_others_when_one_namespace_floods_it_with_tiny_pods() -> None:
    """Those of a hundredth of a card are not expected, those of a twentieth by what they took."""
    learned = LearnedWorkload(half_life=1_000_000)
    for number in range(1000):
        learned.observe([Request(Memory(75))], f"team-{number % 2}", cards=0.75)
        learned.observe([Request(Memory(1))] * 6, "flood", cards=0.01)
        learned.observe([Request(Memory(5))] * 4, "small", cards=0.05)
    weights = by_units(learned.typical())
    assert weights == pytest.approx({75: 1 / 1.8, 5: 0.8 / 1.8}, rel=0.02)


def test_workload_keeps_the_others_when_tiny_pods_come_after_them() -> None:
    """Requests were forgotten by the number of further ones, however small: 50,000 were enough."""
    learned = LearnedWorkload()
    learned.observe([Request(Memory(75))] * 8000, "team", cards=0.75)
    learned.observe([Request(Memory(5))] * 48_000, "flood", cards=0.05)
    weights = by_units(learned.typical())
    # The flood took 2,400 cards, the others 6,000.
    assert weights[75] > 0.15
    assert weights[5] < 0.85


def test_workload_keeps_the_others_when_usual_pods_of_one_namespace_come_after_them() -> None:
    """The others were forgotten after 48,000 pods of a quarter of a card, before any bound counted them."""
    learned = LearnedWorkload()
    learned.observe([Request(Memory(75))] * 8000, "team", cards=0.75)
    for size in range(64):
        learned.observe(
            [Request(Memory(25 + size % 6))] * 750, "flood", cards=0.25 + size % 6 / 100
        )
    assert by_units(learned.typical())[75] >= 0.5


def test_workload_forgets_a_namespace_when_another_has_taken_its_place() -> None:
    """Ten times as many later requests leave less than a tenth of what is expected to the earlier ones."""
    learned = LearnedWorkload(half_life=100)
    learned.observe([Request(Memory(75))] * 1000, "team", cards=0.75)
    learned.observe([Request(Memory(50))] * 10_000, "successor", cards=0.5)
    assert by_units(learned.typical()).get(75, 0.0) < 0.1


def test_workload_is_by_frequency_when_namespaces_have_pods_of_usual_sizes() -> None:
    """Only namespaces whose pods have less than a quarter of a card on average count for less."""
    learned = LearnedWorkload(half_life=1_000_000)
    for _ in range(100):
        learned.observe([Request(Memory(75))] * 3, "large", cards=0.75)
        learned.observe([Request(Memory(20))], "small", cards=0.2)
        learned.observe([Request(Memory(40))] * 2, "small", cards=0.4)
    weights = by_units(learned.typical())
    assert weights == pytest.approx({75: 1 / 2, 20: 1 / 6, 40: 1 / 3}, rel=0.01)


def test_namespace_counts_no_more_than_the_others_when_it_has_had_most_pods() -> None:
    """64 sizes of small pods were 98 % of what was expected, which placed worse than binpack."""
    learned = LearnedWorkload()
    learned.observe([Request(Memory(75))] * 4000, "team", cards=0.75)
    for size in range(50):
        learned.observe([Request(Memory(10 + size))] * 500, "flood", cards=0.1 + size / 100)
    assert by_units(learned.typical())[75] >= 0.5


def test_namespace_counts_by_its_pods_when_another_has_had_few() -> None:
    """Otherwise one pod of another namespace would be half of what is expected."""
    learned = LearnedWorkload()
    learned.observe([Request(Memory(75))] * 4000, "team", cards=0.75)
    learned.observe([Request(Memory(25))], "newcomer", cards=0.25)
    assert by_units(learned.typical())[75] > 0.98


def test_typical_requests_are_found_in_steps_when_many_kinds_are_kept() -> None:
    """The steps are as many as the kinds need."""
    learned = LearnedWorkload()
    for number in range(MAX_NAMESPACES):
        sizes = range(number, number + MAX_KINDS)
        learned.observe((Request(Memory(50 + size)) for size in sizes), f"team-{number}")
    assert len(list(learned.typical_in_steps())) >= learned.kinds // KINDS_A_STEP
    assert len(learned.typical()) == MAX_KINDS


def test_learned_workload_has_few_kinds_when_a_tenant_asks_for_many() -> None:
    """A kind costs time at each step of the prices, and memory until it is forgotten."""
    learned = LearnedWorkload()
    learned.observe(Request(Memory(size)) for size in range(1, 50 * MAX_KINDS))
    assert len(learned.typical()) == MAX_KINDS
    assert learned.kinds <= 2 * MAX_KINDS


def test_learned_workload_keeps_the_usual_namespace_when_a_tenant_has_thousands() -> None:
    """New namespaces replace each other: 255 of them count, each for a fifth of a request."""
    learned = LearnedWorkload()
    learned.observe([Request(Memory(75))] * 100, "team")
    for number in range(10 * MAX_NAMESPACES):
        learned.observe([Request(Memory(5))], f"flood-{number}", cards=0.05)
    assert by_units(learned.typical())[75] > 0.6
    assert learned.kinds <= MAX_NAMESPACES
