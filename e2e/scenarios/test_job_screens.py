"""Look at jobs as users do: hundreds of fenka's own, and those of arena's operators."""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster import Cluster, ClusterError, wait_until
from e2e.configuration import AUDITED
from e2e.images import BUSYBOX
from e2e.scenarios.installation import Installation, kubeconfig_of
from e2e.scenarios.jobs import Jobs
from fenka.cluster.training_objects import COMPLETION_INDEX, JOBS_API, JOBSETS_API
from fenka.jobs.collection import Contents
from fenka.jobs.manifests.training_manifest import render
from fenka.jobs.training import TrainingSpec

Json = dict[str, Any]

# ---- 500 jobs ----

SINGLE, SETS = 450, 50
CREATE = """
import asyncio, json, pathlib, sys
from fenka.kubernetes.api_client import Api
async def main():
    async with await Api.connect(pathlib.Path(sys.argv[1])) as api:
        free = asyncio.Semaphore(8)
        async def create(path, item):
            async with free:
                await api.create(path, dict, item)
        for group in json.load(sys.stdin):
            await asyncio.gather(*(create(*each) for each in group))
asyncio.run(main())
"""
"""Creates groups of objects one after another: each object with the path of its collection."""


def suspended(name: str, workers: int) -> Sequence[tuple[str, Json]]:
    """Return the root object of a job that does not start, and its pods, which no scheduler places."""
    spec = TrainingSpec(
        kind="pytorch", name=name, image=BUSYBOX, command=["true"], workers=workers, gpus=1
    )
    rendered = render(spec, Contents())
    root = rendered.root
    root["spec"]["suspend"] = True
    kind = {"Job": "jobs", "JobSet": "jobsets"}[root["kind"]]
    objects = [(f"/apis/{root['apiVersion']}/namespaces/NAMESPACE/{kind}", root)]
    for job in rendered.role_jobs:
        for index in range(job["spec"]["completions"]):
            template = job["spec"]["template"]
            metadata = {
                "name": f"{job['metadata']['name']}-{index}",
                "labels": template["metadata"]["labels"] | {COMPLETION_INDEX: str(index)},
            }
            gated = template["spec"] | {"schedulingGates": [{"name": "fenka.test/never"}]}
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": gated}
            objects.append(("/api/v1/namespaces/NAMESPACE/pods", pod))
    return objects


@pytest.fixture
def audited(installation: Installation, tmp_path: Path) -> Iterator[Path]:
    """Provide the kubeconfig of a user whose requests are in the API server's audit log."""
    cluster = installation.cluster
    cluster.kubectl("create", "namespace", AUDITED)
    cluster.kubectl("-n", AUDITED, "create", "serviceaccount", "reader")
    rights = ("--clusterrole=cluster-admin", f"--serviceaccount={AUDITED}:reader")
    cluster.kubectl("create", "clusterrolebinding", AUDITED, *rights)
    yield kubeconfig_of(cluster, "reader", AUDITED, tmp_path / "kubeconfig")
    cluster.kubectl("delete", "clusterrolebinding", AUDITED)
    cluster.kubectl("delete", "namespace", AUDITED)


def requests(cluster: Cluster, kubeconfig: Path) -> Sequence[Json]:
    """Return the requests in the audit log, after all of those that this user has sent before."""
    marker = "/version?last"
    cluster.kubectl("--kubeconfig", str(kubeconfig), "get", "--raw", marker)
    wait_until("the audit log", lambda: marker in cluster.audit_log.read_text())
    return [json.loads(line) for line in cluster.audit_log.read_text().splitlines()]


@pytest.fixture
def many_jobs(jobs: Jobs) -> Iterator[Jobs]:
    """Provide the jobs of a namespace, and delete hundreds of objects by one request a kind."""
    yield jobs
    background = "propagationPolicy=Background&gracePeriodSeconds=0"
    for api, kind in ((JOBSETS_API, "jobsets"), (JOBS_API, "jobs"), ("/api/v1", "pods")):
        path = f"{api}/namespaces/{jobs.namespace}/{kind}?{background}"
        jobs.installation.cluster.kubectl("delete", "--raw", path)


