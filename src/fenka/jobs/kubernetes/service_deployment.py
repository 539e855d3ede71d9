"""Deploys a version of a service.

Its Deployment is created first, without replicas, and then what it owns. It gets its replicas when everything
exists. So a client that dies in between leaves a version that runs nothing and holds no card.
"""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime

import msgspec

from fenka.cluster import service_objects
from fenka.cluster.training_objects import SUBMITTED
from fenka.jobs.collection import Contents
from fenka.jobs.kubernetes import checks, creation, load_following
from fenka.jobs.kubernetes.checks import SubmissionRefused, completed, warn_if_too_large
from fenka.jobs.kubernetes.creation import join_owner
from fenka.jobs.kubernetes.gateway_insertion import (
    GatewayRequest,
    create_gateway,
    insert_gateway,
    renew_gateway,
    start_gateway,
)
from fenka.jobs.kubernetes.service_state import ServiceState, name_taken, read_state
from fenka.jobs.manifests.gateway_manifest import GatewaySettings, render_gateway
from fenka.jobs.manifests.object_names import Manifest
from fenka.jobs.manifests.scaling_manifest import Scaler, render_scaled_object
from fenka.jobs.manifests.service_manifest import (
    first_replicas,
    render_address,
    render_version,
)
from fenka.jobs.service import ServiceSpec, weights_with
from fenka.kubernetes.api_client import Api, ApiError, ApiUnreachable


async def deploy(
    api: Api,
    namespace: str,
    spec: ServiceSpec,
    contents: Contents,
    options: GatewayRequest,
    now: datetime,
) -> ServiceState:
    """Deploy a version. If that fails, nothing is left of it. Return what there was of its service.

    Raises:
        SubmissionRefused: The cluster cannot run it, or has a version of this name.
        InvalidRequest, InvalidSize: No cluster can run it.
        ApiError, ApiUnreachable: The API server refused an object or did not answer.
    """
    # A service that no cluster can run is refused before one is asked.
    render_version(spec, contents)
    state, hami, (spec, published), scaler = await asyncio.gather(
        read_state(api, namespace, spec.name),
        checks.check_service(api, namespace, spec),
        completed(api, namespace, spec),
        load_following.choose_scaler(api, namespace, spec),
    )
    _check_version(state, spec)
    objects = render_version(spec, contents, priority=published.get("priorityClass", ""), hami=hami)
    through_gateway = spec.range.scales or bool(state.versions)
    settings = await options.settings(api) if through_gateway else None
    shared = _shared(state, spec, settings, scaler)
    await _check_objects(api, state, spec, [*objects, *shared])
    root, *dependents = objects
    await warn_if_too_large(api, [root])
    root["spec"]["replicas"] = 0
    created = await _create_root(api, state, spec, root)
    try:
        await _create_dependents(api, spec, created, dependents)
        if state.address is None:
            await _found(api, state, spec, created, settings)
        elif settings is not None:
            await _join(api, state, spec, created, settings, options)
        if scaler is not None:
            await load_following.follow_load(api, namespace, spec, created, scaler)
        resumption = {
            "metadata": {
                "uid": created.metadata.uid,
                "annotations": {SUBMITTED: now.isoformat(timespec="seconds")},
            },
            "spec": {"replicas": first_replicas(spec)},
        }
        await api.patch(created.path, msgspec.Raw, resumption)
    except BaseException as why:
        await _remove(api, created, spec, why)
        if isinstance(why, ExceptionGroup):
            raise why.exceptions[0] from None
        raise
    if scaler is not None:
        options.report(load_following.scaler_sentence(spec, namespace, scaler))
    return state


def owner_of(version: service_objects.ServingDeployment) -> Manifest:
    """Return the reference to a version, one of several owners."""
    meta = version.metadata
    kind = {"apiVersion": "apps/v1", "kind": "Deployment"}
    return creation.owner_reference(kind, meta.name, meta.uid, controller=False)


def _check_version(state: ServiceState, spec: ServiceSpec) -> None:
    if spec.version in state.versions:
        name, version = spec.name, spec.version
        raise SubmissionRefused(
            f"version {version} of service {name} already exists in namespace {state.namespace}: use fenka "
            f"serve update, delete it (fenka serve delete {name} -v {version}) or choose another --version"
        )
    if state.address is not None and not state.versions:
        raise name_taken("Service", spec.name, spec, state.namespace)
    state.check_address(spec)


