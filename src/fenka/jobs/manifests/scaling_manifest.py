"""Renders what follows the load of a version with a range: an entry for its gateway, or KEDA's ScaledObject.

Wire facts: keda.sh/v1alpha1. KEDA itself switches between no replica and the first one; for more it creates a
HorizontalPodAutoscaler. `cooldownPeriod` is counted from the last moment at which the version was active.
"""

import math
from collections.abc import Collection
from typing import Literal

from fenka.cluster.service_objects import REPLICA, TYPE, TYPES, VERSION, gateway_name
from fenka.core.scaling import ScalingPolicy
from fenka.jobs.manifests import object_names
from fenka.jobs.manifests.object_names import Manifest
from fenka.jobs.service import ServiceSpec

Scaler = Literal["keda", "fenka"]
"""KEDA or the service's gateway sets the number of replicas."""

SCALER_PORT = 9091
"""Where gateways answer KEDA."""

POLLING_S = 5
"""Between two looks of KEDA. A stream reports the first request of a version without replicas at once."""


def scaling_policy(spec: ServiceSpec) -> ScalingPolicy:
    """Return how a version scales."""
    limits = spec.range
    return ScalingPolicy(limits.least, limits.most, spec.target, spec.up_after_s, spec.down_after_s)


def render_scaled_object(spec: ServiceSpec, namespace: str) -> Manifest:
    """Return the object by which KEDA follows the load of a version."""
    name = f"{spec.name}-{spec.version}"
    trigger = {
        "scalerAddress": f"{gateway_name(spec.name)}.{namespace}:{SCALER_PORT}",
        "version": spec.version,
        "target": str(spec.target),
    }
    behavior = {
        "scaleUp": {"stabilizationWindowSeconds": math.ceil(spec.up_after_s)},
        "scaleDown": {"stabilizationWindowSeconds": math.ceil(spec.down_after_s)},
    }
    fields = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
        "pollingInterval": POLLING_S,
        "cooldownPeriod": math.ceil(spec.down_after_s),
        "minReplicaCount": spec.range.least,
        "maxReplicaCount": spec.range.most,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior}},
        "triggers": [{"type": "external-push", "metadata": trigger}],
    }
    labels = object_names.service_labels(spec.name, REPLICA)
    labels |= {VERSION: spec.version, TYPE: TYPES[spec.kind][0]}
    return object_names.manifest("ScaledObject", "keda.sh/v1alpha1", name, labels, spec=fields)


def gateway_rules(service: str, scaled: Collection[str]) -> list[Manifest]:
    """Return the rights of a service's gateway. scaled: the versions whose replicas it sets."""
    reads = ["get", "list", "watch"]
    rules: list[Manifest] = [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": reads},
        {
            "apiGroups": [""],
            "resources": ["services"],
            "resourceNames": [service],
            "verbs": reads,
        },
    ]
    if scaled:
        rules.append(
            {
                "apiGroups": ["apps"],
                "resources": ["deployments/scale"],
                "resourceNames": [f"{service}-{version}" for version in sorted(scaled)],
                "verbs": ["get", "patch"],
            }
        )
    return rules
