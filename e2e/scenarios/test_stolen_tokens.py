"""Use the tokens of fenka's running programs as somebody would who has escaped to their nodes."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from e2e.cluster import Cluster, wait_until
from e2e.images import BUSYBOX
from e2e.scenarios.containers import installed_with
from e2e.scenarios.installation import MEMORY, RELEASE, Installation
from e2e.scenarios.tenant import TENANT, Mallory

Json = dict[str, Any]
IMAGE = [{"op": "replace", "path": "/spec/containers/0/image", "value": "evil"}]
FOREIGN_GATE = "tenant/quota"


CALL = """
import json, ssl, sys, urllib.error, urllib.request
url, authority, method, kind = sys.argv[1:]
token, body = json.load(sys.stdin)
headers = {"Authorization": "Bearer " + token, "Content-Type": kind}
request = urllib.request.Request(url, json.dumps(body).encode(), headers, method=method)
try:
    urllib.request.urlopen(request, timeout=10, context=ssl.create_default_context(cafile=authority))
except urllib.error.HTTPError as error:
    print(error.code, json.load(error)["message"])
else:
    print("accepted")
"""
"""Sends one request. kubectl reads an object before it patches it, which these accounts may not."""

ACCEPTED = "accepted"
VICTIM = f"/api/v1/namespaces/{TENANT}/pods/victim"
GATED = f"/api/v1/namespaces/{TENANT}/pods/gated"


class Thief:
    """Somebody with a token of one of fenka's accounts."""

    def __init__(self, cluster: Cluster, token: str) -> None:
        self._cluster, self._token = cluster, token
        written = yaml.safe_load(cluster.kubeconfig.read_text())["clusters"][0]["cluster"]
        self._server, self._authority = written["server"], written["certificate-authority"]

    def patch(self, path: str, patch: object) -> str:
        """Return the API server's answer to a patch, of which nothing is stored. A list is a JSON patch."""
        kind = "json" if isinstance(patch, list) else "merge"
        return self._call(path, "PATCH", f"application/{kind}-patch+json", patch)

    def create(self, path: str, body: object) -> str:
        """Return the API server's answer to the creation of an object, of which nothing is stored."""
        return self._call(path, "POST", "application/json", body)

    def _call(self, path: str, method: str, kind: str, body: object) -> str:
        url = f"{self._server}{path}?dryRun=All"
        command = ("python3", "-c", CALL, url, self._authority, method, kind)
        return self._cluster.run(*command, stdin=json.dumps([self._token, body])).strip()


def token_on(cluster: Cluster, pod: Json) -> str:
    """Return the token of a pod as root of its node reads it."""
    volumes = f"/var/lib/kubelet/pods/{pod['metadata']['uid']}/volumes"
    command = f"cat {volumes}/kubernetes.io~projected/*/token"
    return cluster.node(pod["spec"]["nodeName"]).run("sh", "-c", command).strip()


def program(cluster: Cluster, selector: str, node: str = "") -> Json:
    """Return a running pod of fenka's."""
    return next(
        pod
        for pod in cluster.list("pods", RELEASE, selector=selector)
        if pod["status"]["phase"] == "Running" and node in ("", pod["spec"]["nodeName"])
    )


@pytest.fixture
def victim(installation: Installation, two_card_node: str, mallory: Mallory) -> Iterator[Json]:
    """Provide another tenant's running pod on a node that shares cards."""
    cluster = installation.cluster
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "victim", "labels": {"app": "victim"}},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "nodeSelector": {"kubernetes.io/hostname": two_card_node},
            "containers": [
                {
                    "name": "c",
                    "image": BUSYBOX,
                    "imagePullPolicy": "Never",
                    "command": ["sleep", "100000"],
                }
            ],
        },
    }
    mallory.create(json.dumps(body))
    yield cluster.wait_for_pod("victim", TENANT)
    cluster.kubectl("-n", TENANT, "delete", "pod", "victim", "--now")


