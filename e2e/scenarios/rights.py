"""Make all of fenka's API calls with the rights of a kubeconfig.

`rights.py scheduler|node KUBECONFIG NAMESPACE` prints the error of each call, or "". It uses fenka's code, so
a needless right can be found by removing it.
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

from fenka.cluster.gang_placement import GangMembers, GangScheduler
from fenka.cluster.objects import Node, ObjectMeta, Pod, node_path
from fenka.cluster.placement import PodEvaluator
from fenka.cluster.pod_columns import LiveColumns
from fenka.cluster.pod_groups import GangPods
from fenka.cluster.queue_state import queue_state
from fenka.cluster.state import ClusterState
from fenka.core.evaluate import Policy
from fenka.dialects import gpushare
from fenka.kubernetes.api_client import Api, ApiError
from fenka.kubernetes.election import Election
from fenka.kubernetes.events import SERIES_S, EventRecorder
from fenka.kubernetes.eviction import add_taint, evict, remove_taint
from fenka.node.free_cards import PREFER_NO_SCHEDULE, TAINT
from fenka.node.mig_layouts import STATE
from fenka.node.node_api import NodeApi
from fenka.scheduler.binder import Binder, GangBarrier
from fenka.scheduler.controllers import requeue_body
from fenka.scheduler.event_reporter import EventReporter
from fenka.scheduler.extender_api import ExtenderBindingArgs
from fenka.scheduler.informers import ClusterInformers
from fenka.scheduler.queue_controller import QueueController

POLICY: Policy = "binpack"
NODE, POD, CLASS, LEASE = "rights-node", "rights-pod", "rights-class", "rights-fenka-scheduler"
SECONDS, WATCH_S = 3.0, 0.5


class PermanentLeader:
    """A leadership that never ends."""

    time_left_s, leader = 10.0, ""


async def until(condition: Callable[[], object], within_s: float = SECONDS) -> None:
    """Wait until the condition holds, but no longer than `within_s` seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while not condition():
                await asyncio.sleep(0.01)


async def watches(run: Awaitable[None], informers: dict[str, Any]) -> dict[str, str]:
    """List and watch collections, and return the errors by name."""
    task = asyncio.ensure_future(run)
    await until(
        lambda: all(
            informer.synced.is_set() or informer.last_error for informer in informers.values()
        )
    )
    # After the list succeeded, the API server may still reject the watch.
    await until(lambda: any(informer.last_error for informer in informers.values()), WATCH_S)
    errors = {name: informer.last_error or "" for name, informer in informers.items()}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return errors


async def events(api: Api, namespace: str) -> dict[str, str]:
    """Create an event, and send it again, which updates its count."""
    offset = 0.0
    recorder = EventRecorder(api, "rights", "rights", clock=lambda: time.monotonic() + offset)
    pod = Pod(metadata=ObjectMeta(name=POD, namespace=namespace, uid=str(uuid.uuid4())))
    task = asyncio.create_task(recorder.run())
    errors: dict[str, str] = {}
    for verb in ("create", "patch"):
        recorder.record_on_pod(pod, "FenkaTest", "a right is tried")
        await until(lambda: recorder.idle)
        errors[f"events: {verb}"] = "refused" if recorder.dropped else ""
        recorder.dropped, offset = 0, offset + SERIES_S
    task.cancel()
    return errors


async def scheduler(api: Api, namespace: str) -> dict[str, str]:
    """Make all calls of the extender."""
    state = ClusterState()
    evaluator, queue = PodEvaluator(state, POLICY), QueueController(queue_state(state, POLICY))
    recorder = EventRecorder(api, "rights", "rights")
    cluster = ClusterInformers(
        api,
        state,
        LiveColumns(state),
        queue,
        EventReporter(state, evaluator, recorder, lambda: False),
    )
    errors = await watches(cluster.run(), dict(cluster.by_collection))
    election = Election(api, namespace, LEASE, "rights", address="http://rights")
    for step in ("the first election", "renewal"):
        await election.acquire_or_renew()
        errors[step] = election.last_error or ""
    errors |= await events(api, namespace)
    # The binder reads a pod that the watch has not delivered yet.
    gangs = GangScheduler(GangMembers(state, GangPods, dict), state, POLICY, time.monotonic)
    barrier = GangBarrier(gangs)
    binder = Binder(api, state, evaluator.placements, gangs, barrier, PermanentLeader(), dict)
    for pod in cluster.pods.objects.values():
        if (pod.metadata.namespace, pod.metadata.name) == (namespace, POD):
            binding = ExtenderBindingArgs(POD, namespace, pod.metadata.uid, NODE)
            errors["read and bind"] = await binder.bind(binding)
            errors["requeue"] = await refused(api.patch(pod.path, Pod, dict(requeue_body(pod))))
            errors["evict"] = await refused(evict(api, namespace, POD, pod.metadata.uid))
    return errors


async def set_taint(api: Api) -> None:
    """Add the taint of free cards, and remove it. Raises ApiError."""
    read = await api.get(node_path(NODE), Node)
    await add_taint(api, read, TAINT, PREFER_NO_SCHEDULE)
    await remove_taint(api, read, TAINT)


async def node(api: Api, namespace: str) -> dict[str, str]:
    """Make all calls of the node program."""
    cluster = NodeApi(api, NODE)
    task = asyncio.create_task(cluster.run())
    errors: dict[str, str] = {}
    try:
        await until(lambda: cluster.synced and cluster.pods)
        informers: dict[str, Any] = {"nodes": cluster._nodes, "pods": cluster._pods}
        await until(lambda: any(informer.last_error for informer in informers.values()), WATCH_S)
        errors |= {name: informer.last_error or "" for name, informer in informers.items()}
        if cluster.pods:
            (pod,) = cluster.pods.values()
            confirmed = {gpushare.ASSIGNED: "true"}
            errors["confirm a slice"] = await refused(cluster.annotate(pod, confirmed))
            errors["evict"] = await refused(cluster.evict(namespace, POD, pod.metadata.uid))
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    for step, call in (
        ("runtime", cluster.read_node()),
        (
            "inventory",
            cluster.publish_inventory(
                json.dumps([str(uuid.uuid4())]), None, int(time.time()) % 1000 + 1
            ),
        ),
        ("label", cluster.label_node({STATE: "success"})),
        ("taint", set_taint(api)),
    ):
        errors[step] = await refused(call)
    errors["runtime class"] = "" if await cluster.runtime_handler(CLASS) else "refused"
    return errors | await events(api, namespace)


async def refused(call: Awaitable[object]) -> str:
    """Return the API server's error, or "" if the call succeeds."""
    try:
        await call
    except ApiError as error:
        return str(error)
    return ""


async def main(program: str, kubeconfig: str, namespace: str) -> None:
    """Make all calls of one program and print the errors."""
    async with await Api.connect(Path(kubeconfig)) as api:
        errors = await {"scheduler": scheduler, "node": node}[program](api, namespace)
    print(json.dumps(errors))


asyncio.run(main(*sys.argv[1:]))
