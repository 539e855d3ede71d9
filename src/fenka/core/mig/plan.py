"""Plans instances for several cards and requests at once, by dynamic programming over the cards' options.

The objective, in this order: the most value, the fewest moves, the fewest conversions, the largest
flexibility of the cards that have MIG in the end. The last is the fewest idle instances destroyed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fenka.core.mig.case import (
    Create,
    Destroy,
    Enable,
    MigCase,
    MigPlan,
    PlannedCard,
    PlannedInstance,
    PlannedTarget,
    State,
    Step,
    remaining_size,
)
from fenka.core.mig.geometry import Geometry, Place, Profile
from fenka.core.mig.options import (
    MOVE,
    CardOptions,
    Counts,
    Demands,
    Hosting,
    Ints,
    Options,
    layout_table,
)


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
            _measure(
                demands, cards, {geometry: _Scale.memory(geometry) for geometry in geometries}
            ),
            _measure(
                demands, cards, {geometry: _Scale.compute(geometry) for geometry in geometries}
            ),
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
            _fill(served, measure.items, measure.free[number + 1] * share)
            for measure in self._measures
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
        density = max(profile.memory_mib / profile.size for profile in geometry.profiles)
        sizes = {profile.name: profile.size for profile in geometry.profiles}
        return _Scale(geometry.axis, sizes, (density, "memory_mib"))

    @staticmethod
    def compute(geometry: Geometry) -> "_Scale":
        density = max(
            geometry.compute_percent(profile) / profile.compute for profile in geometry.profiles
        )
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
        for instance in card.instances:
            if instance.state in (State.USED, State.SHARED):
                free -= self.profiles[instance.place.profile.name]
            if instance.state is State.SHARED:
                free += getattr(remaining_size(card.geometry, instance), field) / density
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


PAIRS = 1_000_000
"""Pairs of a state and an option that are joined at once, which bounds the memory that is used."""
WORK, EXACT_WORK = 56_000_000, 160_000_000
"""Pairs of a state and an option that are joined for all cards together; the second one for a few cards."""
EXACT_CARDS = 4
"""So many cards are a few: plans for them are worth waiting for."""
DISCOUNT = 0.85
"""The share of free capacity that a state is expected to use, where too many states have to be compared."""


@dataclass(frozen=True, slots=True)
class Combination:
    """The best combination.

    Attributes:
        value: of the requests that are served.
        cost: moves, conversions, flexibility and idle instances; see options.py.
        rows: the option of each card.
    """

    value: int
    cost: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class _Stage:
    """States after a card: what is served, the cost, and how each was reached."""

    served: Counts
    costs: Ints
    parents: Ints
    rows: Ints

    def keep(self, rows: NDArray[np.intp] | NDArray[np.bool_]) -> "_Stage":
        return _Stage(self.served[rows], self.costs[rows], self.parents[rows], self.rows[rows])


class Join:
    """Finds the best combination of options, card by card.

    A state says how much of every demand is served. Of equal states the cheapest is kept, which is exact. If
    too many states remain after a card, the most promising ones are kept.

    Args:
        demands: the columns.
        cards: the options of every card. Cards of one model follow each other.
        geometries: the model of every card.
        bound: limits what cards can serve.
    """

    def __init__(
        self,
        demands: Demands,
        cards: Sequence[Options],
        geometries: Sequence[Geometry],
        bound: Bound,
    ) -> None:
        self._demands, self._cards = demands, cards
        self._geometries, self._bound = geometries, bound
        self._caps = np.array(demands.caps, dtype=np.int16)
        self._first_job = len(demands.values)
        self._low = np.zeros(len(self._caps), dtype=np.int16)
        self._low[self._first_job : -1] = -demands.case.moves
        self._low[-1] = -demands.case.conversions
        self._work = (WORK if len(cards) > EXACT_CARDS else EXACT_WORK) // max(1, len(cards))
        # Less than a move more than is allowed; smaller costs never add up to a move.
        self._too_expensive = demands.case.moves * MOVE + MOVE // 2
        radices = self._caps.astype(np.int64) - self._low + 1
        self._weights = np.cumprod(np.concatenate([[1], radices[:-1]]))
        cheapest = [int(card.costs.min()) for card in cards]
        self._cost_after = [sum(cheapest[number + 1 :]) for number in range(len(cards))]

    def best(self, width: int, known: Combination | None = None) -> Combination | None:
        """Return the best combination, keeping at most `width` states after each card.

        None if all states that were kept move a job that then has no instance.

        known: a combination that was found before. States that cannot lead to a better one are dropped.
        """
        shape = (1, len(self._caps))
        nothing = np.zeros(1, dtype=np.int64)
        stage = _Stage(np.zeros(shape, dtype=np.int16), nothing, nothing, nothing)
        stages: list[_Stage] = []
        for number, options in enumerate(self._cards):
            if number:
                stage = self._prune(
                    stage, number - 1, min(width, self._work // len(options.costs)), known
                )
                stages[-1] = stage
            last = number + 1 == len(self._cards)
            stage = self._add(stage, options, self._best_row if last else self._cheapest)
            geometry = self._geometries[number]
            if not last and geometry not in self._geometries[number + 1 :]:
                stage = self._cheapest(self._settle(stage, geometry))
            stages.append(stage)
        stage = stage if known is None else self._prune(stage, len(self._cards) - 1, 1, known)
        return self._result(stages) if len(stage.costs) else known

    def _result(self, stages: list[_Stage]) -> Combination:
        rows: list[int] = []
        row = 0
        for stage in reversed(stages):
            rows.append(int(stage.rows[row]))
            row = int(stage.parents[row])
        last = stages[-1]
        value, cost = int(self._demands.value(last.served)[0]), int(last.costs[0])
        return Combination(value, cost, tuple(reversed(rows)))

    def _add(self, stage: _Stage, options: Options, reduce: Callable[[_Stage], _Stage]) -> _Stage:
        """Return every state with every option of the next card, reduced to those that matter."""
        count = len(options.costs)
        step = max(1, PAIRS // count)
        parts: list[_Stage] = []
        for begin in range(0, len(stage.costs), step):
            end = min(begin + step, len(stage.costs))
            served = stage.served[begin:end, None, :] + options.gains[None]
            served = np.minimum(served, self._caps).reshape(-1, len(self._caps))
            costs = (stage.costs[begin:end, None] + options.costs[None]).ravel()
            parents = np.repeat(np.arange(begin, end), count)
            rows = np.tile(np.arange(count), end - begin)
            allowed = (served >= self._low).all(axis=1) & (costs < self._too_expensive)
            parts.append(reduce(_Stage(served, costs, parents, rows).keep(allowed)))
            if len(parts) > 1 and sum(len(part.costs) for part in parts) > PAIRS:
                parts = [reduce(_joined(parts))]
        if not parts:
            return stage
        return reduce(_joined(parts)) if len(parts) > 1 else parts[0]

    def _best_row(self, stage: _Stage) -> _Stage:
        """Return only the best of the states after the last card."""
        stage = self._settle(stage, self._geometries[-1])
        order = np.lexsort((stage.costs, -self._demands.value(stage.served)))
        return stage.keep(order[:1])

    def _cheapest(self, stage: _Stage) -> _Stage:
        """Return the cheapest of each group of equal states."""
        # The weights may overflow with many demands; then they hash, and wrap around.
        keys = np.zeros(len(stage.costs), dtype=np.int64)
        for column, weight in enumerate(self._weights):
            keys += stage.served[:, column] * weight
        order = np.lexsort((stage.costs, keys))
        sorted_keys = keys[order]
        first = np.ones(len(order), dtype=np.bool_)
        first[1:] = sorted_keys[1:] != sorted_keys[:-1]
        return stage.keep(order[first])

    def _settle(self, stage: _Stage, geometry: Geometry) -> _Stage:
        """Give jobs of one model their instances, then let the others serve requests of any model."""
        columns = [
            column
            for column, (model, _) in enumerate(self._demands.jobs, self._first_job)
            if model == geometry
        ]
        if not columns:
            return stage
        housed = np.flatnonzero((stage.served[:, columns] >= 0).all(axis=1))
        served = self._demands.for_requests(stage.served)
        served[:, columns] = 0
        after = _Stage(served, stage.costs, stage.parents, stage.rows)
        return after.keep(housed)

    def _prune(self, stage: _Stage, number: int, width: int, known: Combination | None) -> _Stage:
        if known is not None:
            bound = self._bound.value(stage.served, number)
            costs = stage.costs + self._cost_after[number]
            equal = (bound < known.value + 0.5) & (costs >= known.cost)
            hopeless = np.where(bound < known.value - 0.5, True, equal)
            stage = stage.keep(np.flatnonzero(~hopeless))
        if len(stage.costs) > width:
            bound = self._bound.value(stage.served, number, DISCOUNT)
            stage = stage.keep(np.lexsort((stage.costs, -bound))[:width])
        return stage


def _joined(parts: list[_Stage]) -> _Stage:
    return _Stage(
        np.concatenate([part.served for part in parts]),
        np.concatenate([part.costs for part in parts]),
        np.concatenate([part.parents for part in parts]),
        np.concatenate([part.rows for part in parts]),
    )


FIRST_WIDTH = 100
"""States of the first search, whose result limits the second one."""
WIDTH = 60_000
"""States that are kept after each card. Up to four cards need fewer, so that plans for them are optimal."""


def plan(case: MigCase, width: int = WIDTH) -> MigPlan:
    """Return the best steps for a case.

    width: how many states are compared after each card. The result is optimal if they suffice.
    """
    if not case.cards:
        return MigPlan()
    demands = Demands(case)
    seen: dict[PlannedCard, Options] = {}
    sizes: list[tuple[PlannedCard, Options]] = []
    for card in case.cards:
        shape = _anonymous(card)
        if shape not in seen:
            seen[shape] = CardOptions(shape, demands).options()
        sizes.append((card, seen[shape]))
    models = list(dict.fromkeys(card.geometry for card in case.cards))
    # Cards with few options first: their states are few, too.
    sizes.sort(key=lambda size: (models.index(size[0].geometry), len(size[1].costs)))
    cards = [card for card, _ in sizes]
    join = Join(
        demands,
        [options for _, options in sizes],
        [card.geometry for card in cards],
        Bound(demands, cards),
    )
    result = join.best(min(FIRST_WIDTH, width))
    if width > FIRST_WIDTH:
        result = join.best(width, known=result)
    if result is None:
        return plan(replace(case, moves=0), width)
    chosen = {
        card.name: options.hostings[row]
        for (card, options), row in zip(sizes, result.rows, strict=True)
    }
    return _Assignment(case, [chosen[card.name] for card in case.cards]).plan()


def _anonymous(card: PlannedCard) -> PlannedCard:
    """Return the card without its name and those of its jobs, so that equal cards are computed once."""
    instances = (
        replace(instance, job="job" if instance.job else "") for instance in _by_start(card)
    )
    return replace(card, name="", instances=tuple(instances))


def _by_start(card: PlannedCard) -> list[PlannedInstance]:
    """Return the instances in the order that options are computed in, whatever the case's order is."""
    return sorted(card.instances, key=lambda instance: instance.place.start)


