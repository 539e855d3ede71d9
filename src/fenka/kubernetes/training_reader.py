"""Reads the objects of training jobs once: one LIST for each kind, all at the same time."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from fenka.cluster.objects import Node
from fenka.cluster.training_objects import (
    ARENAS_NAME,
    CREATION_FAILED,
    DEPLOYMENTS_API,
    FOREIGN_NAME_LABELS,
    JOB,
    JOBS_API,
    JOBSET_NAME,
    JOBSETS_API,
    KIND,
    BatchJob,
    Deployment,
    ForeignJob,
    ForeignKind,
    JobSet,
    Root,
    Service,
    TrainingEvent,
    TrainingObjects,
    TrainingPod,
)
from fenka.kubernetes.client import Api, ApiError, decoded, if_accepted
from fenka.kubernetes.cluster_reader import PAGE, collection_path

OPERATORS = {
    "kubeflow.org": ("mpijobs", "tfjobs", "pytorchjobs"),
    "trainer.kubeflow.org": ("trainjobs",),
}
"""API groups of other operators, and their kinds of jobs."""


class _Group(msgspec.Struct):
    name: str
    versions: list[dict[str, str]] = []


class _Groups(msgspec.Struct):
    groups: list[_Group] = []


async def read_training_objects(
    api: Api, namespace: str | None, name: str | None = None, *, pods_only: bool = False
) -> TrainingObjects:
    """Return the objects of all training jobs, or of those with this name.

    Args:
        namespace: None for all namespaces.
        pods_only: read neither Services nor nodes.

    Raises:
        ApiError: without the right to list Jobs, JobSets or pods.
        ApiUnreachable: if the API server does not answer.
    """
    own = f"{JOB}={name}" if name else JOB
    (roots, runs), pods, foreign, (services, nodes) = await asyncio.gather(
        read_roots(api, namespace, name),
        api.list(
            collection_path("/api/v1", namespace, "pods"),
            TrainingPod,
            limit=PAGE,
            labelSelector=own,
        ),
        read_foreign(api, namespace, name),
        _nothing() if pods_only else _read_addresses(api, namespace, own),
    )
    own_jobs = TrainingObjects(roots, pods=pods[0], runs=runs)
    others, tensorboards, failures = await asyncio.gather(
        _read_foreign_pods(api, namespace, name, {job.kind for job in foreign}),
        _read_tensorboards(api, namespace, name) if foreign and not pods_only else _none(),
        _read_creation_failures(api, namespace) if own_jobs.incomplete else _none(),
    )
    pods_of_all = [*pods[0], *others]
    return TrainingObjects(
        roots, foreign, pods_of_all, services, nodes, runs, tensorboards, failures
    )


async def _read_addresses(
    api: Api, namespace: str | None, own: str
) -> tuple[list[Service], list[Node] | None]:
    """Return Services and nodes; no Services, and None for nodes, without the right to list them."""
    services, nodes = await asyncio.gather(
        if_accepted(
            api.list(collection_path("/api/v1", namespace, "services"), Service, labelSelector=own),
            (403,),
        ),
        if_accepted(api.list("/api/v1/nodes", Node, limit=PAGE), (403,)),
    )
    return services[0] if services else [], nodes[0] if nodes else None


async def _nothing() -> tuple[list[Service], list[Node] | None]:
    return [], None


async def _none() -> list[Any]:
    return []


async def _read_creation_failures(api: Api, namespace: str | None) -> list[TrainingEvent]:
    """Return the events about Jobs whose pods cannot be created; none without the right to list them."""
    path = collection_path("/api/v1", namespace, "events")
    selector = f"involvedObject.kind=Job,reason={CREATION_FAILED}"
    listed = await if_accepted(
        api.list(path, TrainingEvent, limit=PAGE, fieldSelector=selector), (403,)
    )
    return sorted(listed[0], key=lambda event: event.at) if listed else []


async def _read_tensorboards(api: Api, namespace: str | None, name: str | None) -> list[Service]:
    """Return the Services of arena's TensorBoards; none without the right to list them."""
    job = f"{ARENAS_NAME}={name}" if name else ARENAS_NAME
    path = collection_path("/api/v1", namespace, "services")
    selector = f"role=tensorboard,{job}"
    listed = await if_accepted(api.list(path, Service, labelSelector=selector), (403,))
    return listed[0] if listed else []


