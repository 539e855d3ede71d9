"""`fenka why POD`: what keeps a pod waiting, and what would help."""

import json
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fenka.cluster.training_objects import JOB
from tests.builders import (
    gang_labels,
    node,
    notebooks,
    on_card,
    pod,
    sharing,
    units,
    unschedulable,
)
from tests.cli.command import fenka
from tests.fakes.api_server import FakeApiServer, Json, in_thread
from tests.training_builders import foreign_job, job_set

GOLDEN = Path(__file__).parent / "golden"


def ask(server: FakeApiServer, folder: Path, *arguments: str) -> str:
    """What `fenka why` prints."""
    with in_thread(server, folder) as kubeconfig:
        result = fenka("why", *arguments, "--kubeconfig", str(kubeconfig))
    assert result.exit_code == 0, result.stderr
    return result.stdout


def data(server: FakeApiServer, folder: Path, *arguments: str) -> dict[str, Any]:
    """The same as data."""
    answer: dict[str, Any] = json.loads(ask(server, folder, *arguments, "-o", "json"))
    return answer


def test_screen_is_complete_when_a_fourth_notebook_is_pending(tmp_path: Path) -> None:
    """The whole screen of scenario S1's fourth pod."""
    message = (
        "0/2 nodes are available: 2 Insufficient aliyun.com/gpu-mem. preemption: 0/2 nodes are "
        "available: 2 No preemption victims found for incoming pod."
    )
    event = {
        "metadata": {
            "name": "e",
            "namespace": "default",
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "involvedObject": {"name": "notebook-4", "uid": "u-default-notebook-4"},
        "type": "Warning",
        "reason": "FailedScheduling",
        "message": message,
    }
    server = FakeApiServer.of(
        nodes=[sharing("gpu-1"), node("master")],
        pods=[*notebooks("gpu-1"), pod("notebook-4", units(4), status=unschedulable(message))],
        events=[event],
    )
    assert ask(server, tmp_path, "notebook-4", "-n", "default") == (GOLDEN / "why.txt").read_text()


def waiting(count: int = 4, **given: Any) -> Json:
    """The pod that is asked about."""
    return pod("p", units(count), **given)


def test_screen_says_once_when_a_pod_requests_in_two_dialects(tmp_path: Path) -> None:
    """The whole screen says it in one place."""
    both = waiting()
    both["spec"]["containers"][0]["resources"]["limits"]["tencent.com/vcuda-core"] = "10"
    screen = ask(FakeApiServer.of(nodes=[sharing("a")], pods=[both]), tmp_path, "default/p")
    assert screen.count("which do not go together") == 1
    assert "It can never start as it is: it asks for aliyun.com/gpu-mem" in screen
    assert "What helps:\n  - change the request where the pod is made" in screen


def test_nodes_share_a_line_when_their_reasons_are_equal(tmp_path: Path) -> None:
    """Nodes with the same reason are counted."""
    nodes = [sharing(f"n{number}", 2) for number in range(5)]
    screen = ask(FakeApiServer.of(nodes=nodes, pods=[waiting()]), tmp_path, "default/p")
    assert "n0, n1, n2 and 2 more  card 0: too little memory (2 of 2 units free)" in screen


def test_namespace_is_the_contexts_when_none_is_named(tmp_path: Path) -> None:
    """As kubectl: the context's namespace, unless one is named."""
    server = FakeApiServer.of(nodes=[sharing("a")], pods=[waiting(namespace="team")])
    assert data(server, tmp_path, "p")["namespace"] == "team"


def test_error_is_the_api_servers_when_the_pod_does_not_exist(tmp_path: Path) -> None:
    """The API server's own sentence."""
    with in_thread(FakeApiServer.of(), tmp_path) as kubeconfig:
        result = fenka("why", "nobody", "--kubeconfig", str(kubeconfig))
    assert result.exit_code == 1
    assert result.stderr == 'fenka: pods "nobody" not found\n'


def test_pod_of_a_job_is_explained_when_its_instance_is_named(tmp_path: Path) -> None:
    """`fenka get` shows instances, whose names are stable over restarts: the newest pod counts."""
    labels = {
        "fenka.io/job": "dist",
        "fenka.io/kind": "mpi",
        "fenka.io/role": "worker",
        "batch.kubernetes.io/job-completion-index": "1",
    }
    pods = []
    for name, created in (("dist-worker-0-1-new", "02"), ("dist-worker-0-1-old", "01")):
        each = pod(name, units(4), labels=labels)
        each["metadata"]["creationTimestamp"] = f"2026-01-{created}T00:00:00Z"
        pods.append(each)
    server = FakeApiServer.of(nodes=[sharing("a")], pods=pods)
    answer = data(server, tmp_path, "default/dist-worker-1")
    assert answer["pod"] == "dist-worker-0-1-new"
    with in_thread(server, tmp_path) as kubeconfig:
        result = fenka("why", "default/dist-worker-2", "--kubeconfig", str(kubeconfig))
    assert result.stderr == 'fenka: pods "dist-worker-2" not found\n'


def test_screen_is_shown_without_nodes_when_they_may_not_be_read(tmp_path: Path) -> None:
    """An ordinary user sees the pod, its events and what the scheduler says; one sentence names the role."""
    server = FakeApiServer.of(
        nodes=[sharing("a")], pods=[waiting(status=unschedulable("0/1 nodes are available"))]
    )
    server.forbidden = {"nodes"}
    screen = ask(server, tmp_path, "default/p")
    assert "default-scheduler says: 0/1 nodes are available" in screen
    assert screen.count("nodes and other users' pods may not be read") == 1
    assert "NODE" not in screen


NOW = 1_800_000_000.0
SLOT = {"pods": ["u-default-p"]}


def autoscaled(order: Json, events: Json | None = None, **status: Any) -> FakeApiServer:
    """A cluster with a pending pod, an order, and the autoscaler's status."""
    given = {"group": "t4-spot", "type": "gn6i", "zone": "g", "capacity": "spot", "price": 3.49}
    full = {**given, "state": "asked", "written_at": NOW - 20, "asked_at": NOW - 18, **order}

    def config_map(name: str, namespace: str, data: Json) -> Json:
        return {"metadata": {"name": name, "namespace": namespace}, "data": data}

    return FakeApiServer.of(
        pods=[waiting()],
        nodes=[node("cpu")],
        events=[events] if events else [],
        configmaps=[
            config_map("fenka", "kube-public", {"autoscalerNamespace": "fenka"}),
            config_map("fenka-autoscaler", "fenka", {"status": json.dumps(status)}),
            config_map("fenka-orders", "fenka", {"t4-spot-3": json.dumps(full)}),
        ],
    )


@pytest.mark.parametrize(
    ("slot", "sentence"),
    [
        ({"state": "written"}, "waits for a node of t4-spot, which is being asked for"),
        ({"state": "asked"}, "waits for a node of t4-spot, asked for 18 s ago"),
        ({"state": "known"}, "waits for a node of t4-spot, asked for 18 s ago"),
        (
            {"state": "joined", "node": "n1"},
            "waits for node n1 of t4-spot, which has joined and does not offer its cards yet",
        ),
        (
            {"state": "offering", "node": "n1"},
            "waits for kube-scheduler to place it on node n1 of t4-spot",
        ),
        ({"state": "failed"}, "gets no new node: 1 at its max of 10"),
        ({"state": "asked", "pods": []}, "gets no new node: 1 at its max of 10"),
    ],
)
def test_screen_says_which_node_is_waited_for(
    slot: Json, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the order that it is planned for; else why none is bought."""
    monkeypatch.setattr("fenka.cli.why.time", SimpleNamespace(time=lambda: NOW))
    unserved = {"1 at its max of 10": ["default/p"], "other": ["default/q"]}
    server = autoscaled({"slots": [{**SLOT, **slot}]}, unserved=unserved)
    assert ask(server, tmp_path, "default/p").splitlines()[1] == f"It {sentence}."
    explanation = data(server, tmp_path, "default/p")
    assert explanation["scale_out"] == sentence
    assert bool(explanation["hints"]) == sentence.startswith("gets no")


@pytest.mark.parametrize(
    ("reason", "sentence"),
    [
        ("FenkaScaleOut", "waits for new nodes: TEXT, 3 min ago"),
        ("FenkaNoScaleOut", "gets no new node: TEXT"),
        ("FenkaUnschedulable", ""),
    ],
)
def test_screen_uses_events_when_the_autoscalers_records_may_not_be_read(
    reason: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in the user's own namespace."""
    monkeypatch.setattr("fenka.cli.why.time", SimpleNamespace(time=lambda: NOW))
    event = {
        "metadata": {"name": "e", "namespace": "default"},
        "involvedObject": {"name": "p", "uid": "u-default-p"},
        "lastTimestamp": datetime.fromtimestamp(NOW - 200, UTC).isoformat(),
        "reason": reason,
        "message": "TEXT",
    }
    server = autoscaled({"slots": [{**SLOT, "state": "asked"}]}, event)
    server.forbidden = {"configmaps"}
    assert data(server, tmp_path, "default/p")["scale_out"] == sentence


@pytest.mark.parametrize(("age_s", "notes"), [(50, 0), (750, 1)])
def test_screen_says_so_when_the_autoscaler_does_not_run(
    age_s: int, notes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has published is no longer true, or says nothing of this pod."""
    monkeypatch.setattr("fenka.cli.why.time", SimpleNamespace(time=lambda: NOW))
    server = autoscaled({"slots": [SLOT]}, unserved={"1 at its max of 10": ["default/p"]})
    renewed = datetime.fromtimestamp(NOW - age_s, UTC).isoformat()
    metadata = {"name": "fenka-autoscaler", "namespace": "fenka"}
    server.put("leases", {"metadata": metadata, "spec": {"renewTime": renewed}})
    screen = ask(server, tmp_path, "default/p")
    assert screen.count("  - no autoscaler has run for 12m, so this is out of date: ") == notes


def test_screen_is_shown_when_the_autoscalers_records_are_not_understood(tmp_path: Path) -> None:
    """They are somebody else's mistake."""
    server = autoscaled({"slots": 3})
    assert data(server, tmp_path, "default/p")["scale_out"] == ""


@pytest.mark.parametrize("labels", [{JOB: "j"}, {"release": "j"}])
def test_pending_pod_of_a_job_is_explained_when_the_job_is_named(
    tmp_path: Path, labels: dict[str, str]
) -> None:
    """Its other pods have started."""
    pods = [
        pod("j-worker-0-0-a", units(4), node="a", labels=labels),
        pod("j-worker-0-1-b", units(4), labels=labels),
        pod("j-worker-0-2-c", units(4), node="a", labels=labels),
    ]
    server = FakeApiServer.of(nodes=[sharing("a")], pods=pods)
    server.groups = {"kubeflow.org": ["v1"]}
    if JOB in labels:
        server.put("jobsets", job_set("j", roles={"worker": 3}))
    else:
        server.put("tfjobs", foreign_job("j", "TFJob", []))
    assert data(server, tmp_path, "j", "-n", "default")["pod"] == "j-worker-0-1-b"


def test_error_says_why_a_job_has_no_pods(tmp_path: Path) -> None:
    """Such as one that was submitted to a queue."""
    server = FakeApiServer.of()
    server.put("jobsets", job_set("j", roles={"worker": 3}, suspend=True))
    with in_thread(server, tmp_path) as kubeconfig:
        result = fenka("why", "j", "-n", "default", "--kubeconfig", str(kubeconfig))
    assert result.exit_code == 1
    assert result.stderr.startswith("fenka: job j has no pods now: its submission was interrupted")


def test_gang_is_explained_from_its_pending_pods_when_one_of_them_is_asked_about(
    tmp_path: Path,
) -> None:
    """The screen reads only pods with a node of all namespaces, and a waiting gang has none."""
    labels = gang_labels("g", 2)
    members = [
        pod(f"g-{number}", units(12), labels=labels, status=unschedulable("no"))
        for number in range(2)
    ]
    holder = pod("h", units(4), node="a", annotations=on_card(0, 4))
    server = FakeApiServer.of(nodes=[sharing("a", cards=2)], pods=[*members, holder])
    screen = ask(server, tmp_path, "default/g-0")
    assert "its gang g: 2 of 2 pods exist, 0 of them have a node" in screen
    assert "all 2 pods of gang g start when default/h ends" in screen


def native_gang(minimum: int | None, **rest: Any) -> FakeApiServer:
    """Return a cluster with a pending member of Kubernetes' own PodGroup g. minimum: None without it."""
    group = {
        "metadata": {"name": "g", "namespace": "default", "uid": "u-g"},
        "spec": {"schedulingPolicy": {"gang": {"minCount": minimum}}},
    }
    member = waiting(status=unschedulable("no"), **rest)
    member["spec"]["schedulingGroup"] = {"podGroupName": "g"}
    groups = [] if minimum is None else [group]
    return FakeApiServer.of(nodes=[sharing("a")], pods=[member], podgroups=groups)


@pytest.mark.parametrize(
    ("minimum", "said"),
    [
        (3, "gang g starts when 2 more of its pods exist"),
        (1, "there is room for all 1 pods of gang g"),
        (None, "its PodGroup g does not exist"),
    ],
)
def test_gang_is_explained_when_it_is_a_pod_group(
    tmp_path: Path, minimum: int | None, said: str
) -> None:
    """Its size is in an object of scheduling.k8s.io."""
    assert said in ask(native_gang(minimum), tmp_path, "default/p")


def test_gang_is_named_when_its_pod_group_may_not_be_read(tmp_path: Path) -> None:
    """The pod has room by itself, which says nothing of its gang."""
    server = native_gang(3)
    server.forbidden = {"podgroups"}
    screen = ask(server, tmp_path, "default/p")
    assert "the pods of its PodGroup g" in screen
    assert "fenka-viewer" in screen
    assert "has room by what fenka knows" not in screen
