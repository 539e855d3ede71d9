"""The garbage collector visits what lasts only once."""

import gc
import weakref

import pytest

from fenka.scheduler.main import short_gc_pauses


class Ring:
    """A cycle: only the collector can free it."""

    def __init__(self) -> None:
        self.itself = self


def test_survivors_are_frozen_when_a_full_collection_ends() -> None:
    """So that the next one does not visit them."""
    with short_gc_pauses():
        lasting = Ring()
        gc.collect()
        assert gc.get_freeze_count() > 0
        assert all(obj is not lasting for obj in gc.get_objects())


@pytest.mark.parametrize("starting", [True, False])
def test_survivors_of_any_collection_are_frozen_only_when_the_process_starts(
    starting: bool,
) -> None:
    """Then nearly all that is made lasts."""
    with short_gc_pauses(lambda: starting):
        lasting = Ring()
        gc.collect(0)
        assert all(obj is not lasting for obj in gc.get_objects()) is starting


def test_new_garbage_is_freed_when_older_objects_are_frozen() -> None:
    """A cycle that no full collection has seen before."""
    with short_gc_pauses():
        gc.collect()
        gone = weakref.ref(Ring())
        gc.collect()
        assert gone() is None


def test_frozen_garbage_is_freed_when_a_collection_visits_everything() -> None:
    """Every third collection here."""
    with short_gc_pauses(complete_every=3):
        ring = Ring()
        gc.collect()
        gone = weakref.ref(ring)
        del ring
        gc.collect()
        assert gone() is not None
        gc.collect()
        assert gone() is None


def test_collector_is_as_before_when_the_block_ends() -> None:
    """Other parts of the process are not affected."""
    before = gc.get_threshold(), list(gc.callbacks)
    with short_gc_pauses():
        gc.collect()
    assert gc.get_freeze_count() == 0
    assert (gc.get_threshold(), gc.callbacks) == before
