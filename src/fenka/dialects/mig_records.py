"""Divided cards on a Node, and the instances of a pod, as annotations.

The Node's has what each divided card can be divided into, and what is there. The pod's names its instances by
card and place, since they may not exist yet: the node creates them when the container starts. So in a cluster
the id of an instance is its place, `<UUID of the card>/<start>/<profile>`, and not the UUID of its device.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from typing import Annotated, Literal

import msgspec

from fenka.core.inventory import MAX_STARTS, Card, DeviceId, InstanceId
from fenka.core.mig.geometry import Geometry, Place, Profile
from fenka.core.mig.instances import Division, instance_card
from fenka.core.request import MAX_CARDS, MAX_MEMORY_MIB, Slice
from fenka.dialects import card_records
from fenka.dialects.base import InvalidRecord, SharedNode, SliceRequest

INSTANCES = "fenka.io/instances"
"""Node annotation, written by the node program: its divided cards."""

INSTANCE = "fenka.io/instance"
"""Pod annotation, written at bind: its instances, in the order of its slices."""

INSIDE = "fenka.io/inside"
"""Pod annotation, written by people: its slices are in MIG instances, `mig` for any or a profile.

A Node's label of this name says so for all pods with slices there; their annotation is written at bind.
"""

InstanceState = Literal["own", "unhealthy", "leaving", "foreign"]
"""own: fenka's, for pods. unhealthy: fenka's, and takes no new pods. leaving: fenka's, being destroyed.
foreign: an administrator's."""

TAKEN: Mapping[InstanceState, str] = {
    "leaving": "is being destroyed",
    "foreign": "is an administrator's",
}
"""The reason why an instance is for no pod."""


@dataclass(frozen=True, slots=True)
class DividedCard:
    """A card in MIG mode.

    Attributes:
        uuid: the card's.
        geometry: what it can be divided into.
        on_demand: whether instances are created for pods.
        instances: what is there, by place.
    """

    uuid: DeviceId
    geometry: Geometry
    on_demand: bool
    instances: Mapping[Place, InstanceState]


_Slices = Annotated[int, msgspec.Meta(ge=1, le=MAX_STARTS)]
_Start = Annotated[int, msgspec.Meta(ge=0, lt=MAX_STARTS)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=10_000)]


