"""Renders a service's gateway: a Deployment that owns its account and its rights."""

import math
from collections.abc import Collection
from dataclasses import dataclass

from fenka.cluster.service_objects import (
    GATEWAY,
    SERVICE,
    gateway_name,
)
from fenka.cluster.training_objects import ROLE
from fenka.jobs.manifests import object_names
from fenka.jobs.manifests.common import (
    without_empty,
)
from fenka.jobs.manifests.object_names import Manifest, service_labels
from fenka.jobs.manifests.scaling_manifest import SCALER_PORT, gateway_rules
from fenka.jobs.service import CLIENT_PORTS, ServiceSpec

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
        object_names.manifest("ServiceAccount", "v1", name, labels),
        object_names.manifest(
            "Role", f"{_RBAC}/v1", name, labels, rules=gateway_rules(spec.name, scaled)
        ),
        object_names.manifest(
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
    return object_names.manifest("Service", "v1", gateway_name(service), labels, spec=fields)


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
    return object_names.manifest("Deployment", "apps/v1", name, labels, spec=fields)


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