@pytest.mark.full
def test_list_sends_one_request_a_kind_when_there_are_500_jobs(
    many_jobs: Jobs, audited: Path
) -> None:
    """Every job is shown with its cards. The API server's own log has the requests."""
    cluster = many_jobs.installation.cluster
    created = [suspended(f"single-{number}", 1) for number in range(SINGLE)]
    created += [suspended(f"set-{number}", 2) for number in range(SETS)]
    groups = [root for root, *_ in created], [pod for _, *pods in created for pod in pods]
    given = json.dumps(groups).replace("NAMESPACE", many_jobs.namespace)
    cluster.run(sys.executable, "-c", CREATE, str(cluster.kubeconfig), stdin=given)

    options = ("--layout", "arena", "--kubeconfig", str(audited))
    head, *rows = many_jobs.table("list", *options)
    assert head[:3] == ["NAME", "STATUS", "TRAINER"]
    cells = {tuple(row[1:3] + row[4:]) for row in rows if row[0].startswith("single-")}
    assert cells == {("QUEUING", "PYTORCHJOB", "1", "N/A", "N/A")}
    cells = {tuple(row[1:3] + row[4:]) for row in rows if row[0].startswith("set-")}
    assert cells == {("QUEUING", "PYTORCHJOB", "2", "N/A", "N/A")}
    assert len({row[0] for row in rows}) == len(rows) == SINGLE + SETS
    lists = Counter(
        request["objectRef"]["resource"]
        for request in requests(cluster, audited)
        if request["verb"] == "list"
    )
    kinds = ("jobs", "jobsets", "deployments", "pods", "services", "nodes")
    assert lists == dict.fromkeys(kinds, 1)


# ---- jobs of arena's operators ----

GROUP = "kubeflow.org"
OPEN = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
TIME = {"type": "string", "format": "date-time"}
CONDITION = {
    "type": "object",
    "required": ["type", "status"],
    "properties": {
        **{name: {"type": "string"} for name in ("type", "status", "reason", "message")},
        "lastUpdateTime": TIME,
        "lastTransitionTime": TIME,
    },
}
STATUS = {
    "type": "object",
    "properties": {
        "conditions": {"type": "array", "items": CONDITION},
        "replicaStatuses": {"type": "object", "additionalProperties": OPEN},
        "startTime": TIME,
        "completionTime": TIME,
        "lastReconcileTime": TIME,
        # MPIJob v1alpha1's.
        "launcherStatus": {"type": "string", "enum": ["Active", "Succeeded", "Failed"]},
        "workerReplicas": {"type": "integer"},
    },
}


def definition(kind: str, *versions: str) -> str:
    """Return the CustomResourceDefinition of an operator's kind. The first version is stored."""
    singular = kind.lower()
    schema = {"type": "object", "properties": {"spec": OPEN, "status": STATUS}}
    served = {
        "served": True,
        "subresources": {"status": {}},
        "schema": {"openAPIV3Schema": schema},
    }
    names = {
        "kind": kind,
        "plural": f"{singular}s",
        "singular": singular,
        "listKind": f"{kind}List",
    }
    document = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{singular}s.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": names,
            "versions": [
                {"name": version, "storage": version == versions[0], **served}
                for version in versions
            ],
        },
    }
    return json.dumps(document)


DEFINITIONS = {
    "mpijobs": definition("MPIJob", "v1", "v1alpha1"),
    "tfjobs": definition("TFJob", "v1"),
}


@pytest.fixture
def operators(cluster: Cluster) -> Iterator[None]:
    """Provide the kinds of arena's operators; nothing acts on their objects."""
    for text in DEFINITIONS.values():
        cluster.apply(text)
    listing = ("get", ",".join(f"{plural}.v1.{GROUP}" for plural in DEFINITIONS))
    wait_until("the operators' kinds", lambda: cluster.kubectl(*listing) == "")
    yield
    for text in DEFINITIONS.values():
        cluster.kubectl("delete", "--wait", "-f", "-", stdin=text)


def job(kind: str, version: str, name: str, spec: Json) -> str:
    """Return an object of an operator's kind, as a user of arena creates it."""
    document = {
        "apiVersion": f"{GROUP}/{version}",
        "kind": kind,
        "metadata": {"name": name, "labels": {"app": kind.lower(), "release": name}},
        "spec": spec,
    }
    return json.dumps(document)


def replicas(**numbers: int) -> Json:
    """Return the roles of a job in the words of the operators' version 1."""
    container = {"name": "main", "image": BUSYBOX}
    return {
        role.capitalize() if role != "ps" else "PS": {
            "replicas": number,
            "restartPolicy": "Never",
            "template": {"spec": {"containers": [container]}},
        }
        for role, number in numbers.items()
    }


def conditions(*types: str) -> Json:
    """Return a status whose last condition is the current one."""
    at = "2026-01-01T00:00:00Z"
    return {
        "conditions": [
            {
                "type": type_,
                "status": "True" if type_ in ("Created", types[-1]) else "False",
                "reason": type_,
                "message": "",
                "lastUpdateTime": at,
                "lastTransitionTime": at,
            }
            for type_ in types
        ]
    }


def pod(name: str, node: str, labels: Mapping[str, str], script: str) -> str:
    """Return a pod as an operator creates it."""
    container = {
        "name": "main",
        "image": BUSYBOX,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", script],
    }
    spec = {
        "nodeName": node,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
    }
    metadata = {"name": name, "labels": dict(labels)}
    return json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})


def labels(job_name: str, role: str, index: int) -> Mapping[str, str]:
    """Return the labels of a pod of the training operator."""
    prefix = "training.kubeflow.org"
    return {
        f"{prefix}/job-name": job_name,
        f"{prefix}/replica-type": role,
        f"{prefix}/replica-index": str(index),
    }


