"""Of the cards of this machine one daemon owns each: what a daemon says to who asks for another's."""

import contextlib
import sys
from collections.abc import Iterable

from fenka.core.cards import Card
from fenka.hardware.card_lock import CardLocked, Owner, acquire
from fenka.hardware.peer_credentials import user_name


class CardTaken(Exception):
    """Another daemon owns the card; the message says which process of whom."""


def lock_cards(cards: Iterable[Card]) -> contextlib.ExitStack:
    """Own these cards until the result is closed. Raises CardTaken."""
    with contextlib.ExitStack() as held:
        for card in cards:
            try:
                held.enter_context(acquire(card, lambda owner, card=card: _say(card, owner)))  # type: ignore[misc]
            except CardLocked as it:
                raise CardTaken(
                    f"{it} is owned by {_named(it.owner)}: use that daemon, stop it with "
                    "`fenka daemon --stop`, or leave the card out with --only"
                ) from None
        return held.pop_all()


def _say(card: Card, owner: Owner) -> None:
    print(
        f"fenka daemon: card {card.index} is root's now; process {owner.pid} of {user_name(owner.uid)} had "
        "claimed it: what that user's daemon has given of it stays in use until those programs end",
        file=sys.stderr,
        flush=True,
    )


def _named(owner: Owner | None) -> str:
    if owner is None:
        return "another daemon"
    return f"the daemon of {user_name(owner.uid)} (process {owner.pid})"
