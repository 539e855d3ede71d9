"""The planner's time limit, on a clock that counts calls: a busy machine changes nothing."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

from fenka.autoscaler.solver.solve import improve
from fenka.core.nodes.case import PlanningCase
from fenka.core.nodes.plan import make_plan
from tests.core.nodes.builders import T4_MIB, case, group, held, node, request


def large(seed: int = 1) -> PlanningCase:
    """Return requests of all sizes, and nodes that are mostly full."""
    draw = random.Random(seed)
    requests = (
        request(f"r{number}", units=draw.randint(1, 14), cpu_milli=draw.randrange(500, 4000, 250))
        for number in range(200)
    )
    groups = tuple(
        group(f"g{number}", cards=1 + number % 4, price=2.0 + number) for number in range(12)
    )
    nodes = tuple(
        node(f"n{number}", *(held(draw.randrange(8, 12) * T4_MIB // 16) for _ in range(4)))
        for number in range(40)
    )
    return case(*requests, groups=groups, nodes=nodes)


class CallClock:
    """Seconds that pass with calls of Python functions alone."""

    def __init__(self, calls_per_second: int) -> None:
        self._calls_per_second = calls_per_second
        self._calls = 0

    def now(self) -> float:
        """Return the seconds since the beginning."""
        return self._calls / self._calls_per_second

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count calls meanwhile."""

        def count(_frame: FrameType, event: str, _argument: object) -> None:
            self._calls += event == "call"

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            yield
        finally:
            sys.setprofile(before)


def calls_of_first_plan(what: PlanningCase) -> int:
    """Return the calls that a plan takes at least."""
    clock = CallClock(1)
    with clock.running():
        make_plan(what, lambda: 0.0)
    return round(clock.now())


@pytest.mark.parametrize("times", [1.5, 3.0, 10.0])
def test_plan_keeps_to_its_time_when_the_machine_is_slow(times: float) -> None:
    """The time is a small multiple of the least that a plan takes."""
    what, limit_s = large(), 2.0
    clock = CallClock(round(times * calls_of_first_plan(what) / limit_s))
    with clock.running():
        plan = make_plan(what, lambda: limit_s - clock.now(), improve)
    assert clock.now() <= limit_s * 1.1
    assert 0 < plan.bound <= plan.cost
    assert len(plan.placements) == 200
