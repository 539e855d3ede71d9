"""`nvidia.com/mig-<profile>`: whole MIG instances, by the names of NVIDIA's device plugin.

The scheduler chooses where each instance is; the node creates it when the container starts. The UUID of its
device is known to the node alone, so neither annotations nor the dialect's environment have it.
"""

from collections.abc import Iterable, Mapping, Sequence

from fenka.core.inventory import DeviceId
from fenka.core.mig.geometry import TABLES, Profile
from fenka.core.mig.layouts import capacity
from fenka.core.request import InvalidRequest, Placement, Request, Slice
from fenka.dialects import base, card_records, mig_records
from fenka.dialects.card_records import nominal_slice, whole_slices
from fenka.dialects.mig_records import INSTANCE, DividedCard
from fenka.dialects.parsing import COMMON_OPTIONS, per_container, valid_request, with_options
from fenka.formats.mig_profiles import RESOURCE_PREFIX, resource_name, resource_profile

NAME = "nvidia-mig"
RESOURCES: tuple[str, ...] = (RESOURCE_PREFIX,)
LEASED = RESOURCE_PREFIX
ASSIGNED = ""
NODE_RESOURCES: tuple[base.NodeResource, ...] = ()
"""Those of a node follow from its cards: `node_resources`."""
OPTIONS: tuple[str, ...] = COMMON_OPTIONS
PLACEMENT: tuple[str, ...] = (INSTANCE,)
RECORDS: tuple[str, ...] = (INSTANCE, base.CARDS)


def matches(pod: base.PodRequest) -> bool:
    """Return whether the pod requests instances. Raises InvalidRecord."""
    return bool(pod.requested_resources(RESOURCES))


def parse(pod: base.PodRequest) -> tuple[base.SliceRequest, ...]:
    """Return a slice request for each container. Raises InvalidRecord."""
    return with_options(pod, per_container(pod, _container_request))


def _container_request(container: base.ContainerRequest) -> Request | None:
    names = base.PodRequest((container,)).requested_resources(RESOURCES)
    if not names:
        return None
    if len(names) > 1:
        raise base.InvalidRecord(
            f"container {container.name} asks for {names[0]} and for {names[1]}: "
            "ask for instances of one profile in each container"
        )
    (name,) = names
    if base.parse_milli(container.resources[name]) % 1000:
        raise base.InvalidRecord(
            f"container {container.name} asks for {str(container.resources[name])[:40]} of {name}: "
            "an instance is given whole, ask for a whole number of them"
        )
    try:
        profile = resource_profile(name)
    except InvalidRequest as why:
        raise base.InvalidRecord(f"container {container.name} asks for {why}") from None
    cards = container.amount(name)
    return valid_request(lambda: Request(whole=True, cards=cards, instance=profile))


def encode(
    pod: base.PodRequest,  # noqa: ARG001
    shared: base.SharedNode,  # noqa: ARG001
    placements: Sequence[Placement],
    now_ns: int,  # noqa: ARG001
) -> dict[str, str]:
    """Return the instances, and the UUIDs of the cards that they are on."""
    slices = [piece for placement in placements for piece in placement.slices]
    return {
        INSTANCE: mig_records.encode_places(slices),
        base.CARDS: card_records.encode_card_uuids([slices]),
    }


def decode(
    pod: base.PodRequest, parts: Sequence[base.SliceRequest], shared: base.SharedNode
) -> tuple[Placement, ...] | None:
    """Return the placements on the recorded instances; None if there is no record. Raises InvalidRecord."""
    instances = mig_records.recorded_instances(pod.annotations, parts, shared)
    if instances is None:
        return None
    placements = []
    for part, cards in zip(parts, instances, strict=True):
        slices = tuple(nominal_slice(part.request, shared.node, card) for card in cards)
        placements.append(Placement(shared.node.name, slices, whole=True))
    return tuple(placements)


container_slices = whole_slices(parse)


def environment(
    pod: base.PodRequest,  # noqa: ARG001
    shared: base.SharedNode,  # noqa: ARG001
    slices: Sequence[Slice],  # noqa: ARG001
    container: str,  # noqa: ARG001
) -> dict[str, str]:
    """Return nothing: the node adds the UUIDs of the devices that it has created."""
    return {}


# --- what nodes advertise ---------------------------------------------------------------------------

KNOWN_RESOURCES: tuple[str, ...] = tuple(
    sorted({resource_name(profile.name) for model in TABLES.values() for profile in model.profiles})
)
"""The resources of known card models. kube-scheduler's configuration takes names, and no prefixes."""


def node_resources(divided: Iterable[DividedCard]) -> dict[str, base.NodeResource]:
    """Return the resources of a node with these cards, by name: one for each of their profiles.

    A card has as many units of a profile as instances of it fit on the card when it is empty. So a node
    advertises more than it has: what is free is the scheduler's, and capacities stay the same while instances
    come and go. A card without instances on demand has the units of those that are there for pods.
    """
    units: dict[str, dict[DeviceId, int]] = {}
    for card in divided:
        for profile in card.geometry.profiles:
            of_cards = units.setdefault(profile.name, {})
            of_cards[card.uuid] = _units(card, profile)
    return {resource_name(name): _resource(name, of_cards) for name, of_cards in units.items()}


def _units(card: DividedCard, profile: Profile) -> int:
    if card.on_demand:
        return capacity(card.geometry, (), profile)
    return sum(
        state == "own" and place.profile == profile for place, state in card.instances.items()
    )


def _resource(profile: str, units: Mapping[DeviceId, int]) -> base.NodeResource:
    return base.NodeResource(
        resource_name(profile),
        f"fenka-mig-{profile.replace('+', '.')}",
        lambda _, card: units.get(card.uuid, 0),
        lambda _: True,
    )
