"""Shapes: what a node of an instance type will be, before one exists.

Clouds round memory up: 16384 MiB for a T4 whose driver reports 15079. By the cloud's number a pod of 15 units
would make the planner buy nodes that never fit it. So a shape comes from the first source that is there: a
node of this type that was seen, the configuration, the drivers' own numbers, the cloud's numbers less 8 %.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from fenka.cluster.autoscaling import CloudType
from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.core.planning.case import CaseRequest, Group, NewCard, Taint
from fenka.core.planning.problem import ineligible
from fenka.hardware.spec import MODELS

CLOUD_MARGIN = 0.08
"""What a cloud's number is lowered by: firmware, the driver and the kubelet keep a part."""

SAME_CARD = 0.1
"""A driver's number is of the same card as a cloud's if it is lower by this part at most."""


class UnknownShape(FenkaError):
    """Nothing says what a node of the type will be; the message says where to."""

    exit_code = INVALID_INPUT


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A node's allocatable amounts, with the names of `fenka.plan/1`."""

    cpu_milli: int
    memory_mib: int
    pods: int = 110
    resources: Mapping[str, int] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    cards: tuple[NewCard, ...] = ()


def shape_of(
    name: str,
    *,
    seen: Shape | None = None,
    configured: Shape | None = None,
    cloud: CloudType | None = None,
) -> Shape:
    """Return the shape of an instance type.

    Args:
        name: of the type, for the error.
        seen: what a node of this type was.
        configured: what the configuration says.
        cloud: what the cloud says.

    Raises:
        UnknownShape: if nobody says anything.
    """
    known = seen or configured
    if known is not None:
        return known
    if cloud is None:
        raise UnknownShape(f"the shape of {name} is not known: say shape: for it")
    return Shape(
        cpu_milli=_lowered(cloud.cpu_milli),
        memory_mib=_lowered(cloud.memory_mib),
        cards=(_card(cloud),) * cloud.cards,
    )


def common(one: Shape, other: Shape) -> Shape:
    """Return what nodes of both shapes have: machines of one type differ by a few MiB."""
    smaller = min(one, other, key=lambda each: [card.memory_mib for card in each.cards])
    return Shape(
        cpu_milli=min(one.cpu_milli, other.cpu_milli),
        memory_mib=min(one.memory_mib, other.memory_mib),
        pods=min(one.pods, other.pods),
        resources=_common_resources(one.resources, other.resources),
        labels=dict(one.labels.items() & other.labels.items()),
        taints=tuple(dict.fromkeys((*one.taints, *other.taints))),
        cards=smaller.cards,
    )


def _common_resources(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: min(one[name], other[name]) for name in sorted(one.keys() & other.keys())}


def without_daemons(group: Group, daemons: Iterable[CaseRequest]) -> Group:
    """Return the group less the DaemonSets that run on its nodes.

    Args:
        group: with the whole allocatable amounts.
        daemons: a request without cards for each DaemonSet.
    """
    for daemon in daemons:
        # They run on spot nodes as on all others.
        if ineligible(replace(daemon, interruptible=True), group) or not _has_room(group, daemon):
            continue
        resources = {
            name: max(amount - daemon.resources.get(name, 0), 0)
            for name, amount in group.resources.items()
        }
        group = replace(
            group,
            cpu_milli=max(group.cpu_milli - daemon.cpu_milli, 0),
            memory_mib=max(group.memory_mib - daemon.memory_mib, 0),
            pods=max(group.pods - 1, 0),
            resources=resources,
        )
    return group


def _has_room(group: Group, daemon: CaseRequest) -> bool:
    """Return whether the DaemonSet's pod can start there. One that cannot takes nothing from others."""
    return (
        daemon.cpu_milli <= group.cpu_milli
        and daemon.memory_mib <= group.memory_mib
        and group.pods > 0
        and all(it <= group.resources.get(name, 0) for name, it in daemon.resources.items())
    )


def _card(cloud: CloudType) -> NewCard:
    """Return the card as its driver reports it, where that is known."""
    words = set(re.findall(r"[a-z0-9]+", cloud.model.lower()))
    for model in MODELS.values():
        same_name = model.key.lower().split("-")[0] in words or model.name == cloud.model
        if same_name and (1 - SAME_CARD) * cloud.card_mib <= model.memory_mib <= cloud.card_mib:
            return NewCard(model=model.name, memory_mib=model.memory_mib)
    return NewCard(model=cloud.model, memory_mib=_lowered(cloud.card_mib))


def _lowered(amount: int) -> int:
    return int(amount * (1 - CLOUD_MARGIN))
