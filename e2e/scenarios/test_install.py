"""Test parts of an installation: the API server's contract, and RBAC rights."""

import json
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.artifacts import CHART
from e2e.cluster import Cluster, ClusterError, wait_until
from e2e.images import BUSYBOX
from e2e.scenarios.containers import installed_with
from e2e.scenarios.installation import (
    HERE,
    MEMORY,
    Installation,
    kubeconfig_of,
)
from e2e.supervisor import REPOSITORY

Json = dict[str, Any]
RIGHTS = HERE / "rights.py"


@pytest.mark.versions
def test_api_server_fulfils_the_contract_that_unit_tests_assume(cluster: Cluster) -> None:
    """Run the contract test of the unit tests' fake API server against the real one."""
    tests = REPOSITORY / "tests" / "kubernetes" / "test_contract.py"
    environment = {"FENKA_E2E_KUBECONFIG": str(cluster.kubeconfig)}
    command = (sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", str(tests))
    output = cluster.run(*command, environment=environment)
    assert "passed" in output
    assert "skipped" not in output


# ---- rights ----


def rendered_roles(cluster: Cluster, which: str, namespace: str) -> list[Json]:
    """Render ServiceAccount, roles and bindings of one program in a separate release."""
    only = f"templates/{which}-rbac.yaml"
    text = cluster.helm(
        *("template", "rights", str(CHART), "-n", namespace, "--show-only", only),
        "--set=node.overLimit=evict",
    )
    objects = [document for document in yaml.safe_load_all(text) if document]
    for document in objects:
        if not document["kind"].startswith("Cluster"):
            document["metadata"].setdefault("namespace", namespace)
    return objects


def roles_without_one_verb(objects: list[Json]) -> Iterator[tuple[str, Json]]:
    """Yield for each verb of each role the right's name and the role without it."""
    for role in objects:
        for number, rule in enumerate(role.get("rules", ())):
            for verb in rule["verbs"]:
                reduced = deepcopy(role)
                reduced["rules"][number]["verbs"].remove(verb)
                reduced["rules"] = [rule for rule in reduced["rules"] if rule["verbs"]]
                (resource,) = rule["resources"]
                yield f"{verb} {resource}", reduced


OBJECTS = """
apiVersion: v1
kind: Node
metadata: {name: rights-node}
---
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {name: rights-class}
handler: runc
"""


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("which", ["scheduler", "node"])
def test_api_server_rejects_a_call_when_any_one_right_is_removed(
    installation: Installation, namespace: str, which: str, tmp_path: Path
) -> None:
    """With the chart's rights all calls of fenka's own code succeed.

    The release's admission policies are off, since they reject writes of other releases' ServiceAccounts.
    """
    with installed_with(installation, "admission.enabled=false"):
        check_each_right(installation.cluster, namespace, which, tmp_path)


def check_each_right(cluster: Cluster, namespace: str, which: str, tmp_path: Path) -> None:
    """Check that removing any one verb from the roles makes the API server reject that call."""
    objects = rendered_roles(cluster, which, namespace)
    kubeconfig = tmp_path / "kubeconfig"
    pod: Json = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "rights-pod"},
        "spec": {
            "schedulerName": "none",
            "terminationGracePeriodSeconds": 0,
            "tolerations": [{"operator": "Exists"}],
            # Only pods that name one of fenka's resources are bound.
            "containers": [{"name": "c", "image": BUSYBOX, "resources": {"limits": {MEMORY: "0"}}}],
        },
    }
    if which == "node":
        pod["spec"]["nodeName"] = "rights-node"

    def refused() -> dict[str, str]:
        # Both are created again: a first election has no lease, and a pod is bound and evicted only once.
        at_once = ("--ignore-not-found", "--grace-period=0", "--force")
        for kind_and_name in (("pod", "rights-pod"), ("lease", "rights-fenka-scheduler")):
            cluster.kubectl("-n", namespace, "delete", *kind_and_name, *at_once)
        cluster.apply(json.dumps(pod), namespace)
        output = cluster.run(sys.executable, str(RIGHTS), which, str(kubeconfig), namespace)
        errors: dict[str, str] = json.loads(output)
        return {name: error for name, error in errors.items() if error}

    cluster.apply(OBJECTS)
    try:
        cluster.kubectl("apply", "-f", "-", stdin=to_yaml(objects))
        kubeconfig_of(cluster, f"rights-fenka-{which}", namespace, kubeconfig)
        wait_until("the rights are effective", lambda: refused() == {})
        needless = []
        for right, reduced in roles_without_one_verb(objects):
            roles = [document for document in objects if "rules" in document]
            cluster.kubectl("apply", "-f", "-", stdin=to_yaml([*roles, reduced]))
            verb, resource = right.split()
            sentence = f'cannot {verb} resource "{resource}"'

            def is_refused(sentence: str = sentence) -> bool:
                return any(sentence in error or error == "refused" for error in refused().values())

            # The API server applies a change of roles with a delay.
            try:
                wait_until(f"a rejection without {right}", is_refused, 30)
            except ClusterError:
                needless.append(right)
        assert needless == []
    finally:
        cluster.kubectl("delete", "--ignore-not-found", "-f", "-", stdin=to_yaml(objects))
        cluster.delete(OBJECTS)


def to_yaml(objects: list[Json]) -> str:
    """Return objects as YAML documents."""
    return "\n---\n".join(json.dumps(document) for document in objects)