@dataclass
class _Use:
    """An instance of the final layout that somebody may use.

    contents: counts of slices by size; None if it serves a request or a job alone.
    """

    card: PlannedCard
    place: Place
    contents: tuple[int, ...] | None = None
    used: bool = False

    @property
    def target(self) -> PlannedTarget:
        return PlannedTarget(self.card.name, self.place.start)


class _Assignment:
    """Turns the chosen option of every card into steps, and names who gets what."""

    def __init__(self, case: MigCase, chosen: Sequence[Hosting]) -> None:
        self._case = case
        self._kept = [
            _kept_jobs(card, hosting) for card, hosting in zip(case.cards, chosen, strict=True)
        ]
        self._uses = [
            use
            for card, hosting in zip(case.cards, chosen, strict=True)
            for use in _uses(card, hosting)
        ]

    def plan(self) -> MigPlan:
        """Return the plan."""
        moved = dict(self._move_jobs())
        served = dict(self._serve_profiles()) | dict(self._serve_slices())
        return MigPlan(tuple(self._steps()), served, moved)

    def _alone(self, profile: str) -> Iterator[_Use]:
        return (
            use
            for use in self._uses
            if use.contents is None and not use.used and use.place.profile.name == profile
        )

    def _move_jobs(self) -> Iterator[tuple[str, PlannedTarget]]:
        for card, kept in zip(self._case.cards, self._kept, strict=True):
            for instance in card.instances:
                if instance.state is State.MOVABLE and instance.place not in kept:
                    use = self._new_home(card.geometry, instance.place.profile)
                    use.used = True
                    yield instance.job, use.target

    def _new_home(self, geometry: Geometry, profile: Profile) -> _Use:
        return next(use for use in self._alone(profile.name) if use.card.geometry == geometry)

    def _serve_profiles(self) -> Iterator[tuple[str, PlannedTarget]]:
        for name, requests in self._case.profile_requests.items():
            for request, use in zip(requests, list(self._alone(name)), strict=False):
                use.used = True
                yield request.name, use.target

    def _serve_slices(self) -> Iterator[tuple[str, PlannedTarget]]:
        for kind, requests in enumerate(self._case.slice_requests.values()):
            places = (
                use
                for use in self._uses
                if use.contents is not None
                for _ in range(use.contents[kind])
            )
            for request, use in zip(requests, places, strict=False):
                use.used = True
                yield request.name, use.target

    def _steps(self) -> list[Step]:
        destroys: list[Step] = []
        enables: list[Step] = []
        creates: list[Step] = []
        for card, kept in zip(self._case.cards, self._kept, strict=True):
            uses = [use.place for use in self._uses if use.used and use.card is card]
            present = [instance.place for instance in card.instances]
            new = [place for place in uses if place not in present]
            layout = [*kept, *new]
            idle = [instance.place for instance in card.instances if instance.state is State.IDLE]
            layout += [place for place in idle if place in uses]
            for place in [place for place in idle if place not in uses]:
                if card.geometry.conflict(layout, place):
                    destroys.append(Destroy(card.name, place))
                else:
                    layout.append(place)
            destroys += [
                Destroy(card.name, instance.place)
                for instance in card.instances
                if instance.state is State.MOVABLE and instance.place not in kept
            ]
            enables += [Enable(card.name)] * (not card.mig and bool(new))
            creates += [Create(card.name, place) for place in new]
        return [*destroys, *enables, *creates]


