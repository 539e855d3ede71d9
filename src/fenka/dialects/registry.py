"""Which dialect a pod speaks."""

from collections.abc import Collection

from fenka.dialects import ack, gpu_manager, hami, nvidia
from fenka.dialects.base import Dialect, InvalidRecord, PodRequest

DIALECTS: tuple[Dialect, ...] = (ack, gpu_manager, nvidia)
"""Those that are always understood."""
WITH_HAMI: tuple[Dialect, ...] = (*DIALECTS, hami)
"""And HAMi's, for clusters where HAMi itself is not at work."""


_NAMES = frozenset(name for dialect in WITH_HAMI for name in dialect.RESOURCES)


def names_any(pod: PodRequest) -> bool:
    """Return whether a container names a resource of any dialect, be it 0 of it."""
    return not all(_NAMES.isdisjoint(it.resources) for it in pod.containers)


def detect(pod: PodRequest, dialects: Collection[Dialect] = DIALECTS) -> Dialect | None:
    """The one in which the pod asks; None if it asks for nothing in any.

    Raises InvalidRecord where it asks in two, or for what is no amount.
    """
    if not names_any(pod):
        # As nearly all pods of a cluster.
        return None
    spoken = [dialect for dialect in dialects if dialect.matches(pod)]
    if len(spoken) > 1:
        first, second = (pod.requested_resources(dialect.RESOURCES)[0] for dialect in spoken[:2])
        raise InvalidRecord(
            f"it asks for {first} and for {second}, which do not go together: "
            "use the names of one of them in all its containers"
        )
    return spoken[0] if spoken else None
