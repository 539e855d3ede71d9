"""The scheduler learns the expected workload from the pods that it sees."""

from fenka.cluster.objects import Pod
from fenka.cluster.pod_columns import LiveColumns
from fenka.cluster.state import ClusterState
from fenka.core.policies.candidates import TargetPolicy
from fenka.core.policies.workload import MAX_KINDS, LearnedWorkload
from fenka.core.request import Memory, Request
from fenka.scheduler.workload_learner import RELEARN_PODS, WorkloadLearner, learning_policy
from tests.builders import a_node, a_pod


def learner(name: str, pods: dict[str, Pod]) -> tuple[WorkloadLearner, TargetPolicy]:
    """Return a learner over one node of two cards."""
    cluster = ClusterState()
    cluster.set_node(a_node("n", 15079, 15079))
    policy = learning_policy(name)
    assert isinstance(policy, TargetPolicy)
    return WorkloadLearner(policy, cluster, LiveColumns(cluster), lambda: pods), policy


def test_policy_without_a_workload_stays_a_plain_name() -> None:
    """Only fgd and bid-price expect one."""
    assert not isinstance(learning_policy("binpack"), TargetPolicy)


def test_pods_count_once_when_they_stay() -> None:
    """Three pods of 4 units and one of 8, seen twice; pods without cards, or with a size
    that cannot be read, do not count.
    """
    pods = {
        pod.metadata.uid: pod
        for pod in (
            *(a_pod(f"p{number}", 4) for number in range(3)),
            a_pod("q", 8),
            a_pod("r", 0),
            a_pod("s", "x"),
        )
    }
    learn, policy = learner("fgd", pods)
    learn.learn()
    learn.learn()
    shown = {
        typical.request.memory.amount: typical.weight
        for typical in policy.target.workload
        if typical.request.memory
    }
    assert set(shown) == {4, 8}
    assert 2.9 < shown[4] / shown[8] < 3.1


def test_prices_are_kept_when_the_workload_changes() -> None:
    """A further kind of pod leaves the price of the first kind near what it was."""
    pods = {f"p{number}": a_pod(f"p{number}", 4) for number in range(20)}
    learn, policy = learner("bid-price", pods)
    for _ in range(30):
        learn.learn()
    (before,) = policy.target.prices.host_prices
    pods.update({f"q{number}": a_pod(f"q{number}", 8) for number in range(RELEARN_PODS)})
    learn.learn()
    after = {
        typical.request.memory.amount: price
        for typical, price in zip(
            policy.target.prices.workload, policy.target.prices.host_prices, strict=True
        )
        if typical.request.memory
    }
    assert set(after) == {4, 8}
    assert before > 0
    assert abs(after[4] - before) < 0.2 * before


def test_learned_workload_has_few_kinds_when_a_tenant_asks_for_many() -> None:
    """A kind costs time at each step of the prices."""
    learned = LearnedWorkload()
    learned.observe(Request(Memory(size)) for size in range(1, 5 * MAX_KINDS))
    assert len(learned.typical()) == MAX_KINDS
