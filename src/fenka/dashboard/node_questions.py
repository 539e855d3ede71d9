"""Asks the nodes' programs what their cards and slices use.

The API server passes the questions on, so this works inside and outside a cluster. It takes the right to get
`pods/proxy` in the namespace of the nodes' programs.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from fenka.cluster.objects import Pod
from fenka.kubernetes.api_client import Api, ApiError, ApiUnreachable
from fenka.views.node_figures import NodeFigures

PERIOD_S = 15.0
"""Between two questions to all nodes of a small cluster."""

NODES_PER_S = 40
"""In a large cluster more nodes are not asked each second, so that the API server has other work to do."""

LOOKED_AT_S = 4.0
"""Between two questions to a node that somebody looks at. It takes no sample more often."""

PROGRAM = {"app.kubernetes.io/name": "fenka", "component": "gpushare-device-plugin"}
"""Labels of the nodes' programs."""

DEADLINE_S = 3.0
MAX_BYTES = 4 << 20
TOGETHER = 16
"""Nodes that are asked at a time."""

_decoder = msgspec.json.Decoder(NodeFigures)


@dataclass(frozen=True, slots=True)
class NodeAnswers:
    """Figures by node, and a sentence if some nodes gave none."""

    readings: Mapping[str, NodeFigures]
    problem: str = ""


def is_program(pod: Pod, namespace: str) -> bool:
    """Return whether a pod is a node's program that runs.

    namespace: fenka's. In their own, users may label pods as they like.
    """
    labels = pod.metadata.labels
    if pod.metadata.namespace != namespace:
        return False
    named = all(labels.get(label) == value for label, value in PROGRAM.items())
    return named and pod.status.phase == "Running" and bool(pod.spec.node_name)


def period_s(nodes: int) -> float:
    """Return the seconds between two questions to all of so many nodes."""
    return max(PERIOD_S, nodes / NODES_PER_S)


async def ask_nodes(api: Api, programs: Iterable[Pod]) -> NodeAnswers:
    """Ask these programs, some at a time and each until the deadline."""
    readings: dict[str, NodeFigures] = {}
    failures: dict[str, str] = {}
    slots = asyncio.Semaphore(TOGETHER)

    async def ask(pod: Pod) -> None:
        node = pod.spec.node_name
        async with slots:
            try:
                async with asyncio.timeout(DEADLINE_S):
                    readings[node] = await _reading(api, pod)
            except TimeoutError:
                failures[node] = f"no answer within {DEADLINE_S:g} s"
            except msgspec.MsgspecError:
                failures[node] = "its program is of another release"
            except (ApiError, ApiUnreachable) as why:
                failures[node] = str(why)

    await asyncio.gather(*map(ask, programs))
    return NodeAnswers(readings, _sentence(failures))


async def _reading(api: Api, pod: Pod) -> NodeFigures:
    meta = pod.metadata
    # Without a port the API server takes the first one that the pod names: that of its metrics.
    path = f"/api/v1/namespaces/{meta.namespace}/pods/{meta.name}/proxy/usage"
    body = await api.read_within(path, {}, MAX_BYTES)
    if body is None:
        raise msgspec.DecodeError("too long")
    return _decoder.decode(body)


def _sentence(failures: Mapping[str, str]) -> str:
    if not failures:
        return ""
    first = min(failures)
    more = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
    return f"what cards use is not known of node {first}{more}: {failures[first]}"
