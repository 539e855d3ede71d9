"""Whatever is lost on the way, and whoever is killed: an order is one set of instances."""

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fenka.cloud.port import Order, Throttled, Unknown
from tests.cloud.alibaba.harness import EXACT, AlibabaCloud
from tests.cloud.alibaba.state import Fault, FaultKind
from tests.cloud.contract import ON_DEMAND

LAUNCH_ACTIONS = (
    "DescribeScalingActivities",
    "DescribeScalingConfigurations",
    "DescribeScalingGroups",
    "RunInstances",
    "ScaleWithAdjustment",
)
END_ACTIONS = ("DeleteInstances", "DescribeInstances", "RemoveInstances")
KINDS: tuple[FaultKind, ...] = ("lose-call", "lose-answer", "error")
NUMBERS = itertools.count()


def faults(actions: tuple[str, ...]) -> st.SearchStrategy[list[Fault]]:
    """Return up to six faults of these actions."""
    return st.lists(st.builds(Fault, st.sampled_from(actions), st.sampled_from(KINDS)), max_size=6)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    launching=faults(LAUNCH_ACTIONS),
    ending=faults(END_ACTIONS),
    exact=st.booleans(),
    activity_s=st.sampled_from([0.0, 2.0, 30.0]),
)
async def test_order_is_one_set_and_ends_when_answers_are_lost(
    cloud: AlibabaCloud,
    launching: list[Fault],
    ending: list[Fault],
    exact: bool,
    activity_s: float,
) -> None:
    """Each call is made by a provider that has just started, as after a crash."""
    cloud.change_group("asg-t4", activity_s=activity_s)
    order = Order(f"a-{next(NUMBERS)}", ON_DEMAND, 3)
    ids = await _repeated(cloud, "launch", exact, order, launching)
    assert len(ids) == 3
    cloud.wait(activity_s)
    listed = await cloud.open({}).instances()
    assert {it.order for it in listed} == {order.token}
    assert {it.id for it in listed} == set(ids)
    await _repeated(cloud, "end", exact, ids, ending)
    cloud.wait(activity_s)
    assert not await cloud.open({}).instances()


async def _repeated(
    cloud: AlibabaCloud, method: str, exact: bool, given: object, faults: list[Fault]
) -> list[str]:
    """Call a method until it succeeds. A scaling group that is busy with an end refuses to end more."""
    cloud.folder.clear_faults()
    for fault in faults:
        cloud.folder.add_fault(fault)
    again = (Unknown,) if method == "launch" else (Unknown, Throttled)
    for _ in range(len(faults) + 20):
        try:
            return await getattr(cloud.open(EXACT if exact else {}), method)(given) or []
        except again:
            cloud.wait(3)
    pytest.fail("it never succeeds")
