"""A cluster in a file of the format `fenka.snapshot/1`: nodes, cards, pods and gangs as Kubernetes' objects.

The file comes from another person, so nothing in it is trusted: its size is bounded, and what programs take
for granted of the API server is checked.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec

from fenka import __version__
from fenka.autoscaler.recorded.pseudonyms import TIME, Pseudonyms
from fenka.autoscaler.snapshot import Snapshot
from fenka.autoscaler.watch import DaemonSet, ElasticCluster, ElasticPod, NodeIndex, PodIndex
from fenka.cloud.config import AutoscalerConfig
from fenka.cluster.compact import CompactNode
from fenka.cluster.objects import Node, ObjectMeta
from fenka.cluster.pod_groups import PodGroup
from fenka.cluster.queue_snapshot import SchedulerOptions
from fenka.cluster.state import ClusterState
from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.core.units import MIB
from fenka.isolation.lease_files import decode_json, read_regular_file
from fenka.kubernetes.api_client import Api
from fenka.kubernetes.informer import PodGroupIndex
from fenka.kubernetes.reader import read_scheduler_options

FORMAT: Literal["fenka.snapshot/1"] = "fenka.snapshot/1"

MAX_BYTES = 256 * MIB
"""5,000 nodes with 100,000 pods have 60 MiB."""

MAX_NUMBER = 2**31
"""Seconds and priorities; Kubernetes allows no more."""

MAX_TIME = 10**11
"""Seconds since 1970."""


class InvalidClusterFile(FenkaError):
    """The file is no snapshot of a cluster; the message says why."""

    exit_code = INVALID_INPUT


class ClusterFile(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """The content of a file.

    Attributes:
        fenka: the version that wrote it.
        at: when, in seconds since 1970.
        names: whether names are pseudonyms.
        scheduler: what orders the queue and places pods.
        nodes: with their cards, and what pods hold of these.
        pods: those that have not finished.
        pod_groups: gangs, as Kubernetes has them.
        daemon_sets: what new nodes run.
    """

    format: Literal["fenka.snapshot/1"]
    fenka: str = ""
    at: float
    names: Literal["pseudonyms", "kept"]
    scheduler: SchedulerOptions = msgspec.field(default_factory=SchedulerOptions)
    nodes: tuple[Node, ...]
    pods: tuple[ElasticPod, ...]
    pod_groups: tuple[PodGroup, ...] = ()
    daemon_sets: tuple[DaemonSet, ...] = ()


_FILE = msgspec.json.Decoder(ClusterFile)


# ---- writing ----


async def record_cluster(api: Api, now: float, *, keep_names: bool) -> ClusterFile:
    """Return a cluster as it is now.

    Args:
        api: the cluster.
        now: the Unix time.
        keep_names: keep names and labels; by default they become pseudonyms.

    Raises:
        ApiError: without the right to read the cluster.
        ApiUnreachable: if the API server does not answer.
        InvalidRecord: if the scheduler's options cannot be read.
    """
    options = await read_scheduler_options(api)
    cluster = ElasticCluster(api, options.dialects, options.topology_levels)
    await cluster.read()
    nodes = sorted(cluster.nodes.by_name.values(), key=lambda node: node.metadata.name)
    pods = sorted(
        (pod for pod in cluster.pods.by_uid.values() if not pod.finished),
        key=lambda pod: (pod.metadata.namespace, pod.metadata.name),
    )
    groups, daemons = list(cluster.groups.values()), list(cluster.daemons)
    if keep_names:
        kept_pods = tuple(map(_without_messages, pods))
        kept = tuple(map(_compact, nodes)), kept_pods, tuple(groups), tuple(daemons)
    else:
        names = Pseudonyms(cluster.state, pods, groups, daemons)
        options = replace(options, topology_levels=names.topology_levels())
        kept = (
            tuple(map(names.node, nodes)),
            tuple(map(names.pod, pods)),
            tuple(map(names.group, groups)),
            tuple(map(names.daemon, daemons)),
        )
    return ClusterFile(
        format=FORMAT,
        fenka=__version__,
        at=now,
        names="kept" if keep_names else "pseudonyms",
        scheduler=options,
        nodes=kept[0],
        pods=kept[1],
        pod_groups=kept[2],
        daemon_sets=kept[3],
    )


def encode(file: ClusterFile) -> bytes:
    """Return the content of a file, in lines, so that two can be compared."""
    return msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n"


def _compact(node: Node) -> Node:
    return msgspec.convert(msgspec.to_builtins(node), CompactNode)


def _without_messages(pod: ElasticPod) -> ElasticPod:
    """Return the pod without what its containers and the scheduler said."""
    for condition in pod.status.conditions:
        condition.message = ""
    pod.status.message = pod.status.reason = ""
    pod.status.container_statuses = pod.status.init_container_statuses = ()
    return pod


# ---- reading ----


def read_cluster_file(path: Path) -> ClusterFile:
    """Return the content of a file. Raises InvalidClusterFile, OSError."""
    try:
        file = decode_json(_FILE, read_regular_file(path, MAX_BYTES, follow_link=True))
    except msgspec.DecodeError as why:
        raise InvalidClusterFile(
            f"{path} is no snapshot of a cluster: {why}; `fenka snapshot` writes one"
        ) from None
    for problem in _problems(file):
        raise InvalidClusterFile(f"{path}: {problem}")
    return file


def snapshot_of(file: ClusterFile, config: AutoscalerConfig) -> Snapshot:
    """Return the cluster of a file, as the autoscaler sees one. config: which groups there are."""
    state, changed = ClusterState(dialects=file.scheduler.dialects), asyncio.Event()
    state.topology_levels = file.scheduler.topology_levels
    state.set_time(file.at)
    nodes, pods, groups = NodeIndex(state, changed), PodIndex(state, changed), PodGroupIndex()
    nodes.on_replace(file.nodes)
    pods.on_replace(file.pods)
    groups.on_replace(file.pod_groups)
    return Snapshot(
        now=file.at,
        config=config,
        state=state,
        nodes=nodes.by_name,
        pods=pods.by_uid,
        pods_on=pods.by_node,
        groups=groups.by_name,
        daemons=file.daemon_sets,
    )


def _problems(file: ClusterFile) -> Iterator[str]:
    """Yield a sentence for what no API server would send."""
    if not 0 <= file.at <= MAX_TIME:
        yield f"at is {file.at:g}: it must be a time in seconds since 1970"
    yield from _name_problems("node", [node.metadata for node in file.nodes])
    yield from _name_problems("pod", [pod.metadata for pod in file.pods])
    for pod in file.pods:
        name, spec = pod.metadata.name[:80], pod.spec
        if not pod.metadata.namespace:
            yield f"the pod {name!r} has no namespace: add it"
        if pod.status.start_time and not TIME.fullmatch(pod.status.start_time):
            yield f"the pod {name!r} has a start time that is none: write it as RFC 3339"
        for number in (
            spec.priority,
            spec.active_deadline_seconds,
            spec.termination_grace_period_seconds,
        ):
            if number is not None and abs(number) > MAX_NUMBER:
                yield f"the pod {name!r} has a number beyond {MAX_NUMBER}: correct it"


def _name_problems(kind: str, metas: Sequence[ObjectMeta]) -> Iterator[str]:
    names = [f"{meta.namespace}/{meta.name}" if meta.name else "" for meta in metas]
    for words, counts in (("name", Counter(names)), ("UID", Counter(meta.uid for meta in metas))):
        for text, count in counts.items():
            if not text:
                yield f"a {kind} has no {words}: add it"
            if count > 1:
                yield f"{count} {kind}s have the {words} {text[:80]!r}: it must differ"
    for meta in metas:
        for time in (meta.creation_timestamp, meta.deletion_timestamp or ""):
            if time and not TIME.fullmatch(time):
                yield (
                    f"the {kind} {meta.name[:80]!r} has the time {time[:40]!r}: write it as RFC 3339"
                )
