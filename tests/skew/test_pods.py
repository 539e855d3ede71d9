"""Pods that the last release's scheduler has placed, and what that release reads of this one's."""

import pytest

from fenka.dialects import pod_records
from fenka.dialects.registry import WITH_HAMI, detect
from tests.dialects.mig_builders import placed, with_records
from tests.skew.pods import PODS, annotations, read_annotations
from tests.skew.records import LAST

WRITTEN = read_annotations(LAST)


@pytest.mark.parametrize("name", WRITTEN)
def test_pod_placed_by_the_last_release_keeps_its_placement(name: str) -> None:
    """The node and the scheduler read the same cards and slices of its annotations."""
    request, shared = PODS[name]
    pod = with_records(request, WRITTEN[name])
    dialect = detect(pod, WITH_HAMI)
    assert dialect is not None
    assert pod_records.decode(dialect, pod, dialect.parse(pod), shared) == placed(request, shared)


@pytest.mark.parametrize("name", WRITTEN)
def test_pod_is_recorded_as_the_last_release_records_it(name: str) -> None:
    """After a rollback, or on a node that is not upgraded yet, the older release reads it."""
    request, shared = PODS[name]
    placements = placed(request, shared)
    assert placements is not None
    assert annotations(request, shared, placements) == WRITTEN[name]


def test_every_dialect_is_among_the_samples() -> None:
    """Also those that come later have to stay readable."""
    spoken = [detect(request, WITH_HAMI) for request, _ in PODS.values()]
    assert all(dialect in spoken for dialect in WITH_HAMI)
