"""Measure submissions of MPI jobs, against only creating the same objects.

A fake API server runs in a process of its own. The baseline is a bare aiohttp client that creates the root,
what it owns, and patches the root, without any check. Commands are whole processes, from start to exit; the
row of 200 submissions is one process.
"""

import asyncio
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import msgspec

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.commands import FENKA, by_turns, machine, print_table, server
from fenka.cluster.training_objects import JOBSETS_API
from fenka.jobs.collection import collect
from fenka.jobs.kubernetes.submission import submit
from fenka.jobs.manifests.training_manifest import render
from fenka.jobs.training import TrainingSpec
from fenka.kubernetes.api_client import MERGE, Api
from tests.fakes.api_server import FakeApiServer

JOBS, RUNS = 200, 9
GOAL_S = 1.0
"""For one command, with a machine that others use, too."""
GOAL_ROW_S = 20.0
"""For 200 submissions in a row."""
NAMESPACE = "/namespaces/default"


def training(name: str, queue: str = "") -> TrainingSpec:
    """Return the job with this name. queue: that of Kueue, which starts the job."""
    words = ["mpirun train"]
    return TrainingSpec(name=name, image="i", command=words, workers=2, gpu_mem="4", queue=queue)


async def create(url: str, name: str) -> None:
    """Create a job's objects, as a client without checks would."""
    rendered = render(*collect(training(name)))
    root, paths = rendered.root, {"ConfigMap": "configmaps", "Secret": "secrets"}
    root["spec"]["suspend"] = True
    collection = f"{url}{JOBSETS_API}{NAMESPACE}/jobsets"
    async with aiohttp.ClientSession() as session:
        await post(session, collection, root)
        for item in rendered.dependents:
            await post(session, f"{url}/api/v1{NAMESPACE}/{paths[item['kind']]}", item)
        body, headers = b'{"spec": {"suspend": false}}', {"Content-Type": MERGE}
        async with session.patch(f"{collection}/{name}", data=body, headers=headers) as answer:
            answer.raise_for_status()


async def post(session: aiohttp.ClientSession, url: str, item: object) -> None:
    """Create an object."""
    async with session.post(url, data=msgspec.json.encode(item)) as answer:
        answer.raise_for_status()
        await answer.read()


async def submit_to(config: str, first: str, namespace: str = "default", queue: str = "") -> None:
    """Submit jobs in a row, with one connection."""
    async with await Api.connect(Path(config)) as api:
        for number in range(JOBS):
            spec, contents = collect(training(f"{first}-{number}", queue))
            await submit(api, namespace, spec, contents, datetime.now(UTC))


async def create_row(url: str, first: str) -> None:
    """Create the objects of jobs in a row."""
    for number in range(JOBS):
        await create(url, f"{first}-{number}")


async def serve() -> None:
    """Serve until this process is ended; print the port."""
    server = FakeApiServer(discovered={JOBSETS_API})
    await server.start()
    print(server.port, flush=True)
    await asyncio.Event().wait()


def row(work: Awaitable[None]) -> tuple[float, float]:
    """Return the seconds and the processor seconds of this process for a coroutine."""

    async def run() -> None:
        await work

    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    asyncio.run(run())
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, cpu


def measure() -> bool:
    """Print tables of medians. Return whether the goals are met."""
    with server(sys.executable, __file__, "serve") as served:
        url, config = served.url, str(served.config)

        def commands(number: int) -> dict[str, list[str]]:
            options = [f"--name=b-{number}", "--image=i", "--workers=2", "--gpu-mem=4"]
            return {
                "create only": [sys.executable, __file__, "create", url, f"a-{number}"],
                "fenka submit": [
                    *(FENKA, "submit", "mpi", *options, f"--kubeconfig={config}", "mpirun train")
                ],
            }

        runs = by_turns(commands, RUNS)
        rows = {
            "create only": row(create_row(url, "c")),
            "submit": row(submit_to(config, "d")),
        }
    command_s = print_table("one job, a process each", runs)["fenka submit"]
    print(f"\n| {JOBS} jobs in a row, one process | s | processor s | ratio |\n|---|---|---|---|")
    for name, (wall, cpu) in rows.items():
        print(f"| `{name}` | {wall:.1f} | {cpu:.1f} | {cpu / rows['create only'][1]:.1f} |")
    row_s = rows["submit"][0]
    print(
        f"\none command {command_s:.2f} s, goal {GOAL_S:g} s or less; {JOBS} in a row {row_s:.1f} s, goal "
        f"{GOAL_ROW_S:g} s or less; {machine()}"
    )
    return command_s <= GOAL_S and row_s <= GOAL_ROW_S


ROLES: dict[str, Callable[..., Coroutine[None, None, None]]] = {
    "serve": serve,
    "create": create,
    "submit": submit_to,
}
"""What a process of its own does."""

if __name__ == "__main__":
    asyncio.run(ROLES[sys.argv[1]](*sys.argv[2:]))
