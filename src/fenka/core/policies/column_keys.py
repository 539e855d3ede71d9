"""The columnar form of each policy by name."""

from collections.abc import Callable

from fenka.core.columns import AnyInts
from fenka.core.policies import baseline_columns, fragments, prices
from fenka.core.policies.node_scores import NodeScores
from fenka.core.policies.prices import Floats

Keys = tuple[AnyInts | Floats, ...]

COLUMN_KEYS: dict[str, Callable[[NodeScores], Keys]] = {
    "random": baseline_columns.random_keys,
    "dotprod": baseline_columns.dot_product_keys,
    "clustering": baseline_columns.clustering_keys,
    "packing": baseline_columns.packing_keys,
    "bestfit": baseline_columns.best_fit_keys,
    "fgd": fragments.column_keys,
    "bid-price": prices.column_keys,
}
"""The columnar twins of SCORES, but for binpack and spread (`columnar.py`): the first key decides first."""
