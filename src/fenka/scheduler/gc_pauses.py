"""Keeps the pauses of Python's garbage collector short in a process with a million lasting objects.

A full collection visits every object that may be in a cycle: with 5,000 nodes and 80,000 pods for a second.
Nearly all of them live for hours, and are freed by their reference counts. So what survives a full
collection is frozen, and the next one visits only what is new.

A cycle that becomes garbage after it was frozen, such as a closed connection, is freed by the next full
collection that visits everything.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

OLDEST_GENERATION = 2
YOUNG = 50_000
"""New objects between two collections of the youngest. An answer of 5,000 nodes has some 10,000, none of
them in a cycle; Python's own 700 would visit them a dozen times."""
COMPLETE_EVERY = 1000
"""One of this many full collections visits everything: once a day or so."""


@contextlib.contextmanager
def short_gc_pauses(
    is_starting: Callable[[], bool] = lambda: False, complete_every: int = COMPLETE_EVERY
) -> Iterator[None]:
    """Freeze what survives full collections while the block runs.

    is_starting: whether all that is made now lasts, so that it is frozen by the first collection of any kind.
    """
    number = count(1)

    def on_collection(phase: str, info: dict[str, Any]) -> None:
        oldest = info["generation"] == OLDEST_GENERATION
        if phase == "stop":
            if oldest or is_starting():
                gc.freeze()
        elif oldest and not next(number) % complete_every:
            gc.unfreeze()

    thresholds = gc.get_threshold()
    gc.set_threshold(YOUNG, *thresholds[1:])
    gc.callbacks.append(on_collection)
    try:
        yield
    finally:
        gc.callbacks.remove(on_collection)
        gc.set_threshold(*thresholds)
        gc.unfreeze()
