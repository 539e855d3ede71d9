"""Resizing of running pods: the annotation that users write, and those by which the node program answers.

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
from typing import Literal

import msgspec

from fenka.core.inventory import DeviceId
from fenka.core.request import Memory, Slice
from fenka.dialects import card_records
from fenka.dialects.base import InvalidRecord
from fenka.dialects.card_records import CardIndex, Count
from fenka.formats.durations import parse_percent
from fenka.formats.quantities import InvalidSize, parse_memory

VERSION: Literal[1] = 1

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


def _decoded(slices: Sequence[_RequestedSlice]) -> tuple[Slice, ...]:
    if len({(part.card, part.uuid) for part in slices}) < len(slices):
        raise InvalidRecord(f"annotation {STATUS} is not understood: a card is named twice")
    return tuple(
        Slice(part.card, DeviceId(part.uuid), part.memory_mib, part.compute) for part in slices
    )


def _encoded(slices: Iterable[Slice]) -> list[_RequestedSlice]:
    return [_RequestedSlice(part.card, part.uuid, part.memory_mib, part.compute) for part in slices]
