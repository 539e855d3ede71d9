"""The rate of bindings that the API server reaches, and that fenka's binder reaches on the same server."""

import asyncio
import contextlib
import random
from collections.abc import Callable
from contextlib import AbstractContextManager

from bench.kube_scheduler import workload
from bench.kube_scheduler.control_plane import FENKA, ControlPlane, CpuTime, Measurement
from fenka.cluster.objects import Pod
from fenka.kubernetes.api_client import Api


def measure(
    plane: ControlPlane,
    series: str,
    nodes: int,
    pods: int,
    connections: int,
    extender: Callable[[], AbstractContextManager[None]] | None = None,
) -> Measurement:
    """Bind pods by one POST each, over these connections, and delete them.

    Each pod goes to a node chosen by chance. No more pods are sent to a node than it has cards, so all fit.

    Args:
        plane: has nodes and no pods; neither kube-scheduler nor kwok runs.
        series: a name for the pods, unique in this cluster.
        nodes: the number of nodes.
        pods: the number of pods.
        connections: the number of concurrent requests.
        extender: runs fenka, whose binder binds them. Without it the client posts its own bindings, with
            fenka's rights.
    """
    cards = [(node, card) for node in range(nodes) for card in range(workload.CARDS)]
    targets = random.Random(4).sample(cards, pods)
    running = extender() if extender else contextlib.nullcontext()
    with plane.pending(series, pods), running:
        pending = asyncio.run(_read(plane))
        requests = [
            workload.extender_binding(pod, node)
            if extender
            else workload.api_binding(pod, mib, node, card)
            for pod, mib, (node, card) in zip(pending, workload.sizes(pods), targets, strict=True)
        ]
        cpu = CpuTime(plane)
        report = plane.post(requests, connections, extender=extender is not None, user=FENKA)
        latencies = f", p50 {report.p50_ms:.0f} ms, p99 {report.p99_ms:.0f} ms"
        return cpu.measurement(pods, report.seconds, latencies)


async def _read(plane: ControlPlane) -> list[Pod]:
    async with await Api.connect(plane.kubeconfig) as api:
        pods, _ = await api.list(workload.PODS, Pod)
        return sorted(pods, key=lambda pod: pod.metadata.name)
