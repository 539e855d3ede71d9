"""Options of the program, apart from the program: `fenka autoscaler plan` need not load it.

Files of the format `fenka.plan/1`: cases are read from them, plans are written.
"""

import dataclasses
import functools
import types
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from fenka.core.nodes.case import Case, InvalidCase, check_case
from fenka.core.units import MIB
from fenka.server.program import Kubeconfig, ReplicaName


class AutoscalerOptions(msgspec.Struct, frozen=True):
    """Options of `fenka autoscaler`."""

    address: Annotated[str, Meta(description="address to listen on")] = "0.0.0.0"
    port: Annotated[int, Meta(description="port for probes and metrics")] = 12347
    namespace: Annotated[
        str,
        Meta(
            description="namespace of the replicas' Lease and ConfigMaps",
            extra={"envvar": "POD_NAMESPACE"},
        ),
    ] = "kube-system"
    lease: Annotated[str, Meta(description="Lease by which the replicas elect a leader")] = (
        "fenka-autoscaler"
    )
    name: ReplicaName = ""
    hami_names: Annotated[
        bool, Meta(description="also accept nvidia.com/gpumem and nvidia.com/gpucores")
    ] = False
    scheduler_name: Annotated[
        list[str],
        Meta(
            title="NAME",
            description="serve only pods of this schedulerName, as the scheduler does; repeatable",
        ),
    ] = []
    kubeconfig: Kubeconfig = None


MAX_BYTES = 64 * MIB
"""More than any cluster's case."""

MAX_NAMED = 5
"""Unknown keys that an error names."""


def read_case(path: Path) -> Case:
    """Return the case in a file. Raises InvalidCase, OSError."""
    with path.open("rb") as file:
        text = file.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise InvalidCase(f"{path} has more than {MAX_BYTES} bytes: it is no case")
    return decode_case(text)


def decode_case(text: bytes) -> Case:
    """Return the case of this JSON. Raises InvalidCase for anything that is not understood."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as why:
        raise InvalidCase(f"the case is no JSON: {why}") from None
    unknown = list(islice(_unknown_keys(value, Case, ""), MAX_NAMED))
    if unknown:
        raise InvalidCase("; ".join(unknown))
    try:
        case = msgspec.convert(value, Case)
    except msgspec.ValidationError as why:
        raise InvalidCase(f"the case is not understood: {why}") from None
    check_case(case)
    return case


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _unknown_keys(value: Any, expected: Any, path: str) -> Iterator[str]:
    """Yield a sentence for each key that no field has. Values of another type are msgspec's to reject."""
    if dataclasses.is_dataclass(expected) and isinstance(value, dict):
        hints = _hints(expected)  # type: ignore[arg-type]
        for key, each in value.items():
            name = f"{path}.{key}" if path else str(key)
            if key in hints:
                yield from _unknown_keys(each, hints[key], name)
                continue
            similar = get_close_matches(key, hints, n=1)
            hint = f": did you mean {similar[0]}?" if similar else ": remove it"
            yield f"{name} is not known{hint}"
        return
    arguments = get_args(expected)
    if get_origin(expected) in (Union, types.UnionType):
        yield from _unknown_keys(value, arguments[0], path)
    elif get_origin(expected) is tuple and isinstance(value, list):
        for number, each in enumerate(value):
            yield from _unknown_keys(each, arguments[0], f"{path}[{number}]")
    elif get_origin(expected) is Mapping and isinstance(value, dict):
        for key, each in value.items():
            yield from _unknown_keys(each, arguments[1], f"{path}.{key}")
