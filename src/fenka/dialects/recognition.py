"""Which dialect a pod speaks."""

from collections.abc import Collection

from fenka.dialects import ack, gpu_manager, hami, whole_cards
from fenka.dialects.gpushare import Unreadable
from fenka.dialects.requests import Dialect, Manifest

DIALECTS: tuple[Dialect, ...] = (ack, gpu_manager, whole_cards)
"""Those that are always understood."""
WITH_HAMI: tuple[Dialect, ...] = (*DIALECTS, hami)
"""And HAMi's, for clusters where HAMi itself is not at work."""


_NAMES = frozenset(name for dialect in WITH_HAMI for name in dialect.RESOURCES)


def names_any(pod: Manifest) -> bool:
    """Return whether a container names a resource of any dialect, be it 0 of it."""
    return not all(_NAMES.isdisjoint(it.resources) for it in pod.containers)


def recognise(pod: Manifest, dialects: Collection[Dialect] = DIALECTS) -> Dialect | None:
    """The one in which the pod asks; None if it asks for nothing in any.

    Raises Unreadable where it asks in two, or for what is no amount.
    """
    if not names_any(pod):
        # As nearly all pods of a cluster.
        return None
    spoken = [dialect for dialect in dialects if dialect.speaks(pod)]
    if len(spoken) > 1:
        first, second = (pod.names(dialect.RESOURCES)[0] for dialect in spoken[:2])
        raise Unreadable(
            f"it asks for {first} and for {second}, which do not go together: "
            "use the names of one of them in all its containers"
        )
    return spoken[0] if spoken else None
