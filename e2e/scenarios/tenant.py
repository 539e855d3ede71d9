"""A hostile tenant, who has the role `edit` in one namespace."""

import json

from e2e.scenarios.containers import PRINT_VISIBLE_MIB
from e2e.scenarios.installation import MEMORY, Installation

TENANT = "tenant"
AS = (
    f"--as=system:serviceaccount:{TENANT}:mallory",
    "--as-group=system:serviceaccounts",
    f"--as-group=system:serviceaccounts:{TENANT}",
    "--as-group=system:authenticated",
)
RIGHTS = f"""
apiVersion: v1
kind: ServiceAccount
metadata: {{name: mallory}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {{name: mallory}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: edit}}
subjects: [{{kind: ServiceAccount, name: mallory, namespace: {TENANT}}}]
---
apiVersion: v1
kind: ResourceQuota
metadata: {{name: units}}
spec: {{hard: {{requests.{MEMORY}: 17}}}}
"""


class Mallory:
    """The hostile tenant."""

    def __init__(self, installation: Installation) -> None:
        self.installation = installation

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl with the tenant's rights."""
        return self.installation.cluster.kubectl(*AS, "-n", TENANT, *arguments, stdin=stdin)

    def create(self, manifest: str) -> None:
        """Create an object in its namespace."""
        self.kubectl("create", "-f", "-", stdin=manifest)

    def annotate(self, name: str, **annotations: str) -> None:
        """Annotate its own pod."""
        patch = {"metadata": {"annotations": annotations}}
        self.kubectl("patch", "pod", name, "--type=merge", "-p", json.dumps(patch))

    def visible_mib(self, name: str) -> int:
        """Return the MiB of device memory that a program in its pod sees."""
        return int(self.kubectl("exec", name, "-c", "x", "--", "python3", "-c", PRINT_VISIBLE_MIB))

    def uid(self, name: str) -> str:
        """Return the UID of its pod."""
        return str(self.installation.cluster.get("pod", name, TENANT)["metadata"]["uid"])


def with_annotations(manifest: str, **annotations: str) -> str:
    """Add annotations to the manifest of a pod."""
    body = json.loads(manifest)
    body["metadata"]["annotations"] = annotations
    return json.dumps(body)


def record(card: int, units: int) -> dict[str, str]:
    """Return gpushare's record of a placement, as fenka writes it."""
    return {
        "ALIYUN_COM_GPU_MEM_IDX": str(card),
        "ALIYUN_COM_GPU_MEM_ASSIGNED": "true",
        "scheduler.framework.gpushare.allocation": json.dumps({"0": {str(card): units}}),
    }
