"""All records that one release writes and another reads, and how samples of them are made.

    python -m tests.skew.records > tests/skew/records-VERSION.json

writes the samples of this tree's formats: for each type one value with all fields set, and one with the
required fields alone. The file of the last release is committed, and is never written again.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from fenka.autoscaler import stores
from fenka.cluster import autoscaling, queue_snapshot, service_objects
from fenka.dialects import lease_records, mig_records, nodes, resize_records
from fenka.jobs import routing_table
from fenka.local import records, runs
from fenka.mig import keeper
from fenka.node.lease import store
from fenka.workstation import files, protocol

LAST = "0.1.0"
"""The last release, whose formats are held by files of this folder."""

STORED: Mapping[str, Any] = {
    "autoscaler/orders": autoscaling.OrderRecord,
    "autoscaler/planned": autoscaling.Planned,
    "autoscaler/status": autoscaling.AutoscalerStatus,
    "autoscaler/unhelpful-offers": stores._UnhelpfulOffers,
    "gateway/table": routing_table.RoutingTable,
    "mig/instances": keeper.RecordFile,
    "node/cards": nodes._Inventory,
    "node/instances": mig_records._Instances,
    "node/leases": lease_records._Report,
    "node/token": store.Token,
    "pod/instance": mig_records._PodInstance,
    "pod/resized": resize_records._ResizeStatus,
    "scheduler/options": queue_snapshot.SchedulerOptions,
    "service/scaling": service_objects.ScalingEntry,
    "workstation/config": files.DaemonConfig,
    "workstation/ended": protocol.EndedJob,
    "workstation/layouts": files.LayoutFile,
    "workstation/notebook": records.NotebookRecord,
    "workstation/run-end": runs.RunEnd,
    "workstation/service": records.ServiceRecord,
    "workstation/state": files.StateFile,
    "workstation/training": records.TrainingRecord,
}
"""Files and annotations, by what they are of."""

MESSAGES: Mapping[str, Any] = {
    f"message/{kind.__struct_config__.tag}": kind
    for kind in (*protocol.ToDaemon.__args__, *protocol.FromDaemon.__args__)
}
"""Messages between a command and the daemon of a workstation."""

ALL = {**STORED, **MESSAGES}

_VALID: Mapping[tuple[str, str], Any] = {
    ("Request", "whole"): False,
    ("Request", "linked"): False,
    ("Request", "near"): True,
    ("_InventoryCard", "links"): "0",
    ("SchedulerOptions", "policy"): "spread",
}
"""Fields that are checked beyond their type."""


def sample(kind: inspect.Type, *, full: bool) -> Any:  # noqa: PLR0911, PLR0912
    """Return a value of a type as JSON has it, unlike usual defaults. full: with optional fields, too."""
    match kind:
        case inspect.Metadata():
            return sample(kind.type, full=full)
        case inspect.NoneType():
            return None
        case inspect.BoolType():
            return True
        case inspect.IntType() | inspect.FloatType():
            return _number(kind)
        case inspect.StrType():
            return _text(kind)
        case inspect.LiteralType(values):
            return values[-1]
        case inspect.EnumType(values):
            return [*values][-1].value
        case inspect.UnionType(types):
            # An optional value: that which it has if it has one.
            return sample(next(t for t in types if t != inspect.NoneType()), full=full)
        case inspect.DictType():
            return {sample(kind.key_type, full=full): sample(kind.value_type, full=full)}
        case inspect.NamedTupleType(fields=fields):
            return [sample(field.type, full=full) for field in fields]
        case inspect.TupleType(item_types):
            return [sample(item, full=full) for item in item_types]
        case inspect.StructType() | inspect.DataclassType():
            return _fields(kind, full=full)
        case inspect.CustomType():
            return "/some/path"
        case _:  # a sequence
            return [sample(kind.item_type, full=full)]  # type: ignore[attr-defined]


def _fields(kind: inspect.StructType | inspect.DataclassType, *, full: bool) -> Any:
    values = {
        field.encode_name: _VALID.get(
            (kind.cls.__name__, field.name), _unlike_default(field, full=full)
        )
        for field in kind.fields
        if full or field.required
    }
    if isinstance(kind, inspect.StructType):
        if kind.array_like:
            return list(values.values())
        if kind.tag_field:
            values = {kind.tag_field: kind.tag, **values}
    return values


def _unlike_default(field: inspect.Field, *, full: bool) -> Any:
    """Return a value that is written even where defaults are not."""
    value = sample(field.type, full=full)
    if value != field.default:
        return value
    kind = field.type.type if isinstance(field.type, inspect.Metadata) else field.type
    match kind:
        case inspect.BoolType():
            return not value
        case inspect.LiteralType(values):
            return values[0]
    return value


def _number(kind: inspect.IntType | inspect.FloatType) -> int | float:
    """Return a number that the bounds allow, and that is no usual default."""
    least = kind.ge if kind.ge is not None else kind.gt if kind.gt is not None else 0
    most = kind.le if kind.le is not None else kind.lt if kind.lt is not None else least + 10
    number = min(least + 3, most)
    return number if isinstance(kind, inspect.IntType) else number + 0.5


def _text(kind: inspect.StrType) -> str:
    return "v1" if kind.pattern else "text"


class Samples(msgspec.Struct):
    """Samples of a type: with all fields, and with the required ones alone."""

    full: Any
    least: Any


def samples() -> dict[str, Samples]:
    """Return the samples of all types of this tree."""
    kinds = {name: inspect.type_info(kind) for name, kind in ALL.items()}
    return {
        name: Samples(sample(kind, full=True), sample(kind, full=False))
        for name, kind in kinds.items()
    }


def read_samples(version: str) -> dict[str, Samples]:
    """Return the samples of a release."""
    text = Path(__file__).with_name(f"records-{version}.json").read_bytes()
    return msgspec.json.decode(text, type=dict[str, Samples])


def decode(name: str, value: Any) -> Any:
    """Return a record of this name from its JSON. Raises msgspec.MsgspecError."""
    text = msgspec.json.encode(value)
    return msgspec.json.decode(text, type=ALL[name], dec_hook=lambda _, path: Path(path))


def encoded(record: Any) -> Any:
    """Return a record as its JSON has it."""
    return msgspec.json.decode(protocol.encode(record))


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(samples()), indent=1).decode() + "\n")
