"""Measure the commands that show 500 training jobs, against only fetching the same lists.

An API server in a process of its own serves 500 JobSets of three pods each, as the renderer makes them, and
100 sharing nodes. Its lists are encoded in advance. The baseline is a bare aiohttp client that reads them
without decoding. Each run is a whole process, from its start to its exit.
"""

import asyncio
import sys
from pathlib import Path

import msgspec
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.commands import FENKA, by_turns, machine, print_table, server
from fenka.cluster.training_objects import COMPLETION_INDEX, JOBSET_NAME, JOBSETS_API
from fenka.jobs.collection import Contents
from fenka.jobs.manifests.object_names import Manifest
from fenka.jobs.manifests.training_manifest import render
from fenka.jobs.training import TrainingSpec
from tests.builders import on_card, sharing

JOBS, NODES, RUNS = 500, 100, 5
GOAL_S = 1.0
NOON = "2024-01-01T12:00:00Z"
FILLER = [
    {
        "manager": "kube-controller-manager",
        "fieldsV1": {f"f:field-{number}": {} for number in range(60)},
    }
]
"""What every object of a real cluster carries: about 1.5 KB of managed fields."""

FETCH = """
import asyncio, sys, aiohttp
async def main():
    async with aiohttp.ClientSession() as session:
        async def fetch(path):
            async with session.get(sys.argv[1] + path) as answer:
                await answer.read()
        await asyncio.gather(*map(fetch, sys.argv[2:]))
asyncio.run(main())
"""


def job(number: int) -> tuple[Manifest, list[Manifest]]:
    """Return a job's root object and its pods, which run."""
    name = f"job-{number}"
    spec = TrainingSpec(name=name, image="i", command=["mpirun train"], workers=2, gpu_mem="4")
    rendered = render(spec, Contents(key="ab" * 32))
    own = {
        "namespace": "default",
        "creationTimestamp": NOON,
        "managedFields": FILLER,
        "resourceVersion": "1",
    }
    root = rendered.root
    root["metadata"] |= {**own, "uid": f"root-{name}"}
    pods = []
    for role_job in rendered.role_jobs:
        template = role_job["spec"]["template"]
        for index in range(role_job["spec"]["completions"]):
            pod_name = f"{role_job['metadata']['name']}-{index}-abcde"
            labels = {COMPLETION_INDEX: str(index), JOBSET_NAME: name}
            metadata = {
                **template["metadata"],
                **own,
                "name": pod_name,
                "uid": pod_name,
                "labels": template["metadata"]["labels"] | labels,
                "annotations": on_card(0, 4) if "worker" in pod_name else {},
            }
            status = {"phase": "Running", "hostIP": "10.0.0.1", "podIP": "10.1.0.1"}
            placed = {**template["spec"], "nodeName": f"node-{number % NODES}"}
            pods.append({"metadata": metadata, "spec": placed, "status": status})
    return root, pods


def lists() -> dict[str, list[Manifest]]:
    """Return the objects of each path that the commands read."""
    made = [job(number) for number in range(JOBS)]
    return {
        f"{JOBSETS_API}/namespaces/default/jobsets": [root for root, _ in made],
        "/api/v1/namespaces/default/pods": [pod for _, pods in made for pod in pods],
        "/api/v1/nodes": [sharing(f"node-{number}", cards=8) for number in range(NODES)],
        "/apis/batch/v1/namespaces/default/jobs": [],
        "/api/v1/namespaces/default/services": [],
    }


async def serve() -> None:
    """Serve the lists until this process is ended; print the port."""
    bodies = {
        path: msgspec.json.encode({"items": items, "metadata": {"resourceVersion": "1"}})
        for path, items in lists().items()
    }

    async def answer(request: web.Request) -> web.Response:
        body = bodies.get(request.path, b'{"groups": []}')
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


def measure() -> bool:
    """Print a table of medians. Return whether the goal is met."""
    with server(sys.executable, __file__) as served:
        commands = {"fetch only": [sys.executable, "-c", FETCH, served.url, *lists()]}
        for screen in ("list", "list --layout arena", "top job", "list -o json"):
            config = ("--kubeconfig", str(served.config))
            commands[f"fenka {screen}"] = [FENKA, *screen.split(), *config]
        runs = by_turns(lambda _: commands, RUNS)
    slowest = max(print_table(f"{JOBS} jobs, {3 * JOBS} pods, {NODES} nodes", runs).values())
    print(f"\nslowest {slowest:.2f} s, goal {GOAL_S:g} s or less; {machine()}")
    return slowest <= GOAL_S


if __name__ == "__main__":
    asyncio.run(serve())
