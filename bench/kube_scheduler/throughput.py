"""Pods per second through kube-scheduler, alone and with fenka's extender."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from enum import Enum
from pathlib import Path

from bench.kube_scheduler import workload
from bench.kube_scheduler.control_plane import ControlPlane, CpuTime, Measurement
from fenka.cluster.objects import Pod
from fenka.kubernetes.api_client import Api

SAMPLE = 25
"""What was spent is read after this many pods."""


class Variant(Enum):
    """What kube-scheduler calls."""

    ALONE = "kube-scheduler alone"
    NULL = "an extender that decides nothing"
    FEW = "the same, filter returns 16 nodes"
    ONE = "the same, filter returns one node"
    ANNOTATED = "the same, and bind writes annotations"
    SLOW = "the same, filter waits 8 ms"
    WATCH_JSON = "bind writes annotations, beside a watch in JSON"
    WATCH_PROTOBUF = "bind writes annotations, beside a watch in protobuf"
    FENKA_FEW = "fenka, filter returns 16 nodes"
    FENKA = "fenka"


def measure(
    plane: ControlPlane,
    series: str,
    pods: int,
    limit_s: float,
    variant: Variant,
    program: Path | None = None,
) -> Measurement:
    """Schedule pods that are all pending at the start, measure from the first one on, and delete them.

    The rate is that up to the last binding, the CPU time that up to when all pods run.

    Args:
        plane: has nodes and no pods.
        series: a name for the pods, unique in this cluster.
        pods: their number.
        limit_s: what is not bound by then does not count.
        variant: what kube-scheduler calls.
        program: another `fenka`.
    """
    extender: AbstractContextManager[None]
    match variant:
        case Variant.ALONE:
            extender = contextlib.nullcontext()
        case Variant.NULL:
            extender = plane.null_extender()
        case Variant.FEW:
            extender = plane.null_extender("-keep=16")
        case Variant.ONE:
            extender = plane.null_extender("-keep=1")
        case Variant.ANNOTATED:
            extender = plane.null_extender("-keep=1", "-annotate")
        case Variant.SLOW:
            extender = plane.null_extender("-keep=1", "-annotate", "-wait=8ms")
        case Variant.WATCH_JSON:
            extender = plane.watched("json", "-keep=1", "-annotate")
        case Variant.WATCH_PROTOBUF:
            extender = plane.watched("protobuf", "-keep=1", "-annotate")
        case Variant.FENKA_FEW:
            extender = plane.extender(16, program)
        case Variant.FENKA:
            extender = plane.extender(program=program)
    with plane.pending(series, pods), extender:
        called = variant is not Variant.ALONE
        return asyncio.run(_schedule(plane, pods, limit_s, extender=called))


async def _schedule(
    plane: ControlPlane, pods: int, limit_s: float, *, extender: bool
) -> Measurement:
    result = Measurement()
    async with await Api.connect(plane.kubeconfig) as api:
        _, version = await api.list(workload.PODS, Pod, limit=5000)
        with contextlib.ExitStack() as stack, contextlib.suppress(TimeoutError):
            scheduler = plane.kube_scheduler(extender=extender)
            # The watch is open by then: hundreds of pods are bound in the time that a start takes.
            starting = asyncio.create_task(asyncio.to_thread(stack.enter_context, scheduler))
            async with asyncio.timeout(limit_s):
                cpu, bound, begun = None, 0, 0.0
                async for _ in _shown(api, version, "spec.nodeName!="):
                    if cpu is None:
                        cpu, begun = CpuTime(plane), time.monotonic()
                        continue
                    bound += 1
                    if bound % SAMPLE == 0 or bound == pods - 1:
                        result = cpu.measurement(bound)
                    if bound == pods - 1:
                        break
                assert cpu is not None
                seconds, running = time.monotonic() - begun, 0
                # What a pod causes after its binding counts too, however far it lags behind.
                async for _ in _shown(api, version, "status.phase=Running"):
                    running += 1
                    if running == pods:
                        result = cpu.measurement(bound, seconds)
                        break
            await starting
    return result


async def _shown(api: Api, version: str, selector: str) -> AsyncIterator[None]:
    """Yield once for each pod that a field selector selects from this version on."""
    while True:
        # The server ends a watch whose client is slow.
        async for event in api.watch(workload.PODS, Pod, version, fieldSelector=selector):
            version = event.version
            if event.type == "ADDED":
                yield
