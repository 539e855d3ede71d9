"""A service's objects on a cluster are read once before they are changed."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from fenka.cluster import service_objects
from fenka.cluster.training_objects import ROLE, SPEC
from fenka.core.request import InvalidRequest
from fenka.jobs.kubernetes.checks import SubmissionRefused
from fenka.jobs.service import CLIENT_PORTS, ServiceSpec, check_versions
from fenka.jobs.workload import DEFAULT_SERVICE
from fenka.kubernetes.api_client import Api
from fenka.kubernetes.reader import read_services


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
