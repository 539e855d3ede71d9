"""How many requests a second a service has answered lately, by what its gateway has counted."""

from collections.abc import Mapping

SPAN_S = 5.0
"""Seconds over which a rate is the mean. The status of a busy service is written as often."""


class RequestRates:
    """The rates of a service's versions.

    Attributes:
        per_s: Requests a second by version; empty while they are not known.
    """

    def __init__(self) -> None:
        self.per_s: dict[str, float] = {}
        self._since: tuple[float, Mapping[str, int]] | None = None

    def on_report(self, now: float, responses: Mapping[str, int] | None) -> None:
        """Take what the gateway reports.

        Args:
            now: The monotonic clock's seconds.
            responses: Responses so far, by version; None if the gateway does not answer.
        """
        if responses is None:
            self._since, self.per_s = None, {}
            return
        if self._since is None:
            self._since = now, responses
            return
        since, before = self._since
        if now < since + SPAN_S:
            return
        # A gateway that was started again counts from 0.
        self.per_s = {
            version: round(max(0, count - before.get(version, 0)) / (now - since), 1)
            for version, count in responses.items()
        }
        self._since = now, responses
