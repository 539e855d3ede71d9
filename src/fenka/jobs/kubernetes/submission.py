"""Submits a job to a cluster.

The cluster's resources are checked first. Several objects are also created as a dry run, in which the API
server applies its own rules and rights. Then the root object is created, suspended if it owns others. It is
resumed when they exist. A Deployment is suspended while it has no replicas. A client that dies in between
leaves a suspended root, which runs nothing.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec

from fenka.cluster import training_objects
from fenka.jobs.collection import Contents
from fenka.jobs.kubernetes import checks
from fenka.jobs.kubernetes.checks import (
    Named,
    NamedKind,
    completed,
    warn_if_too_large,
)
from fenka.jobs.kubernetes.creation import check_by_dry_run, collection, owner_reference, remove
from fenka.jobs.manifests import notebook_manifest
from fenka.jobs.manifests.object_names import Manifest
from fenka.jobs.manifests.training_manifest import Rendered, render
from fenka.jobs.notebook_spec import NotebookSpec
from fenka.jobs.training import TrainingSpec
from fenka.kubernetes.api_client import Api, ApiError, ApiUnreachable

_ROOTS: tuple[NamedKind, ...] = ("Job", "JobSet", "Deployment")


async def submit(
    api: Api, namespace: str, spec: TrainingSpec, contents: Contents, now: datetime
) -> None:
    """Submit a training. If that fails, nothing is left of it.

    Args:
        api: The cluster.
        namespace: The namespace of all objects.
        spec: A valid training without secrets.
        contents: Its files and secrets.
        now: The time of the submission.

    Raises:
        SubmissionRefused: The cluster cannot run it, or has a job of this name.
        InvalidRequest, InvalidSize: No cluster, or none without JobSet, can run it.
        ApiError, ApiUnreachable: The API server refused an object or did not answer.
    """
    (jobset, hami), (spec, _) = await asyncio.gather(
        checks.check(api, namespace, spec), completed(api, namespace, spec)
    )
    rendered = render(spec, contents, jobset=jobset, hami=hami)
    await _check_objects(api, namespace, rendered)
    await warn_if_too_large(api, rendered.role_jobs)
    submitted = _submitted(now)
    if rendered.dependents or spec.queue:
        rendered.root["spec"]["suspend"] = True
        await _create_all(api, namespace, rendered, _resumption(spec, submitted))
    else:
        rendered.root["metadata"]["annotations"] |= submitted
        await _create_all(api, namespace, rendered, None)


async def submit_notebook(
    api: Api, namespace: str, spec: NotebookSpec, password: str, now: datetime
) -> None:
    """Create a notebook. If that fails, nothing is left of it.

    Raises SubmissionRefused, InvalidRequest, InvalidSize, ApiError and ApiUnreachable, as `submit` does.
    """
    # A job that no cluster can run is refused before one is asked.
    notebook_manifest.render(spec, password)
    hami, (spec, _) = await asyncio.gather(
        checks.check_notebook(api, namespace, spec), completed(api, namespace, spec)
    )
    rendered = notebook_manifest.render(spec, password, hami=hami)
    await _check_objects(api, namespace, rendered)
    await warn_if_too_large(api, rendered.role_jobs)
    alone = rendered.root["kind"] == "Job"
    rendered.root["spec"] |= {"suspend": True} if alone else {"replicas": 0}
    running = {"suspend": False} if alone else {"replicas": 1}
    resumption = {"metadata": {"annotations": _submitted(now)}, "spec": running}
    await _create_all(api, namespace, rendered, resumption)


async def create_run(
    api: Api, namespace: str, spec: NotebookSpec, root_uid: str, number: int, now: datetime
) -> None:
    """Create the Job of a later run of a notebook, owned by its root.

    Raises ApiError, ApiUnreachable, InvalidRequest, InvalidSize.
    """
    run = notebook_manifest.render_run(spec, number)
    run["metadata"] |= {
        "annotations": _submitted(now),
        "ownerReferences": [owner_reference(run, spec.name, root_uid)],
    }
    await _create(api, namespace, run)


def _submitted(now: datetime) -> dict[str, str]:
    return {training_objects.SUBMITTED: now.isoformat(timespec="seconds")}


async def _create_all(
    api: Api, namespace: str, rendered: Rendered, resumption: Mapping[str, Any] | None
) -> None:
    """Create the root, then what it owns. resumption: the patch that lets a suspended root start."""
    root = rendered.root
    name = root["metadata"]["name"]
    created = await _create_root(api, namespace, root)
    try:
        owner = owner_reference(root, name, created.metadata.uid)
        async with asyncio.TaskGroup() as group:
            group.create_task(_check_other_kind(api, namespace, root))
            for item in rendered.dependents:
                item["metadata"]["ownerReferences"] = [owner]
                group.create_task(_create(api, namespace, item))
        if resumption is not None:
            await api.patch(f"{collection(namespace, root)}/{name}", msgspec.Raw, resumption)
    except BaseException as why:
        removed = await _remove(api, namespace, root, created.metadata.uid)
        if not removed and isinstance(why, ApiError) and why.status == 404:
            raise checks.SubmissionRefused(
                f"job {name} was deleted while it was being submitted"
            ) from None
        if isinstance(why, ExceptionGroup):
            raise why.exceptions[0] from None
        raise


def _resumption(spec: TrainingSpec, submitted: Mapping[str, str]) -> Manifest:
    """Return the patch that lets the pods start. Kueue resumes jobs in its queues by itself."""
    if spec.queue:
        labels = {training_objects.QUEUE_NAME: spec.queue}
        return {"metadata": {"annotations": submitted, "labels": labels}}
    return {"metadata": {"annotations": submitted}, "spec": {"suspend": False}}


async def _check_objects(api: Api, namespace: str, rendered: Rendered) -> None:
    """Create all objects as a dry run, if there are several. Raises ApiError, ApiUnreachable."""
    objects = {
        (item["kind"], item["metadata"]["name"]): item
        # A JobSet's Jobs would be checked by its controller only, when it creates them.
        for item in (rendered.root, *rendered.role_jobs, *rendered.dependents)
    }
    if len(objects) == 1:
        # Its creation is checked by the same rules, and leaves nothing if it fails.
        return
    await check_by_dry_run(_create(api, namespace, item, dry_run=True) for item in objects.values())


async def _check_other_kind(api: Api, namespace: str, root: Manifest) -> None:
    """Check that no other user has submitted the name, as a root of another kind, at the same time."""
    name = root["metadata"]["name"]
    # Later readers see it. So a look that fails is no reason to give up.
    with contextlib.suppress(ApiError, ApiUnreachable):
        others = (kind for kind in _ROOTS if kind != root["kind"])
        await asyncio.gather(*(checks.check_unused(api, namespace, kind, name) for kind in others))


async def _create_root(api: Api, namespace: str, root: Manifest) -> Named:
    """Create the root. Raises what `_create` does, and SubmissionRefused if no answer comes."""
    try:
        return await _create(api, namespace, root)
    except ApiUnreachable as why:
        name = root["metadata"]["name"]
        raise checks.SubmissionRefused(
            f"{why}: fenka get {name} tells whether job {name} was created"
        ) from None


async def _create(api: Api, namespace: str, item: Manifest, *, dry_run: bool = False) -> Named:
    """Create an object. Raises SubmissionRefused if its name is taken, ApiError, ApiUnreachable."""
    try:
        return await api.create(collection(namespace, item), Named, item, dry_run=dry_run)
    except ApiError as why:
        if why.reason != "AlreadyExists":
            raise
    meta = item["metadata"]
    raise checks.name_taken(
        item["kind"], meta["name"], meta["labels"][training_objects.JOB], namespace
    )


async def _remove(api: Api, namespace: str, root: Manifest, uid: str) -> bool:
    """Delete the root of a submission that failed, with what it owns already.

    Return False if it does not exist any more. Raises SubmissionRefused.
    """
    name = root["metadata"]["name"]
    try:
        return await remove(api, f"{collection(namespace, root)}/{name}", uid)
    except (ApiError, ApiUnreachable) as why:
        state = "is suspended" if root["spec"].get("suspend") else "may run"
        raise checks.SubmissionRefused(
            f"job {name} was created and could not be completed or deleted: it {state}, delete it by "
            f"fenka delete {name} ({why})"
        ) from why
