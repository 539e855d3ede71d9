"""Renders a version of a service: a Deployment that owns a Service and files.

The API server gives each replica's port a name. Services and the gateway know ports by these names, so that
versions may use different numbers.
"""

import math
from collections.abc import Mapping

import msgspec

from fenka.cluster import service_objects
from fenka.cluster.service_objects import (
    ADDRESS,
    REPLICA,
    SCALING,
    SERVICE,
    TYPES,
    VERSION,
    scaling_text,
)
from fenka.cluster.training_objects import ROLE, SPEC
from fenka.core.request import InvalidRequest
from fenka.core.scaling import ScalingPolicy
from fenka.jobs.collection import Contents
from fenka.jobs.manifests import object_names
from fenka.jobs.manifests.card_requests import card_request
from fenka.jobs.manifests.common import (
    NO_CARDS,
    escape,
    limits,
    pod_annotations,
    pod_settings,
    variables,
    without_empty,
)
from fenka.jobs.manifests.object_names import Manifest, service_labels
from fenka.jobs.manifests.pod_security import container_security
from fenka.jobs.manifests.volumes import (
    MountedVolume,
    as_manifests,
    claim_volumes,
    config_files,
    config_volumes,
    host_volumes,
    memory_volumes,
)
from fenka.jobs.service import CLIENT_PORTS, PORT_VARIABLES, PortName, ServiceSpec

_WITHDRAWAL_S = 5
"""Between the end of a replica's endpoint and its SIGTERM: Services and gateways learn of it in between."""

_PROBE_TIMEOUT_S = 5


def object_name(spec: ServiceSpec) -> str:
    """Return the name of a version's objects."""
    return f"{spec.name}-{spec.version}"


def render_version(
    spec: ServiceSpec, contents: Contents, *, priority: str = "", hami: bool = True
) -> list[Manifest]:
    """Return the Deployment of a valid version, and then what it owns.

    Args:
        spec: The version.
        contents: Its files.
        priority: The priority class of replicas that name none and have cards.
        hami: The cluster reads HAMi's names.

    Raises:
        InvalidRequest, InvalidSize: No pod can request its cards, it has no image, or it listens at sockets.
    """
    if spec.unix_socket:
        raise InvalidRequest(
            "--unix-socket requires a workstation (--local): leave it out, a cluster's gateway reaches "
            "replicas over the network"
        )
    labels = _labels(spec)
    objects = [_deployment(spec, contents, priority, hami=hami), _version_service(spec)]
    return objects + config_files(f"{object_name(spec)}-config", labels, contents)


def render_address(
    spec: ServiceSpec, *, gateway: bool, scaling: Mapping[str, ScalingPolicy] | None = None
) -> Manifest:
    """Return the Service of all versions, made with the first one.

    Args:
        spec: The version.
        gateway: It leads to the gateway.
        scaling: The versions that the gateway scales.
    """
    fields = {
        "type": spec.service,
        "ports": _service_ports(
            {name: spec.ports[name] for name in CLIENT_PORTS if name in spec.ports}
        ),
        "selector": address_selector(spec.name, gateway=gateway),
    }
    labels = service_labels(spec.name, ADDRESS)
    item = object_names.manifest("Service", "v1", spec.name, labels, spec=fields)
    if scaling:
        item["metadata"]["annotations"] = {SCALING: scaling_text(scaling)}
    return item


def address_selector(service: str, *, gateway: bool) -> dict[str, str]:
    """Return the selector of the Service of all versions."""
    return {SERVICE: service, ROLE: service_objects.GATEWAY if gateway else REPLICA}


def first_replicas(spec: ServiceSpec) -> int:
    """Return with how many replicas a version begins: at least one, which shows whether it can start."""
    return max(spec.range.least, 1)


def strategy(*, surge: bool) -> Manifest:
    """Return how replicas are replaced. surge: one ends when its successor is ready, else before."""
    return {"rollingUpdate": {"maxSurge": int(surge), "maxUnavailable": int(not surge)}}


