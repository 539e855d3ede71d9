"""The cards that a node shares, by fenka's inventory or gpushare's plugin, and its mode, by its labels.

gpushare's and gpu-manager's labels say that it shares cards, ACK's say how. The node program advertises, and
the scheduler admits, what this mode allows.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from sys import intern
from typing import Annotated, Literal

import msgspec

from fenka.core.errors import listed
from fenka.core.inventory import MAX_LINKED_CARDS, UNKNOWN, Card, DeviceId, Links, Node, matrix_of
from fenka.core.request import MAX_CARDS, MAX_MEMORY_MIB, InvalidRequest, Request
from fenka.dialects import base, card_records
from fenka.dialects.card_records import CardIndex
from fenka.dialects.gpushare import COUNT, MEMORY
from fenka.dialects.mig_records import INSIDE, INSTANCES, decode_instances, with_division
from fenka.formats.mig_profiles import parse_inside

CORDONED = "fenka.io/cordoned"
"""Node annotation, written by people: indexes of cards that take no new slices, such as "0,2"."""


def decode_node(
    name: str, annotations: Mapping[str, str], allocatable: Mapping[str, str]
) -> base.SharedNode | None:
    """Return the shared node of that name; None if it shares no card.

    Its cards are those of its inventory. Without one, as on nodes of gpushare's own plugin, the cards are
    equal parts of the resource.

    A node that advertises no slices shares its divided cards, if it has any, and no others. One that does
    advertises as many units of a divided card as of a whole one, for slices inside its instances.

    Raises:
        InvalidRecord: if the inventory cannot be read.
    """
    total = base.parse_quantity(allocatable.get(MEMORY, 0))
    if base.CARDS in annotations and (total > 0 or INSTANCES in annotations):
        shared = _recorded(name, annotations[base.CARDS])
    elif total > 0:
        shared = _assumed_equal(name, total, base.parse_quantity(allocatable.get(COUNT, 0)))
    else:
        return None
    cordoned = parse_indexes(annotations.get(CORDONED, ""))
    shared = _marked(shared, cordoned, lambda card: replace(card, cordoned=True))
    divided = decode_instances(annotations)
    if divided:
        shared = with_division(shared, divided)
    return shared if total > 0 else _divided_only(shared)


def _divided_only(shared: base.SharedNode) -> base.SharedNode | None:
    cards = tuple(card for card in shared.node.cards if card.divided or card.parent is not None)
    if not cards:
        return None
    return replace(shared, node=replace(shared.node, cards=cards), shares_cards=False)


_Mib = Annotated[int, msgspec.Meta(ge=0, le=MAX_MEMORY_MIB)]


class _InventoryCard(msgspec.Struct, omit_defaults=True):
    index: CardIndex
    uuid: str
    model: str
    memory_mib: Annotated[int, msgspec.Meta(ge=1, le=MAX_MEMORY_MIB)] = msgspec.field(
        name="memoryMiB"
    )
    healthy: bool
    unleased_mib: _Mib = msgspec.field(name="unleasedMiB", default=0)
    drawn_mib: _Mib = msgspec.field(name="drawnMiB", default=0)
    unleased: str = ""
    """The users of that memory, in a sentence."""
    links: Annotated[str, msgspec.Meta(pattern=r"^[0-9]*\Z", max_length=MAX_LINKED_CARDS)] = ""
    """Its `Distance` from each card, in the order of the list; empty if that is not known."""


class _Inventory(msgspec.Struct):
    unit_mib: Annotated[int, msgspec.Meta(ge=1)] = msgspec.field(name="unitMiB")
    cards: list[_InventoryCard]


_INVENTORY = msgspec.json.Decoder(_Inventory)


def encode_inventory(
    cards: Sequence[Card],
    unit_mib: int,
    unleased: Mapping[DeviceId, str] | None = None,
    links: Links | None = None,
) -> str:
    """Return the node's `fenka.io/cards`: everything that the extender must know of it.

    Args:
        cards: the cards.
        unit_mib: the node's unit.
        unleased: who uses cards without a lease, in a sentence for each, by UUID.
        links: how they are connected; None if that is not known.
    """
    rows = _rows(links, cards)
    recorded = [
        _InventoryCard(
            *(card.index, card.uuid, card.model, card.memory_mib, card.healthy),
            *(card.unleased_mib, card.drawn_mib),
            *((unleased or {}).get(card.uuid, ""), row),
        )
        for card, row in zip(cards, rows, strict=True)
    ]
    return card_records.encode(_Inventory(unit_mib, recorded))


def _rows(links: Links | None, cards: Sequence[Card]) -> list[str]:
    """Return the distances of each card from all of them, as digits."""
    distances = matrix_of(links, tuple(card.uuid for card in cards))
    if distances is None:
        return [""] * len(cards)
    digits = "".join(map(str, distances))
    return [digits[start : start + len(cards)] for start in range(0, len(digits), len(cards))]


def _links(name: str, cards: Sequence[_InventoryCard]) -> Links | None:
    """Return how a node's cards are connected; None if one of them has no row. Raises InvalidRecord."""
    if not all(card.links for card in cards):
        return None
    if any(len(card.links) != len(cards) for card in cards):
        raise base.InvalidRecord(
            f"annotation {base.CARDS} of node {name} has links of other cards than it names"
        )
    # A later release may know more distances.
    distances = bytes(min(int(digit), UNKNOWN) for card in cards for digit in card.links)
    return Links(tuple(intern(card.uuid) for card in cards), distances)


