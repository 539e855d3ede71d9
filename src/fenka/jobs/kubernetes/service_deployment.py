"""Deploys a version of a service.

Its Deployment is created first, without replicas, and then what it owns. It gets its replicas when everything
exists. So a client that dies in between leaves a version that runs nothing and holds no card.

A service's objects on a cluster are read once before they are changed.

Inserts a gateway between a service's address and its replicas, without losing requests.

Clients are led to the gateway after it is ready. Each step may be repeated: what an interrupted client has
left is completed.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from fenka.cluster import service_objects
from fenka.cluster.training_objects import ROLE, SPEC, SUBMITTED
from fenka.core.request import InvalidRequest
from fenka.jobs.collection import Contents
from fenka.jobs.kubernetes import checks, load_following, submission
from fenka.jobs.kubernetes.checks import Named, SubmissionRefused, completed, warn_if_too_large
from fenka.jobs.manifests.common import Manifest
from fenka.jobs.manifests.scaling_manifest import Scaler, render_scaled_object
from fenka.jobs.manifests.service_manifest import (
    SCALER,
    GatewaySettings,
    address_selector,
    first_replicas,
    render_address,
    render_gateway,
    render_version,
)
from fenka.jobs.service import CLIENT_PORTS, ServiceSpec, check_versions, weights_with
from fenka.jobs.workload import DEFAULT_SERVICE
from fenka.kubernetes.api_client import Api, ApiError, ApiUnreachable
from fenka.kubernetes.reader import read_published, read_services


@dataclass(frozen=True, slots=True)
class ServiceState:
    """A service.

    Attributes:
        name: Its name.
        namespace: Its namespace.
        versions: The versions' Deployments by version.
        gateway: The gateway's Deployment; None without a gateway.
        address: The Service of all versions; None if there is none.
    """

    name: str
    namespace: str
    versions: Mapping[str, service_objects.ServingDeployment]
    gateway: service_objects.ServingDeployment | None
    address: service_objects.AddressService | None

    @property
    def uses_gateway(self) -> bool:
        """Return whether clients' requests go through the gateway."""
        return (
            self.address is not None
            and self.address.spec.selector.get(ROLE) == service_objects.GATEWAY
        )

    @property
    def weights(self) -> dict[str, int] | None:
        """The weights as they were set; None if all are equal, or if nobody can read them."""
        return (
            service_objects.read_weights(self.address.metadata.annotations)
            if self.address
            else None
        )

    def require(self) -> None:
        """Check that the service exists. Raises SubmissionRefused."""
        if not self.versions:
            raise SubmissionRefused(f"service {self.name} not found in namespace {self.namespace}")

    def version(self, name: str) -> service_objects.ServingDeployment:
        """Return a version, or the only one if none is named. Raises SubmissionRefused, InvalidRequest."""
        self.require()
        if not name and len(self.versions) > 1:
            raise SubmissionRefused(
                f"service {self.name} has several versions: choose {', '.join(sorted(self.versions))} by "
                "--version"
            )
        if name:
            check_versions(self.name, {name: 1}, self.versions)
        return self.versions[name or next(iter(self.versions))]

    def check_address(self, spec: ServiceSpec) -> None:
        """Check that a version fits the address that clients connect to. Raises SubmissionRefused."""
        if self.address is None:
            return
        if spec.service not in (DEFAULT_SERVICE, self.address.spec.type):
            raise SubmissionRefused(
                f"service {self.name} is of type {self.address.spec.type}, not {spec.service}: leave out "
                "--service, or choose another --name"
            )
        served = sorted({port.name for port in self.address.spec.ports} & {*CLIENT_PORTS})
        given = sorted(spec.ports.keys() & {*CLIENT_PORTS})
        if served != given:
            raise SubmissionRefused(
                f"service {self.name} has the ports {', '.join(served) or 'none'}, and this version "
                f"{', '.join(given)}: give it the same by --restful-port and --port"
            )


def name_taken(kind: str, name: str, spec: ServiceSpec, namespace: str) -> SubmissionRefused:
    """Return the error for an object that is not the service's."""
    return SubmissionRefused(
        f"{kind} {name}, which service {spec.name} needs, already exists in namespace {namespace}: if it was "
        "deleted just now, deploy again in a moment, else choose another --name or --version"
    )


async def read_state(api: Api, namespace: str, name: str) -> ServiceState:
    """Return what there is of a service. Raises ApiError, ApiUnreachable."""
    objects = await read_services(api, namespace, name, pods=False)
    return ServiceState(
        name,
        namespace,
        {version.version: version for version in objects.versions},
        next(iter(objects.gateways), None),
        next(iter(objects.addresses), None),
    )


