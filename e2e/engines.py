"""Install programs of others in the cluster: KEDA, Kueue, and Contour as a controller of the Gateway API.

Their kinds and rights are applied from the files of their Go modules, so both have the version that go.mod
pins. Their images exist only with FENKA_E2E_TIER=full.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import yaml

from e2e import images
from e2e.administrator import Administrator
from e2e.cluster import Cluster
from e2e.machine import wait_until
from e2e.programs import CONTOUR, KEDA, KUEUE

SEPARATOR = "\n---\n"
EXTERNAL_METRICS = "/apis/external.metrics.k8s.io/v1beta1"
KEDA_NAMESPACE = "keda"
OPERATOR, METRICS_SERVER = "keda-operator", "keda-metrics-apiserver"
OPERATORS_FLAGS = ("--enable-webhook-patching=false",)
DEPLOYMENT = "apiVersion: apps/v1\nkind: Deployment\n"
WEBHOOKS = "keda-admission"
"""The names of all that belongs to KEDA's webhooks begin with this. They only check ScaledObjects."""
SCALED = "scaledobjects.keda.sh,scaledjobs.keda.sh"

KUEUE_NAMESPACE, KUEUE_CONFIG = "kueue-system", "kueue-manager-config"

CONTOUR_NAMESPACE = "projectcontour"
GATEWAY_CLASS, GATEWAY = "contour", "contour"
CONTOUR_FILES = ("00-common.yaml", "01-crds.yaml", "02-rbac.yaml", "02-role-contour.yaml")
# Their kinds are not in the standard channel of the Gateway API.
WITHOUT = ("tlsroutes", "tcproutes", "backendtlspolicies")
XDS = ("--xds-address=127.0.0.1", "--xds-port=8001")
ENVOY_CONFIG = "/shared/envoy.json"
GATEWAY_OBJECTS = f"""
apiVersion: gateway.networking.k8s.io/v1
kind: GatewayClass
metadata: {{name: {GATEWAY_CLASS}}}
spec: {{controllerName: projectcontour.io/gateway-controller}}
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {{name: {GATEWAY}, namespace: {CONTOUR_NAMESPACE}}}
spec:
  gatewayClassName: {GATEWAY_CLASS}
  listeners:
  - {{name: http, protocol: HTTP, port: 80, allowedRoutes: {{namespaces: {{from: All}}}}}}
"""
CONTOUR_CONFIG = f"gateway: {{gatewayRef: {{name: {GATEWAY}, namespace: {CONTOUR_NAMESPACE}}}}}\n"
CONTOUR_OBJECTS = f"""
apiVersion: v1
kind: ConfigMap
metadata: {{name: contour}}
data: {{contour.yaml: {json.dumps(CONTOUR_CONFIG)}}}
---
apiVersion: v1
kind: Service
metadata: {{name: envoy}}
spec:
  selector: {{app: contour}}
  # Contour lets Envoy listen at the listener's port plus 8000.
  ports: [{{name: http, port: 80, targetPort: 8080}}]
"""


# KEDA.


@contextmanager
def keda(cluster: Administrator) -> Iterator[None]:
    """Let KEDA run inside the block. At its end delete it, its kinds, and all objects of them.

    It owns the API external.metrics.k8s.io meanwhile.
    """
    folder = KEDA.source("github.com/kedacore/keda/v2") / "config" / "default"
    documents = [
        document
        for document in cluster.kubectl("kustomize", str(folder)).split(SEPARATOR)
        if f"\n  name: {WEBHOOKS}" not in document
    ]
    deployments = [document for document in documents if document.startswith(DEPLOYMENT)]
    others = SEPARATOR.join(document for document in documents if document not in deployments)
    try:
        _apply(cluster, others)
        loaded = map(yaml.safe_load, deployments)
        named = {deployment["metadata"]["name"]: deployment for deployment in loaded}
        _apply(cluster, _keda_deployment(named[OPERATOR], *OPERATORS_FLAGS))
        # The metrics server cannot start without the certificates that the operator makes.
        wait_until("KEDA's certificates", lambda: _has_certificates(cluster), 120)
        _apply(cluster, _keda_deployment(named[METRICS_SERVER]))
        for name in named:
            _wait_for_rollout(cluster, name, KEDA_NAMESPACE)
        wait_until("KEDA's metrics", lambda: cluster.kubectl("get", "--raw", EXTERNAL_METRICS), 120)
        try:
            yield
        finally:
            # Only the operator removes its finalizers from them.
            cluster.kubectl("delete", SCALED, "--all", "-A", "--timeout=60s")
    finally:
        _delete(cluster, others)


