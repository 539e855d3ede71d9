"""Everything that fenka asks of the API server, with whatever rights a kubeconfig gives.

`rights.py scheduler|node KUBECONFIG NAMESPACE` prints what was refused, by what was tried. It is fenka's own
code that asks, so a right that it does not need is seen by nobody's missing it.
"""

import asyncio
import contextlib
import json
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fenka.cluster.objects import ObjectMeta, Pod
from fenka.cluster.pod_placement import PodEvaluator
from fenka.cluster.state import ClusterState
from fenka.core.evaluate import Policy
from fenka.dialects import gpushare
from fenka.kubernetes.client import Api, ApiError
from fenka.kubernetes.election import Election
from fenka.kubernetes.events import SERIES_S, EventRecorder
from fenka.kubernetes.eviction import evict
from fenka.node.lease.store import Lease
from fenka.node.node_api import NodeApi
from fenka.scheduler.binder import Binder
from fenka.scheduler.event_reporter import EventReporter
from fenka.scheduler.extender_api import ExtenderBindingArgs
from fenka.scheduler.gang_scheduler import GangScheduler
from fenka.scheduler.informers import ClusterInformers
from fenka.scheduler.queue_controller import QueueController, QueuedEvaluator
from fenka.scheduler.requeue import requeue

POLICY: Policy = "binpack"
NODE, POD, CLASS, LEASE = "rights-node", "rights-pod", "rights-class", "rights-fenka-scheduler"
SECONDS = 3.0


class Leads:
    """Leadership that is not in question."""

    time_left_s, leader = 10.0, ""


async def until(truth: Callable[[], object]) -> None:
    """Or until it will never be so."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SECONDS):
            while not truth():
                await asyncio.sleep(0.01)


async def watches(run: Awaitable[None], collections: dict[str, Any]) -> dict[str, str]:
    """Trouble of collections that are listed and watched."""
    task = asyncio.ensure_future(run)
    await until(lambda: all(it.synced.is_set() or it.last_error for it in collections.values()))
    # A watch that is refused is refused at once.
    await asyncio.sleep(0.3)
    found = {name: it.last_error or "" for name, it in collections.items()}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return found


async def events(api: Api, namespace: str) -> dict[str, str]:
    """One event, and the same again later: that one is counted."""
    offset = 0.0
    recorder = EventRecorder(api, "rights", "rights", clock=lambda: time.monotonic() + offset)
    pod = Pod(metadata=ObjectMeta(name=POD, namespace=namespace, uid=str(uuid.uuid4())))
    task = asyncio.create_task(recorder.run())
    found = {}
    for what in ("create", "patch"):
        recorder.on_pod(pod, "FenkaTest", "a right is tried")
        await until(lambda: recorder.idle)
        found[f"events: {what}"] = "refused" if recorder.dropped else ""
        recorder.dropped, offset = 0, offset + SERIES_S
    task.cancel()
    return found


async def scheduler(api: Api, namespace: str) -> dict[str, str]:
    """All that the extender does."""
    world = ClusterState()
    judge, order = PodEvaluator(world, POLICY), QueueController(world, POLICY)
    recorder = EventRecorder(api, "rights", "rights")
    cluster = ClusterInformers(
        api, world, order, EventReporter(world, judge, recorder, lambda: False)
    )
    found = await watches(cluster.run(), dict(cluster.watches))
    election = Election(api, namespace, LEASE, "rights", address="http://rights")
    for what in ("the first election", "renewal"):
        await election.acquire_or_renew()
        found[what] = election.last_error or ""
    found |= await events(api, namespace)
    # What the watch has not brought yet is read.
    gangs = GangScheduler(world, POLICY, dict, dict, time.monotonic)
    unknown = Binder(api, world, QueuedEvaluator(judge, order), gangs, Leads(), dict)
    for pod in cluster.pods.objects.values():
        if (pod.metadata.namespace, pod.metadata.name) == (namespace, POD):
            binding = ExtenderBindingArgs(POD, namespace, pod.metadata.uid, NODE)
            found["read and bind"] = await unknown.bind(binding)
            found["wake"] = await refused(requeue(api, pod, time.time()))
            found["evict"] = await refused(evict(api, namespace, POD, pod.metadata.uid))
    return found


async def node(api: Api, namespace: str) -> dict[str, str]:
    """All that the node program does."""
    cluster = NodeApi(api, NODE)
    task = asyncio.create_task(cluster.run())
    found = {}
    try:
        await until(lambda: cluster.synced and cluster.pods)
        await asyncio.sleep(0.3)
        for name, watch in (("nodes", cluster._nodes), ("pods", cluster._pods)):
            found[name] = watch.last_error or ""
        if cluster.pods:
            (meta,) = (pod.metadata for pod in cluster.pods.values())
            lease = Lease(meta.uid, namespace, POD, "c", [], [], {})
            (pod,) = cluster.pods.values()
            await cluster.note(pod, {gpushare.ASSIGNED: "true"})
            await until(lambda: _confirmed(cluster))
            found["confirm a slice"] = "" if _confirmed(cluster) else "refused"
            found["evict"] = await refused(cluster.evict(lease))
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    for what, call in (
        ("runtime", cluster.first_look()),
        (
            "inventory",
            cluster.describe(json.dumps([str(uuid.uuid4())]), int(time.time()) % 1000 + 1),
        ),
    ):
        found[what] = await refused(call)
    found["runtime class"] = "" if await cluster.handler(CLASS) else "refused"
    return found | await events(api, namespace)


def _confirmed(cluster: NodeApi) -> bool:
    return any(
        "ALIYUN_COM_GPU_MEM_ASSIGNED" in it.metadata.annotations for it in cluster.pods.values()
    )


async def refused(call: Awaitable[object]) -> str:
    """What the server says to that; empty if it is done."""
    try:
        await call
    except ApiError as why:
        return str(why)
    return ""


async def main(which: str, kubeconfig: str, namespace: str) -> None:
    """Try everything."""
    async with await Api.connect(Path(kubeconfig)) as api:
        found = await {"scheduler": scheduler, "node": node}[which](api, namespace)
    print(json.dumps(found))


asyncio.run(main(*sys.argv[1:]))