def pod_patches() -> list[tuple[object, str]]:
    """Return patches of somebody's pod, and what the API server names when it refuses them."""
    return [
        (IMAGE, "may not write spec.containers"),
        ({"spec": {"activeDeadlineSeconds": 1}}, "may not write spec.activeDeadlineSeconds"),
        ({"metadata": {"labels": {"app": "other"}}}, "may not write metadata.labels app"),
        ({"metadata": {"labels": {"app": None}}}, "may not write metadata.labels app"),
        ({"metadata": {"annotations": {"a": "b"}}}, "may not write metadata.annotations a"),
        ({"metadata": {"finalizers": ["a.b/c"]}}, "may not write metadata.finalizers"),
        (
            {"metadata": {"ownerReferences": [owner()]}},
            "may not write metadata.ownerReferences",
        ),
        ({"metadata": {"generateName": "x"}}, "may not write metadata.generateName"),
    ]


def owner() -> Json:
    """Return a reference to an owner that does not exist: the garbage collector would delete the pod."""
    return {"apiVersion": "v1", "kind": "ConfigMap", "name": "none", "uid": "none"}


@pytest.mark.versions
def test_node_programs_token_writes_its_fields_of_its_node_and_pods_only(
    installation: Installation, victim: Json
) -> None:
    """Root of a node has it. Images, labels, addresses and other nodes stay as they are."""
    cluster = installation.cluster
    node = victim["spec"]["nodeName"]
    other = next(one.name for one in cluster.nodes if one.name != node)
    thief = Thief(cluster, token_on(cluster, program(cluster, "app=gpushare,component", node)))
    for patch, sentence in pod_patches():
        assert sentence in thief.patch(VICTIM, patch)
    resized = {"metadata": {"annotations": {"fenka.io/resized": "{}"}}}
    assert thief.patch(VICTIM, resized) == ACCEPTED

    for patch, sentence in (
        ({"metadata": {"labels": {"a": "b"}}}, "may not write metadata.labels a"),
        ({"metadata": {"annotations": {"a": "b"}}}, "may not write metadata.annotations a"),
        ({"spec": {"unschedulable": True}}, "may not write spec.unschedulable"),
        (tainted("a", "NoExecute"), "may not write the taint a"),
        (tainted("fenka.io/free-cards", "NoSchedule"), "the taint fenka.io/free-cards"),
    ):
        assert sentence in thief.patch(node_path(node), patch)
    addresses = [{"type": "InternalIP", "address": "10.0.0.1"}]
    for status, sentence in (
        ({"addresses": addresses}, "may not write status.addresses"),
        ({"capacity": {"cpu": "1000"}}, "may not write status.capacity of cpu"),
        ({"allocatable": {MEMORY: "1000"}}, f"may not write status.allocatable of {MEMORY}"),
    ):
        assert sentence in thief.patch(f"{node_path(node)}/status", {"status": status})
    for patch in (
        {"metadata": {"labels": {"nvidia.com/mig.config.state": "success"}}},
        {"metadata": {"annotations": {"fenka.io/leases": "{}"}}},
        tainted("fenka.io/free-cards", "PreferNoSchedule"),
    ):
        assert thief.patch(node_path(node), patch) == ACCEPTED
        assert "may write only its own node and pods" in thief.patch(node_path(other), patch)
    counted = {"status": {"capacity": {"aliyun.com/gpu-count": "1"}}}
    assert thief.patch(f"{node_path(node)}/status", counted) == ACCEPTED


def node_path(name: str) -> str:
    """Return the path of a Node."""
    return f"/api/v1/nodes/{name}"


def tainted(key: str, effect: str) -> Json:
    """Return a patch of a node's taints."""
    return {"spec": {"taints": [{"key": key, "effect": effect}]}}


@pytest.mark.versions
def test_token_of_the_node_programs_account_is_refused_when_it_names_no_node(
    installation: Installation, victim: Json
) -> None:
    """Who may create tokens in fenka's namespace, or reads an old Secret, has one."""
    cluster = installation.cluster
    unbound = cluster.kubectl("-n", RELEASE, "create", "token", "fenka-node").strip()
    thief = Thief(cluster, unbound)
    mark = {"metadata": {"annotations": {"fenka.io/resized": "{}"}}}
    for path in (VICTIM, node_path(victim["spec"]["nodeName"])):
        assert "names no node" in thief.patch(path, mark)


