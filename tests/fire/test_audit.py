"""The audit itself: an audit that finds nothing must be able to."""

import pytest

from fire.audit import Holding, beyond, cap, overcommitted, strangers


@pytest.mark.parametrize(
    ("units", "mib"),
    [
        (1, 1077),  # 15079 * 1 // 14
        (4, 4308),  # 60316 // 14
        (7, 7539),
        (14, 15079),
    ],
)
def test_cap_is_the_documented_arithmetic(units: int, mib: int) -> None:
    """Units of a T4 in MiB."""
    assert cap(units) == mib


def test_overcommitted_names_the_card_when_more_is_promised_than_it_has() -> None:
    """7539 + 7539 = 15078 fits 15079; two MiB more do not."""
    fits = [Holding("a", "u", 7539, frozenset()), Holding("b", "u", 7539, frozenset())]
    assert overcommitted(fits) == []
    assert overcommitted([*fits, Holding("c", "v", 15079, frozenset())]) == []
    assert overcommitted([*fits, Holding("c", "u", 2, frozenset())]) == [
        "15080 MiB of u are promised, it has 15079"
    ]


def test_beyond_sums_processes_and_leaves_room_for_their_contexts() -> None:
    """Two processes of one tenant: 1077 promised and 2 * 512 of contexts make 2101."""
    tenant = Holding("a", "u", 1077, frozenset({1, 2}))
    assert beyond([tenant], {"u": {1: 1000, 2: 1101, 3: 9000}}) == []
    assert beyond([tenant], {"u": {1: 1001, 2: 1101}}) == [
        "a holds 2102 MiB of u, it was promised 1077"
    ]


def test_strangers_are_processes_without_a_promise_of_that_card() -> None:
    """A promise of another card counts for nothing."""
    tenants = [Holding("a", "u", 1077, frozenset({1})), Holding("b", "v", 1077, frozenset({2}))]
    assert strangers(tenants, {"u": {1: 5}, "v": {2: 5}}) == []
    assert strangers(tenants, {"u": {1: 5, 2: 7}}) == [
        "process 2 uses 7 MiB of u and was promised nothing of it"
    ]
