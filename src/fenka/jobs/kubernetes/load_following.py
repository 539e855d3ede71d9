"""Has the load of a version followed: by KEDA, or by the service's gateway.

Only one of both acts on a Deployment. The gateway scales the versions in an annotation of the service's
Service, and has the right to do so for these only. KEDA scales those with a ScaledObject. The other one is
removed first.

Versions of earlier releases have a HorizontalPodAutoscaler of a metric that nobody serves any more.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from fenka.cluster import service_objects
from fenka.cluster.objects import Object, ObjectMeta
from fenka.cluster.service_objects import SCALING, InvalidScaling, ServingDeployment
from fenka.cluster.training_objects import ROLE
from fenka.core.scaling import ScalingPolicy
from fenka.jobs.kubernetes import creation
from fenka.jobs.kubernetes.checks import SubmissionRefused
from fenka.jobs.manifests.object_names import Manifest
from fenka.jobs.manifests.scaling_manifest import (
    Scaler,
    gateway_rules,
    render_scaled_object,
    scaling_policy,
)
from fenka.jobs.service import ServiceSpec
from fenka.kubernetes.api_client import Api, ApiError, if_accepted

_KEDA = "/apis/keda.sh/v1alpha1"
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_AUTOSCALERS = "/apis/autoscaling/v2/namespaces/{namespace}/horizontalpodautoscalers"
_ROLES = "/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles"
_VERBS = ("get", "create", "patch", "delete")

FORMER_METRIC = "fenka_requests"
"""The external metric of autoscalers that earlier releases created."""

POLL_S = 0.5
REMOVALS = 60
"""How often an update looks whether KEDA has let go of a version."""


class _ReviewStatus(Object):
    allowed: bool = True


class _Review(Object):
    status: _ReviewStatus = msgspec.field(default_factory=_ReviewStatus)


class _Owned(Object):
    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)


async def choose_scaler(api: Api, namespace: str, spec: ServiceSpec) -> Scaler | None:
    """Return what will follow the load of a version; None for a fixed number of replicas.

    Raises SubmissionRefused, ApiError, ApiUnreachable.
    """
    if not spec.range.scales:
        return None
    if spec.scaler == "fenka":
        return "fenka"
    if await if_accepted(api.get(_KEDA, msgspec.Raw)) is None:
        if spec.scaler == "keda":
            raise SubmissionRefused(
                "--scaler keda requires KEDA, which this cluster does not have: leave it out"
            )
        return "fenka"
    allowed = await asyncio.gather(*(_allowed(api, namespace, verb) for verb in _VERBS))
    if not all(allowed):
        raise SubmissionRefused(
            f"KEDA follows the load of services here, and you may not {', '.join(_VERBS)} "
            f"scaledobjects.keda.sh in namespace {namespace}: ask an administrator for that right, or use "
            "--scaler fenka"
        )
    return "keda"


async def _allowed(api: Api, namespace: str, verb: str) -> bool:
    """Return whether the user has a right on ScaledObjects. A dry run would also ask KEDA's webhook."""
    resource = {
        "namespace": namespace,
        "verb": verb,
        "group": "keda.sh",
        "resource": "scaledobjects",
    }
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": resource},
    }
    review = await if_accepted(api.create(_REVIEWS, _Review, body), (403, 404))
    return review is None or review.status.allowed


def scaler_sentence(spec: ServiceSpec, namespace: str, scaler: Scaler) -> str:
    """Return what follows the load of a version, and how to watch it."""
    if scaler == "keda":
        place = f"kubectl get scaledobject {spec.name}-{spec.version} -n {namespace}"
        return f"KEDA follows the load of version {spec.version}: see {place}"
    labels = f"{service_objects.SERVICE}={spec.name},{ROLE}={service_objects.GATEWAY}"
    place = f"kubectl logs -n {namespace} -l {labels}"
    return f"the gateway follows the load of version {spec.version}: see {place}"


async def follow_load(
    api: Api, namespace: str, spec: ServiceSpec, deployment: ServingDeployment, scaler: Scaler
) -> None:
    """Have a version's load followed, and by nothing else. Its gateway exists.

    Raises SubmissionRefused, ApiError, ApiUnreachable.
    """
    if scaler == "fenka":
        await _stop_keda(api, namespace, deployment)
        await _remove_autoscaler(api, namespace, deployment)
        await _set_policy(api, namespace, spec.name, spec.version, scaling_policy(spec))
        return
    await _set_policy(api, namespace, spec.name, spec.version, None)
    await _remove_autoscaler(api, namespace, deployment)
    item = render_scaled_object(spec, namespace)
    meta = deployment.metadata
    kind = {"apiVersion": "apps/v1", "kind": "Deployment"}
    item["metadata"]["ownerReferences"] = [creation.owner_reference(kind, meta.name, meta.uid)]
    known = await creation.create_or_keep(api, namespace, item, _Owned)
    path = f"{_scaled_objects(namespace)}/{known.metadata.name}"
    await api.patch(path, msgspec.Raw, {"spec": item["spec"]})


async def stop_following(
    api: Api, namespace: str, service: str, deployment: ServingDeployment
) -> None:
    """Let a version keep its number of replicas. Raises SubmissionRefused, ApiError, ApiUnreachable."""
    await _set_policy(api, namespace, service, deployment.version, None)
    await _stop_keda(api, namespace, deployment)
    await _remove_autoscaler(api, namespace, deployment)


