"""Renders a version of a service: a Deployment that owns a Service and files.

The API server gives each replica's port a name. Services and the gateway know ports by these names, so that
versions may use different numbers.

Renders a service's gateway: a Deployment that owns its account and its rights.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec

from fenka.cluster import service_objects
from fenka.cluster.service_objects import (
    ADDRESS,
    GATEWAY,
    REPLICA,
    SCALING,
    SERVICE,
    TYPES,
    VERSION,
    gateway_name,
    scaling_text,
)
from fenka.cluster.training_objects import ROLE, SPEC
from fenka.core.request import InvalidRequest
from fenka.core.scaling import ScalingPolicy
from fenka.jobs.collection import Contents
from fenka.jobs.manifests import common
from fenka.jobs.manifests.card_requests import card_request
from fenka.jobs.manifests.common import (
    NO_CARDS,
    Manifest,
    MountedVolume,
    as_manifests,
    claim_volumes,
    config_files,
    config_volumes,
    container_security,
    escape,
    host_volumes,
    limits,
    memory_volumes,
    pod_annotations,
    pod_settings,
    service_labels,
    variables,
    without_empty,
)
from fenka.jobs.manifests.scaling_manifest import SCALER_PORT, gateway_rules
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
    item = common.manifest("Service", "v1", spec.name, labels, spec=fields)
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
    return common.manifest("Service", "v1", object_name(spec), _labels(spec), spec=fields)


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
    item = common.manifest("Deployment", "apps/v1", object_name(spec), _labels(spec), spec=fields)
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


_PORTS = dict(zip(CLIENT_PORTS, (8080, 8081), strict=True))
_ADMIN_PORT = 9090
SCALER = "scaler"
"""The name of the port where gateways answer KEDA."""

_LINGER_S = 5
"""Between SIGTERM and the last new connection: Services learn of the end in between."""
_MIN_GRACE_S = 60
"""For requests that the gateway has begun."""

_RBAC = "rbac.authorization.k8s.io"
_UNPRIVILEGED = 65532


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """How gateways are run.

    Attributes:
        image: fenka's image.
        pull_policy: When it is pulled; empty for Kubernetes' default.
        replicas: How many gateways a service has.
        traces: URL of a collector of spans; empty for none.
    """

    image: str
    pull_policy: str = ""
    replicas: int = 1
    traces: str = ""


def render_gateway(
    spec: ServiceSpec, namespace: str, settings: GatewaySettings, scaled: Collection[str] = ()
) -> list[Manifest]:
    """Return a gateway's Deployment, and then what it owns.

    Args:
        spec: Any version of its service.
        namespace: The service's.
        settings: How gateways are run.
        scaled: The versions that the gateway scales.
    """
    name, labels = gateway_name(spec.name), service_labels(spec.name, GATEWAY)
    return [
        _gateway_deployment(spec, namespace, settings),
        _gateway_service(spec.name),
        common.manifest("ServiceAccount", "v1", name, labels),
        common.manifest(
            "Role", f"{_RBAC}/v1", name, labels, rules=gateway_rules(spec.name, scaled)
        ),
        common.manifest(
            "RoleBinding",
            f"{_RBAC}/v1",
            name,
            labels,
            roleRef={"apiGroup": _RBAC, "kind": "Role", "name": name},
            subjects=[{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
        ),
    ]


def _gateway_service(service: str) -> Manifest:
    """Return the Service by which gateways find each other, and KEDA finds them.

    It has no address of its own, so KEDA spreads its calls, and notices one gateway's end.
    """
    labels = service_labels(service, GATEWAY)
    fields = {
        "clusterIP": "None",
        "ports": [{"name": SCALER, "port": SCALER_PORT, "targetPort": SCALER}],
        "selector": {SERVICE: service, ROLE: GATEWAY},
    }
    return common.manifest("Service", "v1", gateway_name(service), labels, spec=fields)


def _gateway_deployment(spec: ServiceSpec, namespace: str, settings: GatewaySettings) -> Manifest:
    name, labels = gateway_name(spec.name), service_labels(spec.name, GATEWAY)
    pod = {
        "serviceAccountName": name,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": _LINGER_S + _grace_s(spec) + 5,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _UNPRIVILEGED,
            "runAsGroup": _UNPRIVILEGED,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "imagePullSecrets": [{"name": secret} for secret in spec.image_pull_secret],
        "containers": [_container(spec, namespace, settings)],
        # Envoy's configuration and sockets.
        "volumes": [{"name": "tmp", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}}],
    }
    annotations = {"prometheus.io/scrape": "true", "prometheus.io/port": str(_ADMIN_PORT)}
    fields = {
        "replicas": settings.replicas,
        "selector": {"matchLabels": labels},
        "strategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "template": {
            "metadata": {"labels": labels, "annotations": annotations},
            "spec": without_empty(pod),
        },
    }
    return common.manifest("Deployment", "apps/v1", name, labels, spec=fields)


def _grace_s(spec: ServiceSpec) -> int:
    """Return how long a gateway that ends finishes requests: those that wait, too."""
    return max(_MIN_GRACE_S, math.ceil(spec.buffer_timeout_s))


def _container(spec: ServiceSpec, namespace: str, settings: GatewaySettings) -> Manifest:
    ports: dict[str, int] = {port: _PORTS[port] for port in CLIENT_PORTS if port in spec.ports}
    listening = [f"--listen={port}=0.0.0.0:{number}" for port, number in ports.items()]
    policy = {"imagePullPolicy": settings.pull_policy} if settings.pull_policy else {}
    return {
        "name": GATEWAY,
        "image": settings.image,
        **policy,
        "args": [
            GATEWAY,
            f"--service={spec.name}",
            f"--namespace={namespace}",
            *listening,
            f"--admin=0.0.0.0:{_ADMIN_PORT}",
            f"--scaler=0.0.0.0:{SCALER_PORT}",
            f"--linger={_LINGER_S}",
            f"--wait={spec.buffer_timeout_s:g}",
            f"--grace={_grace_s(spec)}",
            *([f"--traces={settings.traces}"] if settings.traces else []),
        ],
        "env": [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "ports": [
            {"name": port, "containerPort": number}
            for port, number in (ports | {"admin": _ADMIN_PORT, SCALER: SCALER_PORT}).items()
        ],
        "readinessProbe": {
            "httpGet": {"path": "/readyz", "port": "admin"},
            "periodSeconds": 2,
            # A slow answer of a busy machine must not take the only gateway out of its Service.
            "timeoutSeconds": 10,
        },
        "livenessProbe": {
            "httpGet": {"path": "/healthz", "port": "admin"},
            "periodSeconds": 10,
            "timeoutSeconds": 10,
        },
        "resources": {
            "requests": {"cpu": "100m", "memory": "160Mi"},
            # Envoy's heap is bounded by 768 MiB, for 13,000 requests at a time. Its program and fenka's need
            # the rest.
            "limits": {"memory": "1Gi"},
        },
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
