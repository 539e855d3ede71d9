"""Computes for one card of a planning case which layouts are useful, and which slices they can hold."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from fenka.core.mig.case import MigCase, PlannedCard, State, remaining_size
from fenka.core.mig.geometry import Geometry, Place, Profile, SliceSize
from fenka.core.mig.layouts import all_layouts, flexibility

SliceCounts = tuple[int, ...]

MOST = 400
"""Vectors that are kept for one set of instances. Beyond it the most valuable ones are kept, and a plan may
miss the optimum."""


class Packer:
    """Packs requests of some sizes into instances, and remembers the results.

    A result is a vector of counts, one for each size. Only maximal vectors are kept.

    Args:
        sizes: the sizes of requests.
        demand: how many requests there are of each size.
        values: the values of each size's requests, descending.
    """

    def __init__(
        self, sizes: Sequence[SliceSize], demand: SliceCounts, values: Sequence[Sequence[int]]
    ) -> None:
        self._sizes, self._demand, self._values = sizes, demand, values
        self.single = lru_cache(maxsize=None)(self._single)
        self.packs = lru_cache(maxsize=None)(self._packs)

    def _single(self, room: SliceSize) -> tuple[SliceCounts, ...]:
        """Return the maximal vectors for one instance."""
        vectors: list[SliceCounts] = []

        def extend(prefix: SliceCounts, left: SliceSize) -> None:
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
                used = SliceSize(count * size.memory_mib, count * size.compute)
                extend((*prefix, count), left.less(used))

        extend((), room)
        return tuple(self._best(vectors))

    def _packs(
        self, rooms: tuple[SliceSize, ...]
    ) -> tuple[tuple[SliceCounts, tuple[SliceCounts, ...]], ...]:
        """Return the maximal vectors for several instances, each with the vector of every instance."""
        if not rooms:
            return (((0,) * len(self._sizes), ()),)
        joined: dict[SliceCounts, tuple[SliceCounts, ...]] = {}
        for total, parts in self.packs(rooms[:-1]):
            for vector in self.single(rooms[-1]):
                both = tuple(map(min, map(sum, zip(total, vector, strict=True)), self._demand))
                joined.setdefault(both, (*parts, vector))
        return tuple((vector, joined[vector]) for vector in self._best(joined))

    def _best(self, vectors: Iterable[SliceCounts]) -> list[SliceCounts]:
        kept: list[SliceCounts] = []
        for vector in sorted(set(vectors), key=lambda counts: (-sum(counts), counts)):
            if not any(all(a >= b for a, b in zip(other, vector, strict=True)) for other in kept):
                kept.append(vector)
        return sorted(kept, key=self._value, reverse=True)[:MOST]

    def _value(self, counts: SliceCounts) -> int:
        return sum(sum(values[:count]) for values, count in zip(self._values, counts, strict=True))


Ints = NDArray[np.int64]
Counts = NDArray[np.int16]

SCALE = 84 * 5
"""Makes flexibility whole: a multiple of the capacities of all profiles of an empty card."""
IDLE, FLEXIBILITY, CONVERSION, MOVE = 1, 1 << 10, 1 << 32, 1 << 42
"""Costs in the order in which they count: idle instances destroyed, flexibility lost, conversions, moves."""


@dataclass(frozen=True)
class LayoutTable:
    """All layouts of a card model as arrays, one row per layout.

    Attributes:
        bits: the place of each bit of `places`.
        places: a bit for every place.
        counts: how many of each profile, in the geometry's order.
        lost: flexibility that the empty card has more, times SCALE.
    """

    bits: dict[Place, int]
    places: Ints
    counts: Ints
    lost: Ints


@cache
def layout_table(geometry: Geometry) -> LayoutTable:
    """Return the layouts of a card model."""
    bits = {place: 1 << number for number, place in enumerate(geometry.places)}
    rows = all_layouts(geometry)
    empty = flexibility(geometry, ())
    counts = [
        [sum(p.profile == profile for p in row) for profile in geometry.profiles] for row in rows
    ]
    return LayoutTable(
        bits,
        np.array([sum(bits[place] for place in row) for row in rows], dtype=np.int64),
        np.array(counts, dtype=np.int64),
        np.array(
            [int(SCALE * (empty - flexibility(geometry, row))) for row in rows], dtype=np.int64
        ),
    )


@cache
def _conflicts(geometry: Geometry, place: Place) -> NDArray[np.bool_]:
    """Return for each layout whether an instance at a place must go."""
    return np.array([bool(geometry.conflict(layout, place)) for layout in all_layouts(geometry)])


@dataclass(frozen=True, slots=True)
class Hosting:
    """How a card's instances are used.

    Attributes:
        layout: the row of the layout, -1 if MIG stays off.
        hosts: how many instances of each profile hold slices.
        contents: what every instance that holds slices takes, shared ones first, then `hosts` in order.
    """

    layout: int
    hosts: tuple[int, ...] = ()
    contents: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Options:
    """A card's choices, one row each.

    Attributes:
        gains: per demand, in the order of `Demands`; less than 0 for jobs that lose their instance.
        costs: of each row.
        hostings: of each row.
    """

    gains: Counts
    costs: Ints
    hostings: list[Hosting]

    def keep(self, rows: NDArray[np.intp]) -> "Options":
        """Return only these rows."""
        return Options(self.gains[rows], self.costs[rows], [self.hostings[row] for row in rows])


class Demands:
    """The columns of `Options.gains`.

    First the profiles that requests name, then sizes of slices, then jobs that may move, by model and
    profile, because a job needs an instance of its own model. Last the number of conversions, negative.
    """

    def __init__(self, case: MigCase) -> None:
        self.case = case
        self.profiles, self.rooms = list(case.profile_requests), list(case.slice_requests)
        slices = [[request.value for request in case.slice_requests[room]] for room in self.rooms]
        self.values = [
            *([request.value for request in case.profile_requests[name]] for name in self.profiles),
            *slices,
        ]
        self.caps = [len(values) for values in self.values]
        self.jobs: list[tuple[Geometry, Profile]] = []
        movable = [
            (card.geometry, instance.place.profile)
            for card in case.cards
            for instance in card.instances
            if instance.state is State.MOVABLE and case.moves
        ]
        for geometry, profile in dict.fromkeys(movable):
            most = min(case.moves, movable.count((geometry, profile)))
            self.jobs.append((geometry, profile))
            self.caps.append(len(case.profile_requests.get(profile.name, ())) + most)
        self.caps.append(0)
        self.packer = Packer(self.rooms, tuple(map(len, slices)), slices)

    def value(self, served: Counts) -> Ints:
        """Return the value of each row of what is served, requests of the highest value first."""
        total = np.zeros(len(served), dtype=np.int64)
        for column, values in enumerate(self.values):
            total += np.concatenate([[0], np.cumsum(values)])[served[:, column]]
        return total

    def for_requests(self, served: Counts) -> Counts:
        """Return the rows with instances that no job needs counted for requests of their profile."""
        served = served.copy()
        for column, (_, profile) in enumerate(self.jobs, len(self.values)):
            if profile.name in self.profiles:
                served[:, self.profiles.index(profile.name)] += np.maximum(served[:, column], 0)
        return np.minimum(served, np.array(self.caps, dtype=np.int16))

    def column(self, geometry: Geometry, profile: Profile) -> int | None:
        """Return the column that instances of a profile count for, None if nobody wants it."""
        if (geometry, profile) in self.jobs:
            return len(self.values) + self.jobs.index((geometry, profile))
        return self.profiles.index(profile.name) if profile.name in self.profiles else None


class CardOptions:
    """Computes the options of one card."""

    def __init__(self, card: PlannedCard, demands: Demands) -> None:
        self._card, self._demands, self._geometry = card, demands, card.geometry
        self._table = layout_table(card.geometry)
        profiles = card.geometry.profiles
        self._hosts = [self._can_host(profile) for profile in profiles]
        self._columns = [demands.column(card.geometry, profile) for profile in profiles]
        # Instances of each profile that requests and jobs can use alone, and slices that they can hold.
        self._alone = [0 if column is None else demands.caps[column] for column in self._columns]
        self._slices = sum(map(len, demands.case.slice_requests.values()))

    def options(self) -> Options:
        """Return the card's options, the pointless ones left out."""
        stay = self._off() if not self._card.mig else None
        if not self._card.mig and (self._card.busy or not self._demands.case.conversions):
            return stay or self._off()
        options = self._expand(*self._layouts())
        if stay is not None:
            options = Options(
                np.concatenate([stay.gains, options.gains]),
                np.concatenate([stay.costs, options.costs]),
                [*stay.hostings, *options.hostings],
            )
        return options.keep(undominated(options.gains, options.costs))

    def _off(self) -> Options:
        """Return the only option of a card whose MIG mode stays off."""
        gains = np.zeros((1, len(self._demands.caps)), dtype=np.int16)
        return Options(gains, np.zeros(1, dtype=np.int64), [Hosting(-1)])

    def _bits(self, *states: State) -> int:
        chosen = (instance.place for instance in self._card.instances if instance.state in states)
        return sum(self._table.bits[place] for place in chosen)

    def _can_host(self, profile: Profile) -> bool:
        room = self._geometry.largest_slice(profile)
        return any(room.holds(size) for size in self._demands.rooms)

    def _layouts(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Return the layouts that can be useful, one for each set of instances that it leaves to requests.

        Returns:
            rows, costs, instances for others by profile, jobs that lose their instance by profile.
        """
        table, demands = self._table, self._demands
        stay, movable = self._bits(State.USED, State.SHARED), self._bits(State.MOVABLE)
        kept = table.places & movable
        moved = self._count_bits(movable & ~kept)
        serving = table.counts - self._count_bits(kept | stay)
        wanted = np.add(self._alone, np.multiply(self._hosts, self._slices))
        possible = ((table.places & stay) == stay) & (serving <= wanted).all(axis=1)
        possible &= moved.sum(axis=1) <= demands.case.moves
        rows = np.nonzero(possible)[0].astype(np.int64)
        conversions = 0 if self._card.mig else CONVERSION
        # An enabled card adds its flexibility. Others have theirs in every plan.
        gain = 0 if self._card.mig else -int(SCALE * flexibility(self._geometry, ())) * FLEXIBILITY
        costs = table.lost[rows] * FLEXIBILITY + self._idle_destroyed()[rows] * IDLE
        costs = costs + moved[rows].sum(axis=1) * MOVE + conversions + gain
        # Of layouts with the same instances for others, the cheapest is enough.
        key = np.concatenate([serving[rows], moved[rows]], axis=1)
        order = np.lexsort((costs, *key.T))
        first = np.ones(len(order), dtype=np.bool_)
        first[1:] = (key[order][1:] != key[order][:-1]).any(axis=1)
        chosen = order[first]
        return rows[chosen], costs[chosen], serving[rows[chosen]], moved[rows[chosen]]

    def _count_bits(self, places: Ints | int) -> Ints:
        """Return how many of the places are of each profile."""
        bits = self._table.bits
        columns = [
            sum(
                ((np.asarray(places) & bit) != 0).astype(np.int64)
                for place, bit in bits.items()
                if place.profile == profile
            )
            for profile in self._geometry.profiles
        ]
        return np.stack(columns, axis=-1).astype(np.int64)

    def _idle_destroyed(self) -> Ints:
        table = self._table
        destroyed = np.zeros(len(table.places), dtype=np.int64)
        for instance in self._card.instances:
            if instance.state is State.IDLE:
                used = (table.places & table.bits[instance.place]) != 0
                destroyed += _conflicts(self._geometry, instance.place) & ~used
        return destroyed

    def _expand(self, rows: Ints, costs: Ints, serving: Ints, moved: Ints) -> Options:
        """Let instances either serve a request alone or hold slices, in every useful combination."""
        gains: list[list[int]] = []
        total: list[int] = []
        hostings: list[Hosting] = []
        shared = tuple(
            remaining_size(self._geometry, instance)
            for instance in self._card.instances
            if instance.state is State.SHARED
        )
        first, last = len(self._demands.profiles), len(self._demands.profiles + self._demands.rooms)
        lists = (rows.tolist(), costs.tolist(), serving.tolist(), moved.tolist())
        for row, cost, present, gone in zip(*lists, strict=True):
            for hosts in self._roles(present):
                base = self._base_gain(present, hosts, gone)
                for vector, contents in self._demands.packer.packs(shared + self._rooms(hosts)):
                    gains.append([*base[:first], *vector, *base[last:]])
                    total.append(cost)
                    hostings.append(Hosting(row, hosts, contents))
        return Options(
            np.array(gains, dtype=np.int16).reshape(len(gains), len(self._demands.caps)),
            np.array(total, dtype=np.int64),
            hostings,
        )

    def _roles(self, serving: list[int]) -> Iterable[tuple[int, ...]]:
        """Return how many of each profile's instances may hold slices, in every combination."""
        ranges = [
            range(max(0, count - alone), (count if can_host else 0) + 1)
            for count, can_host, alone in zip(serving, self._hosts, self._alone, strict=True)
        ]
        return (hosts for hosts in product(*ranges) if sum(hosts) <= self._slices)

    def _rooms(self, hosts: tuple[int, ...]) -> tuple[SliceSize, ...]:
        return tuple(
            self._geometry.largest_slice(profile)
            for profile, count in zip(self._geometry.profiles, hosts, strict=True)
            for _ in range(count)
        )

    def _base_gain(self, serving: list[int], hosts: tuple[int, ...], moved: list[int]) -> list[int]:
        gain = [0] * len(self._demands.caps)
        gain[-1] = 0 if self._card.mig else -1
        for column, count, held, gone in zip(self._columns, serving, hosts, moved, strict=True):
            if column is not None:
                gain[column] += count - held - gone
        return gain


def undominated(gains: Counts, costs: Ints) -> NDArray[np.intp]:
    """Return the rows that no other row reaches in every gain for at most the same cost."""
    order = np.lexsort((*(-gains.T), costs))
    gains = gains[order][:, (gains != gains[:1]).any(axis=0)]
    kept = np.ones(len(order), dtype=np.bool_)
    for row in range(len(order)):
        if kept[row]:
            # Rows that follow cost at least as much.
            covered = (gains[row + 1 :] <= gains[row]).all(axis=1)
            kept[row + 1 :] &= ~covered
    return order[kept]
