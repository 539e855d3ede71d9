"""The columnar twins of `baselines.py`."""

import numpy as np

from fenka.core.columns import CLASS, HOLDERS, WHOLE, Ints
from fenka.core.policies import levels
from fenka.core.policies.baselines import LARGEST_CARDS, LARGEST_CPU, POINTS, drawn
from fenka.core.policies.candidates import FULL
from fenka.core.policies.node_scores import NodeScores


def _needed_of_slots(on: NodeScores) -> Ints:
    columns, cards = on.columns, on.request.cards
    if not cards:
        return np.zeros(on.slots.size, np.int64)
    needs = [cards * levels.need(card_class, on.request) for card_class in columns.classes]
    fitting = np.where(on.card_fits, np.arange(on.card_fits.size), on.card_fits.size)
    first = np.minimum.reduceat(fitting, columns.starts)[on.slots]
    needed: Ints = np.array(needs, np.int64)[columns.cards[CLASS, first]]
    return needed


def best_fit_keys(on: NodeScores) -> tuple[Ints, ...]:
    """Return the twin of `best_fit`."""
    cpu = (on.cpu - on.request.cpu_milli) / LARGEST_CPU
    free = (on.by_slot(on.levels) - _needed_of_slots(on)) / LARGEST_CARDS
    return (-np.floor(POINTS * (1 - (0.5 * cpu + 0.5 * free))).astype(np.int64),)


def dot_product_keys(on: NodeScores) -> tuple[Ints, ...]:
    """Return the twin of `dot_product`."""
    cpu = on.cpu / LARGEST_CPU * (on.request.cpu_milli / LARGEST_CPU)
    free = on.by_slot(on.levels)
    cards = free / LARGEST_CARDS * (_needed_of_slots(on) / LARGEST_CARDS)
    return (-np.floor(POINTS * (1 - (cpu + cards) / 2)).astype(np.int64),)


def packing_keys(on: NodeScores) -> tuple[Ints, ...]:
    """Return the twin of `packing`."""
    if not on.request.cards:
        return ()
    holders = on.columns.usage[HOLDERS] > 0
    idle, used = on.by_slot(on.levels == FULL), on.by_slot(holders)
    of_nodes = np.where(used > 0, 50, 33) - idle
    shared = np.where(on.card_fits & holders, 100 - on.levels * 10 // FULL, -1)
    best = np.maximum.reduceat(shared, on.columns.starts)[on.slots]
    return (-np.where(best >= 0, best, of_nodes),)


def clustering_keys(on: NodeScores) -> tuple[Ints, ...]:
    """Return the twin of `clustering`."""
    if not on.request.cards:
        return ()
    whole = on.by_slot(on.columns.usage[WHOLE] > 0)
    slices = on.by_slot(on.columns.usage[HOLDERS] > 0) - whole
    same, other = (whole, slices) if on.request.whole else (slices, whole)
    tier = np.where(same > 0, np.where(other > 0, 50, 75), np.where(other > 0, 0, 25))
    return (-(tier + 25 * (LARGEST_CARDS - on.by_slot(on.levels)) // LARGEST_CARDS),)


def random_keys(on: NodeScores) -> tuple[Ints, ...]:
    """Return the twin of `random`."""
    nodes = on.columns.nodes
    names = [node.name if node else "" for node in map(nodes.__getitem__, on.slots.tolist())]
    return (np.array([drawn(name, on.target) for name in names], np.int64),)
