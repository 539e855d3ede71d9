"""Objects that make up services, with the fields that fenka reads, and what one reading of them returns.

Each version is a Deployment, which owns a Service and, where KEDA scales it, a ScaledObject. All versions
together own the service's Service and its gateway. So the last version that is deleted takes them along.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Self

import msgspec
from msgspec import Meta

from fenka.cluster.objects import Node, ObjectMeta
from fenka.cluster.training_objects import (
    SUBMITTED,
    Deployment,
    DeploymentSpec,
    JobPodTemplate,
    RootStatus,
    Service,
    TrainingPod,
)
from fenka.core.errors import FenkaError
from fenka.core.scaling import ScalingPolicy

SERVICE = "servingName"
"""arena's label of all objects of a service: its name."""
VERSION = "servingVersion"
"""arena's label of all objects of a version: its name."""
TYPE = "servingType"
"""arena's label: what serves the model."""
WEIGHTS = "fenka.io/traffic"
"""Annotation of the Service of all versions: a JSON object of weights. Without it all are equal."""
SCALING = "fenka.io/scaling"
"""Annotation of the Service of all versions: how the gateway scales versions, as JSON by version."""
PREVIOUS = "fenka.io/previous-spec"
"""Annotation of a version's Deployment: the spec before its last update."""
SERVICE_KIND = "service"
"""Value of fenka's label for the kind of all objects of services."""
REPLICA, GATEWAY, ADDRESS = "replica", "gateway", "address"
"""Roles of objects: of a version, of the gateway, and of the Service of all versions."""


def gateway_name(service: str) -> str:
    """Return the name of a gateway's objects."""
    return f"{service}-{GATEWAY}"


SERVICES_API = "/api/v1/namespaces/{namespace}/services"

TYPES: Mapping[str, tuple[str, str]] = {
    "custom": ("custom-serving", "Custom"),
    "tensorflow": ("tf-serving", "Tensorflow"),
    "triton": ("triton-serving", "Triton"),
}
"""arena's label and word for each kind of service."""


def read_weights(annotations: Mapping[str, str]) -> dict[str, int] | None:
    """Return the weights of a service; None if it has none, or if nobody can read them."""
    text = annotations.get(WEIGHTS)
    try:
        weights = msgspec.json.decode(text, type=dict[str, int]) if text is not None else None
    except (msgspec.MsgspecError, RecursionError):
        return None
    usable = weights is not None and all(weight >= 0 for weight in weights.values())
    return weights if usable else None


class InvalidScaling(FenkaError):
    """The annotation about scaling cannot be used."""


_Version = Annotated[str, Meta(pattern=r"\A[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\Z")]
"""A part of a Deployment's name, and so of a path at the API server."""
_Replicas = Annotated[int, Meta(ge=0, le=1000)]
_Seconds = Annotated[float, Meta(ge=0, le=3600)]

MAX_SCALED_VERSIONS = 100
_MAX_SCALING_BYTES = 64 * 1024


class ScalingEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """How the gateway scales one version, as the annotation has it; see `core.scaling.ScalingPolicy`."""

    least: _Replicas
    most: _Replicas
    target: Annotated[int, Meta(ge=1, le=1_000_000)]
    up_after: _Seconds = 0.0
    down_after: _Seconds = 300.0

    @classmethod
    def of(cls, policy: ScalingPolicy) -> Self:
        """Return the entry of a policy."""
        seconds = policy.up_after_s, policy.down_after_s
        return cls(policy.least, policy.most, int(policy.target), *seconds)

    @property
    def policy(self) -> ScalingPolicy:
        """Return the policy of the entry."""
        return ScalingPolicy(self.least, self.most, self.target, self.up_after, self.down_after)


def read_scaling(annotations: Mapping[str, str]) -> dict[str, ScalingPolicy]:
    """Return how the gateway scales versions. Raises InvalidScaling: tenants write the annotation."""
    text = annotations.get(SCALING, "{}")
    if len(text) > _MAX_SCALING_BYTES:
        raise InvalidScaling(f"annotation {SCALING} has more than {_MAX_SCALING_BYTES // 1024} KiB")
    try:
        entries = msgspec.json.decode(text, type=dict[_Version, ScalingEntry])
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise InvalidScaling(f"annotation {SCALING} is invalid: {error}") from None
    if len(entries) > MAX_SCALED_VERSIONS:
        raise InvalidScaling(
            f"annotation {SCALING} has {len(entries)} versions, the limit is {MAX_SCALED_VERSIONS}"
        )
    for version, entry in entries.items():
        if entry.least > entry.most or not entry.most:
            raise InvalidScaling(
                f"annotation {SCALING} is invalid: version {version} has from {entry.least} to "
                f"{entry.most} replicas"
            )
    return {version: entry.policy for version, entry in entries.items()}


def scaling_text(policies: Mapping[str, ScalingPolicy]) -> str:
    """Return the annotation for these versions."""
    entries = {version: ScalingEntry.of(policy) for version, policy in sorted(policies.items())}
    return msgspec.json.encode(entries).decode()


class DeploymentMeta(ObjectMeta):
    """The metadata of a Deployment. The generation counts changes of its spec."""

    generation: int = 0


class DeploymentStatus(RootStatus):
    """The status of a Deployment, with the numbers of its pods."""

    replicas: int = 0
    updated_replicas: int = 0
    available_replicas: int = 0
    observed_generation: int = 0


_NO_TEMPLATE = JobPodTemplate()


class ServingSpec(DeploymentSpec):
    """The spec of a Deployment whose pods are not read: decoding them takes a third of the time."""

    template: JobPodTemplate = msgspec.field(default_factory=lambda: _NO_TEMPLATE, name="-template")


class ServingDeployment(Deployment):
    """The Deployment of a version or of a gateway."""

    metadata: DeploymentMeta = msgspec.field(default_factory=DeploymentMeta)
    spec: ServingSpec = msgspec.field(default_factory=ServingSpec)
    status: DeploymentStatus = msgspec.field(default_factory=DeploymentStatus)

    @property
    def version(self) -> str:
        """Return the version's name."""
        return self.metadata.labels.get(VERSION, "")

    @property
    def rolled_out(self) -> bool:
        """Return whether all replicas are of the newest spec and accept requests."""
        status = self.status
        counts = {status.replicas, status.updated_replicas, status.available_replicas}
        return status.observed_generation >= self.metadata.generation and counts == {
            self.spec.replicas
        }

    @property
    def interrupted(self) -> bool:
        """Return whether its deployment has not been completed: it has no replicas yet."""
        return SUBMITTED not in self.metadata.annotations


class AddressService(Service):
    """The Service of all versions: where clients connect."""

    @property
    def path(self) -> str:
        """Return its path at the API server."""
        meta = self.metadata
        return f"{SERVICES_API.format(namespace=meta.namespace)}/{meta.name}"

    @property
    def address(self) -> str:
        """Return its address: that of its load balancer, else the one in the cluster; empty for none."""
        return self.external_address or self.spec.cluster_ip.removeprefix("None")


@dataclass(frozen=True, slots=True)
class ServiceObjects:
    """The objects of services, read at one time.

    Attributes:
        versions: The versions' Deployments.
        gateways: The gateways' Deployments.
        addresses: The Services of all versions.
        pods: The versions' pods.
        nodes: All nodes; None without the right to list them.
    """

    versions: list[ServingDeployment] = field(default_factory=list)
    gateways: list[ServingDeployment] = field(default_factory=list)
    addresses: list[AddressService] = field(default_factory=list)
    pods: list[TrainingPod] = field(default_factory=list)
    nodes: list[Node] | None = field(default_factory=list)