def _shared(
    state: ServiceState,
    spec: ServiceSpec,
    settings: GatewaySettings | None,
    scaler: Scaler | None,
) -> list[Manifest]:
    """Return the objects beside the version's own that do not exist yet."""
    objects = [] if state.address else [render_address(spec, gateway=settings is not None)]
    if scaler == "keda":
        objects.append(render_scaled_object(spec, state.namespace))
    if settings is None or state.gateway is not None:
        return objects
    scaled = [spec.version] if scaler == "fenka" else []
    return [*objects, *render_gateway(spec, state.namespace, settings, scaled)]


async def _check_objects(
    api: Api, state: ServiceState, spec: ServiceSpec, objects: Sequence[Manifest]
) -> None:
    """Create objects as a dry run. Raises SubmissionRefused, ApiError, ApiUnreachable."""
    await creation.check_by_dry_run(
        _create(api, state.namespace, spec, item, dry_run=True)
        for item in objects
        # It is refused before its Role exists.
        if item["kind"] != "RoleBinding"
    )


async def _create(
    api: Api, namespace: str, spec: ServiceSpec, item: Manifest, *, dry_run: bool = False
) -> service_objects.ServingDeployment:
    """Create an object. Raises SubmissionRefused if its name is taken, ApiError, ApiUnreachable."""
    try:
        path = creation.collection(namespace, item)
        return await api.create(path, service_objects.ServingDeployment, item, dry_run=dry_run)
    except ApiError as why:
        if why.reason != "AlreadyExists":
            raise
    raise name_taken(item["kind"], item["metadata"]["name"], spec, namespace)


async def _create_root(
    api: Api, state: ServiceState, spec: ServiceSpec, root: Manifest
) -> service_objects.ServingDeployment:
    try:
        return await _create(api, state.namespace, spec, root)
    except ApiUnreachable as why:
        raise SubmissionRefused(
            f"{why}: fenka serve get {spec.name} tells whether version {spec.version} was created"
        ) from None


async def _create_dependents(
    api: Api,
    spec: ServiceSpec,
    created: service_objects.ServingDeployment,
    dependents: Sequence[Manifest],
) -> None:
    """Create what a version alone owns."""
    owner = owner_of(created) | {"controller": True}
    async with asyncio.TaskGroup() as group:
        for item in dependents:
            item["metadata"]["ownerReferences"] = [owner]
            group.create_task(_create(api, created.metadata.namespace, spec, item))


async def _found(
    api: Api,
    state: ServiceState,
    spec: ServiceSpec,
    created: service_objects.ServingDeployment,
    settings: GatewaySettings | None,
) -> None:
    """Create what the service's first version shares with later ones."""
    owners = [owner_of(created)]
    address = render_address(spec, gateway=settings is not None)
    address["metadata"]["ownerReferences"] = owners
    await _create(api, state.namespace, spec, address)
    if settings is not None:
        gateway = await create_gateway(api, state.namespace, spec, settings, owners)
        # It holds no card. So it comes before the replicas, whose clients would find nobody.
        await start_gateway(api, gateway, settings.replicas)


async def _join(
    api: Api,
    state: ServiceState,
    spec: ServiceSpec,
    created: service_objects.ServingDeployment,
    settings: GatewaySettings,
    options: GatewayRequest,
) -> None:
    """Add a version to a service. It gets no requests before somebody gives it a weight."""

    def with_version(annotations: Mapping[str, str]) -> dict[str, str]:
        weights = weights_with(
            service_objects.read_weights(annotations), state.versions, spec.version
        )
        return {service_objects.WEIGHTS: msgspec.json.encode(weights).decode()}

    owner = owner_of(created)
    assert state.address is not None
    await join_owner(api, state.address.path, owner, with_version)
    owners = [owner, *(owner_of(version) for version in state.versions.values())]
    if state.uses_gateway and state.gateway is not None:
        await join_owner(api, state.gateway.path, owner)
        if spec.range.scales:
            await renew_gateway(api, state, spec, options, owners)
        return
    await insert_gateway(api, state, spec, settings, owners, options.report)


async def _remove(
    api: Api, created: service_objects.ServingDeployment, spec: ServiceSpec, why: BaseException
) -> None:
    """Delete a version that could not be completed, with what it owns already. Raises SubmissionRefused."""
    try:
        await creation.remove(api, created.path, created.metadata.uid)
    except (ApiError, ApiUnreachable) as refused:
        raise SubmissionRefused(
            f"version {spec.version} of service {spec.name} was created and could not be completed or "
            f"deleted: delete it by fenka serve delete {spec.name} -v {spec.version} ({refused})"
        ) from why
