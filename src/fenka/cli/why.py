"""`fenka why POD`: explains why a pod is pending."""

import asyncio
from collections.abc import Sequence
from typing import Annotated

import typer

from fenka.cli import cluster, tables
from fenka.cli.options import ClusterTarget, NamespaceOption, OutputOption
from fenka.cluster.explain import PodExplanation, explain
from fenka.cluster.node_verdicts import NodeVerdict
from fenka.cluster.objects import Event, Pod, pod_path
from fenka.cluster.snapshot import ClusterSnapshot
from fenka.dialects.registry import WITH_HAMI
from fenka.kubernetes.client import Api
from fenka.kubernetes.cluster_reader import read_cluster

MAX_NAMES = 3
"""Nodes to name of those that have the same reasons."""


def why(
    pod: Annotated[str, typer.Argument(metavar="POD", help="the pod's name, or NAMESPACE/NAME")],
    cluster_target: ClusterTarget,
    namespace: NamespaceOption = "",
    output: OutputOption = "table",
) -> None:
    """Print the explanation. Raises UserError if there is no such pod."""
    before, slash, name = pod.rpartition("/")
    target = cluster_target.target
    namespace = before if slash else namespace or cluster.namespace(target)

    explanation = cluster.ask(target, lambda api: explain_pod(api, namespace, name))
    if not tables.print_data(explanation, output):
        tables.print_lines(screen(explanation))


async def explain_pod(api: Api, namespace: str, name: str) -> PodExplanation:
    """Explain a pod. Raises ApiError, ApiUnreachable."""
    # The pod first: if it does not exist, nothing else needs to be read.
    pod = await api.get(pod_path(namespace, name), Pod)
    (events, _), snapshot = await asyncio.gather(
        api.list(
            f"/api/v1/namespaces/{namespace}/events",
            Event,
            fieldSelector=f"involvedObject.name={name},involvedObject.uid={pod.metadata.uid}",
        ),
        _surroundings(api, pod),
    )
    return explain(pod, snapshot, events)


async def _surroundings(api: Api, pod: Pod) -> ClusterSnapshot:
    """Read all nodes for a pending pod, else its own."""
    if pod.finished:
        return ClusterSnapshot.of([], [])
    name = pod.spec.node_name or None
    return cluster.keep(await read_cluster(api, name, dialects=WITH_HAMI))


def screen(explanation: PodExplanation) -> list[str]:
    """Return the explanation as text."""
    lines = [explanation.summary]
    lines += [f"It holds {piece}." for piece in explanation.slices]
    if explanation.message:
        lines += ["", f"{explanation.scheduler} says: {explanation.message}"]
        lines += [f"That is: {explanation.extender}."] if explanation.extender else []
    lines += _section("Its containers wait:", explanation.containers)
    if explanation.nodes:
        lines += [
            "",
            *tables.align_to_terminal([("NODE", "VERDICT"), *_grouped(explanation.nodes)]),
        ]
    lines += ["", f"By the cards: {explanation.sentence}."] if explanation.sentence else []
    lines += _section("To be known:", explanation.notes)
    lines += _section("Warnings, the newest first:", explanation.events)
    return [*lines, *_section("What helps:", explanation.hints)]


def _section(title: str, items: Sequence[str]) -> list[str]:
    return ["", title, *(f"  - {item}" for item in items)] if items else []


def _grouped(verdicts: Sequence[NodeVerdict]) -> list[tuple[str, str]]:
    """Put nodes with the same reasons on one line; those without a GPU come last."""
    groups: dict[tuple[bool, str], list[str]] = {}
    for verdict in sorted(verdicts, key=lambda verdict: not verdict.gpu):
        text = "has room" if verdict.fits else "; ".join(verdict.reasons)
        groups.setdefault((verdict.gpu, text), []).append(verdict.node)
    return [(_names(names), text) for (_, text), names in groups.items()]


def _names(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
