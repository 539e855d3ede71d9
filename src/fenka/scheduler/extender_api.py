"""kube-scheduler's extender protocol (v1): decoding its requests and encoding the answers.

Field names are Go's, without tags. Requests are read whatever the case of their letters, as Go reads them.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from fenka.cluster.objects import Pod
from fenka.cluster.placement import FilterResult
from fenka.cluster.pod_preemption import PreemptionResult
from fenka.core.errors import FenkaError
from fenka.formats.documents import without_nulls

T = TypeVar("T")


class InvalidExtenderRequest(FenkaError):
    """The body is not a request of the extender protocol."""


class _Named(msgspec.Struct):
    class Meta(msgspec.Struct):
        name: str = ""

    metadata: Meta = msgspec.field(default_factory=Meta)


class ExtenderFilterResult(msgspec.Struct, rename="pascal"):
    """The answer to filter."""

    nodes: dict[str, Any] | None = None
    node_names: list[str] | None = None
    failed_nodes: dict[str, str] | None = None
    failed_and_unresolvable_nodes: dict[str, str] | None = None
    error: str = ""


class HostPriority(msgspec.Struct, rename="pascal", gc=False):
    """A score in the answer to prioritize."""

    host: str
    score: int


class _UsualArgs(msgspec.Struct):
    """The arguments of filter and prioritize as kube-scheduler writes them to a nodeCacheCapable extender."""

    pod: Pod = msgspec.field(name="Pod")
    names: list[str] = msgspec.field(name="NodeNames")


class ExtenderArgs(msgspec.Struct):
    """The arguments of filter and prioritize. nodes: whole nodes, from a caller without nodeCacheCapable."""

    pod: Pod
    names: list[str]
    nodes: dict[str, msgspec.Raw] | None = None


_USUAL_ARGS = msgspec.json.Decoder(_UsualArgs)


class ExtenderBindingArgs(msgspec.Struct):
    """The arguments of bind."""

    name: str
    namespace: str
    uid: str
    node: str


class ExtenderPreemptionArgs(msgspec.Struct):
    """The arguments of preempt.

    Attributes:
        pod: the pod that needs room.
        victims: UIDs of the pods that kube-scheduler would evict, by node.
        disruptions: NumPDBViolations as counted by kube-scheduler, by node.
        pods: victims that were sent whole, by UID.
    """

    pod: Pod
    victims: dict[str, list[str]]
    disruptions: dict[str, int]
    pods: dict[str, Pod]


def read_args(body: bytes) -> ExtenderArgs:
    """Return the arguments of filter and prioritize. Raises InvalidExtenderRequest."""
    try:
        usual = _USUAL_ARGS.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _read_any_args(body)
    return ExtenderArgs(usual.pod, usual.names)


def _read_any_args(body: bytes) -> ExtenderArgs:
    """Return the arguments whatever the case of their names, with nulls, and with whole nodes."""
    fields = _fields(body)
    pod = _pod(fields)
    names = _optional(fields, "nodenames", list[str])
    if names is not None:
        return ExtenderArgs(pod, names)
    items = _optional(fields, "nodes", dict[str, msgspec.Raw])
    if items is None:
        raise InvalidExtenderRequest("cannot get node names")
    raw = _optional(_lower(items), "items", list[msgspec.Raw]) or []
    nodes = {_decode(node, _Named).metadata.name: node for node in raw}
    return ExtenderArgs(pod, list(nodes), nodes)


def filter_result(args: ExtenderArgs, result: FilterResult) -> ExtenderFilterResult:
    """Return the answer to filter. Nodes are returned in the form in which they were sent.

    kube-scheduler sends nodes that have room by its own count. There it would find no victims, which it
    reports as an error, "expected at least one victim pod". So all that fail are unresolvable. Only where
    it has evicted pods already must it wait for their end, instead of evicting others elsewhere.
    """
    nominated = args.pod.status.nominated_node_name
    failed = {name: why for name, why in result.failed.items() if name == nominated}
    hopeless = {name: why for name, why in result.failed.items() if name != nominated}
    answer = ExtenderFilterResult(
        node_names=result.fitting,
        failed_nodes=failed,
        failed_and_unresolvable_nodes=hopeless | result.unresolvable,
    )
    if args.nodes is not None:
        items = [args.nodes[name] for name in result.fitting]
        answer.nodes = {"metadata": {}, "items": items}
    return answer


def read_binding(body: bytes) -> ExtenderBindingArgs:
    """Return the arguments of bind. Raises InvalidExtenderRequest."""
    fields = _fields(body)
    names = ("podname", "podnamespace", "poduid", "node")
    values = [_optional(fields, name, str) or "" for name in names]
    if not all(values):
        raise InvalidExtenderRequest("a binding needs PodName, PodNamespace, PodUID and Node")
    return ExtenderBindingArgs(*values)


def read_preemption(body: bytes) -> ExtenderPreemptionArgs:
    """Return the arguments of preempt, with whole victims or just their UIDs.

    Raises InvalidExtenderRequest.
    """
    fields = _fields(body)
    args = ExtenderPreemptionArgs(_pod(fields), {}, {}, {})
    by_uid = _optional(fields, "nodenametometavictims", dict[str, msgspec.Raw]) or {}
    whole = _optional(fields, "nodenametovictims", dict[str, msgspec.Raw]) or {}
    for node, raw in (by_uid or whole).items():
        victims = _fields(raw)
        if by_uid:
            uids = _optional(victims, "pods", list[dict[str, str]]) or []
            args.victims[node] = [_lower(victim).get("uid", "") for victim in uids]
        else:
            pods = _optional(victims, "pods", list[Pod]) or []
            args.victims[node] = [victim.metadata.uid for victim in pods]
            args.pods |= {victim.metadata.uid: victim for victim in pods}
        args.disruptions[node] = _optional(victims, "numpdbviolations", int) or 0
    return args


def preemption_result(
    args: ExtenderPreemptionArgs, results: Mapping[str, PreemptionResult]
) -> dict[str, Any]:
    """Return the answer to preempt, always by UID: kube-scheduler looks the pods up."""
    return {
        "NodeNameToMetaVictims": {
            node: {
                "Pods": [{"UID": uid} for uid in result.uids],
                "NumPDBViolations": args.disruptions.get(node, 0) + result.violations,
            }
            for node, result in results.items()
        }
    }


def _lower(fields: dict[str, T]) -> dict[str, T]:
    return {name.lower(): value for name, value in fields.items()}


def _fields(body: bytes | msgspec.Raw) -> dict[str, msgspec.Raw]:
    return _lower(_decode(body, dict[str, msgspec.Raw]))


def _pod(fields: dict[str, msgspec.Raw]) -> Pod:
    raw = fields.get("pod")
    if raw is None or bytes(raw) == b"null":
        raise InvalidExtenderRequest("arg or pod is nil")
    try:
        return _decode(raw, Pod)
    except InvalidExtenderRequest:
        # Go writes null for a time or a list that was never set.
        return _without_nulls(raw)


def _without_nulls(raw: msgspec.Raw) -> Pod:
    try:
        return msgspec.convert(without_nulls(_decode(raw, dict[str, Any])), Pod)
    except msgspec.MsgspecError as why:
        raise InvalidExtenderRequest(str(why)) from None


def _optional(fields: dict[str, msgspec.Raw], name: str, kind: type[T]) -> T | None:
    raw = fields.get(name)
    return None if raw is None else _decode(raw, kind | None)  # type: ignore[arg-type]


def _decode(data: bytes | msgspec.Raw, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as why:
        raise InvalidExtenderRequest(str(why)) from None
