"""Stops notebooks of a cluster and starts them again.

A Deployment is scaled, a Job that runs is suspended. Kubernetes never starts a completed Job again, so a new
one takes its place. The root owns that, and keeps the password, the Service and its address. Each change is
one request, so a client that is killed leaves a notebook that is either stopped or started.
"""

import asyncio
from datetime import datetime

import msgspec

from fenka.cluster.training_objects import SPEC, SUBMITTED, BatchJob, Deployment, Root, current_run
from fenka.core.request import InvalidRequest
from fenka.jobs.kubernetes.checks import (
    SubmissionRefused,
)
from fenka.jobs.kubernetes.submission import create_run
from fenka.jobs.notebook_spec import NotebookSpec
from fenka.kubernetes.api_client import Api, if_accepted


async def stop(api: Api, root: Root, runs: list[BatchJob]) -> None:
    """Stop a notebook: its slice is free, its claims stay. Raises ApiError, ApiUnreachable."""
    run = current_run(root, runs)
    if not (run.status.ended or run.suspended):
        await _resume(api, run, resumed=False)


async def start(api: Api, root: Root, runs: list[BatchJob], now: datetime) -> None:
    """Start a notebook that was stopped or has ended.

    Raises:
        SubmissionRefused: It runs, is being started or cannot be started.
        ApiError, ApiUnreachable: The API server refused it or did not answer.
    """
    run, name = current_run(root, runs), root.metadata.name
    if run.suspended and SUBMITTED not in run.metadata.annotations:
        raise SubmissionRefused(
            f"the submission of notebook {name} was interrupted: delete it (fenka delete {name}) and create "
            "it again"
        )
    if run.status.ended:
        await _start_new_run(api, root, runs, now)
    elif run.suspended:
        await _resume(api, run, resumed=True)
    else:
        raise SubmissionRefused(f"notebook {name} runs already: see fenka get {name}")


async def _start_new_run(api: Api, root: Root, runs: list[BatchJob], now: datetime) -> None:
    spec = _spec(root)
    numbers = [_number(run) for run in runs]
    try:
        await create_run(
            api, root.metadata.namespace, spec, root.metadata.uid, max(numbers, default=1) + 1, now
        )
    except SubmissionRefused:
        raise SubmissionRefused(f"notebook {spec.name} is being started already") from None
    # The garbage collector would remove them with the root only.
    body = {"propagationPolicy": "Background"}
    await asyncio.gather(*(if_accepted(api.delete(run.path, body), (403, 404)) for run in runs))


async def _resume(api: Api, run: Root, *, resumed: bool) -> None:
    fields = {"replicas": int(resumed)} if isinstance(run, Deployment) else {"suspend": not resumed}
    # A notebook of the same name that was created since stays as it is.
    await api.patch(run.path, msgspec.Raw, {"metadata": {"uid": run.metadata.uid}, "spec": fields})


def _spec(root: Root) -> NotebookSpec:
    """Return the notebook as it was created. Its owner may have changed the annotation."""
    name = root.metadata.name
    try:
        spec = msgspec.json.decode(root.metadata.annotations.get(SPEC, ""), type=NotebookSpec)
        spec.validate()
    except (msgspec.MsgspecError, InvalidRequest, RecursionError) as why:
        raise SubmissionRefused(
            f"notebook {name} cannot be started, because its annotation {SPEC} is invalid ({why}): delete it "
            f"(fenka delete {name}) and create it again"
        ) from None
    if spec.name != name or spec.idle_s is None:
        raise SubmissionRefused(
            f"notebook {name} cannot be started, because its annotation {SPEC} describes another one: delete "
            f"it (fenka delete {name}) and create it again"
        )
    return spec


def _number(run: BatchJob) -> int:
    """Return which run of its notebook this is."""
    suffix = run.metadata.name.rpartition("-")[2]
    return int(suffix) if suffix.isascii() and suffix.isdecimal() and len(suffix) < 9 else 1
