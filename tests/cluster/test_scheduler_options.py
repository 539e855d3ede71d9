"""The options that the leader publishes on its Lease."""

import pytest

from fenka.cluster.queue_snapshot import SchedulerOptions, decode
from fenka.core.queue import Fairness
from fenka.dialects.base import InvalidRecord
from fenka.dialects.registry import DIALECTS, WITH_HAMI


@pytest.mark.parametrize(
    "options",
    [SchedulerOptions(), SchedulerOptions("spread", hami=True, fairness=Fairness(0, 60, 0))],
)
def test_options_are_read_as_they_were_written(options: SchedulerOptions) -> None:
    """They are JSON."""
    assert decode(options.encode()) == options
    assert options.dialects == (WITH_HAMI if options.hami else DIALECTS)


def test_options_of_another_version_are_read_when_they_have_other_fields() -> None:
    """Fields that are unknown here are ignored, those that are missing are the defaults."""
    assert decode('{"policy": "spread", "depth": 9}') == SchedulerOptions("spread")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"hami": "yes"}',
        '{"policy": "none"}',
        '{"fairness": {"half_life_s": -1}}',
        '{"fairness": {"max_penalty_s": 1e999}}',
        "[" * 100_000,
        '{"policy": "' + "x" * 100_000,
    ],
)
def test_decoding_fails_when_the_annotation_is_damaged(text: str) -> None:
    """Readers then use the defaults, and say so."""
    with pytest.raises(InvalidRecord, match=r"fenka.io/options") as why:
        decode(text)
    assert len(str(why.value)) < 400