def _labels(spec: ServiceSpec) -> dict[str, str]:
    own = {VERSION: spec.version, service_objects.TYPE: TYPES[spec.kind][0]}
    return service_labels(spec.name, REPLICA) | own


def _selector(spec: ServiceSpec) -> dict[str, str]:
    return {SERVICE: spec.name, VERSION: spec.version, ROLE: REPLICA}


def _version_service(spec: ServiceSpec) -> Manifest:
    """Return the Service of one version, from which the gateway learns its replicas."""
    fields = {"ports": _service_ports(spec.ports), "selector": _selector(spec)}
    return object_names.manifest("Service", "v1", object_name(spec), _labels(spec), spec=fields)


def _service_ports(ports: dict[PortName, int]) -> list[Manifest]:
    """Return the ports of a Service; of two names for one number only the first, as it must be."""
    numbers = {port: name for name, port in reversed(ports.items())}
    return [
        {"name": name, "port": port, "targetPort": name} for port, name in reversed(numbers.items())
    ]


def _deployment(spec: ServiceSpec, contents: Contents, priority: str, *, hami: bool) -> Manifest:
    fields = {
        "replicas": first_replicas(spec),
        "selector": {"matchLabels": _selector(spec)},
        "strategy": strategy(surge=True),
        "template": _pod_template(spec, contents, priority, hami=hami),
    }
    item = object_names.manifest(
        "Deployment", "apps/v1", object_name(spec), _labels(spec), spec=fields
    )
    text = msgspec.json.encode({"kind": spec.kind, **msgspec.to_builtins(spec)}).decode()
    item["metadata"]["annotations"] = {SPEC: text}
    return item


def _pod_template(spec: ServiceSpec, contents: Contents, priority: str, *, hami: bool) -> Manifest:
    if not spec.image:
        raise InvalidRequest("--image is required on Kubernetes")
    cards = card_request(spec.gpu, hami=hami)
    volumes = _volumes(spec, contents)
    container = {
        "name": spec.kind,
        "image": spec.image,
        "imagePullPolicy": spec.image_pull_policy,
        "command": [escape(word) for word in spec.argv],
        "workingDir": spec.working_dir,
        "env": _environment(spec),
        "ports": [{"name": name, "containerPort": port} for name, port in spec.ports.items()],
        "resources": without_empty({"limits": limits(spec, spec.device) | cards.limits}),
        "readinessProbe": _readiness(spec),
        "lifecycle": {"preStop": {"sleep": {"seconds": _WITHDRAWAL_S}}},
        "volumeMounts": [volume.mount for volume in volumes],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": container_security(spec),
    }
    pod = {
        **pod_settings(spec),
        # Without cards kube-scheduler would not ask fenka which pods it may evict.
        "priorityClassName": spec.priority or (priority if spec.gpu else ""),
        "nodeSelector": spec.selector,
        "terminationGracePeriodSeconds": math.ceil(spec.grace_s) + _WITHDRAWAL_S,
        "containers": [without_empty(container)],
        "volumes": as_manifests(volumes),
    }
    metadata = {
        "labels": spec.label | cards.labels | _labels(spec),
        "annotations": pod_annotations(spec) | cards.annotations,
    }
    return {"metadata": without_empty(metadata), "spec": without_empty(pod)}


def _environment(spec: ServiceSpec) -> list[Manifest]:
    given = {PORT_VARIABLES[name]: str(port) for name, port in spec.ports.items()}
    return variables(given if spec.gpu else given | NO_CARDS, spec.env)


def _readiness(spec: ServiceSpec) -> Manifest:
    port, path = spec.readiness
    check = {"httpGet": {"path": path, "port": port}} if path else {"tcpSocket": {"port": port}}
    return {**check, "periodSeconds": 2, "timeoutSeconds": _PROBE_TIMEOUT_S}


def _volumes(spec: ServiceSpec, contents: Contents) -> list[MountedVolume]:
    return [
        *claim_volumes(spec),
        *host_volumes(spec),
        *memory_volumes(spec),
        *config_volumes(f"{object_name(spec)}-config", contents),
    ]