def recorded_spec(
    deployment: service_objects.ServingDeployment, service: str, annotation: str = SPEC
) -> ServiceSpec:
    """Return a version as an annotation records it. Its owner may have changed the annotation.

    Raises SubmissionRefused.
    """
    version = deployment.version
    again = f"delete it (fenka serve delete {service} -v {version}) and deploy it again"
    try:
        spec = msgspec.json.decode(
            deployment.metadata.annotations.get(annotation, ""), type=ServiceSpec
        )
        spec.validate()
    except (msgspec.MsgspecError, InvalidRequest, RecursionError) as why:
        raise SubmissionRefused(
            f"version {version} of service {service} cannot be changed, because its annotation {annotation} "
            f"is invalid ({why}): {again}"
        ) from None
    if (spec.name, spec.version) != (service, version):
        raise SubmissionRefused(
            f"version {version} of service {service} cannot be changed, because its annotation {annotation} "
            f"describes another one: {again}"
        )
    return spec


POLL_S = 0.5
GATEWAY_START_S = 120.0
"""An image is pulled in this time."""


@dataclass(frozen=True, slots=True)
class GatewayRequest:
    """The users' options for gateways.

    Attributes:
        image: fenka's image; empty for the one that the chart publishes.
        replicas: The number of gateways.
        report: Receives what is waited for.
    """

    image: str = ""
    replicas: int = 1
    report: Callable[[str], None] = lambda _: None

    async def settings(self, api: Api) -> GatewaySettings:
        """Return how gateways are run. Raises SubmissionRefused, ApiError, ApiUnreachable."""
        published = {} if self.image else await read_published(api)
        image = self.image or published.get("gatewayImage", "")
        if not image:
            raise SubmissionRefused(
                "this service needs a gateway, whose image this cluster does not publish: upgrade fenka's "
                "chart, or use --gateway-image IMAGE"
            )
        pull_policy, traces = (published.get(name, "") for name in ("gatewayPullPolicy", "traces"))
        return GatewaySettings(image, pull_policy, self.replicas, traces)


async def create_gateway(
    api: Api,
    namespace: str,
    spec: ServiceSpec,
    settings: GatewaySettings,
    owners: Sequence[Manifest],
) -> service_objects.ServingDeployment:
    """Create what is missing of a gateway. It has no replicas if it is new.

    Args:
        api: The cluster.
        namespace: The namespace of the service.
        spec: Any version of it.
        settings: How gateways are run.
        owners: References to the versions' Deployments.

    Raises:
        SubmissionRefused: Another Deployment has its name.
        ApiError, ApiUnreachable: The API server refused an object or did not answer.
    """
    root, *dependents = render_gateway(spec, namespace, settings)
    root["spec"]["replicas"] = 0
    root["metadata"]["ownerReferences"] = [*owners]
    gateway = await submission.create_or_keep(
        api, namespace, root, service_objects.ServingDeployment
    )
    if not root["metadata"]["labels"].items() <= gateway.metadata.labels.items():
        raise name_taken("Deployment", gateway.metadata.name, spec, namespace)
    owner = submission.owner_reference(root, gateway.metadata.name, gateway.metadata.uid)
    for item in dependents:
        item["metadata"]["ownerReferences"] = [owner]
        # In this order: the API server refuses a RoleBinding before its Role exists.
        await submission.create_or_keep(api, namespace, item, Named)
    known = {reference.uid for reference in gateway.metadata.owner_references}
    for reference in owners:
        if reference["uid"] not in known:
            await join_owner(api, gateway.path, reference)
    return gateway


async def start_gateway(
    api: Api, gateway: service_objects.ServingDeployment, replicas: int
) -> None:
    """Give a gateway its replicas, if it has none. Raises ApiError, ApiUnreachable."""
    if gateway.spec.replicas == 0:
        await api.patch(gateway.path, msgspec.Raw, {"spec": {"replicas": replicas}})


async def insert_gateway(
    api: Api,
    state: ServiceState,
    spec: ServiceSpec,
    settings: GatewaySettings,
    owners: Sequence[Manifest],
    report: Callable[[str], None],
) -> None:
    """Lead the clients of a running service to a gateway. If it does not start, they stay where they are.

    Raises SubmissionRefused, ApiError, ApiUnreachable.
    """
    try:
        gateway = await create_gateway(api, state.namespace, spec, settings, owners)
        await start_gateway(api, gateway, settings.replicas)
        await _wait(api, gateway, report, lambda known: bool(known.status.available_replicas))
    except BaseException:
        if state.gateway is None:
            await _remove_unused(api, state, owners)
        raise
    selector = address_selector(spec.name, gateway=True)
    if state.address is not None:
        await api.patch(state.address.path, msgspec.Raw, {"spec": {"selector": selector}})


