"""An upper bound of what cards can serve, by which the search for a plan drops states early."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fenka.core.mig.case import PlannedCard, State, remaining_room
from fenka.core.mig.geometry import Geometry
from fenka.core.mig.options import Counts, Demands


@dataclass(frozen=True, slots=True)
class _Item:
    """A request. column, rank: where it stands among the demands. units: what it needs, in whole cards."""

    column: int
    rank: int
    value: int
    units: float


@dataclass(frozen=True)
class _Measure:
    """Memory or compute. items: by falling value per unit. free: what cards have from each one on."""

    items: list[_Item]
    free: list[float]


class Bound:
    """Fills the free memory, and the free compute, with parts of requests: no plan serves more.

    Args:
        demands: the requests.
        cards: in the order in which they are joined.
    """

    def __init__(self, demands: Demands, cards: Sequence[PlannedCard]) -> None:
        self._demands = demands
        geometries = {card.geometry for card in cards}
        self._measures = (
            _measure(demands, cards, {each: _Scale.memory(each) for each in geometries}),
            _measure(demands, cards, {each: _Scale.compute(each) for each in geometries}),
        )

    def value(self, served: Counts, number: int, share: float = 1.0) -> NDArray[np.float64]:
        """Return the value of each row of what is served, with the most that later cards can add.

        Args:
            served: one row for each state after some cards.
            number: the last of those cards.
            share: how much of the later cards is assumed to be usable.
        """
        served = self._demands.for_requests(served)
        added = [
            _fill(served, each.items, each.free[number + 1] * share) for each in self._measures
        ]
        return self._demands.value(served).astype(np.float64) + np.minimum(*added)


@dataclass(frozen=True)
class _Scale:
    """How instances and slices of a model count in one measure.

    Attributes:
        whole: of the card.
        profiles: what an instance takes, by name.
        slices: what slices get per unit of an instance, at most; the second item is the field of their size.
    """

    whole: float
    profiles: dict[str, int]
    slices: tuple[float, str]

    @staticmethod
    def memory(geometry: Geometry) -> "_Scale":
        axis = max(profile.size for profile in geometry.profiles)
        density = max(profile.memory_mib / profile.size for profile in geometry.profiles)
        sizes = {profile.name: profile.size for profile in geometry.profiles}
        return _Scale(axis, sizes, (density, "memory_mib"))

    @staticmethod
    def compute(geometry: Geometry) -> "_Scale":
        density = max(geometry.compute_percent(each) / each.compute for each in geometry.profiles)
        sizes = {profile.name: profile.compute for profile in geometry.profiles}
        return _Scale(geometry.compute, sizes, (density, "compute"))

    def units(self, demands: Demands, column: int) -> float:
        """Return what a request takes of a whole card; infinite if the model does not have its profile."""
        if column < len(demands.profiles):
            name = demands.profiles[column]
            return self.profiles[name] / self.whole if name in self.profiles else float("inf")
        density, field = self.slices
        size: int = getattr(demands.rooms[column - len(demands.profiles)], field)
        return size / density / self.whole

    def free(self, card: PlannedCard, conversions: int) -> float:
        """Return what a plan may use of a card."""
        if not card.mig and (card.busy or not conversions):
            return 0.0
        density, field = self.slices
        free = self.whole
        for each in card.instances:
            if each.state in (State.USED, State.SHARED):
                free -= self.profiles[each.place.profile.name]
            if each.state is State.SHARED:
                free += getattr(remaining_room(card.geometry, each), field) / density
        return free / self.whole


def _measure(
    demands: Demands, cards: Sequence[PlannedCard], scales: Mapping[Geometry, _Scale]
) -> _Measure:
    items = [
        _Item(column, rank, value, min(scale.units(demands, column) for scale in scales.values()))
        for column, values in enumerate(demands.values)
        for rank, value in enumerate(values)
    ]
    items.sort(key=lambda item: -item.value / item.units if item.units else -float("inf"))
    free = [0.0]
    for card in reversed(cards):
        free.append(free[-1] + scales[card.geometry].free(card, demands.case.conversions))
    return _Measure(items, free[::-1])


def _fill(served: Counts, items: list[_Item], free: float) -> NDArray[np.float64]:
    left = np.full(len(served), free)
    value = np.zeros(len(served))
    for item in items:
        pending = served[:, item.column] <= item.rank
        part = np.minimum(1.0, left / item.units) * pending if item.units else pending
        value += part * item.value
        left -= part * item.units
    return value