def unleased_memory(annotations: Mapping[str, str]) -> dict[int, str]:
    """Return who uses cards of a node without a lease, in a sentence for each, by the card's index."""
    try:
        cards = card_records.decode(annotations.get(base.CARDS, ""), _INVENTORY, base.CARDS).cards
    except base.InvalidRecord:
        return {}
    return {card.index: card.unleased for card in cards if card.unleased}


def with_unhealthy(shared: base.SharedNode, sick: frozenset[int]) -> base.SharedNode:
    """Return the node with these cards unhealthy too."""
    return _marked(shared, sick, lambda card: replace(card, healthy=False))


def _recorded(name: str, text: str) -> base.SharedNode:
    inventory = card_records.decode(text, _INVENTORY, f"annotation {base.CARDS} of node {name}")
    cards = [
        Card(
            card.index,
            DeviceId(intern(card.uuid)) or base.invented_id(name, card.index),
            intern(card.model),
            card.memory_mib,
            healthy=card.healthy,
            unleased_mib=card.unleased_mib,
            drawn_mib=card.drawn_mib,
        )
        for card in sorted(inventory.cards, key=lambda card: card.index)
    ]
    if min(len({card.index for card in cards}), len({card.uuid for card in cards})) < len(cards):
        raise base.InvalidRecord(f"annotation {base.CARDS} of node {name} names a card twice")
    links = _links(name, inventory.cards)
    return base.SharedNode(Node(name, tuple(cards), unit_mib=inventory.unit_mib, links=links))


def _assumed_equal(name: str, total: int, count: int) -> base.SharedNode:
    units = total // max(count, 1)
    # gpushare's own rule: more than 100 units of a card are MiB.
    unit = 1 if units > 100 else base.GIB_MIB
    if count > MAX_CARDS or units * unit > MAX_MEMORY_MIB:
        raise base.InvalidRecord(
            f"node {name} offers {total} of {MEMORY} on {count} cards: no node has that"
        )
    cards = tuple(
        Card(index, base.invented_id(name, index), "", units * unit)
        for index in range(max(count, 1))
    )
    return base.SharedNode(Node(name, cards, unit_mib=unit), has_inventory=False)


def _marked(
    shared: base.SharedNode, indexes: frozenset[int], mark: Callable[[Card], Card]
) -> base.SharedNode:
    """Return the node with some of its cards replaced."""
    if not indexes:
        return shared
    cards = tuple(mark(card) if card.index in indexes else card for card in shared.node.cards)
    return replace(shared, node=replace(shared.node, cards=cards))


def parse_indexes(text: str) -> frozenset[int]:
    """Return card indexes as people list them, "0,2"; anything else in the list is ignored."""
    return frozenset(int(item) for item in re.split(r"[,\s]+", text) if base.is_index(item))


MAX_UNKNOWN, MAX_ITEM = 5, 20
"""Items of a list of indexes to name, and characters of each."""


def unknown_cards(name: str, text: str, known: Collection[int]) -> str:
    """Return a sentence about a list of card indexes that names no card of the node; empty if all are known.

    Args:
        name: the annotation.
        text: its value, by a person.
        known: the indexes of the node's cards.
    """
    items = [item for item in re.split(r"[,\s]+", text) if item]
    unknown = [item for item in items if not (base.is_index(item) and int(item) in known)]
    if not unknown:
        return ""
    wrong = listed([item[:MAX_ITEM] for item in unknown], MAX_UNKNOWN)
    cards = listed([str(index) for index in sorted(known)], MAX_LINKED_CARDS)
    return (
        f"annotation {name} names {wrong}, and this node has the cards {cards}: write indexes of these, "
        'such as "0,2"'
    )


