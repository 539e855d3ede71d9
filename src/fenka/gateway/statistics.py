"""Counts what has become of requests: plain numbers, which cost a request less than a microsecond."""

from bisect import bisect_left
from collections import Counter

BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class Durations:
    """A histogram of seconds. counts: one more than BUCKETS_S, for what exceeds all."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.total_s += seconds


class Statistics:
    """Counters since the start of the program.

    Attributes:
        responses: The number of responses by version and status.
        durations: From a request's arrival to the end of its response, by version.
        rejected: The number of requests that got no complete response from a replica, by reason.
        buffered: The number of requests that waited for a replica.
        abandoned: The number of requests whose clients went before the response was complete.
        retries: The number of requests sent to a second connection.
        unreachable: The number of connections that replicas did not accept.
    """

    def __init__(self) -> None:
        self.responses: Counter[tuple[str, int]] = Counter()
        self.durations: dict[str, Durations] = {}
        self.rejected: Counter[str] = Counter()
        self.buffered = self.abandoned = self.retries = self.unreachable = 0

    def observe(self, version: str, status: int, seconds: float) -> None:
        """Count a response."""
        self.responses[version, status] += 1
        durations = self.durations.get(version)
        if durations is None:
            durations = self.durations[version] = Durations()
        durations.add(seconds)

    def reject(self, reason: str) -> None:
        """Count a request without a complete response."""
        self.rejected[reason] += 1
