"""Inserts a gateway between a service's address and its replicas, without losing requests.

Clients are led to the gateway after it is ready. Each step may be repeated: what an interrupted client has
left is completed.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from fenka.cluster import service_objects
from fenka.jobs.kubernetes import creation
from fenka.jobs.kubernetes.checks import Named, SubmissionRefused
from fenka.jobs.kubernetes.creation import join_owner
from fenka.jobs.kubernetes.service_state import ServiceState, name_taken, read_state
from fenka.jobs.manifests.gateway_manifest import SCALER, GatewaySettings, render_gateway
from fenka.jobs.manifests.object_names import Manifest
from fenka.jobs.manifests.service_manifest import (
    address_selector,
)
from fenka.jobs.service import ServiceSpec
from fenka.kubernetes.api_client import Api
from fenka.kubernetes.reader import read_published

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
    gateway = await creation.create_or_keep(api, namespace, root, service_objects.ServingDeployment)
    if not root["metadata"]["labels"].items() <= gateway.metadata.labels.items():
        raise name_taken("Deployment", gateway.metadata.name, spec, namespace)
    owner = creation.owner_reference(root, gateway.metadata.name, gateway.metadata.uid)
    for item in dependents:
        item["metadata"]["ownerReferences"] = [owner]
        # In this order: the API server refuses a RoleBinding before its Role exists.
        await creation.create_or_keep(api, namespace, item, Named)
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
        await creation.remove(api, now.gateway.path, meta.uid)


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