PLACEMENT_LABEL = "ack.node.gpu.placement"
"""Node label: binpack or spread, over the cards of that node."""


SHARING_LABELS = {"gpushare": "true", "cgpu": "true", "nvidia-device-enable": "enable"}
"""Node labels, with the value by which each makes a node share its cards."""
MODE_LABEL = "ack.node.gpu.schedule"
"""Node label: ACK's mode of the node."""
WHOLE_LABEL = "fenka.io/whole-cards"
"""Node label: with `true` a node that shares cards also gives whole ones."""
DISABLE_ISOLATION_LABEL = "cgpu.disable.isolation"
MIG_LABEL = "fenka.io/mig"
"""Node label: which cards are divided into MIG instances, see `mig_mode`."""
MIG_TENANCY = "fenka.io/mig-tenancy"
"""Node label: with `shared` pods of two namespaces may share a MIG instance; `namespace` is the default."""
TENANCIES = ("namespace", "shared")

MODE_LABELS = (*SHARING_LABELS, MODE_LABEL, WHOLE_LABEL, MIG_LABEL, MIG_TENANCY, INSIDE)
"""The labels that decide what a node admits."""


SHARED = base.NodeMode(memory=True, compute=True)
EXCLUSIVE = base.NodeMode(whole=True)

MODES = {
    "default": EXCLUSIVE,
    "topology": EXCLUSIVE,
    "cgpu": base.NodeMode(memory=True),
    "core_mem": SHARED,
    "share": base.NodeMode(memory=True, isolated=False),
}
"""Modes by the value of ACK's label."""


def has_mode_label(labels: Mapping[str, str]) -> bool:
    """Return whether the node has any of the labels, with any value."""
    return MODE_LABEL in labels or any(label in labels for label in SHARING_LABELS)


def node_mode(labels: Mapping[str, str]) -> base.NodeMode:
    """Return the mode of a node. Without any of the labels it does not share cards.

    Raises:
        InvalidRecord: for labels that contradict each other, and for a mode that fenka does not serve.
    """
    sharing = {
        label: labels[label] == yes for label, yes in SHARING_LABELS.items() if label in labels
    }
    known = dict(sharing)
    if MODE_LABEL in labels:
        if labels[MODE_LABEL] not in MODES:
            raise base.InvalidRecord(
                f"its label {MODE_LABEL}={labels[MODE_LABEL]} is none of {', '.join(sorted(MODES))}"
            )
        known[MODE_LABEL] = MODES[labels[MODE_LABEL]].memory
    if len(set(known.values())) > 1:
        written = " and ".join(f"{label}={labels[label]}" for label in known)
        raise base.InvalidRecord(f"the labels {written} contradict each other: keep one of them")
    mode = (
        MODES[labels[MODE_LABEL]]
        if MODE_LABEL in labels
        else SHARED
        if any(sharing.values())
        else EXCLUSIVE
    )
    if mode.memory and labels.get(WHOLE_LABEL) == "true":
        mode = replace(mode, whole=True)
    if labels.get(DISABLE_ISOLATION_LABEL) == "true":
        mode = replace(mode, isolated=False)
    return mode


@dataclass(frozen=True, slots=True)
class NodeMigMode:
    """Which cards of a node are divided, and by what.

    Attributes:
        kind: off: by fenka none. on-demand: for pods. static: by layouts.
        indexes: the cards that are divided on demand; None for all that can be.
        labelled: whether the node has the label.
    """

    kind: Literal["off", "on-demand", "static"] = "off"
    indexes: frozenset[int] | None = None
    labelled: bool = False

    @property
    def on(self) -> bool:
        """Whether the node gives instances."""
        return self.kind != "off"


_ON_DEMAND = re.compile(r"on-demand((?:[.:,_-][0-9]{1,4})*)")


