"""What users write on a running pod to resize it, and what the node's program writes there in answer.

    fenka.io/resize          "gpu-mem=6", "gpu-mem=4096MiB,gpu-core=30", "x: gpu-mem=6; y: gpu-core=20"
    fenka.io/resized         JSON: what the pod holds now of each card, and each container's part; for people
    fenka.io/resize-refused  why not, in one sentence; taken away by success

The record counts for nothing: whoever may annotate a pod can write it. What a resized pod holds is what its
node reports (dialects/leases.py).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fenka.core.inventory import DeviceId
from fenka.core.request import Memory, Slice
from fenka.dialects.base import InvalidRecord, counted
from fenka.dialects.sizes import InvalidSize, parse_memory

REQUEST = "fenka.io/resize"
STATUS = "fenka.io/resized"
REFUSED = "fenka.io/resize-refused"
RECORDS = (STATUS, REFUSED)

VERSION = 1

MEMORY, CORE = "gpu-mem", "gpu-core"
FULL = 100

_CONTAINER = re.compile(r"\s*([a-z0-9](?:[-a-z0-9]*[a-z0-9])?)\s*:(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ResizeRequest:
    """For one container, of each of its cards; None: as it is. compute: percent, 0 for no limit."""

    memory: Memory | None = None
    compute: int | None = None


@dataclass(frozen=True, slots=True)
class ResizeStatus:
    """What a pod holds now, at its peak, and its containers' parts by name. wish: the last one granted."""

    pod: str
    """Its UID."""
    slices: tuple[Slice, ...]
    containers: Mapping[str, tuple[Slice, ...]] = field(default_factory=dict)
    request: str = ""


# ---- wishes ----


def decode_request(text: str, unit_mib: int) -> dict[str, ResizeRequest]:
    """Wishes by container; under "" what is wished for the only one. Raises InvalidRecord."""
    found: dict[str, ResizeRequest] = {}
    for part in filter(str.strip, text.split(";")):
        named = _CONTAINER.fullmatch(part)
        name, items = (named[1], named[2]) if named else ("", part)
        if name in found:
            raise InvalidRecord(f"annotation {REQUEST} speaks twice of {name or 'the container'}")
        found[name] = _wish(items, unit_mib)
    if not found:
        raise InvalidRecord(
            f"annotation {REQUEST} is empty: write {MEMORY}=6, {CORE}=40 or both with a comma"
        )
    if "" in found and len(found) > 1:
        raise InvalidRecord(
            f"annotation {REQUEST} names some containers and not others: write x: {MEMORY}=6; y: {CORE}=20"
        )
    return found


def _wish(text: str, unit_mib: int) -> ResizeRequest:
    said: dict[str, str] = {}
    for item in text.split(","):
        key, equals, value = (it.strip() for it in item.partition("="))
        if not equals or key not in (MEMORY, CORE):
            raise InvalidRecord(
                f"annotation {REQUEST}: {item.strip()[:40]!r} is not understood: write {MEMORY}=6, "
                f"{MEMORY}=4096MiB or {CORE}=40"
            )
        if key in said:
            raise InvalidRecord(f"annotation {REQUEST} says {key} twice for one container")
        said[key] = value
    try:
        memory = parse_memory(said[MEMORY], unit_mib) if MEMORY in said else None
    except InvalidSize as why:
        raise InvalidRecord(f"annotation {REQUEST}: {why}") from None
    return ResizeRequest(memory, _percent(said[CORE]) if CORE in said else None)


def _percent(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 3 and int(text) <= FULL):
        raise InvalidRecord(
            f"annotation {REQUEST}: {CORE}={text[:40]} is no percentage: write 1 to 100, or 0 for no limit"
        )
    return int(text)


def encode_request(container: str, gpu_mem: str, gpu_core: int | None) -> str:
    """container: empty for the only one. gpu_mem: a size as users write it, empty to leave it as it is."""
    items = [f"{MEMORY}={gpu_mem.strip()}"] if gpu_mem else []
    items += [f"{CORE}={gpu_core}"] if gpu_core is not None else []
    return (f"{container}: " if container else "") + ",".join(items)


# ---- records ----


def encode_status(record: ResizeStatus) -> str:
    """The annotation RECORD."""
    return json.dumps(
        {
            "version": VERSION,
            "pod": record.pod,
            "holds": list(map(_written, record.slices)),
            "containers": {
                name: list(map(_written, part)) for name, part in sorted(record.containers.items())
            },
            "wish": record.request,
        },
        separators=(",", ":"),
    )


def decode_status(annotations: Mapping[str, str], pod: str = "") -> ResizeStatus | None:
    """None where there is none, or where it is another's. pod: whose it must be, by UID; empty for anybody's.

    Raises InvalidRecord.
    """
    if STATUS not in annotations:
        return None
    try:
        record = _fields(
            json.loads(annotations[STATUS]), "version", "pod", "holds", "containers", "wish"
        )
        _check_version(record["version"])
        found = ResizeStatus(
            _text(record["pod"]),
            _slices(record["holds"]),
            {name: _slices(part) for name, part in record["containers"].items()},
            _text(record["wish"]),
        )
    except (ValueError, TypeError, AttributeError, RecursionError) as why:
        raise InvalidRecord(f"annotation {STATUS} is not understood: {why}") from None
    return found if pod in ("", found.pod) else None


def _written(piece: Slice) -> dict[str, Any]:
    return {
        "card": piece.card,
        "uuid": piece.uuid,
        "memoryMiB": piece.memory_mib,
        "compute": piece.compute,
    }


def _slices(items: Any) -> tuple[Slice, ...]:
    read = [_fields(it, "card", "uuid", "memoryMiB", "compute") for it in _list(items)]
    slices = tuple(
        Slice(
            counted(it["card"]),
            DeviceId(_text(it["uuid"])),
            counted(it["memoryMiB"]),
            counted(it["compute"]),
        )
        for it in read
    )
    if len({it.card for it in slices}) < len(slices):
        raise ValueError("a card is named twice")
    return slices


def _fields(value: Any, *names: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} has no fields")
    for name in names:
        if name not in value:
            raise ValueError(f"it has no {name}")
    if unknown := sorted(set(value) - set(names)):
        raise ValueError(f"{unknown[0]} is not known to this version")
    return value


def _check_version(value: Any) -> None:
    if value != VERSION:
        raise ValueError(f"version {value!r} is not {VERSION}")


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value
