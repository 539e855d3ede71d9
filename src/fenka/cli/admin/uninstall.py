"""`fenka uninstall`: removes objects, labels and annotations that fenka's programs leave in a cluster."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fenka.cli import cluster, tables
from fenka.cli.common_options import ClusterTarget
from fenka.cli.error_report import UserError
from fenka.cluster.autoscaling import KEPT_FROM_OTHERS, ORDER, ORDERS_MAP, SHAPES_MAP, STATUS_MAP
from fenka.cluster.objects import QUEUE_GATE, Node, Object, Pod, node_path
from fenka.core.errors import INVALID_INPUT, listed
from fenka.dialects.gpushare import COUNT
from fenka.kubernetes.api_client import Api, if_accepted
from fenka.kubernetes.eviction import remove_taint
from fenka.kubernetes.reader import HOLDING

if TYPE_CHECKING:
    from fenka.cloud.config import AutoscalerConfig

PREFIX = "fenka.io/"
"""Of all labels, annotations and taints that fenka writes on nodes, or reads there."""

SHARING_LABELS = ("gpushare", "cgpu")
"""Labels of nodes that share their cards. gpushare and cGPU read them, too."""


def written_objects(release: str) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return the names of the objects that programs have created, by API and plural.

    Args:
        release: The prefix of the chart's names.
    """
    scheduler = f"{release}-scheduler"
    return {
        ("apis/coordination.k8s.io/v1", "leases"): (
            scheduler,
            f"{release}-autoscaler",
            f"{release}-second-scheduler",
        ),
        ("api/v1", "configmaps"): (ORDERS_MAP, SHAPES_MAP, STATUS_MAP),
        ("api/v1", "secrets"): (
            *(f"{scheduler}-{kind}" for kind in ("authority", "server", "client")),
            # Made by releases that had a metrics adapter.
            f"{release}-metrics-adapter-server",
        ),
    }


def is_bought(node: Node) -> bool:
    """Return whether the autoscaler has bought the node."""
    return ORDER in node.metadata.labels


def own_taints(node: Node) -> list[str]:
    """Return the keys of fenka's taints of the node."""
    return sorted({taint.key for taint in node.spec.taints if taint.key.startswith(PREFIX)})


def cleaning_patch(node: Node) -> dict[str, dict[str, None]]:
    """Return the merge patch of the metadata that removes fenka's labels and annotations."""
    labels, annotations = node.metadata.labels, node.metadata.annotations
    foreign = KEPT_FROM_OTHERS if is_bought(node) else {}
    patch = {
        "labels": [
            label for label in labels if label in SHARING_LABELS or label.startswith(PREFIX)
        ],
        "annotations": [
            annotation
            for annotation in annotations
            if annotation in foreign or annotation.startswith(PREFIX)
        ],
    }
    return {field: dict.fromkeys(names) for field, names in patch.items() if names}


def status_patch(node: Node) -> Mapping[str, Any] | None:
    """Return the merge patch of the status that removes the number of cards; None if it has none.

    Amounts of device plugins are the kubelet's, which sets them to 0 by itself.
    """
    if COUNT not in node.status.capacity and COUNT not in node.status.allocatable:
        return None
    return {"status": {"capacity": {COUNT: None}, "allocatable": {COUNT: None}}}


PODS_END_S = 120.0
"""After `helm uninstall` the programs' pods have this time to end."""

MAX_NAMED = 5
"""Nodes or pods that a sentence names."""


@dataclass(frozen=True, slots=True)
class UninstallOptions:
    """The installation to clean up after, and the end of nodes that the autoscaler has bought."""

    namespace: Annotated[
        str, typer.Option("-n", "--namespace", help="namespace in which fenka was installed")
    ] = "fenka-system"
    release: Annotated[
        str, typer.Option("--release", help="prefix of the names of the chart's objects")
    ] = "fenka"
    scheduler_name: Annotated[
        str, typer.Option("--scheduler-name", help="schedulerName of the chart's second scheduler")
    ] = "fenka"
    end_waiting: Annotated[
        bool,
        typer.Option("--end-waiting", help="delete pods that wait for the second scheduler"),
    ] = False
    hand_over: Annotated[
        bool,
        typer.Option("--hand-over", help="leave bought nodes running, without fenka's marks"),
    ] = False
    end_nodes: Annotated[
        bool, typer.Option("--end-nodes", help="end bought nodes in the cloud; needs --config")
    ] = False
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="the autoscaler's configuration"),
    ] = None
    force: Annotated[bool, typer.Option("--force", help="end nodes although pods run there")] = (
        False
    )
    check: Annotated[
        bool,
        typer.Option("--check", help="only print which bought nodes would stay; remove nothing"),
    ] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print what would be removed")] = False


