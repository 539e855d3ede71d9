"""Computations in steps, taken all at once."""

import pytest

from fenka.core.backfill import Steps, complete


def test_all_steps_are_taken_when_the_result_is_wanted_at_once() -> None:
    """Also those of computations inside."""
    taken = []

    def inner(count: int) -> Steps[int]:
        for number in range(count):
            taken.append(number)
            yield
        return count

    def outer() -> Steps[int]:
        first = yield from inner(2)
        yield
        second = yield from inner(1)
        return first + second

    assert complete(outer()) == 3
    assert taken == [0, 1, 0]


def test_result_is_none_when_the_steps_are_over_at_once() -> None:
    """And an error in a step is the caller's."""

    def nothing() -> Steps[None]:
        return
        yield

    def failing() -> Steps[None]:
        yield
        raise KeyError("policy")

    assert complete(nothing()) is None
    with pytest.raises(KeyError, match="policy"):
        complete(failing())