async def _remove_unused(api: Api, state: ServiceState, owners: Sequence[Manifest]) -> None:
    """Delete a gateway, unless others have led clients to it or are about to: they own it, too."""
    now = await read_state(api, state.namespace, state.name)
    if now.gateway is None or now.uses_gateway:
        return
    meta = now.gateway.metadata
    if {reference.uid for reference in meta.owner_references} <= {owner["uid"] for owner in owners}:
        await submission.remove(api, now.gateway.path, meta.uid)


async def renew_gateway(
    api: Api,
    state: ServiceState,
    spec: ServiceSpec,
    options: GatewayRequest,
    owners: Sequence[Manifest],
) -> None:
    """Replace a gateway of an earlier release, which cannot scale, by one that can. No request is lost.

    Raises SubmissionRefused, ApiError, ApiUnreachable.
    """
    assert state.gateway is not None
    path = state.gateway.path
    template = (await api.get(path, dict[str, Any]))["spec"]["template"]
    if _port_names(template) >= {SCALER}:
        return
    settings = await options.settings(api)
    gateway = await create_gateway(api, state.namespace, spec, settings, owners)
    rendered = render_gateway(spec, state.namespace, settings)[0]["spec"]["template"]
    _keep_waiting_times(rendered["spec"], template["spec"])
    await api.patch(path, msgspec.Raw, {"spec": {"template": rendered}})
    await _wait(api, gateway, options.report, lambda now: now.rolled_out)


_WAITING = ("--wait", "--grace")
"""Options of gateways that are those of the version that they were created for."""


def _keep_waiting_times(rendered: Manifest, known: Manifest) -> None:
    """Let requests wait in a gateway's new pods as long as in the present ones. Keep others' containers."""
    (container,) = rendered["containers"]
    others = [item for item in known["containers"] if item.get("name") != container["name"]]
    own = [item for item in known["containers"] if item not in others]
    present = [word for item in own for word in item.get("args") or ()]
    kept = {word.partition("=")[0]: word for word in present if word.startswith(_WAITING)}
    container["args"] = [kept.get(word.partition("=")[0], word) for word in container["args"]]
    rendered["containers"] = [container, *others]
    grace = "terminationGracePeriodSeconds"
    rendered[grace] = known.get(grace, rendered[grace])


def _port_names(template: Manifest) -> set[str]:
    containers = template["spec"]["containers"]
    return {port.get("name", "") for item in containers for port in item.get("ports") or ()}


async def _wait(
    api: Api,
    gateway: service_objects.ServingDeployment,
    report: Callable[[str], None],
    started: Callable[[service_objects.ServingDeployment], bool],
) -> None:
    loop = asyncio.get_running_loop()
    deadline, reported = loop.time() + GATEWAY_START_S, False
    while True:
        current = await api.get(gateway.path, service_objects.ServingDeployment)
        if started(current):
            return
        if loop.time() > deadline:
            name, problem = gateway.metadata.name, current.status.problem
            raise SubmissionRefused(
                f"gateway {name} does not start within {GATEWAY_START_S:g} s {problem}".rstrip()
                + f": see kubectl describe deployment {name} -n {gateway.metadata.namespace}"
            )
        if not reported:
            report(f"waits for gateway {gateway.metadata.name}")
            reported = True
        await asyncio.sleep(POLL_S)


async def join_owner(
    api: Api,
    path: str,
    owner: Manifest,
    annotate: Callable[[Mapping[str, str]], dict[str, str]] = lambda _: {},
) -> None:
    """Add an owner to an object that several own, and annotations.

    Args:
        api: The cluster.
        path: The object's.
        owner: The reference to the owner.
        annotate: Returns annotations to set, by those that the object has.

    Raises:
        ApiError, ApiUnreachable: The API server refused it or did not answer.
    """

    def joined(known: Manifest) -> Manifest:
        meta = known["metadata"]
        others = [
            reference
            for reference in meta.get("ownerReferences", [])
            if reference["uid"] != owner["uid"]
        ]
        annotations = annotate(meta.get("annotations", {}))
        return {"metadata": {"ownerReferences": [*others, owner], "annotations": annotations}}

    await submission.change(api, path, joined)


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
    return submission.owner_reference(kind, meta.name, meta.uid, controller=False)


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
    await submission.check_by_dry_run(
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
        path = submission.collection(namespace, item)
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
        await submission.remove(api, created.path, created.metadata.uid)
    except (ApiError, ApiUnreachable) as refused:
        raise SubmissionRefused(
            f"version {spec.version} of service {spec.name} was created and could not be completed or "
            f"deleted: delete it by fenka serve delete {spec.name} -v {spec.version} ({refused})"
        ) from why
