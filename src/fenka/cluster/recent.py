"""A dictionary of bounded size, for what may never be reported as gone."""

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

LIMIT = 10_000


class RecentDict(OrderedDict[K, V]):
    """Keeps the LIMIT keys that were set last."""

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > LIMIT:
            self.popitem(last=False)
