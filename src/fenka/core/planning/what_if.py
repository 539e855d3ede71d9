"""Would pending requests start if certain nodes were there?

The answer is the plan of a case whose only choice is which requests these nodes serve.
"""

from collections.abc import Mapping
from dataclasses import replace

from fenka.core.planning.case import BuyLimits, Case, CaseNode, Group, InvalidCase, NewCard

HOSTNAME_LABEL = "kubernetes.io/hostname"
MAX_NAMED = 5


def with_nodes(case: Case, added: Mapping[str, int]) -> Case:
    """Return the case whose plans have exactly these new nodes, whatever their price and stock.

    Args:
        case: what is there and what is pending.
        added: how many nodes, by the name of a group, or of a node there that the new ones are like.

    Raises:
        InvalidCase: if there is no such group or node, or two names are of one group.
    """
    groups: dict[str, Group] = {}
    for name, count in added.items():
        group = replace(_template(case, name), size=0, min=count, max=count, stock=None)
        if group.name in groups:
            raise InvalidCase(f"{name} is of group {group.name}, which is named too: name it once")
        groups[group.name] = group
    return replace(case, groups=tuple(groups.values()), limits=BuyLimits())


def _template(case: Case, name: str) -> Group:
    """Return a group of this name, or of nodes like that of this name."""
    for group in case.groups:
        if group.name == name:
            return group
    for node in case.nodes:
        if node.name == name:
            return _like(node)
    names = [each.name for each in (*case.groups, *case.nodes)]
    known = ", ".join(names[:MAX_NAMED]) + f" and {len(names) - MAX_NAMED} more" * (
        len(names) > MAX_NAMED
    )
    raise InvalidCase(
        f"no group and no node is called {name!r}: name one of {known}"
        if names
        else f"no group and no node is called {name!r}: there is none"
    )


def _like(node: CaseNode) -> Group:
    return Group(
        # Its group is the label that requests may select.
        name=node.group or node.name,
        zone=node.zone,
        capacity=node.capacity,
        labels={key: value for key, value in node.labels.items() if key != HOSTNAME_LABEL},
        taints=node.taints,
        cpu_milli=node.cpu_milli,
        memory_mib=node.memory_mib,
        pods=node.pods,
        resources=node.resources,
        price=0,
        protection_s=node.protected_s,
        cards=tuple(NewCard(model=card.model, memory_mib=card.memory_mib) for card in node.cards),
    )
