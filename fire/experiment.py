"""Draw random actions and check invariants after each; shared by both experiments."""

import random
import time
from collections.abc import Callable, Sequence
from typing import Protocol


class InvariantViolation(Exception):
    """The audit found a violated invariant; the message names it."""


class Experiment(Protocol):
    """A run of random actions against one installation."""

    rng: random.Random
    counts: dict[str, int]

    def check(self, moment: str) -> None:
        """Audit the installation.

        Args:
            moment: the action before, for the message.

        Raises:
            InvariantViolation: an invariant is violated.
        """


Action = Callable[[], None]


def inject(
    experiment: Experiment,
    table: Sequence[tuple[Action, float]],
    limit: int,
    seconds: float,
    progress: Callable[[int], None],
) -> int:
    """Run random actions, audit after each, and return their number.

    Args:
        experiment: the installation.
        table: the actions with their weights.
        limit: the maximum number of actions.
        seconds: after this time no further action begins. The installation's start does not count.
        progress: called with the number of each finished action.

    Raises:
        InvariantViolation: the audit after an action failed, or there was no action.
    """
    done, until = 0, time.monotonic() + seconds
    while done < limit and time.monotonic() < until:
        action = experiment.rng.choices(
            [candidate for candidate, _ in table], [weight for _, weight in table]
        )[0]
        name = action.__name__
        experiment.counts[name] = experiment.counts.get(name, 0) + 1
        action()
        done += 1
        experiment.check(f"action {done} ({name})")
        progress(done)
    if not done:
        raise InvariantViolation(
            f"nothing was tried: {limit} actions in {seconds:g} s were allowed"
        )
    return done
