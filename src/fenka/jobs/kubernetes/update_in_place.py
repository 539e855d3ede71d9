"""Lets an old replica of a service end before its successor starts, where there is no room for both."""

import asyncio
from collections.abc import Callable

import msgspec

from fenka.cluster import service_objects
from fenka.cluster.training_objects import TrainingPod
from fenka.jobs.manifests.service_manifest import strategy
from fenka.jobs.service import ServiceSpec
from fenka.kubernetes.api_client import Api
from fenka.kubernetes.reader import read_services

POLL_S = 0.5


LOOKS = 60
"""How often an update looks for a new replica that finds no room, before it leaves that to --wait."""


_PLACED = (
    *("gpus", "gpu_mem", "gpu_core", "gpu_core_mode", "cards", "cpu", "memory", "device"),
    *("selector", "toleration", "scheduler", "priority", "interruptible", "share_memory"),
    *("data", "data_dir", "label", "annotation"),
)
"""Fields on which it may depend where a replica can be placed."""


def fits_in_place(old: ServiceSpec, new: ServiceSpec) -> bool:
    """Return whether a new replica certainly fits where an old one has ended."""
    return all(getattr(old, field) == getattr(new, field) for field in _PLACED)


async def make_room(
    api: Api,
    deployment: service_objects.ServingDeployment,
    spec: ServiceSpec,
    report: Callable[[str], None],
) -> None:
    """Wait until a new replica has been placed. If none can be, let an old one end first.

    Args:
        api: The cluster.
        deployment: The version, which has just been changed.
        spec: The version as it is now.
        report: Prints a sentence.

    Raises:
        ApiError, ApiUnreachable: The API server refused it or did not answer.
    """
    namespace = deployment.metadata.namespace
    for _ in range(LOOKS):
        objects = await read_services(api, namespace, spec.name)
        known = next(
            (version for version in objects.versions if version.version == spec.version), None
        )
        if known is None or known.metadata.uid != deployment.metadata.uid or known.rolled_out:
            return
        if known.status.observed_generation >= known.metadata.generation:
            pending = _pending(objects, spec.version)
            if any(pod.unschedulable and not pod.status.nominated_node_name for pod in pending):
                await api.patch(known.path, msgspec.Raw, _in_place(known))
                report(
                    f"there is no room for one more replica of {spec.name}: an old one ends before its "
                    "successor starts (--surge waits for room instead)"
                )
                return
            if known.status.updated_replicas and not pending:
                return
        await asyncio.sleep(POLL_S)


def _pending(objects: service_objects.ServiceObjects, version: str) -> list[TrainingPod]:
    """Return the replicas of a version that have no node yet."""
    return [
        pod
        for pod in objects.pods
        if pod.metadata.labels.get(service_objects.VERSION) == version
        and not (pod.spec.node_name or pod.gone or pod.finished)
    ]


def _in_place(known: service_objects.ServingDeployment) -> dict[str, object]:
    # Another one of its name would be changed otherwise.
    return {"metadata": {"uid": known.metadata.uid}, "spec": {"strategy": strategy(surge=False)}}
