"""Leases as a node program reports them on its Node: pods and their slices.

    fenka.io/leases   JSON, written by the node program alone

A pod's owner can change the record on the pod, but not the Node. So the scheduler counts a pod that is
reported here by this report, whatever the pod's own record says. `refused` lists pods that the node has
refused to start for a minute: the scheduler moves them.

Resizing of running pods: the annotation that users write, and those by which the node program answers.

    fenka.io/resize          "gpu-mem=6", "gpu-mem=4096MiB,gpu-core=30", "x: gpu-mem=6; y: gpu-core=20"
    fenka.io/resized         JSON: what the pod holds now of each card, and each container's part; for people
    fenka.io/resize-refused  why not, in one sentence; taken away by success
    fenka.io/resize-final    "true" beside it if the request can never be granted

The record counts for nothing: whoever may annotate a pod can write it. The size of a resized pod is the one
that its node reports.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from sys import intern
from typing import Literal

import msgspec

from fenka.core.inventory import DeviceId
from fenka.core.request import Memory, Slice
from fenka.dialects import card_records
from fenka.dialects.base import InvalidRecord
from fenka.dialects.card_records import CardIndex, Count
from fenka.formats.quantities import InvalidSize, parse_memory, parse_percent

REPORT = "fenka.io/leases"
"""Node annotation."""

VERSION: Literal[1] = 1

MAX_CHARACTERS = 200_000
"""All annotations of an object together may have 256 KiB."""

MAX_SENTENCE = 300


@dataclass(frozen=True, slots=True)
class Lingering:
    """Slices of a pod that the API server no longer shows, or shows as finished. name: namespace/name."""

    name: str
    slices: tuple[Slice, ...]


class Refusal(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Why a pod does not start. movable: whether it may start on another node."""

    sentence: str
    movable: bool = False


@dataclass(frozen=True, slots=True)
class LeaseReport:
    """The slices of pods, by UID.

    Attributes:
        pods: slices of pods at their peak, whose processes are alive or may start at any moment.
        lingering: slices of pods that the API server no longer shows.
        refused: pods that the node does not start.
    """

    pods: Mapping[str, tuple[Slice, ...]] = field(default_factory=dict)
    lingering: Mapping[str, Lingering] = field(default_factory=dict)
    refused: Mapping[str, Refusal] = field(default_factory=dict)


EMPTY_REPORT = LeaseReport()


