"""Renders a service's gateway: a Deployment that owns its account and its rights."""

import math
from dataclasses import dataclass

from fenka.cluster.service_objects import GATEWAY
from fenka.jobs.manifests import names
from fenka.jobs.manifests.names import Manifest
from fenka.jobs.manifests.service import service_labels
from fenka.jobs.manifests.workload import without_empty
from fenka.jobs.service import CLIENT_PORTS, ServiceSpec

_PORTS = dict(zip(CLIENT_PORTS, (8080, 8081), strict=True))
_ADMIN_PORT = 9090

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
    """

    image: str
    pull_policy: str = ""
    replicas: int = 1


def gateway_name(service: str) -> str:
    """Return the name of a gateway's objects."""
    return f"{service}-{GATEWAY}"


def render_gateway(spec: ServiceSpec, namespace: str, settings: GatewaySettings) -> list[Manifest]:
    """Return a gateway's Deployment, and then what it owns. `spec`: any version of its service."""
    name, labels = gateway_name(spec.name), service_labels(spec.name, GATEWAY)
    return [
        _deployment(spec, namespace, settings),
        names.manifest("ServiceAccount", "v1", name, labels),
        names.manifest("Role", f"{_RBAC}/v1", name, labels, rules=_rules(spec.name)),
        names.manifest(
            "RoleBinding",
            f"{_RBAC}/v1",
            name,
            labels,
            roleRef={"apiGroup": _RBAC, "kind": "Role", "name": name},
            subjects=[{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
        ),
    ]


def _rules(service: str) -> list[Manifest]:
    reads = ["get", "list", "watch"]
    return [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": reads},
        {
            "apiGroups": [""],
            "resources": ["services"],
            "resourceNames": [service],
            "verbs": reads,
        },
    ]


def _deployment(spec: ServiceSpec, namespace: str, settings: GatewaySettings) -> Manifest:
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
    return names.manifest("Deployment", "apps/v1", name, labels, spec=fields)


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
            f"--linger={_LINGER_S}",
            f"--wait={spec.buffer_timeout_s:g}",
            f"--grace={_grace_s(spec)}",
        ],
        "ports": [
            {"name": port, "containerPort": number}
            for port, number in (ports | {"admin": _ADMIN_PORT}).items()
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
            "requests": {"cpu": "100m", "memory": "96Mi"},
            "limits": {"memory": "512Mi"},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