def uninstall(options: UninstallOptions, cluster_target: ClusterTarget) -> None:
    """Remove labels, annotations and objects that outlive the chart. Raises UserError, InvalidConfig."""
    if options.hand_over and options.end_nodes:
        raise UserError("--hand-over and --end-nodes exclude each other", INVALID_INPUT)
    if options.end_nodes and options.config is None:
        raise UserError(
            "--end-nodes needs the autoscaler's configuration: add --config FILE", INVALID_INPUT
        )
    config = _config(options.config) if options.end_nodes and options.config else None
    with tables.spinner("removing what is left of fenka …"):
        lines = cluster.converse(
            cluster_target.target,
            lambda api: _uninstall(api, options, config),
            cluster.explain_cluster_denial,
        )
    nothing = "no bought nodes would stay" if options.check else "nothing of fenka is left"
    tables.print_lines(lines or [nothing])


def _config(path: Path) -> "AutoscalerConfig":
    from fenka.cli.admin.autoscaler import from_file
    from fenka.cloud.config_file import read_config

    return from_file(read_config, path)


async def _uninstall(
    api: Api, options: UninstallOptions, config: "AutoscalerConfig | None"
) -> list[str]:
    nodes, _ = await api.list("/api/v1/nodes", Node)
    bought = [node for node in nodes if is_bought(node)]
    if options.check:
        return [_bought_sentence(bought, "run fenka uninstall with")] if bought else []
    await _check_nothing_runs(api, options)
    if bought and not (options.hand_over or options.end_nodes):
        raise UserError(_bought_sentence(bought, "add"))
    lines = []
    if config is not None:
        if not options.force:
            await _check_idle(api, bought)
        lines += await _end(api, bought, config, dry_run=options.dry_run)
        nodes = [node for node in nodes if not is_bought(node)]
    for node in nodes:
        lines += await _clean(api, node, dry_run=options.dry_run)
    lines += await _release_pods(api, options)
    return lines + await _delete_objects(api, options)


def _bought_sentence(bought: Sequence[Node], how: str) -> str:
    count = f"{len(bought)} node{'s' * (len(bought) > 1)}"
    names = listed([node.metadata.name for node in bought], MAX_NAMED)
    return (
        f"{count} bought by fenka's autoscaler will run, and cost money, until ended "
        f"({names}): {how} --end-nodes --config FILE to end them, "
        "or --hand-over to leave them to you and to other autoscalers"
    )


async def _check_nothing_runs(api: Api, options: UninstallOptions) -> None:
    """Wait for the end of the programs' pods. Raises UserError if the chart is still installed."""
    namespace = options.namespace
    scheduler = f"/apis/apps/v1/namespaces/{namespace}/deployments/{options.release}-scheduler"
    if await if_accepted(api.get(scheduler, Object)) is not None:
        raise UserError(
            f"fenka still runs in namespace {namespace}: first helm uninstall {options.release} -n "
            f"{namespace}"
        )
    waiting_until = time.monotonic() + PODS_END_S
    while pods := await _own_pods(api, namespace):
        if time.monotonic() > waiting_until:
            raise UserError(
                f"pods of fenka still run in namespace {namespace} ({listed(pods, MAX_NAMED)}): "
                "end them, since they would write what is removed"
            )
        await asyncio.sleep(1)


async def _own_pods(api: Api, namespace: str) -> list[str]:
    path = f"/api/v1/namespaces/{namespace}/pods"
    pods, _ = await api.list(path, Pod, labelSelector="app.kubernetes.io/name=fenka")
    return [pod.metadata.name for pod in pods]


