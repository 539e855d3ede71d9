"""Renders the security context of pods, and chooses it as a namespace requires.

Sources: Kubernetes' Pod Security Standards.
"""

from typing import TypeVar

import msgspec

from fenka.jobs.manifests.object_names import Manifest
from fenka.jobs.workload import DEFAULT_WORKING_DIR, PodOptions, WorkloadSpec

S = TypeVar("S", bound=PodOptions)


ENFORCED = "pod-security.kubernetes.io/enforce"
"""Label of a namespace: the Pod Security Standard that its pods must meet."""


WORKSPACE = "/workspace"
"""Working directory of users who have no access to root's."""


UNPRIVILEGED = 65532
"""The user of containers whose image is fenka's choice, where the image's own is root."""


_DROPPED = ["MKNOD", "NET_RAW", "SETFCAP", "SETPCAP"]
"""Capabilities that no training, model server or notebook needs, whose image may run as root."""


def secured(spec: S, enforced: str) -> S:
    """Return a job with the security that its namespace enforces. `enforced`: a Pod Security Standard."""
    if spec.security == "auto":
        level = "restricted" if enforced == "restricted" else "baseline"
        spec = msgspec.structs.replace(spec, security=level)
    unprivileged = isinstance(spec, WorkloadSpec) and _is_unprivileged(spec)
    if unprivileged and getattr(spec, "working_dir", "") == DEFAULT_WORKING_DIR:
        spec = msgspec.structs.replace(spec, working_dir=WORKSPACE)
    return spec


def pod_security(spec: PodOptions, group: int | None = None) -> Manifest:
    """Return the securityContext of a pod. group: what owns its volumes if no option says so."""
    context: Manifest = {}
    if spec.security != "none":
        context["seccompProfile"] = {"type": "RuntimeDefault"}
    if _is_unprivileged(spec):
        context["runAsNonRoot"] = True
    if spec.user is not None:
        user, own = spec.user
        context |= {"runAsUser": user, "runAsGroup": own}
        group = own
    if group is not None:
        context |= {"fsGroup": group, "fsGroupChangePolicy": "OnRootMismatch"}
    return context


def container_security(spec: PodOptions) -> Manifest:
    """Return the securityContext of a container that runs the user's image."""
    if spec.security == "none":
        return {}
    dropped = ["ALL"] if _is_unprivileged(spec) else _DROPPED
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": dropped}}


def tool_security(spec: PodOptions) -> Manifest:
    """Return the securityContext of a container with an image of tools, which needs no user of its own."""
    context = container_security(spec)
    if spec.security == "restricted" and spec.user is None:
        context |= {"runAsUser": UNPRIVILEGED}
    return context


def _is_unprivileged(spec: PodOptions) -> bool:
    return spec.security == "restricted" or (spec.user is not None and spec.user[0] > 0)
