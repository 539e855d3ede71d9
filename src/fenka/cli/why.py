"""`fenka why NAME`: explains why a pod, or a job of this machine, is pending."""

import asyncio
import time
from functools import partial
from typing import Annotated

import typer

from fenka.cli import cluster, tables
from fenka.cli.admin.elastic import out_of_date
from fenka.cli.common_options import NamespaceOption, OutputOption, Target, cluster_configured
from fenka.cli.error_report import UserError
from fenka.cli.world import snapshot_here
from fenka.cluster.explain import (
    PodExplanation,
    explain,
)
from fenka.cluster.objects import Event, Pod, pod_path
from fenka.cluster.state import ClusterSnapshot
from fenka.cluster.training_objects import COMPLETION_INDEX, JOB, KIND, ROLE
from fenka.dialects.base import InvalidRecord
from fenka.kubernetes.api_client import Api, ApiError, if_accepted
from fenka.kubernetes.autoscaler_reader import AutoscalerState, read_autoscaler
from fenka.kubernetes.reader import (
    read_cluster,
    read_services,
    read_training_objects,
    read_waiting_surroundings,
)
from fenka.local.views import explain_jobs
from fenka.views.cluster_workloads import training_jobs
from fenka.views.pod_explanations import explain_growth, explanation_lines
from fenka.views.workloads import TRAINERS, instance_name
from fenka.workstation import paths


def why(
    pod: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="a pod, a job or a job's instance: NAME or NAMESPACE/NAME"
        ),
    ],
    target: Target,
    namespace: NamespaceOption = "",
    output: OutputOption = "table",
) -> None:
    """Print the explanation. Raises UserError if there is no such pod or job."""
    if not (target.of_cluster or namespace) and _explained_here(target, pod, output):
        return
    before, slash, name = pod.rpartition("/")
    namespace = before if slash else namespace or cluster.namespace(target)

    explanation = cluster.ask(target, lambda api: explain_pod(api, namespace, name, time.time()))
    if not tables.print_data(explanation, output):
        tables.print_lines(explanation_lines(explanation, tables.align_to_terminal))


def _explained_here(target: Target, name: str, output: str) -> bool:
    """Explain a job of this machine; return False if it has none of this name. Raises UserError."""
    from fenka.workstation.client import get_helps

    snapshot = snapshot_here(target)
    helps_of = partial(get_helps, paths.current())
    explanations = explain_jobs(snapshot, name, helps_of) if snapshot else []
    if snapshot and not explanations:
        # It imports the supervisor, which most explanations need not.
        from fenka.local.service_commands import versions

        replicas = [replica for version in versions(name) for replica in version.instances]
        explanations = [
            line for replica in replicas for line in explain_jobs(snapshot, replica.pod, helps_of)
        ]
    if not explanations:
        if target.local or (snapshot and not cluster_configured()):
            raise UserError(f"no job is called {name}: `fenka ps -a` lists jobs")
        return False
    if not tables.print_data(explanations, output):
        tables.print_lines(line for explanation in explanations for line in explanation.lines)
    return True


async def explain_pod(api: Api, namespace: str, name: str, now: float) -> PodExplanation:
    """Explain a pod. Raises ApiError, ApiUnreachable."""
    # The pod first: if it does not exist, nothing else needs to be read.
    pod = await _pod(api, namespace, name)
    name = pod.metadata.name
    (events, _), snapshot, autoscaler = await asyncio.gather(
        api.list(
            f"/api/v1/namespaces/{namespace}/events",
            Event,
            fieldSelector=f"involvedObject.name={name},involvedObject.uid={pod.metadata.uid}",
        ),
        if_accepted(_surroundings(api, pod), (403,)),
        _autoscaler(api),
    )
    explanation = explain(pod, snapshot, events)
    published = None if autoscaler is None else (autoscaler.status, autoscaler.orders)
    explain_growth(explanation, pod, published, events, now)
    if explanation.state == "pending" and autoscaler is not None:
        explanation.notes += filter(None, [out_of_date(autoscaler, now)])
    return explanation


async def _pod(api: Api, namespace: str, name: str) -> Pod:
    """Return the pod of this name, or of the job or the job's instance that `fenka get` shows by it.

    Raises ApiError, and UserError for a job without pods.
    """
    try:
        return await api.get(pod_path(namespace, name), Pod)
    except ApiError as why:
        if why.status != 404:
            raise
        path = f"/api/v1/namespaces/{namespace}/pods"
        listed = await if_accepted(api.list(path, Pod, labelSelector=JOB), (403,))
        pods = [pod for pod in (listed[0] if listed else ()) if _instance(pod) == name]
        pods = pods or await _pods_of_job(api, namespace, name)
        if not pods:
            raise
        return max(pods, key=_needs_explanation)


async def _pods_of_job(api: Api, namespace: str, name: str) -> list[Pod]:
    """Return the pods of fenka's or another operator's job, or of a service; none if there is no such job.

    Raises UserError for a job without pods.
    """
    objects = await if_accepted(
        read_training_objects(api, namespace, name, pods_only=True), (403, 404)
    )
    if objects is None:
        return []
    jobs = training_jobs(objects, time.time())
    if jobs and not objects.pods:
        reason = jobs[0].blocked or jobs[0].note or f"it is {jobs[0].status}"
        raise UserError(f"job {name} has no pods now: {reason}")
    if jobs:
        return [*objects.pods]
    service = await if_accepted(read_services(api, namespace, name), (403, 404))
    return [*service.pods] if service else []


def _needs_explanation(pod: Pod) -> tuple[bool, bool, str]:
    """Return a sort key by which pending pods come last, then those that run, the newest of them last."""
    pending = not (pod.spec.node_name or pod.finished)
    return pending, not pod.finished, pod.metadata.creation_timestamp


def _instance(pod: Pod) -> str:
    """Return the name of the instance whose pod this is."""
    labels = pod.metadata.labels
    index = labels.get(COMPLETION_INDEX, "0")
    trainer = TRAINERS.get(labels.get(KIND, ""), "mpijob")
    number = int(index) if index.isdecimal() else 0
    return instance_name(labels.get(JOB, ""), trainer, labels.get(ROLE, "main"), number)


async def _surroundings(api: Api, pod: Pod) -> ClusterSnapshot:
    """Read all nodes for a pending pod, else its own."""
    if pod.finished:
        return ClusterSnapshot.of([], [])
    if pod.spec.node_name:
        return cluster.keep(await read_cluster(api, pod.spec.node_name))
    return cluster.keep(await read_waiting_surroundings(api, pod))


async def _autoscaler(api: Api) -> AutoscalerState | None:
    """Return what the autoscaler publishes; None without one, or if that cannot be read."""
    try:
        return await read_autoscaler(api)
    except (ApiError, InvalidRecord):
        return None
