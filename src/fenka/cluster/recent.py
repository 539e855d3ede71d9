"""Dictionaries of bounded size."""

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

LIMIT = 10_000
SHARED, MAX_SHARED_BYTES = 4096, 1024


class RecentDict(OrderedDict[K, V]):
    """Keeps the LIMIT keys that were set last, for what may never be reported as gone."""

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > LIMIT:
            self.popitem(last=False)


class SharedValues(dict[bytes, V]):
    """Values by an encoding of all that they depend on, so that equal ones need not be made again.

    It forgets all when it is full, and keeps none with a long key: tenants choose what is in them.
    """

    def __setitem__(self, key: bytes, value: V) -> None:
        if len(key) <= MAX_SHARED_BYTES:
            if len(self) >= SHARED:
                self.clear()
            super().__setitem__(key, value)
