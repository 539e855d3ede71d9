"""A plan's answer as orders. Pure."""

import dataclasses
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from fenka.autoscaler.orders import new_name
from fenka.autoscaler.plan_case import PlanCase, new_slots, planned_by_node
from fenka.autoscaler.view import View
from fenka.cluster.autoscaling import OrderRecord, Slot
from fenka.core.planning.case import PRICE_DECIMALS
from fenka.core.planning.plan import NewNodes, Plan

MAX_NODES = 100
"""Of one order: what clouds accept in one call."""


def purchases(view: View, case: PlanCase, plan: Plan) -> dict[str, OrderRecord]:
    """Return the new orders of a plan, and those whose coming nodes get more pods."""
    placed = planned_by_node(plan)
    gang_members = {each.name for each in case.case.requests if each.gang is not None}
    changed: dict[str, OrderRecord] = {}
    for new in plan.nodes:
        offer = case.offers[new.group]
        config = view.group(offer.group)
        price = next(each.price for each in case.case.groups if each.name == new.group)
        for names in _parts(list(new_slots(new.group, new.count))):
            pods = [placed.get(name, []) for name in names]
            in_gang = any(request in gang_members for of_node in pods for request, _ in of_node)
            name = new_name(offer.group, view.now, {*view.orders, *changed})
            changed[name] = OrderRecord(
                group=offer.group,
                type=offer.type,
                zone=offer.zone,
                capacity=offer.capacity,
                slots=tuple(_with_pods(view, Slot(), case, of_node) for of_node in pods),
                state="written",
                price=price,
                written_at=view.now,
                changed_at=view.now,
                whole=in_gang,
                cap=config.spot.cap if config is not None and offer.capacity == "spot" else None,
            )
    for node, (name, number) in case.slots.items():
        if node in placed and name in view.orders:
            record = changed.get(name, view.orders[name])
            slots = list(record.slots)
            slots[number] = _with_pods(view, slots[number], case, placed[node])
            changed[name] = replace(record, slots=tuple(slots))
    return changed


def _with_pods(
    view: View, slot: Slot, case: PlanCase, pods: Iterable[tuple[str, tuple[int, ...]]]
) -> Slot:
    """Return the slot with these pods more, and without those that are gone: there is room for few."""
    added = [(case.pods[name], cards) for name, cards in pods]
    there = [each for each in zip(slot.pods, _cards(slot), strict=False) if each[0] in view.pods]
    both = [*there, *added]
    return replace(slot, pods=tuple(uid for uid, _ in both), cards=tuple(it for _, it in both))


def _cards(slot: Slot) -> Sequence[tuple[int, ...]]:
    """Return the cards of a slot's pods, one entry for each."""
    missing = len(slot.pods) - len(slot.cards)
    return (*slot.cards, *((),) * missing)


def _parts(names: list[str]) -> Iterable[list[str]]:
    for start in range(0, len(names), MAX_NODES):
        yield names[start : start + MAX_NODES]


def without_stale(view: View, case: PlanCase, plan: Plan) -> Plan:
    """Return the plan without pods that were bound or deleted since, and without the nodes for them alone.

    Pods come and go all the time, and a plan takes seconds: what concerns the others is still right. A gang
    of which a member is gone is left out whole.
    """
    gone = {name for name, uid in case.pods.items() if not _is_pending(view, uid)}
    gang_of = {each.name: each.gang for each in case.case.requests if each.gang is not None}
    broken = {gang_of[name] for name in gone if name in gang_of}
    live = tuple(
        pod
        for pod in plan.placements
        if pod.request not in gone
        and gang_of.get(pod.request) not in broken
        and _is_there(view, case.slots.get(pod.node))
    )
    if len(live) == len(plan.placements):
        return plan
    idle = {pod.node for pod in plan.placements} - {pod.node for pod in live}
    names, nodes = dict[str, str](), list[NewNodes]()
    for new in plan.nodes:
        left = [name for name in new_slots(new.group, new.count) if name not in idle]
        names |= zip(left, new_slots(new.group, len(left)), strict=True)
        nodes += [NewNodes(new.group, len(left))] if left else []
    placements = tuple(dataclasses.replace(pod, node=names.get(pod.node, pod.node)) for pod in live)
    return dataclasses.replace(plan, nodes=tuple(nodes), placements=placements)


def _is_pending(view: View, uid: str) -> bool:
    pod = view.pods.get(uid)
    if uid in view.displaced:
        return True
    return (
        pod is not None
        and not pod.spec.node_name
        and not pod.finished
        and pod.metadata.deletion_timestamp is None
    )


def _is_there(view: View, slot: tuple[str, int] | None) -> bool:
    """Return whether a node that is coming is still expected. None: any other node."""
    if slot is None:
        return True
    name, number = slot
    return name in view.orders and number < len(view.orders[name].slots)


def summary(case: PlanCase, plan: Plan) -> dict[str, str]:
    """Return by pod's request a sentence about the nodes that are asked for, for events."""
    counts = {each.group: each.count for each in plan.nodes}
    prices = {each.name: each.price for each in case.case.groups}
    sentences = {}
    for pod in plan.placements:
        kind, _, rest = pod.node.partition(":")
        group = rest.rpartition(":")[0]
        if kind == "new" and group in counts:
            count, name = counts[group], case.offers[group].group
            noun = "node" if count == 1 else "nodes"
            price = round(count * prices[group], PRICE_DECIMALS)
            sentences[pod.request] = f"{count} {noun} of {name} asked for, {price:g} an hour"
    return sentences
