"""The list of dialects, and which of them a pod uses.

To add a dialect, write its module (`base.Dialect` says what it has) and add it here.
"""

from collections.abc import Iterable
from functools import lru_cache

from fenka.dialects import ack, gpu_manager, hami, nvidia
from fenka.dialects.base import Dialect, InvalidRecord, NodeResource, PodRequest

DIALECTS: tuple[Dialect, ...] = (ack, gpu_manager, nvidia)
"""Those that are always in use."""
WITH_HAMI: tuple[Dialect, ...] = (*DIALECTS, hami)
"""With HAMi's, for clusters where HAMi itself does not run."""


def names_any(
    resources: Iterable[Iterable[str]], dialects: tuple[Dialect, ...] = WITH_HAMI
) -> bool:
    """Return whether a container names a resource of any dialect. resources: those of each container."""
    names = _resource_names(dialects)
    # The loop takes half of the time of any(), and runs for each pod of a cluster.
    for of_container in resources:  # noqa: SIM110
        if not names.isdisjoint(of_container):
            return True
    return False


@lru_cache(maxsize=8)
def _resource_names(dialects: tuple[Dialect, ...]) -> frozenset[str]:
    return frozenset(name for dialect in dialects for name in dialect.RESOURCES)


@lru_cache(maxsize=8)
def option_names(dialects: tuple[Dialect, ...]) -> frozenset[str]:
    """Return the labels and annotations by which users change what a pod requests."""
    return frozenset(name for dialect in dialects for name in dialect.OPTIONS)


@lru_cache(maxsize=1)
def annotation_names() -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the annotations of pods that `parse` or `decode` reads: names, and prefixes of names."""
    names = {name for dialect in WITH_HAMI for name in (*dialect.OPTIONS, *dialect.PLACEMENT)}
    prefixes = tuple(name for name in names if name.endswith("-"))
    return frozenset(names), prefixes


def detect(pod: PodRequest, dialects: tuple[Dialect, ...] = DIALECTS) -> Dialect | None:
    """Return the dialect in which the pod requests something; None if it requests nothing.

    Raises:
        InvalidRecord: if it uses two dialects, or an amount is no number.
    """
    names = set().union(*[container.resources for container in pod.containers])
    matching = [
        dialect
        for dialect in dialects
        if not names.isdisjoint(dialect.RESOURCES) and dialect.matches(pod)
    ]
    if len(matching) > 1:
        first, second = (pod.requested_resources(dialect.RESOURCES)[0] for dialect in matching[:2])
        raise InvalidRecord(
            f"it asks for {first} and for {second}, which do not go together: "
            "use the names of one of them in all its containers"
        )
    return matching[0] if matching else None


def node_resources(dialects: Iterable[Dialect]) -> dict[str, NodeResource]:
    """Return the resources that a node advertises, by name. The last dialect with a name defines it."""
    return {resource.name: resource for dialect in dialects for resource in dialect.NODE_RESOURCES}


def leased_resources(dialects: Iterable[Dialect]) -> frozenset[str]:
    """Return the resources whose allocation brings a lease; the others are only counted."""
    return frozenset(dialect.LEASED for dialect in dialects)
