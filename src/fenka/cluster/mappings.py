"""Dictionaries of bounded size.

A read-only mapping of a few keys, in half of a dictionary's memory; reading takes ten times as long.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, TypeVar, cast

K = TypeVar("K")
V = TypeVar("V")

LIMIT = 10_000
SHARED, MAX_SHARED_BYTES = 4096, 1024


class RecentDict(OrderedDict[K, V]):
    """Keeps the LIMIT keys that were set last, for what may never be reported as gone.

    cachetools.FIFOCache does the same; setting a key takes it three times as long, reading one twice.
    """

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


class _SmallMapping(tuple[Any, ...]):
    __slots__ = ()

    def keys(self) -> tuple[str, ...]:
        return tuple.__getitem__(self, slice(0, None, 2))

    def values(self) -> tuple[Any, ...]:
        return tuple.__getitem__(self, slice(1, None, 2))

    def items(self) -> list[tuple[str, Any]]:
        return list(zip(self.keys(), self.values(), strict=True))

    def get(self, key: object, default: Any = None) -> Any:
        # Mostly it is absent: then one look at keys and values is enough.
        return self[key] if key in self else default  # noqa: SIM401

    def __getitem__(self, key: Any) -> Any:
        keys = self.keys()
        if key not in keys:
            raise KeyError(key)
        return self.values()[keys.index(key)]

    def __contains__(self, key: object) -> bool:
        return tuple.__contains__(self, key) and key in self.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return tuple.__len__(self) // 2

    def __eq__(self, other: object) -> bool:
        if isinstance(other, _SmallMapping) and tuple.__eq__(self, other):
            return True
        return isinstance(other, Mapping) and dict(self.items()) == dict(other.items())

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]


Mapping.register(_SmallMapping)


def small_mapping(mapping: Mapping[str, V]) -> Mapping[str, V]:
    """Return an equal mapping."""
    items = chain.from_iterable(mapping.items())
    return cast(Mapping[str, V], _SmallMapping(items))
