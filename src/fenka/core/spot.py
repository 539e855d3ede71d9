"""The one definition of which work may run on spot nodes, which the cloud takes back.

The planner asks before it buys a node, the scheduler before it admits a pod.
"""

from math import inf


def needed_protection_s(duration_s: float | None, *, interruptible: bool) -> float:
    """Return for how long a spot node must be protected to run this: 0 for interruptible work.

    duration_s: how long it runs at most, None if that is not limited.
    """
    if interruptible:
        return 0.0
    return inf if duration_s is None else duration_s
