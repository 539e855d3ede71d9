"""Measure how many requests of any size fit in MIG instances, in slices inside instances, and on whole cards.

Four A100-40G, Poisson arrivals, exponential durations of mean 1, a load of 0.8 of the cards' memory, sizes
drawn evenly in MiB. A request that does not fit is lost. Slices go where the least is left.
"""

import heapq
import random
from collections.abc import Callable, Iterator, Sequence

from bench.mig.arrivals import CARDS, LOAD
from fenka.core.mig.geometry import Geometry, Place
from fenka.core.mig.layouts import best_place

REQUESTS, WARM_UP = 20_000, 1000
SIZES = {"2 to 12 GiB": (2048, 12288), "1 to 20 GiB": (1024, 20480)}
CARD_MIB = 40960

Serve = Callable[[int, int], bool]
"""Takes the number of a request and its MiB; returns whether it is served."""


def in_bins(bins: Sequence[int]) -> tuple[Serve, Callable[[int], None]]:
    """Serve slices of these MiB."""
    left, where = list(bins), dict[int, tuple[int, int]]()

    def serve(number: int, mib: int) -> bool:
        fitting = [(free - mib, each) for each, free in enumerate(left) if free >= mib]
        if not fitting:
            return False
        _, chosen = min(fitting)
        left[chosen] -= mib
        where[number] = chosen, mib
        return True

    def end(number: int) -> None:
        chosen, mib = where.pop(number)
        left[chosen] += mib

    return serve, end


def in_profiles(geometry: Geometry) -> tuple[Serve, Callable[[int], None]]:
    """Serve the smallest profile that is large enough, at the most flexible place."""
    plain = sorted((each for each in geometry.profiles if each.plain), key=lambda it: it.memory_mib)
    layouts = [frozenset[Place]() for _ in range(CARDS)]
    where = dict[int, tuple[int, Place]]()

    def serve(number: int, mib: int) -> bool:
        profile = next(each for each in plain if each.memory_mib >= mib)
        choice = best_place([(geometry, layout) for layout in layouts], profile.name)
        if choice is None:
            return False
        place = Place(profile, choice.start)
        layouts[choice.card] |= {place}
        where[number] = choice.card, place
        return True

    def end(number: int) -> None:
        card, place = where.pop(number)
        layouts[card] -= {place}

    return serve, end


def ways(geometry: Geometry) -> Iterator[tuple[str, tuple[Serve, Callable[[int], None]]]]:
    """Yield the ways to serve requests, by name."""
    mib = {name: profile.memory_mib for name, profile in geometry.by_name.items()}
    yield "MIG profiles alone", in_profiles(geometry)
    yield "slices in 3g+4g", in_bins([mib["3g.20gb"], mib["4g.20gb"]] * CARDS)
    yield "slices in 7g", in_bins([mib["7g.40gb"]] * CARDS)
    yield "slices on whole cards", in_bins([CARD_MIB] * CARDS)


def share(sizes: tuple[int, int], way: tuple[Serve, Callable[[int], None]]) -> str:
    """Return the percentages of requests and of memory that are served."""
    rng, now, (serve, end) = random.Random(f"{sizes}"), 0.0, way
    running: list[tuple[float, int]] = []
    counts = [0, 0, 0, 0]
    for number in range(REQUESTS):
        now += rng.expovariate(LOAD * CARDS * CARD_MIB / (sum(sizes) / 2))
        mib, until = rng.randint(*sizes), now + rng.expovariate(1)
        while running and running[0][0] <= now:
            end(heapq.heappop(running)[1])
        served = serve(number, mib)
        if served:
            heapq.heappush(running, (until, number))
        if number >= WARM_UP:
            for at, more in enumerate((1, served, mib, mib * served)):
                counts[at] += more
    return f"{100 * counts[1] / counts[0]:.1f}/{100 * counts[3] / counts[2]:.1f}"
