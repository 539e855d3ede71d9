"""Tells users at once if no card of the cluster can ever hold what they submit."""

from collections.abc import Iterable

import msgspec

from fenka.cluster.node_verdicts import explain_nodes
from fenka.cluster.objects import Node, Pod
from fenka.cluster.snapshot import ClusterSnapshot
from fenka.dialects.base import InvalidRecord
from fenka.dialects.registry import WITH_HAMI
from fenka.jobs.manifests.names import Manifest
from fenka.kubernetes.client import Api, if_accepted
from fenka.kubernetes.cluster_reader import PAGE


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
            api.on_warning(f"{never}, or add a node that has it; until then it waits")
            return
