"""The policies by name: one row each for what is compared. To add one, write its functions and its rows."""

from collections.abc import Callable

from fenka.core.columns import AnyInts
from fenka.core.policies import baselines, fragments, prices
from fenka.core.policies.candidates import ScoreFunction
from fenka.core.policies.node_scores import NodeScores
from fenka.core.policies.prices import Floats

SCORES: dict[str, ScoreFunction] = {
    "binpack": baselines.binpack,
    "spread": baselines.spread,
    "random": baselines.random,
    "dotprod": baselines.dot_product,
    "clustering": baselines.clustering,
    "packing": baselines.packing,
    "bestfit": baselines.best_fit,
    "fgd": fragments.plain_score,
    "bid-price": prices.plain_score,
}
"""Functions that compare nodes, each with its best card.

binpack: the fullest node, and on it gpushare's card, the one with the smallest sufficient free memory;
ties go to less free compute, then to the lowest index. spread: the reverse, ties to the lowest index."""

CARD_SCORES: dict[str, ScoreFunction] = {
    "random": baselines.random_card,
    "dotprod": baselines.tightest_card,
    "clustering": baselines.tightest_card,
    "bestfit": baselines.tightest_card,
}
"""Functions that compare the cards of a node, for policies that compare these otherwise than nodes."""

Keys = tuple[AnyInts | Floats, ...]

COLUMN_KEYS: dict[str, Callable[[NodeScores], Keys]] = {
    "random": baselines.random_keys,
    "dotprod": baselines.dot_product_keys,
    "clustering": baselines.clustering_keys,
    "packing": baselines.packing_keys,
    "bestfit": baselines.best_fit_keys,
    "fgd": fragments.column_keys,
    "bid-price": prices.column_keys,
}
"""The columnar twins of SCORES, but for binpack and spread (`columnar.py`): the first key decides first."""

TARGET_POLICIES = ("fgd", "bid-price")
"""Policies that place for an expected workload."""
