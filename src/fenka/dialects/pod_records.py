"""Writes and reads a pod's placement, whether its slices are on cards or inside instances.

Dialects number physical cards and know nothing of instances. So for a pod with slices inside instances they
are given a *view* of its node. There each instance has its card's place: the card's index and UUID, and the
instance's memory and compute. Records then name the physical card, as other tools expect, and the annotation
`fenka.io/instance` says where on it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec

from fenka.core.inventory import Card
from fenka.core.mig.instances import NO_DIVISION
from fenka.core.request import ANY_INSTANCE, Placement, Slice
from fenka.dialects import base, mig_records
from fenka.dialects.card_records import VISIBLE, find_container

CHOSEN_BY = "fenka.io/chosen-by"
"""Annotation of a bound pod: the policy by which the scheduler chose its card."""

RECORDS: tuple[str, ...] = (CHOSEN_BY,)
"""The records that pods of every dialect have. The chart has the names, too, in `fenka.recordNames`."""

ON_BINDINGS: tuple[str, ...] = (*RECORDS, mig_records.INSIDE)
"""The annotations of a binding beside its dialect's records. INSIDE: a node's label, now of the pod."""


def encode(
    dialect: base.Dialect,
    pod: base.PodRequest,
    shared: base.SharedNode,
    placements: Sequence[Placement],
    now_ns: int,
) -> dict[str, str]:
    """Return the annotations of a pod with these placements. now_ns: since 1970."""
    slices = [piece for placement in placements for piece in placement.slices]
    if any(placement.whole for placement in placements) or not any(
        piece.instance for piece in slices
    ):
        return dialect.encode(pod, shared, placements, now_ns)
    # The node's label may have said where they are. From now on the pod does, whatever becomes of the label.
    asked = {mig_records.INSIDE: pod.annotations.get(mig_records.INSIDE, ANY_INSTANCE)}
    pod = msgspec.structs.replace(pod, annotations={**pod.annotations, **asked})
    view = _view(shared, _instances(shared, slices))
    on_cards = [_on_cards(shared, placement) for placement in placements]
    return {
        **dialect.encode(pod, view, on_cards, now_ns),
        **asked,
        mig_records.INSTANCE: mig_records.encode_places(slices),
    }


def decode(
    dialect: base.Dialect,
    pod: base.PodRequest,
    parts: Sequence[base.SliceRequest],
    shared: base.SharedNode,
) -> tuple[Placement, ...] | None:
    """Return the recorded placements; None if there is no record. parts: those of `dialect.parse`.

    Raises:
        InvalidRecord: also if slices are recorded on what they are not for.
    """
    if mig_records.INSIDE not in pod.annotations:
        _check_asked(pod, parts)
        placements = dialect.decode(pod, parts, shared)
        if placements is not None and shared.division is not NO_DIVISION:
            _check_kinds(shared, parts, placements)
        return placements
    instances = mig_records.recorded_instances(pod.annotations, parts, shared)
    if instances is None:
        return None
    inside = list[Placement]()
    for part, (instance,) in zip(parts, instances, strict=True):
        # Two parts may be in different instances of one card.
        decoded = dialect.decode(pod, (part,), _view(shared, [instance]))
        if decoded is None:
            return None
        inside += [_inside(placement, instance) for placement in decoded]
    return tuple(inside)


def container_slices(
    dialect: base.Dialect,
    pod: base.PodRequest,
    shared: base.SharedNode,
    placements: Sequence[Placement],
    container: str,
) -> tuple[Slice, ...]:
    """Return the slices of one container, by the pod's record; empty if it has none. Raises InvalidRecord."""
    if mig_records.INSIDE not in pod.annotations:
        return dialect.container_slices(pod, shared, placements, container)
    found = find_container(dialect.parse(pod), placements, container)
    if found is None:
        return ()
    instances = _instances(shared, found[1].slices)
    on_cards = [_on_cards(shared, placement) for placement in placements]
    slices = dialect.container_slices(pod, _view(shared, instances), on_cards, container)
    (instance,) = instances
    return tuple(replace(piece, uuid=instance.uuid) for piece in slices)


def environment(
    dialect: base.Dialect,
    pod: base.PodRequest,
    shared: base.SharedNode,
    slices: Sequence[Slice],
    container: str,
) -> dict[str, str]:
    """Return the environment variables of a container that has these slices, at least one.

    None of them names the device of an instance: its UUID is known to the node alone.
    """
    if mig_records.INSIDE not in pod.annotations:
        return dialect.environment(pod, shared, slices, container)
    view = _view(shared, _instances(shared, slices))
    on_cards = _on_cards(shared, Placement(shared.node.name, tuple(slices))).slices
    variables = dialect.environment(pod, view, on_cards, container)
    return {name: value for name, value in variables.items() if name != VISIBLE}


def _instances(shared: base.SharedNode, slices: Iterable[Slice]) -> list[Card]:
    """Return the instances of slices, as cards. Raises InvalidRecord if the node cannot have them."""
    devices = list(dict.fromkeys(piece.uuid for piece in slices))
    cards = {card.uuid: card for card in mig_records.with_instances(shared, devices).node.cards}
    for device in devices:
        if device not in cards or cards[device].parent is None:
            raise base.InvalidRecord(f"{device[:100]!r} is no instance that the node can have")
    return [cards[device] for device in devices]


def _view(shared: base.SharedNode, instances: Iterable[Card]) -> base.SharedNode:
    """Return the node as if each instance were all of its card."""
    cards = tuple(
        replace(card, uuid=card.parent, parent=None)
        for card in instances
        if card.parent is not None
    )
    return replace(shared, node=replace(shared.node, cards=cards), division=NO_DIVISION)


def _on_cards(shared: base.SharedNode, placement: Placement) -> Placement:
    """Return the placement with cards in place of their instances."""
    instances = _instances(shared, placement.slices)
    parents = {card.uuid: card.parent for card in instances if card.parent is not None}
    slices = (replace(piece, uuid=parents[piece.uuid]) for piece in placement.slices)
    return replace(placement, slices=tuple(slices))


def _inside(placement: Placement, instance: Card) -> Placement:
    slices = (replace(piece, uuid=instance.uuid) for piece in placement.slices)
    return replace(placement, slices=tuple(slices))


def _check_asked(pod: base.PodRequest, parts: Iterable[base.SliceRequest]) -> None:
    if mig_records.INSTANCE in pod.annotations and not any(part.request.instance for part in parts):
        raise base.InvalidRecord(
            f"the pod was placed inside an instance, and its annotation {mig_records.INSIDE} "
            "was removed: write it again"
        )


def _check_kinds(
    shared: base.SharedNode, parts: Iterable[base.SliceRequest], placements: Iterable[Placement]
) -> None:
    """Check that no slice is on a divided card, or in an instance that the pod does not ask for."""
    cards = {card.uuid: card for card in shared.node.cards}
    for part, placement in zip(parts, placements, strict=True):
        for piece in placement.slices:
            card = cards.get(piece.uuid)
            if card and not part.request.is_for(card.profile, divided=card.divided):
                raise base.InvalidRecord(f"the pod's card {piece.card} is divided into instances")