STAYS = "; exec sleep 100000"


@pytest.fixture
def foreign(operators: None, jobs: Jobs) -> Sequence[str]:
    """Create jobs with their status and pods. Return `KIND/NAME` of each."""
    del operators
    cluster, namespace = jobs.installation.cluster, jobs.namespace
    first, second = (node.name for node in cluster.nodes)
    arenas = {"mpi_job_name": "bert", "release": "bert"}
    texts = [
        # As arena's mpi-operator: no conditions, its own labels.
        job("MPIJob", "v1alpha1", "bert", {"replicas": 1, "template": {"spec": {}}}),
        job("MPIJob", "v1", "resnet", {"mpiReplicaSpecs": replicas(launcher=1, worker=1)}),
        job("TFJob", "v1", "mnist", {"tfReplicaSpecs": replicas(chief=1, ps=1)}),
        pod(
            *("bert-launcher-x7k2p", first),
            *(arenas | {"mpi_role_type": "launcher"}, "echo bert trains" + STAYS),
        ),
        pod("bert-worker-0", second, arenas | {"mpi_role_type": "worker"}, "echo waits" + STAYS),
        pod("resnet-launcher", first, labels("resnet", "launcher", 0), "echo resnet is done"),
        pod("mnist-chief-0", second, labels("mnist", "chief", 0), "echo mnist trains" + STAYS),
        pod("mnist-ps-0", first, labels("mnist", "ps", 0), "echo mnist serves" + STAYS),
    ]
    cluster.apply("\n---\n".join(texts), namespace)
    statuses = {
        f"mpijobs.v1alpha1.{GROUP}/bert": {"launcherStatus": "Active", "workerReplicas": 1},
        f"mpijobs.v1.{GROUP}/resnet": conditions("Created", "Running", "Succeeded"),
        f"tfjobs.v1.{GROUP}/mnist": conditions("Created", "Running"),
    }
    for name, status in statuses.items():
        patch = ("--subresource=status", "--type=merge", "-p", json.dumps({"status": status}))
        cluster.kubectl("-n", namespace, "patch", name, *patch)
    for name in ("bert-launcher-x7k2p", "bert-worker-0", "mnist-chief-0", "mnist-ps-0"):
        cluster.wait_for_pod(name, namespace)
    cluster.wait_for_pod("resnet-launcher", namespace, "Succeeded")
    return [*statuses]


@pytest.mark.full
def test_jobs_of_arenas_operators_are_shown_and_never_changed(
    jobs: Jobs, foreign: Sequence[str]
) -> None:
    """`list`, `get`, `top job` and `logs` show them; `delete` and `prune` leave them."""
    cluster, namespace = jobs.installation.cluster, jobs.namespace
    first, second = (node.address for node in cluster.nodes)

    def objects() -> Mapping[str, Json]:
        shown = ("-n", namespace, "get", *foreign, "-o", "json")
        items = json.loads(cluster.kubectl(*shown))["items"]
        return {item["metadata"]["name"]: item for item in items}

    before, pods = objects(), {item["metadata"]["uid"] for item in cluster.list("pods", namespace)}
    # NAME STATUS TRAINER AGE NODE
    assert sorted([*row[:3], row[4]] for row in jobs.table("list")[1:]) == [
        ["bert", "RUNNING", "MPIJOB", first],
        ["mnist", "RUNNING", "TFJOB", second],
        ["resnet", "SUCCEEDED", "MPIJOB", first],
    ]
    table = jobs.table("get", "mnist")
    assert table[0] == ["STATUS:", "RUNNING"]
    assert [[*row[:3], *row[4:]] for row in table[-2:]] == [
        ["mnist", "RUNNING", "TFJOB", "mnist-chief-0", second],
        ["mnist", "RUNNING", "TFJOB", "mnist-ps-0", first],
    ]
    assert jobs.record("resnet")["instances"][0]["status"] == "Completed"
    assert jobs.record("bert")["chiefName"] == "bert-launcher-x7k2p"
    assert {row[0] for row in jobs.table("top", "job")[1:4]} == before.keys()
    assert jobs.fenka("logs", "bert") == "bert trains\n"
    assert jobs.fenka("logs", "resnet") == "resnet is done\n"
    assert jobs.fenka("logs", "mnist", "-i", "mnist-ps-0") == "mnist serves\n"

    for name, kind in (("bert", "mpijob"), ("resnet", "mpijob"), ("mnist", "tfjob")):
        refused = f"job {name} was not created by fenka, .*: use kubectl delete {kind} {name} -n"
        with pytest.raises(ClusterError, match=refused):
            jobs.fenka("delete", name)
    assert jobs.fenka("prune", "--since=1s") == "no job has ended more than 1s ago\n"
    assert objects() == before
    assert {item["metadata"]["uid"] for item in cluster.list("pods", namespace)} == pods
