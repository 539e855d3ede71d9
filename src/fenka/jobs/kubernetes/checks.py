"""Checks what a job needs of a cluster before anything is created.

Completes what users submit by what the administrator publishes, and what the namespace enforces.

Tells users at once if no card of the cluster can ever hold what they submit.
"""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from fenka.cluster.explain import explain_nodes
from fenka.cluster.objects import BACKFILL_CLASS, Node, Object, ObjectMeta, Pod
from fenka.cluster.state import ClusterSnapshot
from fenka.cluster.training_objects import DEPLOYMENTS_API, JOB, JOBS_API, JOBSETS_API
from fenka.core.errors import FenkaError
from fenka.dialects.base import InvalidRecord
from fenka.dialects.registry import WITH_HAMI
from fenka.jobs import roles
from fenka.jobs.job_spec import GpuResources
from fenka.jobs.manifests.card_requests import requires_hami
from fenka.jobs.manifests.object_names import Manifest
from fenka.jobs.manifests.pod_security import ENFORCED, secured
from fenka.jobs.notebook_spec import NotebookSpec
from fenka.jobs.service import ServiceSpec
from fenka.jobs.training import TrainingSpec
from fenka.jobs.workload import PodOptions, PullPolicy, SecurityLevel
from fenka.kubernetes.api_client import Api, ApiError, if_accepted
from fenka.kubernetes.reader import PAGE, read_foreign, read_published, read_scheduler_options

_SHARED_MODES = ("ReadWriteMany", "ReadOnlyMany")
NamedKind = Literal["Job", "JobSet", "Deployment", "Service"]
"""Kinds whose objects are called like the job: roots, and the Service of the pods' names."""

_PATHS: dict[NamedKind, str] = {
    "Job": f"{JOBS_API}/namespaces/{{namespace}}/jobs",
    "JobSet": f"{JOBSETS_API}/namespaces/{{namespace}}/jobsets",
    "Deployment": f"{DEPLOYMENTS_API}/namespaces/{{namespace}}/deployments",
    "Service": "/api/v1/namespaces/{namespace}/services",
}
_PRIORITY_CLASSES = "/apis/scheduling.k8s.io/v1/priorityclasses"


class SubmissionRefused(FenkaError):
    """A job cannot be submitted to this cluster; the message says why and what to do."""


def name_taken(kind: str, name: str, job: str, namespace: str) -> SubmissionRefused:
    """Return the error for an object of a job that exists already."""
    if name == job and kind in ("Job", "JobSet", "Deployment"):
        return SubmissionRefused(
            f"job {job} already exists in namespace {namespace}: delete it (fenka delete {job}) or "
            "choose another --name"
        )
    return SubmissionRefused(
        f"{kind} {name} of job {job} already exists in namespace {namespace}: if a job of this name was "
        "deleted just now, submit again in a moment, else choose another --name"
    )


class Named(Object):
    """An object of any kind: its metadata alone is read."""

    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)


async def pod_security(api: Api, namespace: str) -> str:
    """Return the Pod Security Standard that a namespace enforces; empty if none, or if nobody may know.

    Raises ApiError, ApiUnreachable.
    """
    found = await if_accepted(api.get(f"/api/v1/namespaces/{namespace}", Named), (403, 404))
    return found.metadata.labels.get(ENFORCED, "") if found else ""


class _ClaimSpec(Object):
    access_modes: tuple[str, ...] = ()


class _Claim(Object):
    spec: _ClaimSpec = msgspec.field(default_factory=_ClaimSpec)


async def check(api: Api, namespace: str, spec: TrainingSpec) -> tuple[bool, bool]:
    """Return whether the cluster has JobSet, and whether it reads HAMi's names if those are needed.

    Raises SubmissionRefused, ApiError, ApiUnreachable.
    """
    claims = {claim for claim, _ in spec.mounts}
    jobset, hami, _ = await asyncio.gather(
        _has_jobset(api, spec),
        _reads_hami(api, [role.gpu for role in roles.roles(spec)]),
        asyncio.gather(
            _check_name(api, namespace, spec.name),
            _check_priority(api, BACKFILL_CLASS if spec.backfill else spec.priority),
            *(_check_claim(api, namespace, spec, claim) for claim in claims),
        ),
    )
    return jobset, hami


