"""Which cards the daemon's option `--mig` divides."""

from collections.abc import Collection, Iterable, Mapping

from fenka.core.inventory import Card
from fenka.core.mig.geometry import Geometry
from fenka.hardware import mig_instances
from fenka.hardware.mig_instances import InstanceInUse, MigError
from fenka.instances.manager import is_enabled
from fenka.workstation.log import log

OFF, ALL = "off", "all"
"""Values of the daemon's option `--mig` beside cards."""


def switch(cards: Iterable[Card], wanted: Collection[str], capable: Mapping[str, Geometry]) -> None:
    """Enable MIG on the cards that the administrator names, by index or UUID, or on all that have it.

    A card that is in use stays whole, and is reported in the log. Raises MigError for a card without MIG.
    """
    for card in cards:
        named = not {str(card.index), card.uuid}.isdisjoint(wanted)
        if not named and not (ALL in wanted and card.uuid in capable):
            continue
        if card.uuid not in capable:
            raise MigError(f"card {card.index} ({card.model}) has no MIG: leave it out of --mig")
        if is_enabled(card.uuid):
            continue
        try:
            mig_instances.set_mig_mode(card.uuid, enabled=True)
        except InstanceInUse:
            log(
                f"card {card.index} stays whole: programs have it open; MIG is pending until they have ended"
            )
