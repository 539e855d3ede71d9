"""A decorator for the values of which a cluster has tens of thousands: one or more for each pod."""

from collections.abc import Callable
from typing import TYPE_CHECKING

__all__ = ["value_class"]

if TYPE_CHECKING:
    from dataclasses import dataclass as value_class
else:
    from dataclasses import dataclass

    def value_class(*, frozen: bool, slots: bool) -> Callable[[type], type]:
        """Make a data class that type checkers protect from changes. Nothing checks that at run time.

        Python sets each field of a frozen data class by a call, which triples the cost of making one.
        """
        assert frozen
        return dataclass(slots=slots, unsafe_hash=True)