class _Profile(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    name: str
    profile_id: _Number
    enum: _Number
    compute: _Slices
    size: _Slices
    starts: tuple[_Start, ...]
    limit: _Slices
    memory_mib: Annotated[int, msgspec.Meta(ge=1, le=MAX_MEMORY_MIB)]
    sms: Annotated[int, msgspec.Meta(ge=1, le=10_000)]


class _Geometry(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    compute: _Slices
    sms: Annotated[int, msgspec.Meta(ge=1, le=10_000)]
    profiles: list[_Profile]


class _RecordedInstance(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    profile: str
    start: _Start
    state: InstanceState


class _DividedCard(msgspec.Struct, forbid_unknown_fields=True):
    uuid: str
    geometry: Annotated[int, msgspec.Meta(ge=0)]
    on_demand: bool = msgspec.field(name="onDemand")
    instances: list[_RecordedInstance] = []


class _Instances(msgspec.Struct, forbid_unknown_fields=True):
    geometries: list[_Geometry]
    cards: list[_DividedCard]


class _PodInstance(msgspec.Struct, frozen=True):
    card: Annotated[str, msgspec.Meta(max_length=100)]
    start: _Start
    profile: Annotated[str, msgspec.Meta(max_length=40)]


_INSTANCES = msgspec.json.Decoder(_Instances)
_POD_INSTANCES = msgspec.json.Decoder(
    Annotated[list[_PodInstance], msgspec.Meta(max_length=MAX_CARDS)]
)


# --- on the Node ------------------------------------------------------------------------------------


def encode_instances(cards: Sequence[DividedCard]) -> str:
    """Return the node's INSTANCES."""
    geometries = list(dict.fromkeys(card.geometry for card in cards))
    return card_records.encode(
        _Instances(
            [
                _Geometry(
                    geometry.model,
                    geometry.compute,
                    geometry.sms,
                    [_Profile(*astuple(profile)) for profile in geometry.profiles],
                )
                for geometry in geometries
            ],
            [
                _DividedCard(
                    card.uuid,
                    geometries.index(card.geometry),
                    card.on_demand,
                    [
                        _RecordedInstance(place.profile.name, place.start, state)
                        for place, state in sorted(
                            card.instances.items(), key=lambda item: item[0].start
                        )
                    ],
                )
                for card in cards
            ],
        )
    )


def decode_instances(annotations: Mapping[str, str]) -> tuple[DividedCard, ...]:
    """Return the node's divided cards; none without a record. Raises InvalidRecord."""
    text = annotations.get(INSTANCES)
    if text is None:
        return ()
    record = card_records.decode(text, _INSTANCES, f"annotation {INSTANCES}")
    geometries = [
        _same(
            Geometry(
                geometry.model,
                geometry.compute,
                geometry.sms,
                tuple(Profile(*msgspec.structs.astuple(profile)) for profile in geometry.profiles),
            )
        )
        for geometry in record.geometries
    ]
    try:
        return tuple(
            DividedCard(
                DeviceId(card.uuid),
                geometry := geometries[card.geometry],
                card.on_demand,
                {
                    Place(geometry.by_name[instance.profile], instance.start): instance.state
                    for instance in card.instances
                },
            )
            for card in record.cards
        )
    except (IndexError, KeyError) as why:
        raise InvalidRecord(
            f"annotation {INSTANCES} is not understood: it does not have {str(why)[:60]}"
        ) from None


@lru_cache(maxsize=64)
def _same(geometry: Geometry) -> Geometry:
    """Return the same object for equal geometries: all that is computed of one is kept with it."""
    return geometry


def with_division(shared: SharedNode, divided: Sequence[DividedCard]) -> SharedNode:
    """Return the node with its divided cards marked, and with the instances that are for pods as cards."""
    by_uuid = {card.uuid: card for card in divided}
    cards = tuple(
        replace(card, divided=True) if card.uuid in by_uuid else card for card in shared.node.cards
    )
    present = [card for card in cards if card.divided]
    own = [
        replace(instance, healthy=instance.healthy and state == "own")
        for card in present
        for place, state in by_uuid[card.uuid].instances.items()
        if state not in TAKEN
        for instance in [instance_card(card, by_uuid[card.uuid].geometry, place)]
    ]
    division = Division(
        {card.uuid: by_uuid[card.uuid].geometry for card in present},
        {
            card.uuid: {
                place: TAKEN[state]
                for place, state in by_uuid[card.uuid].instances.items()
                if state in TAKEN
            }
            for card in present
        },
        frozenset(card.uuid for card in present if not by_uuid[card.uuid].on_demand),
    )
    return replace(shared, node=replace(shared.node, cards=(*cards, *own)), division=division)


# --- on the pod -------------------------------------------------------------------------------------


def encode_places(slices: Iterable[Slice]) -> str:
    """Return the pod's INSTANCE, in the order of the slices; those of cards are left out."""
    instances = (piece.instance for piece in slices)
    return card_records.encode(
        [
            _PodInstance(instance.card, instance.start, instance.profile)
            for instance in instances
            if instance is not None
        ]
    )


def decode_places(annotations: Mapping[str, str]) -> tuple[DeviceId, ...]:
    """Return the ids of a pod's instances, in the order of its slices. Raises InvalidRecord."""
    text = annotations.get(INSTANCE)
    if text is None:
        return ()
    listed = card_records.decode(text, _POD_INSTANCES, f"annotation {INSTANCE} of the pod")
    return tuple(
        InstanceId(DeviceId(record.card), record.start, record.profile).device for record in listed
    )


def with_instances(shared: SharedNode, devices: Iterable[DeviceId]) -> SharedNode:
    """Return the node with these instances as cards, too, where its cards can have them.

    Pods hold instances that the node has not created yet. Anybody may write a pod's annotation, so an id that
    no divided card of the node can have adds nothing.
    """
    if not shared.division.geometries:
        return shared
    cards = {card.uuid: card for card in shared.node.cards}
    for device in devices:
        instance = InstanceId.parse(device)
        if instance is None or device in cards:
            continue
        parent, geometry = cards.get(instance.card), shared.division.geometries.get(instance.card)
        place = geometry.place_of(instance) if geometry else None
        if parent is not None and geometry and place:
            cards[device] = instance_card(parent, geometry, place)
    if len(cards) == len(shared.node.cards):
        return shared
    return replace(shared, node=replace(shared.node, cards=tuple(cards.values())))


def recorded_instances(
    annotations: Mapping[str, str], parts: Sequence[SliceRequest], shared: SharedNode
) -> list[list[Card]] | None:
    """Return the instances of each part of a pod, as cards; None if there is no record.

    Raises:
        InvalidRecord: also if the node cannot have them, or they are not what the parts request.
    """
    if INSTANCE not in annotations:
        return None
    devices = decode_places(annotations)
    cards = {card.uuid: card for card in with_instances(shared, devices).node.cards}
    requested = [part.request for part in parts for _ in range(part.request.cards)]
    # Two containers may have slices in one instance.
    whole = any(request.whole for request in requested)
    different = len(set(devices)) if whole else len(devices)
    if different != len(requested) or len(devices) != len(requested):
        raise InvalidRecord(
            f"annotation {INSTANCE} of the pod has {different} different instances, it asks for "
            f"{len(requested)}"
        )
    instances = list[Card]()
    for device, request in zip(devices, requested, strict=True):
        instance = cards.get(device)
        if instance is None:
            raise InvalidRecord(
                f"the pod's instance {device[:100]!r} is none that its node can have"
            )
        if not request.is_for(instance.profile, divided=instance.divided):
            raise InvalidRecord(
                f"the pod's instance {device[:100]!r} is not one of {request.instance!r}, which it asks for"
            )
        instances.append(instance)
    left = iter(instances)
    return [[next(left) for _ in range(part.request.cards)] for part in parts]
