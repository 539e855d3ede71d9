"""The list of dialects, and which of them a pod uses.

To add a dialect, write its module (`base.Dialect` says what it has) and add it here.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from fenka.dialects import ack, gpu_manager, hami, nvidia, nvidia_mig
from fenka.dialects.base import Dialect, InvalidRecord, NodeResource, PodRequest

DIALECTS: tuple[Dialect, ...] = (ack, gpu_manager, nvidia, nvidia_mig)
"""Those that are always in use."""
WITH_HAMI: tuple[Dialect, ...] = (*DIALECTS, hami)
"""With HAMi's, for clusters where HAMi itself does not run."""


@dataclass(frozen=True, slots=True)
class ResourceNames:
    """Names of extended resources, some by their prefix."""

    names: frozenset[str]
    prefixes: tuple[str, ...]

    def __contains__(self, name: object) -> bool:
        return name in self.names or (isinstance(name, str) and name.startswith(self.prefixes))

    def intersect(self, names: Iterable[str]) -> bool:
        """Return whether any of the names is one of these."""
        if not self.names.isdisjoint(names):
            return True
        # The loop takes half of the time of any(), and runs for each pod of a cluster.
        for name in names:  # noqa: SIM110
            if name.startswith(self.prefixes):
                return True
        return False


def _resource_names(names: Iterable[str]) -> ResourceNames:
    listed = list(names)
    return ResourceNames(
        frozenset(name for name in listed if not name.endswith("-")),
        tuple(name for name in listed if name.endswith("-")),
    )


def names_any(
    resources: Iterable[Iterable[str]], dialects: tuple[Dialect, ...] = WITH_HAMI
) -> bool:
    """Return whether a container names a resource of any dialect. resources: those of each container."""
    names = resource_names(dialects)
    for of_container in resources:  # noqa: SIM110
        if names.intersect(of_container):
            return True
    return False


@lru_cache(maxsize=16)
def resource_names(dialects: tuple[Dialect, ...]) -> ResourceNames:
    """Return the resources that containers name to request cards, or parts of them."""
    return _resource_names(name for dialect in dialects for name in dialect.RESOURCES)


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
        if resource_names((dialect,)).intersect(names) and dialect.matches(pod)
    ]
    if len(matching) > 1:
        first, second = (pod.requested_resources(dialect.RESOURCES)[0] for dialect in matching[:2])
        raise InvalidRecord(
            f"it asks for {first} and for {second}, which do not go together: "
            "use the names of one of them in all its containers"
        )
    return matching[0] if matching else None


def node_resources(dialects: Iterable[Dialect]) -> dict[str, NodeResource]:
    """Return the resources that every node advertises, by name. The last dialect with a name defines it.

    Those of instances follow from the node's cards: `nvidia_mig.node_resources`.
    """
    return {resource.name: resource for dialect in dialects for resource in dialect.NODE_RESOURCES}


def leased_resources(dialects: Iterable[Dialect]) -> ResourceNames:
    """Return the resources whose allocation brings a lease; the others are only counted."""
    return _resource_names(dialect.LEASED for dialect in dialects)
