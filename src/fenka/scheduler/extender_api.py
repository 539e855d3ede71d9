"""kube-scheduler's extender protocol (v1), as it arrives and as it is answered.

Go's names, without tags; what arrives is read whatever its letters' case, as Go reads it.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from fenka.cluster.objects import Pod
from fenka.core.errors import FenkaError

T = TypeVar("T")


class InvalidExtenderRequest(FenkaError):
    """No request of the extender protocol; the message says why."""


class _Named(msgspec.Struct):
    class Meta(msgspec.Struct):
        name: str = ""

    metadata: Meta = msgspec.field(default_factory=Meta)


class ExtenderFilterResult(msgspec.Struct, rename="pascal"):
    """Of filter."""

    nodes: dict[str, Any] | None = None
    node_names: list[str] | None = None
    failed_nodes: dict[str, str] | None = None
    failed_and_unresolvable_nodes: dict[str, str] | None = None
    error: str = ""


class ExtenderArgs(msgspec.Struct):
    """By filter and prioritize. nodes: as they were sent, where no cache was promised."""

    pod: Pod
    names: list[str]
    nodes: dict[str, msgspec.Raw] | None = None


class ExtenderBindingArgs(msgspec.Struct):
    """By bind."""

    name: str
    namespace: str
    uid: str
    node: str


class ExtenderPreemptionArgs(msgspec.Struct):
    """By preempt. victims: UIDs by node. disruptions: NumPDBViolations, as kube-scheduler counted them."""

    pod: Pod
    victims: dict[str, list[str]]
    disruptions: dict[str, int]
    pods: dict[str, Pod]
    """Victims that were sent whole, by UID."""


def read_args(body: bytes) -> ExtenderArgs:
    """The arguments of filter and prioritize. Raises NotUnderstood."""
    fields = _fields(body)
    pod = _pod(fields)
    names = _maybe(fields, "nodenames", list[str])
    if names is not None:
        return ExtenderArgs(pod, names)
    items = _maybe(fields, "nodes", dict[str, msgspec.Raw])
    if items is None:
        raise InvalidExtenderRequest("cannot get node names")
    raw = _maybe(_lower(items), "items", list[msgspec.Raw]) or []
    nodes = {_decoded(bytes(it), _Named).metadata.name: it for it in raw}
    return ExtenderArgs(pod, list(nodes), nodes)


def filter_result(asked: ExtenderArgs, fitting: list[str]) -> ExtenderFilterResult:
    """In the form in which it was asked."""
    if asked.nodes is None:
        return ExtenderFilterResult(node_names=fitting)
    items = [asked.nodes[name] for name in fitting]
    return ExtenderFilterResult(nodes={"metadata": {}, "items": items}, node_names=fitting)


def read_binding(body: bytes) -> ExtenderBindingArgs:
    """The arguments of bind. Raises NotUnderstood."""
    fields = _fields(body)
    wanted = [
        _maybe(fields, name, str) or "" for name in ("podname", "podnamespace", "poduid", "node")
    ]
    if not all(wanted):
        raise InvalidExtenderRequest("a binding names PodName, PodNamespace, PodUID and Node")
    return ExtenderBindingArgs(*wanted)


def read_preemption(body: bytes) -> ExtenderPreemptionArgs:
    """The arguments of preempt, whole victims or just their UIDs. Raises NotUnderstood."""
    fields = _fields(body)
    preemption = ExtenderPreemptionArgs(_pod(fields), {}, {}, {})
    by_node = _maybe(fields, "nodenametometavictims", dict[str, msgspec.Raw])
    if by_node:
        for node, victims in by_node.items():
            inner = _fields(bytes(victims))
            pods = _maybe(inner, "pods", list[dict[str, str]]) or []
            preemption.victims[node] = [_lower(it).get("uid", "") for it in pods]
            preemption.disruptions[node] = _maybe(inner, "numpdbviolations", int) or 0
        return preemption
    for node, victims in (
        _maybe(fields, "nodenametovictims", dict[str, msgspec.Raw]) or {}
    ).items():
        inner = _fields(bytes(victims))
        whole = _maybe(inner, "pods", list[Pod]) or []
        preemption.victims[node] = [it.metadata.uid for it in whole]
        preemption.pods |= {it.metadata.uid: it for it in whole}
        preemption.disruptions[node] = _maybe(inner, "numpdbviolations", int) or 0
    return preemption


def preemption_result(
    asked: ExtenderPreemptionArgs, chosen: Mapping[str, tuple[Iterable[str], int]]
) -> dict[str, Any]:
    """Always by UID: kube-scheduler looks them up. chosen: with the budgets violated beyond its own count."""
    return {
        "NodeNameToMetaVictims": {
            node: {
                "Pods": [{"UID": uid} for uid in uids],
                "NumPDBViolations": asked.disruptions.get(node, 0) + violations,
            }
            for node, (uids, violations) in chosen.items()
        }
    }


def _lower(fields: dict[str, T]) -> dict[str, T]:
    return {name.lower(): value for name, value in fields.items()}


def _fields(body: bytes) -> dict[str, msgspec.Raw]:
    return _lower(_decoded(body, dict[str, msgspec.Raw]))


def _pod(fields: dict[str, msgspec.Raw]) -> Pod:
    raw = fields.get("pod")
    if raw is None or bytes(raw) == b"null":
        raise InvalidExtenderRequest("arg or pod is nil")
    try:
        return _decoded(bytes(raw), Pod)
    except InvalidExtenderRequest:
        # Go writes null for a time or a list that was never set.
        return _without_nulls(bytes(raw))


def _without_nulls(data: bytes) -> Pod:
    try:
        return msgspec.convert(_dropped(_decoded(data, dict[str, Any])), Pod)
    except msgspec.MsgspecError as why:
        raise InvalidExtenderRequest(str(why)) from None


def _dropped(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _dropped(it) for name, it in value.items() if it is not None}
    if isinstance(value, list):
        return [_dropped(it) for it in value if it is not None]
    return value


def _maybe(fields: dict[str, msgspec.Raw], name: str, kind: type[T]) -> T | None:
    raw = fields.get(name)
    return None if raw is None else _decoded(bytes(raw), kind | None)  # type: ignore[arg-type]


def _decoded(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as why:
        raise InvalidExtenderRequest(str(why)) from None
