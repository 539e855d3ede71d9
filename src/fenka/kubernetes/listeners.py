"""Listeners of informers that several programs have."""

from collections.abc import Sequence

from fenka.cluster.pod_groups import PodGroup


class NullListener:
    """Ignores changes: the objects are looked up in the informer."""

    def on_replace(self, objects: Sequence[object]) -> None:
        """Ignore all objects."""

    def on_upsert(self, obj: object) -> None:
        """Ignore a new or changed object."""

    def on_delete(self, obj: object) -> None:
        """Ignore a deleted object."""


class PodGroupIndex:
    """Finds PodGroups by name. Attributes: by_name: the groups, by namespace/name."""

    def __init__(self) -> None:
        self.by_name: dict[str, PodGroup] = {}

    def on_replace(self, objects: Sequence[PodGroup]) -> None:
        """Replace all PodGroups."""
        self.by_name = {_full_name(group): group for group in objects}

    def on_upsert(self, obj: PodGroup) -> None:
        """Set a PodGroup."""
        self.by_name[_full_name(obj)] = obj

    def on_delete(self, obj: PodGroup) -> None:
        """Remove a PodGroup, unless another one already has its name."""
        known = self.by_name.get(_full_name(obj))
        if known is not None and known.metadata.uid == obj.metadata.uid:
            del self.by_name[_full_name(obj)]


def _full_name(group: PodGroup) -> str:
    return f"{group.metadata.namespace}/{group.metadata.name}"