def _keda_deployment(deployment: dict[str, Any], *flags: str) -> str:
    """Return a Deployment of KEDA with the local image, more flags, and probes that begin at once."""
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    container |= {"image": images.KEDA, "imagePullPolicy": "Never"}
    container["resources"] = {"requests": {"cpu": "10m"}}
    container["readinessProbe"] |= {"initialDelaySeconds": 1, "periodSeconds": 1}
    container["args"] += flags
    return yaml.safe_dump(deployment)


def _has_certificates(cluster: Administrator) -> bool:
    secret = cluster.get("secret", "kedaorg-certs", KEDA_NAMESPACE)
    return set(secret.get("data", {})) >= {"ca.crt", "tls.crt", "tls.key"}


# Kueue.


@contextmanager
def kueue(cluster: Cluster, configuration: str) -> Iterator[None]:
    """Let Kueue run inside the block. At its end delete it, its kinds, and all objects of them.

    configuration: the text of its Configuration.
    """
    node = cluster.nodes[1]
    node.import_image(images.kueue())
    folder = KUEUE.source("sigs.k8s.io/kueue") / "config" / "default"
    rendered = cluster.kubectl("kustomize", str(folder))
    documents = [document for document in yaml.safe_load_all(rendered) if document]
    for document in documents:
        if document["kind"] == "Deployment":
            _use_kueue_image(document["spec"]["template"]["spec"], node.name)
        elif document["metadata"]["name"] == KUEUE_CONFIG:
            document["data"] = {"controller_manager_config.yaml": configuration}
    webhooks = [item for item in documents if item["kind"].endswith("WebhookConfiguration")]
    others = [item for item in documents if item not in webhooks]
    try:
        for part in (others, webhooks):
            _apply(cluster, SEPARATOR.join(map(yaml.safe_dump, part)))
        _wait_for_rollout(cluster, "kueue-controller-manager", KUEUE_NAMESPACE)
        yield
    finally:
        # Without the controller they would refuse every pod.
        for part in (webhooks, others):
            _delete(cluster, SEPARATOR.join(map(yaml.safe_dump, part)))


def _use_kueue_image(pod: dict[str, Any], node: str) -> None:
    """Change the controller's pod so that it runs on the node that has its image."""
    (container,) = pod["containers"]
    container |= {"image": images.KUEUE, "imagePullPolicy": "Never"}
    container["resources"] = {"requests": {"cpu": "10m"}}
    container["readinessProbe"] |= {"initialDelaySeconds": 1, "periodSeconds": 1}
    pod["nodeSelector"] = {"kubernetes.io/hostname": node}


# The Gateway API.


@dataclass(frozen=True)
class GatewayApi:
    """A Gateway to which HTTPRoutes of all namespaces may attach.

    Attributes:
        cluster: the cluster.
        address: its address on port 80 in the cluster, of HTTP and for any host.
    """

    cluster: Administrator
    address: str

    def apply_route(self, namespace: str, name: str, port: int, weights: Mapping[str, int]) -> None:
        """Create or update an HTTPRoute, and wait until it has its effect.

        Args:
            namespace: the route's and the Services'.
            name: the route's.
            port: of all the Services.
            weights: by Service.
        """
        refs = [
            {"name": service, "port": port, "weight": weight} for service, weight in weights.items()
        ]
        parent = {"name": GATEWAY, "namespace": CONTOUR_NAMESPACE}
        route = {
            "apiVersion": "gateway.networking.k8s.io/v1",
            "kind": "HTTPRoute",
            "metadata": {"name": name},
            "spec": {"parentRefs": [parent], "rules": [{"backendRefs": refs}]},
        }
        self.cluster.apply(yaml.safe_dump(route), namespace)
        self.wait_for_route(namespace, name)

    def wait_for_route(self, namespace: str, name: str) -> None:
        """Wait until the controller has accepted the latest change of an HTTPRoute."""

        def accepted() -> bool:
            route = self.cluster.get("httproute", name, namespace)
            parents = route.get("status", {}).get("parents", ())
            generation = route["metadata"]["generation"]
            return bool(parents) and _holds(parents[0]["conditions"], "Accepted", generation)

        wait_until(f"route {name}", accepted, 60)