@pytest.mark.versions
def test_schedulers_token_removes_its_gate_and_writes_its_marks_only(
    installation: Installation, victim: Json, mallory: Mallory
) -> None:
    """It may patch all pods: their images, others' gates and what a binding copies stay out of its reach."""
    cluster = installation.cluster
    stolen = token_on(cluster, program(cluster, "app.kubernetes.io/component=scheduler"))
    thief = Thief(cluster, stolen)
    for patch, sentence in pod_patches():
        assert sentence in thief.patch(VICTIM, patch)
    for patch in (
        {"metadata": {"annotations": {"fenka.io/queue-position": "1"}}},
        {"metadata": {"labels": {"fenka.io/requeued-at": "1"}}},
    ):
        assert thief.patch(VICTIM, patch) == ACCEPTED
    for gates, answer in (
        ([FOREIGN_GATE], "may not write spec.schedulingGates"),
        ([FOREIGN_GATE, "fenka.io/queue"], "may not write spec.schedulingGates"),
        (["fenka.io/queue"], ACCEPTED),
    ):
        mallory.create(json.dumps(gated(gates)))
        assert answer in thief.patch(GATED, {"spec": {"schedulingGates": None}})
        cluster.kubectl("-n", TENANT, "delete", "pod", "gated", "--now")
    mallory.create(json.dumps(gated([])))
    for meta, answer in (
        ({"annotations": {"a": "b"}}, "only the records of a pod's card"),
        ({"labels": {"topology.kubernetes.io/zone": "b"}}, "only the records of a pod's card"),
        ({"annotations": {"fenka.io/cards": "{}"}}, ACCEPTED),
    ):
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": "gated", **meta},
            "target": {"kind": "Node", "name": victim["spec"]["nodeName"]},
        }
        assert answer in thief.create(f"{GATED}/binding", binding)
    for grace, answer in (
        ({"gracePeriodSeconds": 0}, "leave a pod its own grace period"),
        ({"gracePeriodSeconds": 3600}, "leave a pod its own grace period"),
        ({}, ACCEPTED),
    ):
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": "victim"},
            "deleteOptions": {"dryRun": ["All"], **grace},
        }
        assert answer in thief.create(f"{VICTIM}/eviction", eviction)


AUTOSCALER = {
    "enabled": True,
    "config": {
        "cluster": "c",
        "provider": {"kind": "ess", "region": "r"},
        "groups": [{"name": "t4", "id": "g", "types": ["t"], "max": 1}],
    },
}


@pytest.mark.usefixtures("victim")
def test_autoscalers_token_ends_the_status_of_pods_that_are_deleted_only(
    installation: Installation, mallory: Mallory
) -> None:
    """It deletes pods. A status alone would have a Job begin again while the program runs."""
    cluster = installation.cluster
    with installed_with(installation, f"autoscaler={json.dumps(AUTOSCALER)}"):
        account = "fenka-autoscaler"
        token = cluster.kubectl("-n", RELEASE, "create", "token", account).strip()
        thief = Thief(cluster, token)

        def refuses() -> bool:
            return "may not write metadata.labels" in thief.patch(
                VICTIM, {"metadata": {"labels": {"app": "other"}}}
            )

        wait_until("the policy", refuses)
        for patch, sentence in pod_patches():
            assert sentence in thief.patch(VICTIM, patch)
        failed = {"status": {"phase": "Failed"}}
        for status, sentence in (
            (failed["status"], "may not write status.phase"),
            ({"podIP": "10.0.0.1"}, "may not write status.podIP"),
            ({"conditions": []}, "may not write status.conditions"),
        ):
            assert sentence in thief.patch(f"{VICTIM}/status", {"status": status})
        kept = gated([]) | {"metadata": {"name": "gated", "finalizers": ["tenant/x"]}}
        mallory.create(json.dumps(kept))
        mallory.kubectl("delete", "pod", "gated", "--wait=false")
        assert thief.patch(f"{GATED}/status", failed) == ACCEPTED
        finalized = json.dumps({"metadata": {"finalizers": None}})
        mallory.kubectl("patch", "pod", "gated", "--type=merge", "-p", finalized)


def gated(gates: list[str]) -> Json:
    """Return a pod that nobody schedules, with these gates."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "gated"},
        "spec": {
            "schedulerName": "none",
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "c", "image": BUSYBOX}],
            "schedulingGates": [{"name": gate} for gate in gates],
        },
    }
