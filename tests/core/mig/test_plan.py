"""The planner is optimal: compared with exhaustion on small cases, checked step by step on larger ones."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.core.mig.case import (
    Create,
    Destroy,
    Enable,
    MigCase,
    PlannedCard,
    PlannedInstance,
    PlannedSlice,
    PlannedTarget,
    ProfileRequest,
    State,
)
from fenka.core.mig.geometry import TABLES, Place, SliceSize
from fenka.core.mig.plan import plan
from tests.core.mig.cases import random_case
from tests.core.mig.exhaustive import best_score, check

A100, A30 = TABLES["A100-40G"], TABLES["A30"]
SEEDS = st.integers(0, 2**32)


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_plan_is_optimal_when_two_small_cards_are_random(seed: int) -> None:
    """Value, moves, conversions, flexibility and idle instances, in this order."""
    case = random_case(random.Random(seed), [A30], 2, 4, 2)
    assert check(case, plan(case)) == best_score(case)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(SEEDS)
def test_plan_is_optimal_when_one_large_card_is_random(seed: int) -> None:
    """All profiles of a card with seven slices."""
    case = random_case(random.Random(seed), [A100], 1, 4, 3)
    assert check(case, plan(case)) == best_score(case)


@settings(max_examples=12, deadline=None)
@given(SEEDS, st.sampled_from([1, 3, 100]))
def test_plan_is_legal_when_the_search_is_narrow(seed: int, width: int) -> None:
    """Eight cards of all models; the search keeps a few states only."""
    models = [TABLES[name] for name in ("A100-40G", "H100-80G", "B200", "A30")]
    case = random_case(random.Random(seed), models, 8, 12, 4)
    narrow, wide = check(case, plan(case, width)), check(case, plan(case, 1000))
    assert narrow <= wide


def used(name: str, start: int, state: State = State.USED, job: str = "") -> PlannedInstance:
    """Return an instance of an A100."""
    return PlannedInstance(Place(A100.by_name[name], start), state, job)


def test_plan_moves_only_when_value_is_gained() -> None:
    """A 2g in the middle of a half blocks a 4g; it goes to another place of its profile."""
    card = PlannedCard("g0", A100, instances=(used("2g.10gb", 2, State.MOVABLE, "job"),))
    requests = (ProfileRequest("r", "4g.20gb"),)
    assert plan(MigCase((card,), requests)).served == {}
    result = plan(MigCase((card,), requests, moves=1))
    assert result.steps[0] == Destroy("g0", Place(A100.by_name["2g.10gb"], 2))
    assert set(result.steps[1:]) == {
        Create("g0", Place(A100.by_name["2g.10gb"], 4)),
        Create("g0", Place(A100.by_name["4g.20gb"], 0)),
    }
    assert result.moved == {"job": PlannedTarget("g0", 4)}


def test_plan_moves_no_more_jobs_than_allowed_on_all_cards_together() -> None:
    """On each of two cards one move would make room for a 4g; only one is allowed."""
    cards = tuple(
        PlannedCard(f"g{n}", A100, instances=(used("2g.10gb", 2, State.MOVABLE, f"job{n}"),))
        for n in range(2)
    )
    requests = tuple(ProfileRequest(f"r{n}", "4g.20gb") for n in range(2))
    assert len(plan(MigCase(cards, requests, moves=1)).moved) == 1
    assert len(plan(MigCase(cards, requests, moves=2)).moved) == 2


def test_plan_enables_mig_only_when_the_case_allows_it() -> None:
    """A busy card stays as it is."""
    cards = (PlannedCard("g0", A100, mig=False, busy=True), PlannedCard("g1", A100, mig=False))
    requests = (ProfileRequest("r", "7g.40gb"),)
    assert plan(MigCase(cards, requests)).steps == ()
    steps = plan(MigCase(cards, requests, conversions=2)).steps
    assert steps == (Enable("g1"), Create("g1", Place(A100.by_name["7g.40gb"], 0)))


def test_plan_uses_an_idle_instance_when_it_has_the_profile() -> None:
    """Nothing is created or destroyed."""
    card = PlannedCard("g0", A100, instances=(used("1g.5gb", 6, State.IDLE),))
    result = plan(MigCase((card,), (ProfileRequest("r", "1g.5gb"),)))
    assert (result.steps, result.served) == ((), {"r": PlannedTarget("g0", 6)})


def test_plan_fills_a_shared_instance_only_up_to_its_room() -> None:
    """Of 9984 MiB and 25 percent, 4000 MiB and 10 percent are taken; compute decides for the third."""
    taken = (SliceSize(4000, 10),)
    held = PlannedInstance(Place(A100.by_name["2g.10gb"], 0), State.SHARED, slices=taken)
    room = PlannedCard("g0", A100, instances=(held, used("3g.20gb", 4), used("2g.10gb", 2)))
    requests = (PlannedSlice("a", SliceSize(2000, 10), 2), PlannedSlice("b", SliceSize(1000, 10)))
    assert plan(MigCase((room,), requests)).served == {"a": PlannedTarget("g0", 0)}


def test_plan_is_empty_when_nothing_is_asked() -> None:
    """Also without any card."""
    assert plan(MigCase((), ())).steps == ()
    assert plan(MigCase((PlannedCard("g0", A30),), ())).steps == ()
