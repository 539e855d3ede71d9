"""Inserts a gateway between a service's address and its replicas, without losing requests.

Clients are led to the gateway after it is ready. Each step may be repeated: what an interrupted client has
left is completed.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from fenka.cluster.service_objects import ServingDeployment
from fenka.jobs.cluster_checks import Named, SubmissionRefused
from fenka.jobs.creation import change, create_or_keep, owner_reference, remove
from fenka.jobs.manifests.gateway import GatewaySettings, render_gateway
from fenka.jobs.manifests.names import Manifest
from fenka.jobs.manifests.service import address_selector
from fenka.jobs.service import ServiceSpec
from fenka.jobs.serving.state import ServiceState, name_taken, read_state
from fenka.kubernetes.client import Api
from fenka.kubernetes.service_reader import read_published

POLL_S = 0.5
GATEWAY_START_S = 120.0
"""An image is pulled in this time."""


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """What users say about gateways.

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
        return GatewaySettings(image, published.get("gatewayPullPolicy", ""), self.replicas)


async def create_gateway(
    api: Api,
    namespace: str,
    spec: ServiceSpec,
    settings: GatewaySettings,
    owners: Sequence[Manifest],
) -> ServingDeployment:
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
    gateway = await create_or_keep(api, namespace, root, ServingDeployment)
    if not root["metadata"]["labels"].items() <= gateway.metadata.labels.items():
        raise name_taken("Deployment", gateway.metadata.name, spec, namespace)
    owner = owner_reference(root, gateway.metadata.name, gateway.metadata.uid)
    for item in dependents:
        item["metadata"]["ownerReferences"] = [owner]
        # In this order: the API server refuses a RoleBinding before its Role exists.
        await create_or_keep(api, namespace, item, Named)
    known = {each.uid for each in gateway.metadata.owner_references}
    for reference in owners:
        if reference["uid"] not in known:
            await join_owner(api, gateway.path, reference)
    return gateway


async def start_gateway(api: Api, gateway: ServingDeployment, replicas: int) -> None:
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
        await _wait(api, gateway, report)
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
    if {each.uid for each in meta.owner_references} <= {each["uid"] for each in owners}:
        await remove(api, now.gateway.path, meta.uid)


async def _wait(api: Api, gateway: ServingDeployment, report: Callable[[str], None]) -> None:
    loop = asyncio.get_running_loop()
    deadline, reported = loop.time() + GATEWAY_START_S, False
    while True:
        current = await api.get(gateway.path, ServingDeployment)
        if current.status.available_replicas:
            return
        if loop.time() > deadline:
            name = gateway.metadata.name
            raise SubmissionRefused(
                f"gateway {name} does not start within {GATEWAY_START_S:g} s {current.problem}".rstrip()
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
        others = [each for each in meta.get("ownerReferences", []) if each["uid"] != owner["uid"]]
        annotations = annotate(meta.get("annotations", {}))
        return {"metadata": {"ownerReferences": [*others, owner], "annotations": annotations}}

    await change(api, path, joined)
