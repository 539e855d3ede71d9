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

CHOICES = {
    "binpack": "it is on the fullest node with room, and has the least free memory there that suffices",
    "spread": "it is on the emptiest node with room, and has the most free memory there",
    "random": "it is any of those with room",
    "dotprod": "what its node has free is the least like what the pod requests",
    "clustering": "its node has the same kind of pods",
    "packing": "it was in use, or its node was, where there was room",
    "bestfit": "its node has the least CPU and cards left",
    "fgd": "here the least that is free becomes useless to the pods that are expected",
    "bid-price": "of those with room its node loses the least value for the pods that are expected",
}
"""Why a policy has chosen a card, as the end of a sentence about the card."""

CARD_SCORES: dict[str, ScoreFunction] = {
    "random": baselines.random_card,
    "dotprod": baselines.tightest_card,
    "clustering": baselines.tightest_card,
    "bestfit": baselines.tightest_card,
}
"""Functions that compare the cards of a node, for policies that compare these otherwise than nodes."""

TARGET_POLICIES = ("fgd", "bid-price")
"""Policies that place for an expected workload."""