def _layout(card: PlannedCard, hosting: Hosting) -> list[Place]:
    if hosting.layout < 0:
        return []
    table = layout_table(card.geometry)
    places = int(table.places[hosting.layout])
    return [place for place, bit in table.bits.items() if places & bit]


def _kept_jobs(card: PlannedCard, hosting: Hosting) -> list[Place]:
    """Return the places of used, shared and movable instances that stay."""
    layout = _layout(card, hosting)
    return [
        instance.place
        for instance in card.instances
        if instance.state is not State.IDLE and instance.place in layout
    ]


def _uses(card: PlannedCard, hosting: Hosting) -> Iterator[_Use]:
    """Return the instances that are there for requests, shared ones included."""
    contents = iter(hosting.contents)
    for instance in _by_start(card):
        if instance.state is State.SHARED and hosting.contents:
            yield _Use(card, instance.place, next(contents))
    kept = _kept_jobs(card, hosting)
    serving = [place for place in _layout(card, hosting) if place not in kept]
    for number, profile in enumerate(card.geometry.profiles):
        places = [place for place in serving if place.profile == profile]
        holding = hosting.hosts[number] if hosting.hosts else 0
        for place in places[:holding]:
            yield _Use(card, place, next(contents))
        for place in places[holding:]:
            yield _Use(card, place)
