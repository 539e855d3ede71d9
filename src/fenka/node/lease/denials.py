"""Remembers which pods are denied a lease, so that the scheduler moves those that cannot start here."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from fenka.dialects.leases import Refusal
from fenka.node.lease.resolve import LeaseDenied, LeasePending, Misplaced

REPORT_AFTER_S = 60.0
"""A pod that is denied a lease for so long is reported to the scheduler."""


@dataclass(frozen=True, slots=True)
class _Denial:
    uid: str
    since: float
    refusal: Refusal


class Denials:
    """Denials by token. clock: seconds since the epoch."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._denials: dict[str, _Denial] = {}

    def add(self, token: str, uid: str, error: LeaseDenied) -> None:
        """Remember the denial with its first time. A lease that is only pending is none."""
        if isinstance(error, LeasePending):
            return
        former = self._denials.get(token)
        since = former.since if former is not None else self._clock()
        self._denials[token] = _Denial(
            uid, since, Refusal(str(error), isinstance(error, Misplaced))
        )

    def discard(self, token: str) -> None:
        """Forget the denial of a token that has its lease."""
        self._denials.pop(token, None)

    def retain(self, tokens: Collection[str]) -> None:
        """Forget the denials of all other tokens."""
        self._denials = {name: it for name, it in self._denials.items() if name in tokens}

    def reportable(self) -> dict[str, Refusal]:
        """Return the denials that have lasted, by the pod's UID."""
        now = self._clock()
        return {
            denial.uid: denial.refusal
            for denial in self._denials.values()
            if now - denial.since >= REPORT_AFTER_S
        }
