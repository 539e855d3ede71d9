"""Layouts that an administrator asks for are reached with the fewest changes."""

import pytest

from fenka.core.mig.geometry import TABLES, Place
from fenka.core.mig.layout_changes import ImpossibleLayout, plan_layout

A100 = TABLES["A100-40G"]


def place(name: str, start: int) -> Place:
    """Return a place of an A100."""
    return Place(A100.by_name[name], start)


def test_layout_is_created_on_an_empty_card() -> None:
    """Every instance once, and legal together."""
    change = plan_layout(A100, {"3g.20gb": 1, "2g.10gb": 1, "1g.5gb": 2, "7g.40gb": 0}, (), ())
    assert sorted(str(each) for each in change.create) == [
        *("1g.5gb at 2", "1g.5gb at 3", "2g.10gb at 0", "3g.20gb at 4")
    ]
    assert (change.destroy, change.blocked, change.leaving) == ((), {}, ())


def test_instances_that_are_there_stay_when_the_layout_has_them() -> None:
    """Wherever they are; only what is too much is destroyed."""
    change = plan_layout(
        A100,
        {"3g.20gb": 1, "1g.5gb": 1},
        [place("1g.5gb", 1), place("1g.5gb", 2)],
        [place("3g.20gb", 4)],
    )
    assert len(change.destroy) == 1
    assert (change.create, change.blocked, change.leaving) == ((), {}, ())


def test_instances_in_use_stay_and_block_what_overlaps_them() -> None:
    """The rest is created now."""
    used = place("1g.5gb", 5)
    change = plan_layout(A100, {"3g.20gb": 2}, (), [used])
    assert change.create == (place("3g.20gb", 0),)
    assert change.blocked == {place("3g.20gb", 4): (used,)}
    assert change.leaving == (used,)


def test_instance_waits_when_only_compute_slices_are_missing() -> None:
    """A second 1g of double memory beside a 4g, a 2g and a 1g that are in use: 7 slices are taken."""
    used = [place("4g.20gb", 0), place("2g.10gb", 4), place("1g.5gb", 6)]
    change = plan_layout(A100, {"4g.20gb": 1, "2g.10gb": 1, "1g.10gb": 1}, (), used)
    assert change.create == ()
    assert change.blocked == {place("1g.10gb", 6): (used[2],)}


@pytest.mark.parametrize(
    ("counts", "sentence"),
    [
        ({"3g.20gb": 3}, "A100-40G cannot be divided into 3x 3g.20gb at once"),
        ({"1g.5gb+me": 2}, r"cannot be divided into 2x 1g\.5gb\+me at once"),
        ({"1g.6gb": 1}, "A100-40G has no profile 1g.6gb: it has 1g.5gb, "),
    ],
)
def test_impossible_layout_is_refused(counts: dict[str, int], sentence: str) -> None:
    """With what the card has."""
    with pytest.raises(ImpossibleLayout, match=sentence):
        plan_layout(A100, counts, (), ())


def test_empty_layout_destroys_all_that_is_idle() -> None:
    """What is in use leaves later."""
    idle, used = place("1g.5gb", 0), place("1g.5gb", 6)
    change = plan_layout(A100, {}, [idle], [used])
    assert (change.destroy, change.leaving, change.create) == ((idle,), (used,), ())
