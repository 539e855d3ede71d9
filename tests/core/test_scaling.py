"""The number of replicas for a load."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.core.scaling import (
    ReplicaScaler,
    ScalingPolicy,
    VersionUse,
    desired_replicas,
    version_loads,
)

POLICY = ScalingPolicy(least=1, most=4, target=10)


@pytest.mark.parametrize(
    ("current", "load", "expected"),
    [
        (1, 10, 1),
        (1, 11, 1),  # 11 / 10 = 1.1: within the tolerance
        (1, 11.5, 2),  # ceil(1.15)
        (2, 18.5, 2),  # 18.5 / 20 = 0.925: within the tolerance
        (3, 20, 2),
        (1, 35, 4),
        (1, 200, 4),
        (4, 0, 1),
        (0, 0, 1),
        (0, 1, 1),
    ],
)
def test_desired_number_follows_the_formula(current: int, load: float, expected: int) -> None:
    """The number is ceil(load / target) within the limits, and stays within the tolerance."""
    assert desired_replicas(POLICY, current, load) == expected


def test_idle_version_needs_no_replica_when_its_range_begins_with_zero() -> None:
    """Any load needs one."""
    policy = ScalingPolicy(least=0, most=2, target=10)
    assert desired_replicas(policy, 1, 0) == 0
    assert desired_replicas(policy, 0, 0) == 0
    assert desired_replicas(policy, 0, 0.1) == 1


def test_number_shrinks_after_the_pause_only() -> None:
    """A trough that is shorter than the pause costs no replica."""
    scaler = ReplicaScaler(ScalingPolicy(least=1, most=4, target=10, down_after_s=300))
    assert scaler.step(0, 1, 40) == 4
    assert scaler.step(100, 4, 0) == 4
    assert scaler.step(200, 4, 25) == 4
    assert scaler.step(301, 4, 0) == 3
    assert scaler.step(501, 3, 0) == 1


def test_number_grows_after_the_pause_only() -> None:
    """A peak that is shorter than the pause starts no replica."""
    scaler = ReplicaScaler(ScalingPolicy(least=1, most=4, target=10, up_after_s=30))
    assert scaler.step(0, 1, 10) == 1
    assert scaler.step(10, 1, 40) == 1
    assert scaler.step(20, 1, 40) == 1
    assert scaler.step(31, 1, 30) == 3


def test_pauses_begin_at_the_first_step_when_the_past_is_unknown() -> None:
    """A changed version, and a supervisor that was started again, keep the replicas that there are."""
    policy = ScalingPolicy(least=0, most=4, target=10, up_after_s=30, down_after_s=300)
    idle, busy = ReplicaScaler(policy), ReplicaScaler(policy)
    assert idle.step(0, 2, 0) == 2
    assert idle.step(299, 2, 0) == 2
    assert idle.step(301, 2, 0) == 0
    assert busy.step(0, 1, 40) == 1
    assert busy.step(29, 1, 40) == 1
    assert busy.step(31, 1, 40) == 4


def test_first_replica_starts_at_once() -> None:
    """Requests that wait do not wait for the pause."""
    scaler = ReplicaScaler(ScalingPolicy(least=0, most=4, target=10, up_after_s=30))
    assert scaler.step(0, 0, 0) == 0
    assert scaler.step(1, 0, 1) == 1


@given(
    st.integers(0, 3),
    st.integers(0, 5),
    st.lists(st.tuples(st.floats(0, 400), st.floats(0, 1000)), max_size=30),
    st.floats(0, 60),
    st.floats(0, 300),
)
def test_number_stays_within_the_range(
    least: int, more: int, steps: list[tuple[float, float]], up_s: float, down_s: float
) -> None:
    """Whatever the load, the range holds, and a constant load comes to rest at its number."""
    policy = ScalingPolicy(least, max(least + more, 1), 10, up_s, down_s)
    scaler, now, current = ReplicaScaler(policy), 0.0, least
    for pause, load in steps:
        now += pause
        current = scaler.step(now, current, load)
        assert policy.least <= current <= policy.most
    for _ in range(3):
        now += 1000
        current = scaler.step(now, current, 25)
    assert current == min(max(3, policy.least), policy.most)


def test_waiting_requests_count_by_weight_when_versions_serve() -> None:
    """Of 10 waiting requests, v1 with 90 of 100 has 9."""
    loads = version_loads({"v1": VersionUse(90, 4, True), "v2": VersionUse(10, 1, True)}, 10)
    assert loads == {"v1": 4 + 9, "v2": 1 + 1}


def test_each_version_has_load_when_none_serves() -> None:
    """One request waits: 10% of it is still a reason to start a replica, 0% is none."""
    uses = {
        "v1": VersionUse(90, 0, False),
        "v2": VersionUse(10, 0, False),
        "old": VersionUse(0, 0, True),
    }
    assert version_loads(uses, 1) == {"v1": 1, "v2": 1, "old": 0}


def test_version_has_no_load_when_its_service_is_idle() -> None:
    """Weights may all be zero."""
    assert version_loads({"v1": VersionUse(0, 0, False)}, 3) == {"v1": 0}
    assert version_loads({"v1": VersionUse(1, 0, False)}, 0) == {"v1": 0}
