"""Sentences for requests that a plan leaves out: why no group helps."""

from collections import Counter
from collections.abc import Sequence

from fenka.core.inventory import WHOLE_COMPUTE
from fenka.core.planning.case import BuyLimits, Case, CaseRequest, Group, whole_price
from fenka.core.planning.problem import card_needs, ineligible
from fenka.core.units import card_units


def unserved_reason(case: Case, request: CaseRequest, new: Sequence[int]) -> str:
    """Return `0/3 groups help: 2 cards too small (14 units, 15 wanted), 1 at its max of 10`.

    Args:
        case: what was planned.
        request: one that is left out.
        new: the number of new nodes by group.
    """
    if not case.groups:
        return "no group may grow: there is none"
    counts: Counter[str] = Counter()
    details: dict[str, set[tuple[int, str]]] = {}
    for number, group in enumerate(case.groups):
        code, measure, detail = _misfit(request, group) or _bound(case, number, new)
        counts[code] += 1
        if detail:
            details.setdefault(code, set()).add((measure, detail))
    helping = counts.pop(_HELPS, 0)
    parts = [f"{count} {code}{_of(details.get(code))}" for code, count in counts.most_common()]
    if request.gang is not None:
        parts.append(f"gang {request.gang} starts whole or not at all")
    elif helping:
        parts.append("the rest is needed by requests before it")
    return f"{helping}/{len(case.groups)} groups help: {', '.join(parts)}"


Reason = tuple[str, int, str]
"""What is counted; what sorts details; the detail, of which the largest is shown."""

_HELPS = "helps"


def _of(details: set[tuple[int, str]] | None) -> str:
    return f" ({max(details)[1]})" if details else ""


def _misfit(request: CaseRequest, group: Group) -> Reason | None:
    """Return why the request does not fit an empty node of the group, None if it does."""
    if reason := ineligible(request, group):
        return reason, 0, ""
    hosts = [
        ("with too little CPU", request.cpu_milli / 1000, group.cpu_milli / 1000, "cores"),
        ("with too little host memory", request.memory_mib, group.memory_mib, "MiB"),
        ("without room for pods", 1, group.pods, "pods"),
    ]
    hosts += [
        (f"with too few {name}", amount, group.resources.get(name, 0), "there")
        for name, amount in request.resources.items()
    ]
    for code, wanted, total, measure in hosts:
        if wanted > total:
            return code, int(total), f"{total:g} {measure}, {wanted:g} wanted"
    return _card_misfit(request, group)


def _card_misfit(request: CaseRequest, group: Group) -> Reason | None:
    asked = request.card_request()
    if asked is None:
        return None
    if not group.cards:
        return "without cards", 0, ""
    of_model = [card for card in group.cards if not asked.models or card.model in asked.models]
    if not of_model:
        return "of another model", 0, ""
    fitting = sum(need is not None for need in card_needs(asked, group))
    if not fitting:
        largest = max(card.memory_mib for card in of_model)
        assert asked.memory is not None
        unit = asked.memory.unit_mib or 1
        name = "MiB" if unit == 1 else "units"
        units = card_units(largest, unit)
        return "cards too small", units, f"{units} {name}, {asked.memory.amount} wanted"
    if fitting < asked.cards:
        return "with too few cards", fitting, f"{fitting}, {asked.cards} wanted"
    assert asked.compute <= WHOLE_COMPUTE
    return None


def _bound(case: Case, number: int, new: Sequence[int]) -> Reason:
    """Return what keeps the group from growing further."""
    group, bought = case.groups[number], new[number]
    if group.size + bought >= group.max:
        if group.min == group.max:
            return f"fixed at {group.max} node{'s' * (group.max != 1)}", 0, ""
        return f"at its max of {group.max}", 0, ""
    if group.stock is not None and bought >= group.stock:
        return f"out of stock ({group.stock} left before this plan)", 0, ""
    return _limit(case.limits, case.groups, number, new) or (_HELPS, 0, "")


def _limit(
    limits: BuyLimits, groups: Sequence[Group], number: int, new: Sequence[int]
) -> Reason | None:
    if limits.nodes is not None and sum(new) >= limits.nodes:
        return f"beyond the limit of {limits.nodes} new nodes", 0, ""
    if limits.price is not None:
        price = sum(
            count * whole_price(group.price) for group, count in zip(groups, new, strict=True)
        )
        if price + whole_price(groups[number].price) > whole_price(limits.price):
            return f"beyond the price limit of {limits.price:g} an hour", 0, ""
    for model, most in limits.cards.items():
        per_node = [sum(card.model == model for card in group.cards) for group in groups]
        have = sum(count * each for count, each in zip(new, per_node, strict=True))
        if per_node[number] and have + per_node[number] > most:
            return f"beyond the limit of {most} new {model} cards", 0, ""
    return None
