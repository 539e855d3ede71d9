"""Kubernetes' rule of taints and tolerations, for whatever type has their fields."""

from typing import Protocol


class Taint(Protocol):
    """A node's taint."""

    @property
    def key(self) -> str:
        """Return its key."""

    @property
    def value(self) -> str:
        """Return its value, which may be empty."""

    @property
    def effect(self) -> str:
        """Return its effect, such as NoSchedule."""


class Toleration(Taint, Protocol):
    """A pod's toleration. An empty key or effect covers all."""

    @property
    def operator(self) -> str:
        """Return Equal or Exists; empty is Equal."""


STRICT_EFFECTS = ("NoSchedule", "NoExecute")
"""A taint of another effect, such as PreferNoSchedule, keeps no pod from a node."""


def tolerates(toleration: Toleration, taint: Taint) -> bool:
    """Return whether a toleration covers a taint."""
    return (
        (not toleration.key or toleration.key == taint.key)
        and (not toleration.effect or toleration.effect == taint.effect)
        and (toleration.operator == "Exists" or toleration.value == taint.value)
    )
