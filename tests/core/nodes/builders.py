"""Cases of the planner's values, in short."""

from typing import Any

from fenka.core.nodes.case import (
    FORMAT,
    Amount,
    CaseNode,
    CaseRequest,
    HeldCard,
    NewCard,
    NodeGroup,
    PlanningCase,
)

T4_MIB = 15079
T4 = NewCard(model="Tesla T4", memory_mib=T4_MIB)


def case(*requests: CaseRequest, groups: tuple[NodeGroup, ...] = (), **more: Any) -> PlanningCase:
    """Return a case."""
    return PlanningCase(format=FORMAT, groups=groups, requests=requests, **more)


def group(name: str = "t4", price: float = 4.0, cards: int = 1, **more: Any) -> NodeGroup:
    """Return a group of nodes with T4s."""
    host = {"cpu_milli": 16000, "memory_mib": 65536, **more}
    return NodeGroup(name=name, price=price, cards=(T4,) * cards, **host)


def node(name: str = "gpu", *held: HeldCard, **more: Any) -> CaseNode:
    """Return a node with these cards."""
    host = {"cpu_milli": 16000, "memory_mib": 65536, **more}
    return CaseNode(name=name, cards=held, **host)


def held(mib: int = 0, **more: Any) -> HeldCard:
    """Return a T4 of which so much is held."""
    return HeldCard(model="Tesla T4", memory_mib=T4_MIB, held_mib=mib, **more)


def request(name: str = "r", units: int = 4, count: int = 1, **more: Any) -> CaseRequest:
    """Return a request for units of GiB."""
    memory = {"memory": Amount(units=units) if units else None}
    return CaseRequest(name=name, count=count, **{**memory, **more})
