"""When to plan: pods that come together are planned for together. Pure: times are passed in."""

from collections.abc import Collection

from fenka.cloud.config import ScaleOut


class Windows:
    """Follows which pods are pending and not planned for."""

    def __init__(self, settings: ScaleOut) -> None:
        self._settings = settings
        self._considered: set[str] = set()
        """Pods that a plan was made for."""
        self._new: set[str] = set()
        self._first_at = self._last_at = 0.0

    def see(self, uids: Collection[str], now: float) -> None:
        """Take these as all pods that are pending and not planned for."""
        self._considered.intersection_update(uids)
        self._new.intersection_update(uids)
        fresh = set(uids) - self._considered - self._new
        if not fresh:
            return
        if not self._new:
            self._first_at = now
        self._last_at = now
        self._new |= fresh

    def forget(self) -> None:
        """Take all pods as new ones at the next look."""
        self._considered.clear()
        self._new.clear()

    def due_at(self) -> float | None:
        """Return when to plan for the new pods, None if there are none."""
        if not self._new:
            return None
        settings = self._settings
        return min(self._last_at + settings.window, self._first_at + settings.window_most)

    def planned(self) -> None:
        """Note that a plan was made for all that were seen."""
        self._considered |= self._new
        self._new.clear()
