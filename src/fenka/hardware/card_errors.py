"""Reported errors after which a card, or a MIG instance, is not used until it is reset.

The node program and the workstation's daemon follow these rules alike.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping

from fenka.hardware.xids import is_fatal_xid

FALLEN_OFF = "it has fallen off the bus"
NO_SIZE = "the driver reports no memory of it, so slices need its size to be configured"


class CardErrors:
    """The errors by the card's UUID, or by an instance's key, which begins with its card's UUID and `/`."""

    def __init__(
        self,
        known: Mapping[str, str] | None = None,
        save: Callable[[Mapping[str, str]], None] = lambda _: None,
    ) -> None:
        """Args:
        known: Errors that an earlier process has recorded.
        save: Records all errors for the next process. It may be called in any thread.
        """
        self._errors, self._save = dict(known or {}), save
        self._changing = threading.Lock()

    def get(self, key: str) -> str | None:
        """Return why a card or instance is not used; None if nothing is known against it."""
        return self._errors.get(key)

    def report_xid(self, keys: Iterable[str], xid: int) -> bool:
        """Record an XID of these cards or instances. Return whether they are not used any more."""
        if not is_fatal_xid(xid):
            return False
        self._update(self._errors | dict.fromkeys(keys, f"XID {xid}"))
        return True

    def clear_returned(self, cards: Collection[str]) -> None:
        """Forget the errors of lost cards that the driver shows again: only a reset does that."""
        self._update({key: error for key, error in self._errors.items() if key not in cards})

    def clear_reset(self, cards: Collection[str]) -> None:
        """Forget the errors of cards that a user has reset, and of their instances."""
        self._update(
            {
                key: error
                for key, error in self._errors.items()
                if key.partition("/")[0] not in cards
            }
        )

    def _update(self, errors: dict[str, str]) -> None:
        with self._changing:
            if errors != self._errors:
                self._errors = errors
                self._save(errors)