async def _has_jobset(api: Api, spec: TrainingSpec) -> bool:
    # One process is a Job, whatever the cluster has. A request less is a connection less.
    if sum(role.replicas for role in roles.roles(spec)) == 1:
        return True
    return await if_accepted(api.get(JOBSETS_API, msgspec.Raw)) is not None


async def _reads_hami(api: Api, requests: Iterable[GpuResources | None]) -> bool:
    """Return whether HAMi's names are needed, and the scheduler publishes that it reads them."""
    if not any(map(requires_hami, requests)):
        return False
    try:
        return (await read_scheduler_options(api)).hami
    except (ApiError, InvalidRecord):
        # Users of one namespace may not read it.
        return False


async def check_service(api: Api, namespace: str, spec: ServiceSpec) -> bool:
    """Return whether the cluster reads HAMi's names; False also if the service does not need them.

    Raises SubmissionRefused, ApiError, ApiUnreachable.
    """
    claims = {claim for claim, _ in spec.mounts}
    hami, _ = await asyncio.gather(
        _reads_hami(api, [spec.gpu]),
        asyncio.gather(
            _check_priority(api, spec.priority),
            *(_check_service_claim(api, namespace, spec, claim) for claim in claims),
        ),
    )
    return hami


async def _check_service_claim(api: Api, namespace: str, spec: ServiceSpec, claim: str) -> None:
    mode = await _exclusive_mode(api, namespace, claim)
    if mode and spec.range.most > 1:
        raise _mounted_twice(claim, mode, "--replicas 1")


async def check_notebook(api: Api, namespace: str, spec: NotebookSpec) -> bool:
    """Return whether the cluster reads HAMi's names; False also if the notebook does not need them.

    Raises SubmissionRefused, ApiError, ApiUnreachable.
    """
    claims = {claim for claim, _ in spec.mounts}
    hami, *_ = await asyncio.gather(
        _reads_hami(api, [spec.gpu]),
        _check_name(api, namespace, spec.name),
        asyncio.gather(*(_read_claim(api, namespace, claim) for claim in claims)),
    )
    return hami


async def _check_name(api: Api, namespace: str, name: str) -> None:
    """Check that no job has the name, and nothing that of the root or of the Service of the pods' names."""
    foreign, _ = await asyncio.gather(
        read_foreign(api, namespace, name),
        asyncio.gather(*(check_unused(api, namespace, kind, name) for kind in _PATHS)),
    )
    for job in foreign:
        raise _not_ours(job.kind, name, namespace)


async def check_unused(api: Api, namespace: str, kind: NamedKind, name: str) -> None:
    """Check that no object of this kind has a job's name. Raises SubmissionRefused."""
    path = _PATHS[kind].format(namespace=namespace)
    # Without the right to read them, the dry run tells of the right to create them.
    existing = await if_accepted(api.get(f"{path}/{name}", Named), (403, 404))
    if existing is None:
        return
    if existing.metadata.labels.get(JOB) == name:
        raise name_taken(kind, name, name, namespace)
    raise _not_ours(kind, name, namespace)


def _not_ours(kind: str, name: str, namespace: str) -> SubmissionRefused:
    return SubmissionRefused(
        f"{kind} {name}, which is not fenka's, already exists in namespace {namespace}: choose another "
        "--name"
    )


async def _check_priority(api: Api, name: str) -> None:
    if not name:
        return
    try:
        await api.get(f"{_PRIORITY_CLASSES}/{_segment(name)}", msgspec.Raw)
    except ApiError as why:
        if why.status == 404:
            raise SubmissionRefused(
                f"priority class {name!r} not found: list them with kubectl get priorityclasses"
            ) from None
        # They belong to no namespace, so users of one namespace may often not read them.
        if why.status != 403:
            raise


async def _read_claim(api: Api, namespace: str, claim: str) -> _Claim:
    path = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{_segment(claim)}"
    found = await if_accepted(api.get(path, _Claim))
    if found is None:
        raise SubmissionRefused(f"claim {claim} not found in namespace {namespace}")
    return found


async def _check_claim(api: Api, namespace: str, spec: TrainingSpec, claim: str) -> None:
    mode = await _exclusive_mode(api, namespace, claim)
    if not mode:
        return
    if _mounting_pods(spec) > 1:
        raise _mounted_twice(claim, mode, "--workers 1")
    if spec.tensorboard:
        raise SubmissionRefused(
            f"claim {claim} is {mode} and cannot be mounted by TensorBoard on another node: use a "
            "ReadWriteMany claim or leave out --tensorboard"
        )


