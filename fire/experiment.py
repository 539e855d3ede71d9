"""What both storms share: the drawing of moves, and what a breach is."""

import random
import time
from collections.abc import Callable, Sequence
from typing import Protocol


class InvariantViolation(Exception):
    """The audit found what must never be; the message says what."""


class Experiment(Protocol):
    """A run of random actions against one installation."""

    rng: random.Random
    counts: dict[str, int]

    def check(self, moment: str) -> None:
        """Audit. Raises Breach."""


Move = Callable[[], None]


def inject(
    experiment: Experiment,
    table: Sequence[tuple[Move, float]],
    moves: int,
    until: float,
    progress: Callable[[int], None],
) -> int:
    """Make so many moves, or until this moment, and audit after each; return how many were made.

    table: the moves with their weights. progress: called after each move with its number. Raises Breach.
    """
    made = 0
    while made < moves and time.monotonic() < until:
        move = experiment.rng.choices(
            [candidate for candidate, _ in table], [weight for _, weight in table]
        )[0]
        name = move.__name__
        experiment.counts[name] = experiment.counts.get(name, 0) + 1
        move()
        made += 1
        experiment.check(f"move {made} ({name})")
        progress(made)
    return made
