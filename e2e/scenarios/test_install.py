"""Test parts of an installation: the API server's contract, RBAC rights, the second scheduler."""

import json
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster import Cluster, ClusterError, wait_until
from e2e.image_files import archive, hash_of, image_of
from e2e.images import BUSYBOX
from e2e.programs import directories
from e2e.scenarios.containers import installed_with
from e2e.scenarios.installation import (
    CHART,
    HERE,
    MEMORY,
    RELEASE,
    Installation,
    deployment,
    kubeconfig_of,
)
from e2e.supervisor import REPOSITORY

Json = dict[str, Any]
RIGHTS = HERE / "rights.py"


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


# ---- the second scheduler ----

SCHEDULER_IMAGE = "localhost/kube-scheduler:e2e"


def scheduler_image() -> Path:
    """Build an image of the cluster's own kube-scheduler, like the one of registry.k8s.io."""
    program = directories()[0] / "kube-scheduler"

    def make(target: Path) -> None:
        files = {"bin/kube-scheduler": program.read_bytes()}
        config = {"Env": ["PATH=/bin"]}
        target.write_bytes(image_of(SCHEDULER_IMAGE, config, files, ()))

    return archive("kube-scheduler", hash_of(str(program.resolve())), make)


@pytest.fixture
def second_scheduler(shared: Installation) -> Iterator[Installation]:
    """Run the chart's second scheduler on one node; the default one is not configured for fenka."""
    cluster = shared.cluster
    node = cluster.nodes[1]
    node.import_image(scheduler_image())
    cluster.set_scheduler_configuration(None)
    cluster.helm(
        *("upgrade", RELEASE, str(CHART), "-n", RELEASE, "--reuse-values"),
        "--set=secondScheduler.enabled=true",
        f"--set=secondScheduler.image={SCHEDULER_IMAGE}",
        f"--set=secondScheduler.nodeSelector.kubernetes\\.io/hostname={node.name}",
    )
    # An alias replaces DNS, which this cluster does not have.
    address = cluster.get("service", "fenka-scheduler", RELEASE)["spec"]["clusterIP"]
    alias = {"ip": address, "hostnames": [f"fenka-scheduler.{RELEASE}.svc"]}
    patch = {"spec": {"template": {"spec": {"hostAliases": [alias]}}}}
    name = "deployment/fenka-second-scheduler"
    cluster.kubectl("-n", RELEASE, "patch", name, f"--patch={json.dumps(patch)}")
    cluster.kubectl("-n", RELEASE, "rollout", "status", name, "--timeout=90s", timeout=100)
    yield shared
    cluster.helm(
        *("upgrade", RELEASE, str(CHART), "-n", RELEASE, "--reuse-values"),
        "--set=secondScheduler.enabled=false",
    )
    cluster.set_scheduler_configuration((CHART / "files" / "scheduler-config.yaml").read_text())


def test_second_scheduler_places_only_pods_that_name_it_when_enabled(
    second_scheduler: Installation,
) -> None:
    """A pod that does not name it gets no card, and an event with the reason."""
    text = deployment("named", MEMORY, 4)
    named = text.replace("terminationGracePeriodSeconds: 0", "schedulerName: fenka")
    second_scheduler.cluster.apply(named)
    second_scheduler.cluster.apply(deployment("astray", MEMORY, 4))
    (pod,) = second_scheduler.wait_for_running("named", 1)
    assert pod["spec"]["schedulerName"] == "fenka"
    assert pod["metadata"]["annotations"]["ALIYUN_COM_GPU_MEM_IDX"] == "0"
    wait_until("the other pod exists", lambda: len(second_scheduler.pods("astray")) == 1)
    (astray,) = second_scheduler.pods("astray")
    second_scheduler.wait_for_event(astray["metadata"]["name"], "not placed by fenka's scheduler")
