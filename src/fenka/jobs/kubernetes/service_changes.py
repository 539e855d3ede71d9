"""Changes services that run: updates and deletes versions, divides requests among them.

Each change is one request, or leaves a service that works after each of several.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from fenka.cluster import service_objects
from fenka.cluster.training_objects import SPEC
from fenka.core.scaling import shares
from fenka.jobs.collection import Contents
from fenka.jobs.kubernetes import (
    checks,
    creation,
    gateway_insertion,
    load_following,
    service_deployment,
    service_state,
)
from fenka.jobs.kubernetes.checks import SubmissionRefused, completed
from fenka.jobs.kubernetes.gateway_route import split_route
from fenka.jobs.kubernetes.update_in_place import fits_in_place, make_room
from fenka.jobs.manifests.object_names import Manifest
from fenka.jobs.manifests.service_manifest import render_version, strategy
from fenka.jobs.service import ServiceSpec, check_change, check_versions
from fenka.kubernetes.api_client import Api, ApiError


async def split(
    api: Api, namespace: str, name: str, weights: Mapping[str, int], route: str = ""
) -> None:
    """Divide a service's requests by its gateway, or by a HTTPRoute if one is named.

    Raises SubmissionRefused, InvalidRequest, ApiError, ApiUnreachable.
    """
    state = await service_state.read_state(api, namespace, name)
    state.require()
    check_versions(name, weights, state.versions)
    if route:
        await split_route(api, state, route, weights)
    else:
        await _set_weights(api, state, weights)


async def _set_weights(
    api: Api, state: service_state.ServiceState, weights: Mapping[str, int]
) -> None:
    if state.address is None:
        raise SubmissionRefused(
            f"service {state.name} has no address: its deployment was interrupted, delete it (fenka serve "
            f"delete {state.name}) and deploy it again"
        )
    text = msgspec.json.encode(weights).decode()
    # Of what was read only: since then a version may have been added, or withdrawn.
    known = state.address.metadata
    meta = {
        "uid": known.uid,
        "resourceVersion": known.resource_version,
        "annotations": {service_objects.WEIGHTS: text},
    }
    try:
        await api.patch(state.address.path, msgspec.Raw, {"metadata": meta})
    except ApiError as why:
        if why.status != 409:
            raise
        raise _changed(state.name) from None


async def delete(api: Api, namespace: str, name: str, version: str = "") -> None:
    """Delete a version, or all of them. Their dependents are collected with the last one.

    Raises SubmissionRefused, InvalidRequest, ApiError, ApiUnreachable.
    """
    state = await service_state.read_state(api, namespace, name)
    state.require()
    if version:
        check_versions(name, {version: 1}, state.versions)
    removed = {version: state.versions[version]} if version else state.versions
    rest = state.versions.keys() - removed.keys()
    if rest and state.address is not None:
        # New requests go elsewhere before its replicas end.
        await _withdraw(api, state, version, rest)
        await load_following.forget(api, namespace, name, version)
    await asyncio.gather(
        *(creation.remove(api, change.path, change.metadata.uid) for change in removed.values())
    )


async def _withdraw(
    api: Api, state: service_state.ServiceState, version: str, rest: set[str]
) -> None:
    weights = shares(state.weights, rest)
    if not weights and state.versions[version].interrupted:
        return
    if not weights:
        raise SubmissionRefused(
            f"version {version} gets all requests of service {state.name}: move them first, by fenka "
            f"traffic-split --name {state.name} -v {min(rest)}:100"
        )
    await _set_weights(api, state, weights)


async def update(  # noqa: PLR0913
    api: Api,
    namespace: str,
    name: str,
    version: str,
    changed: Callable[[ServiceSpec], ServiceSpec],
    options: gateway_insertion.GatewayRequest,
    *,
    surge: bool | None = None,
) -> ServiceSpec:
    """Change a version: its replicas are replaced one by one. Return it as it is now.

    Args:
        api: The cluster.
        namespace: The service's.
        name: The service.
        version: The version; empty for the only one.
        changed: Returns the version as it shall be.
        options: How a gateway is made.
        surge: Whether a replica ends when its successor is ready, or before it starts. None: before,
            if there is no room for both.

    Raises:
        SubmissionRefused, InvalidRequest, InvalidSize, ApiError, ApiUnreachable.
    """
    state = await service_state.read_state(api, namespace, name)
    deployment = state.version(version)
    if deployment.interrupted:
        raise SubmissionRefused(
            f"the deployment of version {deployment.version} of service {name} was interrupted: delete it "
            f"(fenka serve delete {name} -v {deployment.version}) and deploy it again"
        )
    old = service_state.recorded_spec(deployment, name)
    spec = changed(old)
    spec.validate()
    check_change(old, spec)
    hami, (spec, published), scaler = await asyncio.gather(
        checks.check_service(api, namespace, spec),
        completed(api, namespace, spec),
        load_following.choose_scaler(api, namespace, spec),
    )
    # The files themselves stay in their object.
    contents = Contents(config_files={path: b"" for _, path in spec.config_files})
    objects = render_version(spec, contents, priority=published.get("priorityClass", ""), hami=hami)
    if scaler is not None:
        await _prepare_gateway(api, state, spec, options)
    elif old.range.scales:
        await load_following.stop_following(api, namespace, name, deployment)
    objects[0]["spec"]["strategy"] = strategy(surge=surge is not False)
    await _replace(api, deployment, objects[0], spec)
    if scaler is not None:
        await load_following.follow_load(api, namespace, spec, deployment, scaler)
        options.report(load_following.scaler_sentence(spec, namespace, scaler))
    if surge is None and fits_in_place(old, spec):
        await make_room(api, deployment, spec, options.report)
    return spec


async def _prepare_gateway(
    api: Api,
    state: service_state.ServiceState,
    spec: ServiceSpec,
    options: gateway_insertion.GatewayRequest,
) -> None:
    """Give a running service a gateway that can scale.

    Raises SubmissionRefused, ApiError, ApiUnreachable.
    """
    owners = [service_deployment.owner_of(version) for version in state.versions.values()]
    if state.uses_gateway and state.gateway is not None:
        await gateway_insertion.renew_gateway(api, state, spec, options, owners)
        return
    settings = await options.settings(api)
    await gateway_insertion.insert_gateway(api, state, spec, settings, owners, options.report)


async def undo(
    api: Api,
    namespace: str,
    name: str,
    version: str,
    options: gateway_insertion.GatewayRequest,
    *,
    surge: bool | None = None,
) -> ServiceSpec:
    """Make a version what it was before its last update, as `update` does. Return it as it is now."""
    state = await service_state.read_state(api, namespace, name)
    deployment = state.version(version)
    if service_objects.PREVIOUS not in deployment.metadata.annotations:
        raise SubmissionRefused(
            f"version {deployment.version} of service {name} has not been updated: there is nothing to undo"
        )
    previous = service_state.recorded_spec(deployment, name, service_objects.PREVIOUS)
    return await update(
        api, namespace, name, deployment.version, lambda _: previous, options, surge=surge
    )


async def _replace(
    api: Api, deployment: service_objects.ServingDeployment, rendered: Manifest, spec: ServiceSpec
) -> None:
    """Patch a version's Deployment, so that its pods are those that would be deployed now.

    Raises SubmissionRefused if it is no longer the one that was read.
    """
    read = deployment.metadata

    def replaced(known: Manifest) -> Manifest:
        meta = known["metadata"]
        if (meta["uid"], meta.get("annotations", {}).get(SPEC)) != (
            read.uid,
            read.annotations[SPEC],
        ):
            raise _changed(spec.name)
        return _patch(known, rendered, spec)

    await creation.change(api, deployment.path, replaced)


def _patch(known: Manifest, rendered: Manifest, spec: ServiceSpec) -> Manifest:
    template = replacement(known["spec"]["template"], rendered["spec"]["template"])
    # The gateway leaves a version without replicas alone whose range begins at 1.
    keep = spec.range.scales and known["spec"]["replicas"] >= spec.range.least
    replicas = {} if keep else {"replicas": rendered["spec"]["replicas"]}
    annotations = dict(rendered["metadata"]["annotations"])
    before = known["metadata"]["annotations"][SPEC]
    if before != annotations[SPEC]:
        annotations[service_objects.PREVIOUS] = before
    return {
        "metadata": {"annotations": annotations},
        "spec": {**replicas, "strategy": rendered["spec"]["strategy"], "template": template},
    }


def _changed(name: str) -> SubmissionRefused:
    return SubmissionRefused(
        f"service {name} was changed by somebody else at this moment: look at it (fenka serve list), and "
        "try again"
    )


def replacement(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merge patch that makes `wanted` of an object; the API server adds its defaults again."""
    patch: dict[str, Any] = dict.fromkeys(known.keys() - wanted.keys())
    for name, value in wanted.items():
        before = known.get(name)
        nested = isinstance(before, Mapping) and isinstance(value, Mapping)
        patch[name] = replacement(before or {}, value) if nested else value
    return patch