async def _exclusive_mode(api: Api, namespace: str, claim: str) -> str:
    """Return the access mode of a claim for one node; empty if several nodes may mount it."""
    modes = (await _read_claim(api, namespace, claim)).spec.access_modes
    if any(mode in _SHARED_MODES for mode in modes):
        return ""
    return next(iter(modes), "ReadWriteOnce")


def _mounted_twice(claim: str, mode: str, instead: str) -> SubmissionRefused:
    return SubmissionRefused(
        f"claim {claim} is {mode} and cannot be mounted on several nodes: use a ReadWriteMany claim or "
        f"{instead}"
    )


def _mounting_pods(spec: TrainingSpec) -> int:
    """Return how many pods mount the claims."""
    return sum(
        role.replicas
        for role in roles.roles(spec)
        if spec.mounts_on_launcher or not (spec.kind == "mpi" and role.chief)
    )


def _segment(name: str) -> str:
    """Return a name as a part of a path; one that no object can have stays without an object."""
    from urllib.parse import quote

    return quote(name, safe="") if name.strip(".") else "-"


S = TypeVar("S", bound=PodOptions)

DEFAULTS = "defaults"
"""Key of the chart's ConfigMap for users: a JSON object of the fields of ClusterDefaults."""


class ClusterDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """Values of options of submit, serve and notebook where none is given; they mean the same."""

    scheduler: str | UnsetType = UNSET
    toleration: list[str] | UnsetType = UNSET
    selector: dict[str, str] | UnsetType = UNSET
    annotation: dict[str, str] | UnsetType = UNSET
    label: dict[str, str] | UnsetType = UNSET
    priority: str | UnsetType = UNSET
    image_pull_secret: list[str] | UnsetType = UNSET
    image_pull_policy: PullPolicy | UnsetType = UNSET
    security: SecurityLevel | UnsetType = UNSET
    run_as: str | UnsetType = UNSET


async def completed(api: Api, namespace: str, spec: S) -> tuple[S, Mapping[str, str]]:
    """Return a job as it is on this cluster, and all that the chart publishes for users.

    Raises SubmissionRefused, InvalidRequest, ApiError, ApiUnreachable.
    """
    published, enforced = await asyncio.gather(read_published(api), pod_security(api, namespace))
    known = with_defaults(spec, published.get(DEFAULTS, "{}"))
    known.validate_pods()
    return secured(known, enforced), published


def with_defaults(spec: S, text: str) -> S:
    """Return a job with the published values of options that were not given. Raises SubmissionRefused."""
    try:
        defaults = msgspec.json.decode(text, type=ClusterDefaults)
    except (msgspec.MsgspecError, RecursionError) as why:
        raise SubmissionRefused(
            f"the key {DEFAULTS} of ConfigMap kube-public/fenka is invalid ({why}): ask the cluster's "
            "administrator to correct users.defaults of fenka's chart"
        ) from None
    bare = type(spec)()
    values = {
        field: value
        for field in defaults.__struct_fields__
        if (value := getattr(defaults, field)) is not UNSET
        and getattr(spec, field) == getattr(bare, field)
    }
    return msgspec.structs.replace(spec, **values)


async def warn_if_too_large(api: Api, workloads: Iterable[Manifest]) -> None:
    """Have the client warn of the first pod that could not start if nothing ran in the cluster.

    A node may be added later, so it is no error. Users who may not list nodes hear it of the scheduler.

    Args:
        api: The cluster.
        workloads: Jobs or Deployments.

    Raises:
        ApiError, ApiUnreachable: The API server refused something else or did not answer.
    """
    pods = [msgspec.convert(item["spec"]["template"], Pod) for item in workloads]
    pods = [pod for pod in pods if pod.demand().amounts]
    if not pods:
        return
    found = await if_accepted(api.list("/api/v1/nodes", Node, limit=PAGE), (403,))
    if found is None:
        return
    snapshot = ClusterSnapshot.of(found[0], [], dialects=WITH_HAMI)
    for pod in pods:
        try:
            never = explain_nodes(pod, snapshot).never
        except InvalidRecord as why:
            never = str(why)
        if never:
            api.on_warning(
                f"it can never start as it is: {never}, or add a node that has it; until then it waits"
            )
            return
