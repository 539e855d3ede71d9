"""Whether the API belongs to this program: the APIService refers to its Service.

Only one program of a cluster can serve the API. The chart creates the APIService if no other has it; this
program adds its authority's certificate, and never changes one that refers to another Service.
"""

import base64

import msgspec

from fenka.cluster.objects import Object, ObjectMeta
from fenka.core.errors import FenkaError
from fenka.kubernetes.client import Api, if_accepted
from fenka.metrics_adapter.wire import GROUP, VERSION

NAME = f"{VERSION}.{GROUP}"
API_SERVICE = f"/apis/apiregistration.k8s.io/v1/apiservices/{NAME}"


class NotRegistered(FenkaError):
    """The API is not this program's; the sentence says whose it is."""


class ServiceReference(Object):
    """The Service that serves an API."""

    namespace: str = ""
    name: str = ""


class APIServiceSpec(Object):
    """Who serves an API. ca_bundle: in base64."""

    service: ServiceReference | None = None
    ca_bundle: str = msgspec.field(default="", name="caBundle")


class APIService(Object):
    """The registration of an API."""

    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    spec: APIServiceSpec = msgspec.field(default_factory=APIServiceSpec)


async def register(api: Api, own: ServiceReference, authority: bytes) -> None:
    """Have the API server trust this authority for the API. Raises NotRegistered, ApiError, ApiUnreachable.

    Args:
        api: The API server.
        own: This program's Service.
        authority: Certificates in PEM.
    """
    current = await if_accepted(api.get(API_SERVICE, APIService))
    if current is None:
        raise NotRegistered(
            f"APIService {NAME} does not exist: install the chart again with metricsAdapter.enabled=true"
        )
    if current.spec.service != own:
        owner = current.spec.service
        whose = f"Service {owner.namespace}/{owner.name}" if owner else "the API server itself"
        raise NotRegistered(
            f"APIService {NAME} belongs to {whose}, and only one program can serve it: use its metrics, or "
            "remove it and install the chart again"
        )
    bundle = base64.b64encode(authority).decode()
    if current.spec.ca_bundle != bundle:
        # Of this version only: another program may be taking the API over.
        version = current.metadata.resource_version
        change = {"metadata": {"resourceVersion": version}, "spec": {"caBundle": bundle}}
        await api.patch(API_SERVICE, APIService, change)