class _LeaseSlice(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    uuid: Count
    """A position in the report's list of cards."""
    card: CardIndex
    memory_mib: Count
    compute: Count


class _Report(msgspec.Struct, forbid_unknown_fields=True):
    version: Literal[1]
    cards: list[str]
    pods: dict[str, list[_LeaseSlice]]
    lingering: dict[str, tuple[str, list[_LeaseSlice]]]
    refused: dict[str, Refusal]


_REPORT = msgspec.json.Decoder(_Report)


def encode_report(report: LeaseReport) -> str:
    """Return the annotation REPORT, without `refused` if it would be too long.

    Raises:
        InvalidRecord: if it is too long even so.
    """
    uuids: dict[DeviceId, int] = {}

    def encoded(slices: Iterable[Slice]) -> list[_LeaseSlice]:
        return [
            _LeaseSlice(
                uuids.setdefault(part.uuid, len(uuids)), part.card, part.memory_mib, part.compute
            )
            for part in slices
        ]

    pods = {uid: encoded(slices) for uid, slices in sorted(report.pods.items())}
    lingering = {
        uid: (pod.name, encoded(pod.slices)) for uid, pod in sorted(report.lingering.items())
    }
    refused = {
        uid: Refusal(refusal.sentence[:MAX_SENTENCE], refusal.movable)
        for uid, refusal in sorted(report.refused.items())
    }
    for shown in (refused, {}):
        text = card_records.encode(_Report(VERSION, list(uuids), pods, lingering, shown))
        if len(text) <= MAX_CHARACTERS:
            return text
    raise InvalidRecord(f"annotation {REPORT} would have {len(text)} characters")


def decode_report(annotations: Mapping[str, str]) -> LeaseReport | None:
    """Return None if the node program has reported nothing. Raises InvalidRecord."""
    if REPORT not in annotations:
        return None
    record = card_records.decode(annotations[REPORT], _REPORT, f"annotation {REPORT}")
    # The node's inventory has the same ids: they are kept once. Pods' are not: Python 3.12.0 to 3.12.6 never
    # frees a string that was interned, and a cluster has new pods all the time.
    devices = [DeviceId(intern(text)) for text in record.cards]

    def decoded(slices: Iterable[_LeaseSlice]) -> tuple[Slice, ...]:
        return tuple(
            Slice(part.card, devices[part.uuid], part.memory_mib, part.compute) for part in slices
        )

    try:
        return LeaseReport(
            {uid: decoded(slices) for uid, slices in record.pods.items()},
            {
                uid: Lingering(name, decoded(slices))
                for uid, (name, slices) in record.lingering.items()
            },
            record.refused,
        )
    except IndexError:
        raise InvalidRecord(
            f"annotation {REPORT} is not understood: a slice is on a card that it does not list"
        ) from None


REQUEST = "fenka.io/resize"
STATUS = "fenka.io/resized"
REFUSED = "fenka.io/resize-refused"
FINAL = "fenka.io/resize-final"
RECORDS = (STATUS, REFUSED, FINAL)


MEMORY, CORE = "gpu-mem", "gpu-core"

_CONTAINER = re.compile(r"\s*([a-z0-9](?:[-a-z0-9]*[a-z0-9])?)\s*:(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ResizeRequest:
    """The size of one container on each of its cards; None for no change. compute: 0 for no limit."""

    memory: Memory | None = None
    compute: int | None = None


@dataclass(frozen=True, slots=True)
class ResizeStatus:
    """The slices of a pod at its peak, and those of its containers by name. request: the last granted one."""

    pod: str
    """Its UID."""
    slices: tuple[Slice, ...]
    containers: Mapping[str, tuple[Slice, ...]] = field(default_factory=dict)
    request: str = ""


# ---- the request ----


def decode_request(text: str, unit_mib: int) -> dict[str, ResizeRequest]:
    """Return the requests by container, under "" that for the only one. Raises InvalidRecord."""
    requests: dict[str, ResizeRequest] = {}
    for part in filter(str.strip, text.split(";")):
        named = _CONTAINER.fullmatch(part)
        name, items = (named[1], named[2]) if named else ("", part)
        if name in requests:
            raise InvalidRecord(f"annotation {REQUEST} names {name or 'the container'} twice")
        requests[name] = _request(items, unit_mib)
    if not requests:
        raise InvalidRecord(
            f"annotation {REQUEST} is empty: write {MEMORY}=6, {CORE}=40 or both with a comma"
        )
    if "" in requests and len(requests) > 1:
        raise InvalidRecord(
            f"annotation {REQUEST} names some containers and not others: write x: {MEMORY}=6; y: {CORE}=20"
        )
    return requests


def _request(text: str, unit_mib: int) -> ResizeRequest:
    values: dict[str, str] = {}
    for item in text.split(","):
        key, equals, value = (piece.strip() for piece in item.partition("="))
        if not equals or key not in (MEMORY, CORE):
            raise InvalidRecord(
                f"annotation {REQUEST}: {item.strip()[:40]!r} is not understood: write {MEMORY}=6, "
                f"{MEMORY}=4096MiB or {CORE}=40"
            )
        if key in values:
            raise InvalidRecord(f"annotation {REQUEST} says {key} twice for one container")
        values[key] = value
    try:
        memory = parse_memory(values[MEMORY], unit_mib) if MEMORY in values else None
    except InvalidSize as why:
        raise InvalidRecord(f"annotation {REQUEST}: {why}") from None
    return ResizeRequest(memory, _percent(values[CORE]) if CORE in values else None)


def _percent(text: str) -> int:
    number = parse_percent(text)
    if number is None:
        raise InvalidRecord(
            f"annotation {REQUEST}: {CORE}={text[:40]} is no percentage: write 1 to 100, or 0 for no limit"
        )
    return number


def encode_request(container: str, gpu_mem: str, gpu_core: int | None) -> str:
    """Return the annotation. container: empty for the only one. gpu_mem: a size, empty for no change."""
    items = [f"{MEMORY}={gpu_mem.strip()}"] if gpu_mem else []
    items += [f"{CORE}={gpu_core}"] if gpu_core is not None else []
    return (f"{container}: " if container else "") + ",".join(items)


# ---- the status ----


class _RequestedSlice(msgspec.Struct, forbid_unknown_fields=True):
    card: CardIndex
    uuid: str
    memory_mib: Count = msgspec.field(name="memoryMiB")
    compute: Count


class _ResizeStatus(msgspec.Struct, forbid_unknown_fields=True):
    version: Literal[1]
    pod: str
    holds: list[_RequestedSlice]
    containers: dict[str, list[_RequestedSlice]]
    request: str


_STATUS = msgspec.json.Decoder(_ResizeStatus)


def encode_status(status: ResizeStatus) -> str:
    """Return the annotation STATUS."""
    containers = {name: _encoded(slices) for name, slices in sorted(status.containers.items())}
    return card_records.encode(
        _ResizeStatus(VERSION, status.pod, _encoded(status.slices), containers, status.request)
    )


def decode_status(annotations: Mapping[str, str], pod: str = "") -> ResizeStatus | None:
    """Return None if there is none, or if it is another pod's.

    Args:
        annotations: the pod's.
        pod: the UID that it must be of; empty for any.

    Raises:
        InvalidRecord: if it cannot be read.
    """
    if STATUS not in annotations:
        return None
    record = card_records.decode(annotations[STATUS], _STATUS, f"annotation {STATUS}")
    status = ResizeStatus(
        record.pod,
        _decoded(record.holds),
        {name: _decoded(slices) for name, slices in record.containers.items()},
        record.request,
    )
    return status if pod in ("", status.pod) else None


def _encoded(slices: Iterable[Slice]) -> list[_RequestedSlice]:
    return [_RequestedSlice(part.card, part.uuid, part.memory_mib, part.compute) for part in slices]


def _decoded(slices: Sequence[_RequestedSlice]) -> tuple[Slice, ...]:
    if len({(part.card, part.uuid) for part in slices}) < len(slices):
        raise InvalidRecord(f"annotation {STATUS} is not understood: a card is named twice")
    return tuple(
        Slice(part.card, DeviceId(part.uuid), part.memory_mib, part.compute) for part in slices
    )
