"""Pauses of queue entries whose pods another program refuses: an admission policy or a webhook.

Such a refusal says nothing about cards. Without a pause the pod would reserve a card, and have others
preempted, at each attempt. Pure: times are seconds since 1970 and come in as arguments.
"""

from dataclasses import dataclass
from math import inf

from fenka.cluster.mappings import RecentDict

REFUSED = "FenkaRefused"
"""Reason of the event on a pod that neither reserves nor preempts for some time."""

FREE_REFUSALS = 1
"""RefusedEntries after which an entry is tried again at once."""

FIRST_PAUSE_S, MAX_PAUSE_S = 30.0, 600.0
"""The pause doubles at each further refusal."""

MAX_TEXT = 400
"""Characters that are kept of what the other program says."""


@dataclass(slots=True)
class RefusedEntry:
    """The refusals of an entry.

    Attributes:
        count: the number of refusals.
        until: until when the entry neither reserves nor preempts; 0 without a pause.
        what: the request that was refused, such as `its binding`.
        why: the API server's message.
        resumed: whether kube-scheduler was asked to try the entry since the pause ended.
    """

    count: int = 0
    until: float = 0.0
    what: str = ""
    why: str = ""
    resumed: bool = False

    def sentence(self, now: float) -> str:
        """Return what is refused, and for how long nothing is reserved."""
        left_s = max(round(self.until - now), 1)
        return (
            f"the API server refused {self.what} {self.count} times, whatever cards are free: {self.why}; "
            f"nothing is reserved or evicted for the pod for {left_s} s, then it is tried again"
        )


class RefusedEntries:
    """The refusals of entries, by ID. The limit of the dictionary bounds what tenants can fill."""

    def __init__(self) -> None:
        self._refused: RecentDict[str, RefusedEntry] = RecentDict()
        self.version = 0
        """Changes when a pause begins or ends."""

    def refuse(self, entry_id: str, what: str, why: str, now: float) -> RefusedEntry:
        """Record a refusal, and return it.

        Args:
            entry_id: the entry whose pod was refused.
            what: the request, such as `its binding`.
            why: the API server's message.
            now: the time.
        """
        refusal = self._refused.setdefault(entry_id, RefusedEntry())
        if refusal.until > now:
            # Another member of the same gang, in the same attempt.
            return refusal
        refusal.count += 1
        refusal.what, refusal.why, refusal.resumed = what, why[:MAX_TEXT], False
        pauses = refusal.count - FREE_REFUSALS
        if pauses > 0:
            # The exponent is bounded, so that the power stays a finite float.
            refusal.until = now + min(FIRST_PAUSE_S * 2.0 ** min(pauses - 1, 16), MAX_PAUSE_S)
            self.version += 1
        return refusal

    def pause(self, entry_id: str, now: float) -> RefusedEntry | None:
        """Return the refusal because of which the entry neither reserves nor preempts; None without one."""
        refusal = self._refused.get(entry_id)
        return refusal if refusal is not None and now < refusal.until else None

    def paused(self, now: float) -> dict[str, RefusedEntry]:
        """Return all entries in a pause, by ID."""
        return {name: refusal for name, refusal in self._refused.items() if now < refusal.until}

    def next_end(self, now: float) -> float:
        """Return when the next pause ends; infinite if there is none."""
        return min(
            (refusal.until for refusal in self._refused.values() if now < refusal.until),
            default=inf,
        )

    def resume(self, now: float) -> list[str]:
        """Return the entries whose pause has ended, each once: kube-scheduler is to try them."""
        ended = [
            name
            for name, refusal in self._refused.items()
            if 0 < refusal.until <= now and not refusal.resumed
        ]
        for name in ended:
            self._refused[name].resumed = True
        return ended

    def forget(self, entry_id: str) -> None:
        """Remove an entry that is bound or deleted."""
        if self._refused.pop(entry_id, None) is not None:
            self.version += 1

    def __contains__(self, entry_id: object) -> bool:
        return entry_id in self._refused

    def __bool__(self) -> bool:
        return bool(self._refused)
