"""Test that a run of random actions ends as it is told, and says when it tried nothing."""

import random
from dataclasses import dataclass, field

import pytest

from fire.experiment import InvariantViolation, inject


@dataclass
class Counted:
    """An installation in which nothing can be violated."""

    rng: random.Random = field(default_factory=lambda: random.Random(1))
    counts: dict[str, int] = field(default_factory=dict)
    moments: list[str] = field(default_factory=list)

    def check(self, moment: str) -> None:
        """Note the moment."""
        self.moments.append(moment)

    def act(self) -> None:
        """Do nothing."""


def test_inject_audits_after_each_action_until_the_limit() -> None:
    """Three actions are allowed, and 600 s: three audits."""
    installation, seen = Counted(), list[int]()
    assert inject(installation, [(installation.act, 1)], 3, 600, seen.append) == 3
    assert installation.moments == [f"action {number} (act)" for number in (1, 2, 3)]
    assert seen == [1, 2, 3]
    assert installation.counts == {"act": 3}


@pytest.mark.parametrize(("limit", "seconds"), [(0, 600), (3, 0)])
def test_inject_fails_when_nothing_was_tried(limit: int, seconds: float) -> None:
    """A run that had no time, or that was allowed no action, has shown nothing."""
    installation = Counted()
    with pytest.raises(InvariantViolation, match="nothing was tried"):
        inject(installation, [(installation.act, 1)], limit, seconds, lambda _: None)
