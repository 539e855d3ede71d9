"""The policies by name: one row each for what is compared. To add one, write its functions and its rows."""

from fenka.core.policies import baselines, target_scores
from fenka.core.policies.candidates import ScoreFunction

SCORES: dict[str, ScoreFunction] = {
    "binpack": baselines.binpack,
    "spread": baselines.spread,
    "random": baselines.random,
    "dotprod": baselines.dot_product,
    "clustering": baselines.clustering,
    "packing": baselines.packing,
    "bestfit": baselines.best_fit,
    "fgd": target_scores.fgd,
    "bid-price": target_scores.bid_price,
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

TARGET_POLICIES = ("fgd", "bid-price")
"""Policies that place for an expected workload."""