async def read_roots(
    api: Api, namespace: str | None, name: str | None = None
) -> tuple[list[Root], list[BatchJob]]:
    """Return the root objects of fenka's jobs, and later runs of notebooks.

    Raises ApiError, ApiUnreachable.
    """
    own = f"{JOB}={name}" if name else JOB
    (jobs, _), job_sets, notebooks = await asyncio.gather(
        # JobSet's child Jobs have the label too.
        api.list(
            collection_path(JOBS_API, namespace, "jobs"),
            BatchJob,
            limit=PAGE,
            labelSelector=f"{own},!{JOBSET_NAME}",
        ),
        if_accepted(
            api.list(
                collection_path(JOBSETS_API, namespace, "jobsets"),
                JobSet,
                limit=PAGE,
                labelSelector=own,
            )
        ),
        # Rights of earlier releases do not include them.
        if_accepted(
            api.list(
                collection_path(DEPLOYMENTS_API, namespace, "deployments"),
                Deployment,
                limit=PAGE,
                labelSelector=f"{own},{KIND}=notebook",
            ),
            (403,),
        ),
    )
    roots: list[Root] = [
        *jobs,
        *(job_sets[0] if job_sets else ()),
        *(notebooks[0] if notebooks else ()),
    ]
    # The label alone does not make a root: its dependents have the label as well.
    named = [root for root in roots if root.metadata.labels[JOB] == root.metadata.name]
    return named, [job for job in jobs if job.metadata.owner_references]


async def read_events(
    api: Api, namespace: str, concerns: Callable[[TrainingEvent], bool]
) -> list[TrainingEvent]:
    """Return those events of a namespace, the oldest first. Raises ApiError, ApiUnreachable."""
    events, _ = await api.list(
        collection_path("/api/v1", namespace, "events"), TrainingEvent, limit=PAGE
    )
    return sorted(filter(concerns, events), key=lambda event: event.at)


async def read_foreign(api: Api, namespace: str | None, name: str | None) -> list[ForeignJob]:
    """Return the jobs of other operators whose kinds the cluster has, and which may be listed."""
    groups = await if_accepted(api.get("/apis", _Groups), (403, 404))
    paths = [
        collection_path(f"/apis/{group.name}/{version['version']}", namespace, kind)
        for group in (groups.groups if groups else ())
        for kind in OPERATORS.get(group.name, ())
        for version in group.versions
    ]
    selected = {"fieldSelector": f"metadata.name={name}"} if name else {}
    answers = await asyncio.gather(
        *(
            if_accepted(api.list(path, msgspec.Raw, limit=PAGE, **selected), (403, 404))
            for path in paths
        )
    )
    jobs: dict[str, ForeignJob] = {}
    for answer in answers:
        for raw in answer[0] if answer else ():
            try:
                job = decoded(raw, ForeignJob)
            except ApiError:
                # Some versions of these kinds accept any status.
                continue
            jobs.setdefault(job.metadata.uid, job)
    return [*jobs.values()]


async def _read_foreign_pods(
    api: Api, namespace: str | None, name: str | None, kinds: set[ForeignKind]
) -> list[TrainingPod]:
    """Return the pods of other operators' jobs of these kinds."""
    labels = dict.fromkeys(label for kind in kinds for label in FOREIGN_NAME_LABELS[kind])
    answers = await asyncio.gather(
        *(
            api.list(
                collection_path("/api/v1", namespace, "pods"),
                TrainingPod,
                limit=PAGE,
                labelSelector=f"{label}={name},!{JOB}" if name else f"{label},!{JOB}",
            )
            for label in labels
        )
    )
    return [*{pod.metadata.uid: pod for pods, _ in answers for pod in pods}.values()]
