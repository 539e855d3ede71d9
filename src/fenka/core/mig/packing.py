"""Slices into instances: the largest sets of slice requests that given instances can hold.

A set is a vector of counts, one for each size of request. Only maximal vectors are kept: what is contained in
a larger one never has to be considered.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

from fenka.core.mig.case import Room

Counts = tuple[int, ...]

MOST = 400
"""Vectors that are kept for one set of instances. Beyond it the most valuable ones are kept, and a plan may
miss the optimum."""


class Packer:
    """Packs requests of some sizes into instances, and remembers the results.

    Args:
        sizes: the sizes of requests.
        demand: how many requests there are of each size.
        values: the values of each size's requests, descending.
    """

    def __init__(
        self, sizes: Sequence[Room], demand: Counts, values: Sequence[Sequence[int]]
    ) -> None:
        self._sizes, self._demand, self._values = sizes, demand, values
        self.single = lru_cache(maxsize=None)(self._single)
        self.packs = lru_cache(maxsize=None)(self._packs)

    def _single(self, room: Room) -> tuple[Counts, ...]:
        """Return the maximal vectors for one instance."""
        vectors: list[Counts] = []

        def extend(prefix: Counts, left: Room) -> None:
            kind = len(prefix)
            if kind == len(self._sizes):
                vectors.append(prefix)
                return
            size = self._sizes[kind]
            most = self._demand[kind]
            most = min(most, left.memory_mib // size.memory_mib)
            if size.compute:
                most = min(most, left.compute // size.compute)
            for count in range(most, -1, -1):
                used = Room(count * size.memory_mib, count * size.compute)
                extend((*prefix, count), left.less(used))

        extend((), room)
        return tuple(self._best(vectors))

    def _packs(self, rooms: tuple[Room, ...]) -> tuple[tuple[Counts, tuple[Counts, ...]], ...]:
        """Return the maximal vectors for several instances, each with the vector of every instance."""
        if not rooms:
            return (((0,) * len(self._sizes), ()),)
        joined: dict[Counts, tuple[Counts, ...]] = {}
        for total, parts in self.packs(rooms[:-1]):
            for vector in self.single(rooms[-1]):
                both = tuple(map(min, map(sum, zip(total, vector, strict=True)), self._demand))
                joined.setdefault(both, (*parts, vector))
        return tuple((vector, joined[vector]) for vector in self._best(joined))

    def _best(self, vectors: Iterable[Counts]) -> list[Counts]:
        kept: list[Counts] = []
        for vector in sorted(set(vectors), key=lambda each: (-sum(each), each)):
            if not any(all(a >= b for a, b in zip(other, vector, strict=True)) for other in kept):
                kept.append(vector)
        return sorted(kept, key=self._value, reverse=True)[:MOST]

    def _value(self, counts: Counts) -> int:
        return sum(sum(values[:count]) for values, count in zip(self._values, counts, strict=True))
