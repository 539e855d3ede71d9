"""Test that the audit can find violations."""

import pytest

from fire.audit import Allocation, over_limit, overcommitted, units_to_mib, unleased_processes


@pytest.mark.parametrize(
    ("units", "mib"),
    [
        (1, 1077),  # 15079 * 1 // 14
        (4, 4308),  # 60316 // 14
        (7, 7539),
        (14, 15079),
    ],
)
def test_units_to_mib_follows_the_documented_arithmetic(units: int, mib: int) -> None:
    """Units are those of a T4."""
    assert units_to_mib(units) == mib


def test_overcommitted_names_the_card_when_more_is_allocated_than_it_has() -> None:
    """7539 + 7539 = 15078 fits 15079; two MiB more do not."""
    fits = [Allocation("a", "u", 7539, frozenset()), Allocation("b", "u", 7539, frozenset())]
    assert overcommitted(fits) == []
    assert overcommitted([*fits, Allocation("c", "v", 15079, frozenset())]) == []
    assert overcommitted([*fits, Allocation("c", "u", 2, frozenset())]) == [
        "15080 MiB of u are allocated, it has 15079"
    ]


def test_over_limit_sums_processes_and_allows_for_their_contexts() -> None:
    """Two processes of one tenant: a limit of 1077 and 2 * 512 for contexts make 2101."""
    tenant = Allocation("a", "u", 1077, frozenset({1, 2}))
    assert over_limit([tenant], {"u": {1: 1000, 2: 1101, 3: 9000}}) == []
    assert over_limit([tenant], {"u": {1: 1001, 2: 1101}}) == [
        "a uses 2102 MiB of u, its limit is 1077"
    ]


def test_unleased_processes_are_those_without_an_allocation_of_that_card() -> None:
    """An allocation of another card does not count."""
    tenants = [
        Allocation("a", "u", 1077, frozenset({1})),
        Allocation("b", "v", 1077, frozenset({2})),
    ]
    assert unleased_processes(tenants, {"u": {1: 5}, "v": {2: 5}}) == []
    assert unleased_processes(tenants, {"u": {1: 5, 2: 7}}) == [
        "process 2 uses 7 MiB of u without an allocation"
    ]