async def forget(api: Api, namespace: str, service: str, version: str) -> None:
    """Let the gateway no longer scale a version that is deleted. Raises ApiError, ApiUnreachable."""
    await _set_policy(api, namespace, service, version, None)


async def _stop_keda(api: Api, namespace: str, deployment: ServingDeployment) -> None:
    """Delete a version's ScaledObject, and wait until KEDA has ended its autoscaler."""
    path = f"{_scaled_objects(namespace)}/{deployment.metadata.name}"
    try:
        known = await if_accepted(api.get(path, _Owned))
    except ApiError as why:
        if why.status != 403:
            raise
        await _check_left_alone(api, namespace, deployment)
        return
    if known is None or not _belongs(known.metadata, deployment):
        return
    body = {"propagationPolicy": "Foreground", "preconditions": {"uid": known.metadata.uid}}
    await if_accepted(api.delete(path, body), (404, 409))
    for _ in range(REMOVALS):
        now = await if_accepted(api.get(path, _Owned))
        if now is None or now.metadata.uid != known.metadata.uid:
            return
        await asyncio.sleep(POLL_S)
    raise SubmissionRefused(
        f"ScaledObject {deployment.metadata.name} in namespace {namespace} is not removed, because KEDA does "
        "not remove its finalizer: see whether KEDA runs, and try again"
    )


async def _check_left_alone(api: Api, namespace: str, deployment: ServingDeployment) -> None:
    """Check, for users who may not read ScaledObjects, that KEDA does not scale a version."""
    name = deployment.metadata.name
    path = f"{_AUTOSCALERS.format(namespace=namespace)}/keda-hpa-{name}"
    if await if_accepted(api.get(path, _Owned), (403, 404)) is not None:
        raise SubmissionRefused(
            f"KEDA follows the load of version {deployment.version}, and you may not read or delete "
            f"scaledobjects.keda.sh in namespace {namespace}: have somebody delete ScaledObject {name}"
        )


async def _remove_autoscaler(api: Api, namespace: str, deployment: ServingDeployment) -> None:
    """Delete the autoscaler that an earlier release created for a version. A user's own stays."""
    path = f"{_AUTOSCALERS.format(namespace=namespace)}/{deployment.metadata.name}"
    known = await if_accepted(api.get(path, dict[str, Any]), (403, 404))
    if known is None:
        return
    external = [
        metric.get("external") or {} for metric in known.get("spec", {}).get("metrics") or ()
    ]
    if any(metric.get("metric", {}).get("name") == FORMER_METRIC for metric in external):
        await creation.remove(api, path, known["metadata"]["uid"])


def _belongs(meta: ObjectMeta, deployment: ServingDeployment) -> bool:
    return any(owner.uid == deployment.metadata.uid for owner in meta.owner_references)


def _scaled_objects(namespace: str) -> str:
    return f"{_KEDA}/namespaces/{namespace}/scaledobjects"


async def _set_policy(
    api: Api, namespace: str, service: str, version: str, policy: ScalingPolicy | None
) -> None:
    """Have the gateway scale a version by this policy, or not at all for None."""
    address = f"{service_objects.SERVICES_API.format(namespace=namespace)}/{service}"
    known = await if_accepted(api.get(address, service_objects.AddressService))
    if known is None:
        return
    before = _policies(known.metadata.annotations)
    after = _with(before, version, policy)
    if policy is not None:
        # The right first: the gateway acts as soon as it reads the annotation.
        await _set_rules(api, namespace, service, after)
    if before != after:
        await creation.change(api, address, _annotated(version, policy))
        # Others may have changed it at the same time.
        now = await api.get(address, service_objects.AddressService)
        after = _policies(now.metadata.annotations)
    await _set_rules(api, namespace, service, after)


def _annotated(version: str, policy: ScalingPolicy | None) -> Callable[[Manifest], Manifest]:
    def annotated(known: Manifest) -> Manifest:
        now = _with(_policies(known["metadata"].get("annotations", {})), version, policy)
        text = service_objects.scaling_text(now) if now else None
        return {"metadata": {"annotations": {SCALING: text}}}

    return annotated


def _policies(annotations: Mapping[str, str]) -> dict[str, ScalingPolicy]:
    try:
        return service_objects.read_scaling(annotations)
    except InvalidScaling:
        # The gateway scales nothing by it, and it is written again.
        return {}


def _with(
    policies: Mapping[str, ScalingPolicy], version: str, policy: ScalingPolicy | None
) -> dict[str, ScalingPolicy]:
    others = {name: known for name, known in policies.items() if name != version}
    return others if policy is None else {**others, version: policy}


async def _set_rules(
    api: Api, namespace: str, service: str, scaled: Mapping[str, ScalingPolicy]
) -> None:
    """Give the gateway the rights for the versions that it scales. A missing Role has none to take away."""
    path = f"{_ROLES.format(namespace=namespace)}/{service_objects.gateway_name(service)}"
    # Without versions that the gateway scales it is no concern of a user who may not read it.
    known = await if_accepted(api.get(path, dict[str, Any]), (404,) if scaled else (403, 404))
    rules = gateway_rules(service, scaled)
    present = (known or {}).get("rules") or []
    unneeded = not scaled and not any(
        "deployments/scale" in rule.get("resources", ()) for rule in present
    )
    if known is not None and present != rules and not unneeded:
        await if_accepted(api.patch(path, msgspec.Raw, {"rules": rules}))
