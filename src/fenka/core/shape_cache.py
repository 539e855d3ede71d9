"""Values by request and node, for the requests that were used last."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Generic, TypeVar

S = TypeVar("S")
V = TypeVar("V")

MAX_SHAPES = 64
"""A cluster's requests are of few shapes."""


class ShapeCache(Generic[S, V]):
    """Keeps values for at most MAX_SHAPES different requests."""

    def __init__(self) -> None:
        self._by_shape: OrderedDict[S, dict[str, V]] = OrderedDict()

    def by_node(self, shape: S) -> dict[str, V]:
        """Return the values for such a request, to be read and written."""
        values = self._by_shape.setdefault(shape, {})
        self._by_shape.move_to_end(shape)
        if len(self._by_shape) > MAX_SHAPES:
            self._by_shape.popitem(last=False)
        return values

    def forget(self, nodes: Iterable[str]) -> None:
        """Remove all values for these nodes."""
        names = list(nodes)
        for values in self._by_shape.values():
            for name in names:
                values.pop(name, None)

    def clear(self) -> None:
        """Remove all values."""
        self._by_shape.clear()