def mig_mode(labels: Mapping[str, str]) -> NodeMigMode:
    """Return how a node is divided: `off`, `static`, `on-demand`, or `on-demand.0.1` for these cards.

    Kubernetes allows no colon or comma in the value of a label, so that dots separate the indexes.

    Raises:
        InvalidRecord: for another value.
    """
    if MIG_LABEL not in labels:
        return NodeMigMode()
    value = labels[MIG_LABEL]
    if value in ("off", "static"):
        return NodeMigMode("static" if value == "static" else "off", labelled=True)
    match = _ON_DEMAND.fullmatch(value)
    if match is None:
        raise base.InvalidRecord(
            f"its label {MIG_LABEL}={value[:63]} is none of off, static, on-demand, and on-demand.0.1 for "
            "the cards 0 and 1"
        )
    indexes = frozenset(map(int, re.findall("[0-9]+", match[1])))
    return NodeMigMode("on-demand", indexes or None, labelled=True)


def mig_shared(labels: Mapping[str, str]) -> bool:
    """Return whether two namespaces may share an instance of a node; `check_admission` rejects bad values."""
    return labels.get(MIG_TENANCY) == TENANCIES[1]


def slices_inside(labels: Mapping[str, str]) -> str:
    """Return the profile of the instances that slices of a node are in, or ANY_INSTANCE; empty for cards.

    Raises:
        InvalidRecord: if the label is no profile.
    """
    try:
        return parse_inside(labels[INSIDE]) if INSIDE in labels else ""
    except InvalidRequest as why:
        raise base.InvalidRecord(f"its label {INSIDE}: {why}") from None


def check_shared(labels: Mapping[str, str]) -> None:
    """Raise InvalidRecord with the reason if a node that advertises shared cards takes no new pods.

    A node without any of the labels takes them: gpushare's extender ignores labels. So does one that gives
    instances; `check_admission` says what else it takes.
    """
    if has_mode_label(labels) and not node_mode(labels).memory and not mig_mode(labels).on:
        label = next(label for label in (*SHARING_LABELS, MODE_LABEL) if label in labels)
        raise base.InvalidRecord(f"its label {label}={labels[label]} takes it out of sharing")


def check_admission(
    labels: Mapping[str, str], parts: Sequence[base.SliceRequest], neighbours: Collection[bool] = ()
) -> None:
    """Raise InvalidRecord with the reason if the mode of a shared node rejects the pod.

    Instances are admitted if the node divides cards, whether it shares the others or not. Slices inside them
    need both.

    Args:
        labels: the node's.
        parts: what the pod requests.
        neighbours: for each pod that has memory there now, whether it has compute too. On nodes of `core_mem`
            the two kinds do not mix: pods without a share of compute would take it from those with one.
    """
    allowed = node_mode(labels) if has_mode_label(labels) else SHARED
    subject = (
        f"its label {MODE_LABEL}={labels[MODE_LABEL]}" if MODE_LABEL in labels else "its owner"
    )
    for part in parts:
        request = part.request
        if request.instance:
            _check_instances(labels, request)
            if request.whole:
                continue
        if request.whole:
            if not (allowed.whole if part.requires_opt_in else allowed.compute or allowed.whole):
                raise base.InvalidRecord(
                    f"{subject} keeps it for slices: {WHOLE_LABEL}=true is for both"
                )
        elif not allowed.memory:
            raise base.InvalidRecord(f"{subject} keeps it for whole cards")
        elif not request.instance and slices_inside(labels):
            raise base.InvalidRecord(
                f"its label {INSIDE}={labels[INSIDE]} keeps it for slices of one card, inside MIG instances, "
                "of pods outside of gangs"
            )
        elif part.has_compute and not allowed.compute:
            raise base.InvalidRecord(f"{subject} shares out memory alone, not compute")
        elif labels.get(MODE_LABEL) == "core_mem" and any(
            has_compute != part.has_compute for has_compute in neighbours
        ):
            other = "without" if part.has_compute else "with"
            raise base.InvalidRecord(
                f"{subject} does not mix, and pods {other} a share of compute are there"
            )


def _check_instances(labels: Mapping[str, str], request: Request) -> None:
    """Check that a node has instances for a request, and shares them if it is for a slice."""
    if not mig_mode(labels).on:
        raise base.InvalidRecord(
            f"its owner has no card divided into MIG instances: label {MIG_LABEL}=on-demand does that"
        )
    if request.whole:
        return
    if not node_mode(labels).memory:
        raise base.InvalidRecord("its owner keeps it for whole cards and whole MIG instances")
    tenancy = labels.get(MIG_TENANCY, TENANCIES[0])
    if tenancy not in TENANCIES:
        raise base.InvalidRecord(
            f"its label {MIG_TENANCY}={tenancy[:63]} is none of {' and '.join(TENANCIES)}"
        )