@contextmanager
def gateway_api(cluster: Administrator) -> Iterator[GatewayApi]:
    """Let a Gateway run inside the block. At its end delete it, and the kinds of the Gateway API."""
    kinds = CONTOUR.source("sigs.k8s.io/gateway-api") / "config" / "crd" / "standard"
    folder = CONTOUR.source("github.com/projectcontour/contour") / "examples" / "contour"
    files = [*sorted(kinds.glob("*.yaml")), *(folder / name for name in CONTOUR_FILES)]
    text = SEPARATOR.join(file.read_text() for file in files)
    in_namespace = ("-n", CONTOUR_NAMESPACE)
    try:
        _apply(cluster, text)
        _apply(cluster, CONTOUR_OBJECTS, *in_namespace)
        _apply_when_known(cluster, GATEWAY_OBJECTS)
        address = cluster.get("service", "envoy", CONTOUR_NAMESPACE)["spec"]["clusterIP"]
        _apply(cluster, yaml.safe_dump(_contour(address)), *in_namespace)
        _wait_for_rollout(cluster, "contour", CONTOUR_NAMESPACE)
        wait_until("the Gateway", lambda: _gateway_address(cluster) == address, 60)
        yield GatewayApi(cluster, address)
    finally:
        _delete(cluster, text)


def _contour(address: str) -> dict[str, Any]:
    """Return the Deployment of one pod, in which Contour configures Envoy over the loopback address."""
    shared = [{"name": "shared", "mountPath": "/shared"}]
    config = [{"name": "config", "mountPath": "/config"}]
    image = {"image": images.CONTOUR, "imagePullPolicy": "Never"}
    field = {"fieldRef": {"fieldPath": "metadata.namespace"}}
    contour = image | {"env": [{"name": "CONTOUR_NAMESPACE", "valueFrom": field}]}
    bootstrap = ("bootstrap", ENVOY_CONFIG, *XDS, "--admin-address=/shared/admin.sock")
    serve = ("serve", "--incluster", "--insecure", *XDS, "--config-path=/config/contour.yaml")
    features = [f"--disable-feature={feature}" for feature in WITHOUT]
    envoy = ("-c", ENVOY_CONFIG, "--service-cluster", "contour", "--service-node", "contour")
    containers = [
        contour
        | {
            "name": "contour",
            "command": ["contour", *serve, f"--ingress-status-address={address}", *features],
            "readinessProbe": _probe("/healthz", 8000),
            "volumeMounts": config,
        },
        image
        | {
            "name": "envoy",
            "command": ["envoy", *envoy, "--log-level", "warn", "--concurrency", "1"],
            "readinessProbe": _probe("/ready", 8002),
            "volumeMounts": shared,
        },
    ]
    first = contour | {
        "name": "bootstrap",
        "command": ["contour", *bootstrap],
        "volumeMounts": shared,
    }
    pod = {
        "serviceAccountName": "contour",
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65534, "runAsGroup": 65534},
        "terminationGracePeriodSeconds": 1,
        "initContainers": [first],
        "containers": containers,
        "volumes": [
            {"name": "shared", "emptyDir": {}},
            {"name": "config", "configMap": {"name": "contour"}},
        ],
    }
    labels = {"app": "contour"}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "contour"},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _probe(path: str, port: int) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": port}, "periodSeconds": 1}


def _gateway_address(cluster: Administrator) -> str:
    """Return the Gateway's address once it is programmed, "" before."""
    gateway = cluster.get("gateway", GATEWAY, CONTOUR_NAMESPACE)
    status, generation = gateway.get("status", {}), gateway["metadata"]["generation"]
    addresses = [address["value"] for address in status.get("addresses", ())]
    programmed = _holds(status.get("conditions", ()), "Programmed", generation)
    return str(addresses[0]) if programmed and addresses else ""


# Both.


def _holds(conditions: Iterable[Mapping[str, Any]], name: str, generation: int) -> bool:
    """Return whether a condition is true of this generation of an object."""
    return any(
        condition["type"] == name
        and condition["status"] == "True"
        and condition.get("observedGeneration") == generation
        for condition in conditions
    )


def _apply(cluster: Administrator, text: str, *options: str) -> None:
    # On the server: kinds of this size do not fit in the annotation that the client would add.
    arguments = ("--server-side", "--force-conflicts", "-f", "-")
    cluster.kubectl(*options, "apply", *arguments, stdin=text)


def _apply_when_known(cluster: Administrator, text: str) -> None:
    """Apply objects of kinds that have just been created."""

    def applied() -> bool:
        _apply(cluster, text)
        return True

    wait_until("new kinds", applied)


def _delete(cluster: Administrator, text: str) -> None:
    cluster.kubectl("delete", "--ignore-not-found", "--timeout=120s", "-f", "-", stdin=text)


def _wait_for_rollout(cluster: Administrator, name: str, namespace: str) -> None:
    cluster.kubectl("-n", namespace, "rollout", "status", f"deployment/{name}", "--timeout=120s")
