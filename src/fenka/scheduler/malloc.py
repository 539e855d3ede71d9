"""Has the C library return freed memory to the system.

With 5,000 nodes each pass over the queue replaces arrays of several MiB. By default glibc would keep them: it
raises its thresholds with the largest block that was freed.
"""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Options of mallopt(3)."""
RETURNED_BYTES = 4 << 20
"""Blocks of at least this size are mapped on their own, and so much is kept free at the end of the heap."""


def return_freed_memory() -> None:
    """Set the thresholds of this process. Other C libraries than glibc have none."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, RETURNED_BYTES)
        mallopt(_MMAP_THRESHOLD, RETURNED_BYTES)