async def _check_idle(api: Api, bought: Sequence[Node]) -> None:
    """Raise UserError if ending the nodes would end somebody's pods."""
    names = {node.metadata.name for node in bought}
    pods, _ = await api.list("/api/v1/pods", Pod, fieldSelector=HOLDING)
    holders = [
        f"{pod.full_name} on {pod.spec.node_name}"
        for pod in pods
        if pod.spec.node_name in names
        and not any(owner.kind in ("DaemonSet", "Node") for owner in pod.metadata.owner_references)
    ]
    if holders:
        raise UserError(
            f"pods run on nodes that would end ({listed(holders, MAX_NAMED)}): end them first, or "
            "add --force"
        )


async def _end(
    api: Api, bought: Sequence[Node], config: "AutoscalerConfig", *, dry_run: bool
) -> list[str]:
    """End all instances of the configuration's cluster, and delete the Nodes that were bought."""
    from fenka.autoscaler.providers import open_provider

    async with AsyncExitStack() as stack:
        provider = await stack.enter_async_context(open_provider(config, api))
        instances = await provider.instances()
        if not dry_run:
            await provider.end([instance.id for instance in instances])
    lines = [f"instance {instance.id} of {instance.offer}: ended" for instance in instances]
    for node in bought:
        if not dry_run:
            await if_accepted(api.delete(node_path(node.metadata.name)))
        lines.append(f"node {node.metadata.name}: deleted")
    return lines


async def _clean(api: Api, node: Node, *, dry_run: bool) -> list[str]:
    """Remove fenka's names from a node, and return what was removed."""
    path, name = node_path(node.metadata.name), node.metadata.name
    patch, taints, status = cleaning_patch(node), own_taints(node), status_patch(node)
    if not dry_run:
        if patch:
            await api.patch(path, Object, {"metadata": {"uid": node.metadata.uid, **patch}})
        for key in taints:
            await remove_taint(api, node, key)
        if status is not None:
            await api.patch(f"{path}/status", Object, status)
    kinds = {**patch, **({"taints": taints} if taints else {})}
    lines = [f"node {name}: removed {kind} {', '.join(names)}" for kind, names in kinds.items()]
    return lines + ([f"node {name}: removed its number of cards"] if status is not None else [])


async def _release_pods(api: Api, options: UninstallOptions) -> list[str]:
    """Remove the queue's gate from pods, and end or name those that no scheduler would place."""
    waiting, _ = await api.list("/api/v1/pods", Pod, fieldSelector="spec.nodeName=")
    lines = []
    for pod in waiting:
        if pod.gated_by(QUEUE_GATE):
            others = [gate for gate in pod.spec.scheduling_gates if gate.name != QUEUE_GATE]
            patch = {"spec": {"schedulingGates": others or None}}
            metadata = {"uid": pod.metadata.uid, "resourceVersion": pod.metadata.resource_version}
            if not options.dry_run:
                await if_accepted(api.patch(pod.path, Object, {"metadata": metadata, **patch}))
            lines.append(f"pod {pod.full_name}: removed the gate {QUEUE_GATE}")
    stuck = [pod for pod in waiting if pod.spec.scheduler_name == options.scheduler_name]
    if options.end_waiting:
        for pod in stuck:
            if not options.dry_run:
                await if_accepted(api.delete(pod.path))
            lines.append(f"pod {pod.full_name}: deleted")
    elif stuck:
        named = listed([pod.full_name for pod in stuck], MAX_NAMED)
        lines.append(
            f"{len(stuck)} pod{'s' * (len(stuck) > 1)} would wait for the scheduler "
            f"{options.scheduler_name} indefinitely ({named}): add --end-waiting to delete them, so "
            "that their controllers create them again"
        )
    return lines


async def _delete_objects(api: Api, options: UninstallOptions) -> list[str]:
    paths = [
        (plural, name, f"/{group}/namespaces/{options.namespace}/{plural}/{name}")
        for (group, plural), names in written_objects(options.release).items()
        for name in names
    ]
    there = await asyncio.gather(*(if_accepted(api.get(path, Object)) for *_, path in paths))
    lines = []
    for (plural, name, path), found in zip(paths, there, strict=True):
        if found is not None:
            if not options.dry_run:
                await if_accepted(api.delete(path))
            lines.append(f"{plural.removesuffix('s')} {options.namespace}/{name}: deleted")
    return lines
