"""Programs that keep pods need little memory, whatever tenants write into them."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from fenka.autoscaler.watch import DaemonSet, ElasticPod
from fenka.cluster.compact import CompactPod
from fenka.cluster.objects import Pod
from fenka.cluster.pod_groups import PodGroup
from fenka.cluster.pod_preemption import PodDisruptionBudget
from fenka.dialects import gpushare
from fenka.kubernetes.api_client import Api
from fenka.kubernetes.informer import Informer, NullListener
from fenka.kubernetes.kube_config import ApiServer
from fenka.node.node_api import NodePod
from tests.builders import Json, pod

PODS, SIZE = 200, 1_400_000
LIMIT_MIB = 512
"""The smallest limit of these programs in the chart. Here they share it."""
CARD: Json = {gpushare.MEMORY: 1}


def large(field: str, limits: Json | None = None) -> Json:
    """Return a pod whose field has as much as the API server accepts of an object."""
    made = pod("p", CARD if limits is None else limits)
    made["metadata"] |= {"uid": "UID", "resourceVersion": "VERSION"}
    made["spec"]["schedulingGates"] = [{"name": "fenka.io/queue"}]
    container, spec = made["spec"]["containers"][0], made["spec"]
    numbers = range(SIZE)
    parts: dict[str, tuple[Any, Any]] = {
        "labels": (
            {f"a{number}": "" for number in numbers[: SIZE // 12]},
            lambda it: made["metadata"].update(labels=it),
        ),
        "env": (
            [{"name": f"A{number}", "value": "x" * 40} for number in numbers[: SIZE // 65]],
            lambda it: container.update(env=it),
        ),
        "affinity": (
            [{"key": f"k{number}", "operator": "Exists"} for number in numbers[: SIZE // 40]],
            lambda it: spec.update(
                affinity={
                    "nodeAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": {
                            "nodeSelectorTerms": [{"matchExpressions": it}]
                        }
                    }
                }
            ),
        ),
        "tolerations": (
            [{"key": f"k{number}", "operator": "Exists"} for number in numbers[: SIZE // 40]],
            lambda it: spec.update(tolerations=it),
        ),
        "resources": (
            {f"a.b/r{number}": "1" for number in numbers[: SIZE // 16]},
            lambda it: container["resources"].update(limits={**CARD, **it}),
        ),
        "containers": (
            [
                {"name": f"c{number}", "resources": {"limits": CARD}}
                for number in numbers[: SIZE // 60]
            ],
            lambda it: spec.update(containers=it),
        ),
        "gates": (
            [{"name": f"a.b/g{number}"} for number in numbers[: SIZE // 22]],
            lambda it: spec.update(schedulingGates=it),
        ),
        "owners": (
            [{"kind": "Job", "name": f"j{number}"} for number in numbers[: SIZE // 32]],
            lambda it: made["metadata"].update(ownerReferences=it),
        ),
    }
    value, put = parts[field]
    put(value)
    return made


FIELDS = ("labels", "env", "affinity", "tolerations")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The port of an API server in a process of its own: 200 such pods, and an event of each."""
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(sender,), daemon=True)
    process.start()
    yield receiver.recv()
    process.kill()
    process.join()


def _serve(sender: Any) -> None:
    asyncio.run(_server(sender))


async def _server(sender: Any) -> None:
    templates = [msgspec.json.encode(large(field)) for field in FIELDS]

    def nth(number: int, version: int) -> bytes:
        text = templates[number % len(templates)].replace(b"UID", b"uid-%d" % number)
        return text.replace(b'"VERSION"', b'"%d"' % version)

    async def listed(request: web.Request) -> web.StreamResponse:
        if request.query.get("watch"):
            return await watched(request)
        first = int(request.query.get("continue", 0))
        last = min(first + int(request.query["limit"]), PODS)
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        following = str(last) if last < PODS else ""
        meta = msgspec.json.encode({"resourceVersion": "1", "continue": following})
        await answer.write(b'{"metadata":' + meta + b',"items":[')
        for number in range(first, last):
            await answer.write(b"," * (number > first) + nth(number, 1))
        await answer.write(b"]}")
        return answer

    async def watched(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        for number in range(PODS):
            await answer.write(b'{"type":"MODIFIED","object":' + nth(number, 2) + b"}\n")
        await asyncio.Event().wait()
        return answer

    app = web.Application()
    app.router.add_get("/api/v1/pods", listed)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    sender.send(runner.addresses[0][1])
    await asyncio.Event().wait()


async def _peak_mib(port: int) -> int:
    async with Api(ApiServer(f"http://127.0.0.1:{port}")) as api:
        kinds: tuple[type[Pod], ...] = (CompactPod, NodePod, ElasticPod)
        informers = [Informer[Any](api, "/api/v1/pods", kind, NullListener()) for kind in kinds]
        tasks = [asyncio.create_task(informer.run()) for informer in informers]
        try:
            for informer in informers:
                while not (
                    len(informer.objects) == PODS
                    and all(it.metadata.resource_version == "2" for it in informer.objects.values())
                ):
                    await asyncio.sleep(0.05)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    # getrusage would have the peak of the process that started this one, too.
    (line,) = (it for it in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in it)
    return int(line.split()[1]) // 1024


def peak_mib(port: int) -> int:
    """Return the peak of memory of following all pods three times, as three programs do, from a list on."""
    return asyncio.run(_peak_mib(port))


@pytest.mark.timeout(1200)
def test_programs_stay_within_the_charts_limits_when_pods_are_large(port: int) -> None:
    """At start, when all are listed, and when each of them changes."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        assert processes.submit(peak_mib, port).result() < LIMIT_MIB


MANY = (*FIELDS, "resources", "containers", "gates", "owners")


@pytest.mark.parametrize("kind", [CompactPod, NodePod, ElasticPod])
@pytest.mark.parametrize("field", MANY)
def test_kept_pod_is_small_when_its_owner_wrote_much(kind: type[Pod], field: str) -> None:
    """Whatever the field is; what it requests of cards is kept, or a sentence says why it is not served."""
    kept = msgspec.json.decode(msgspec.json.encode(large(field)), type=kind)
    assert len(msgspec.json.encode(kept)) < 48 * 1024
    demand = kept.demand()
    assert demand.requests_gpu
    sentence = {
        "affinity": "the pod has an affinity of ",
        "tolerations": "the pod has tolerations of ",
        "containers": "containers, and fenka serves at most 128: make it smaller",
    }.get(field)
    assert sentence is None or (demand.error is not None and sentence in demand.error)


def test_other_objects_of_tenants_are_small_when_their_owners_wrote_much() -> None:
    """Budgets, gangs and DaemonSets are followed, too."""
    template = large("labels")
    meta = {
        "name": "a",
        "labels": template["metadata"]["labels"],
        "annotations": {"note": "x" * 200_000},
    }
    rules = {"matchLabels": template["metadata"]["labels"]}
    sent: list[tuple[Json, type[Any]]] = [
        ({"metadata": meta, "spec": {"selector": rules}}, PodDisruptionBudget),
        ({"metadata": meta}, PodGroup),
        ({"metadata": meta, "spec": {"template": large("tolerations")}}, DaemonSet),
    ]
    for obj, kind in sent:
        kept = msgspec.json.decode(msgspec.json.encode(obj), type=kind)
        assert len(msgspec.json.encode(kept)) < 4096
