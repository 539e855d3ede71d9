"""A dictionary of bounded size, for what may never be reported as gone."""

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

LIMIT = 10_000


class RecentDict(OrderedDict[K, V]):
    """Keeps the keys that were set last."""

    def __init__(self, limit: int = LIMIT) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._limit:
            self.popitem(last=False)
