"""Long computations in steps, between which the caller may do something else."""

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

Steps = Generator[None, None, T]
"""Yields after each step; its return value is the result."""


def complete(steps: Steps[T]) -> T:
    """Take all steps at once. Return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
