"""`fenka notebook --cluster`, `start` and `stop`: what is created, printed, refused and left."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from fenka.cli.workloads import cluster_submission, waiting
from fenka.cluster.training_objects import JOB, KIND
from tests.builders import Json, node
from tests.cli.command import Completed, fenka
from tests.cli.workloads.conftest import Run
from tests.fakes.api_server import FakeApiServer
from tests.training_builders import condition, member, moment

IMAGE = "tensorflow/tensorflow:1.4.1-gpu-py3"
CREATE = ("notebook", "--name", "nb", "--image", IMAGE, "--gpu-mem", "4")
PASSWORD = "mypassw0rd"
OWNED = ("services", "secrets", "configmaps")


@pytest.fixture(autouse=True)
def password(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the password as a careful user does, and poll without pauses."""
    monkeypatch.setenv("PASSWORD", PASSWORD)
    monkeypatch.setattr(waiting, "POLL_S", 0.0)


def ok(done: Completed) -> str:
    """Return what a command has printed."""
    assert done.exit_code == 0, done.stderr
    return done.stdout


def root(server: FakeApiServer, kind: str = "deployments") -> Json:
    """Return the notebook's root object."""
    return server.get(kind, "nb", "default")


def owners(server: FakeApiServer) -> set[str]:
    """Return the UIDs of what owns the notebook's other objects."""
    items = [item for kind in OWNED for item in server.all(kind)]
    assert len(items) == 3
    return {owner["uid"] for item in items for owner in item["metadata"]["ownerReferences"]}


def a_pod(server: FakeApiServer, *, ready: bool = True, **given: Any) -> None:
    """Put the notebook's pod there."""
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    pod = member("nb", "notebook", name="nb-x7k2p", status={"conditions": conditions}, **given)
    server.put("pods", pod)


def complete(server: FakeApiServer, name: str) -> None:
    """Let a Job complete, as when its notebook was idle."""
    job = server.get("jobs", name, "default")
    server.put("jobs", {**job, "status": {"conditions": [condition("Complete")]}})


# ---- creation ----


def test_notebook_runs_when_all_that_it_owns_exists(run: Run, server: FakeApiServer) -> None:
    """The Deployment has no replicas before."""
    assert ok(run(*CREATE, "--detach")) == "nb: created, see `fenka get nb`\n"
    paths = [path.rsplit("/", 1)[1] for path, _ in server.writes]
    assert (paths[0], sorted(paths[1:-1]), paths[-1]) == ("deployments", sorted(OWNED), "nb")
    assert server.writes[0][1]["spec"]["replicas"] == 0
    assert root(server)["spec"]["replicas"] == 1
    assert owners(server) == {root(server)["metadata"]["uid"]}


def test_root_is_a_job_when_the_notebook_ends_when_idle(run: Run, server: FakeApiServer) -> None:
    """A Deployment would start it again."""
    ok(run(*CREATE, "--idle", "2h", "--detach"))
    assert root(server, "jobs")["spec"]["suspend"] is False
    (container,) = root(server, "jobs")["spec"]["template"]["spec"]["containers"]
    assert container["command"][-4:] == ["--port", "8888", "--idle", "7200"]
    assert not server.all("deployments")


def test_user_is_told_when_an_idle_notebook_would_lose_its_files(
    run: Run, server: FakeApiServer
) -> None:
    """Those that are not on a claim end with the pod."""
    server.put("persistentvolumeclaims", {"metadata": {"name": "work", "namespace": "default"}})
    kept = run(*CREATE, "--idle", "2h", "--data", "work:/work", "--detach")
    assert (kept.exit_code, kept.stderr) == (0, "")
    server.objects.clear()
    lost = run(*CREATE, "--idle", "2h", "--detach")
    assert (lost.exit_code, lost.stderr) == (
        0,
        "fenka: the notebook's files are lost when it ends: --data CLAIM:PATH keeps them\n",
    )


def test_dry_run_prints_what_is_created(run: Run, server: FakeApiServer) -> None:
    """Nothing more, nothing less, and nothing is created."""
    printed = list(yaml.safe_load_all(ok(run(*CREATE, "--dry-run", "-o", "yaml"))))
    assert not server.writes
    as_json = json.loads(ok(run(*CREATE, "--dry-run", "-o", "json")))
    assert as_json["items"] == printed
    ok(run(*CREATE, "--detach"))
    for item in printed:
        kind, name = f"{item['kind'].lower()}s", item["metadata"]["name"]
        created = server.get(kind, name, "default")
        for field in set(item) - {"metadata"}:
            assert created[field] == item[field]
        assert created["metadata"]["labels"] == item["metadata"]["labels"]


def test_pod_has_what_options_of_all_jobs_say(run: Run) -> None:
    """The same options as those of submit and serve. Nobody outside reaches it by default."""
    words = (
        *("--scheduler", "fenka", "--selector", "zone=a", "--toleration", "gpu", "--priority", "p"),
        *("--env", "A=1", "--image-pull-secret", "r", "--image-pull-policy", "Always"),
        *("--label", "l=1", "--annotation", "n=1", "--run-as", "1000:100", "--inside", "mig"),
        *("--ingress", "lab.example.com", "--tls-secret", "cert", "--dry-run"),
    )
    root, service, ingress, *_ = yaml.safe_load_all(ok(run(*CREATE, *words)))
    template = root["spec"]["template"]
    assert template["metadata"]["labels"]["l"] == "1"
    assert template["metadata"]["annotations"] == {"n": "1", "fenka.io/inside": "mig"}
    pod = template["spec"]
    (container,) = pod["containers"]
    assert pod["schedulerName"] == "fenka"
    assert pod["priorityClassName"] == "p"
    assert pod["nodeSelector"] == {"zone": "a"}
    assert pod["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert pod["imagePullSecrets"] == [{"name": "r"}]
    assert pod["securityContext"]["runAsUser"] == 1000
    assert container["imagePullPolicy"] == "Always"
    assert {"name": "A", "value": "1"} in container["env"]
    assert service["spec"]["type"] == "ClusterIP"
    assert ingress["spec"]["tls"] == [{"hosts": ["lab.example.com"], "secretName": "cert"}]
    (rule,) = ingress["spec"]["rules"]
    assert rule["host"] == "lab.example.com"
    create = [word for word in CREATE if word not in ("--gpu-mem", "4")]
    root, *_ = yaml.safe_load_all(ok(run(*create, "--mig", "1g.5gb", "--dry-run")))
    (container,) = root["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/mig-1g.5gb": "1"}


def test_notebook_has_the_clusters_scheduler_and_its_namespaces_security(
    run: Run, server: FakeApiServer
) -> None:
    """The chart publishes the one, and the namespace's label is the other. Warnings are printed once."""
    data = {"defaults": '{"scheduler": "fenka"}'}
    server.put(
        "configmaps", {"metadata": {"name": "fenka", "namespace": "kube-public"}, "data": data}
    )
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    server.put("namespaces", {"metadata": {"name": "default", "labels": labels}})
    server.warnings = ['would violate "x"']
    done = run(*CREATE, "--detach")
    pod = server.get("deployments", "nb", "default")["spec"]["template"]["spec"]
    assert pod["schedulerName"] == "fenka"
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert ok(done)
    assert done.stderr == 'Warning: would violate "x"\n'


@pytest.mark.parametrize("step", range(5))
def test_get_reports_and_delete_removes_when_creation_is_interrupted(
    run: Run, server: FakeApiServer, step: int
) -> None:
    """What exists is owned by a root that runs nothing."""
    answered = 0

    async def drop(request: web.Request) -> web.Response | None:
        nonlocal answered
        if request.method in ("POST", "PATCH") and "dryRun" not in request.query:
            answered += 1
        # Neither the request nor the removal of what exists reaches the server: a killed client.
        dead = answered > step and request.method in ("POST", "PATCH", "DELETE")
        return web.json_response({"message": "gone", "code": 503}, status=503) if dead else None

    server.before = drop
    assert run(*CREATE, "--detach").exit_code == 1
    server.before = None
    if not server.all("deployments"):
        assert not [item for kind in OWNED for item in server.all(kind)]
        return
    assert root(server)["spec"]["replicas"] == 0
    uid = root(server)["metadata"]["uid"]
    for item in (item for kind in OWNED for item in server.all(kind)):
        assert [owner["uid"] for owner in item["metadata"]["ownerReferences"]] == [uid]
    assert "its submission was interrupted" in ok(run("get", "nb"))
    assert "was interrupted: delete it (fenka delete nb)" in run("start", "nb").stderr
    assert ok(run("delete", "nb")) == "The notebook nb has been deleted successfully\n"
    assert not server.all("deployments")


# ---- the password ----


def test_password_is_read_from_a_file(run: Run, server: FakeApiServer, tmp_path: Path) -> None:
    """Only its first line."""
    file = tmp_path / "password"
    file.write_text("from a file\nand more\n")
    assert run(*CREATE, "--password-file", str(file)).stderr == (
        "fenka: --password-file: leave out --password and PASSWORD\n"
    )
    ok(run(*CREATE, "--password", "", "--password-file", str(file), "--detach"))
    (secret,) = server.all("secrets")
    assert secret["data"] == {"password": "ZnJvbSBhIGZpbGU="}


def test_password_is_required_when_others_can_reach_the_notebook(
    run: Run, server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is created without."""
    monkeypatch.delenv("PASSWORD")
    done = run(*CREATE)
    assert done.exit_code == 2
    assert done.stderr == (
        "fenka: a notebook on a cluster requires a password: set PASSWORD in the environment, or use "
        "--password-file FILE\n"
    )
    assert not server.writes


@pytest.mark.parametrize("words", [["--password", PASSWORD], [f"--password={PASSWORD}"]])
def test_password_is_overwritten_when_it_is_on_the_command_line(words: list[str]) -> None:
    """All users can read the arguments of all processes."""
    program = (
        "import pathlib, sys\n"
        "from fenka.cli.notebook_command import PasswordOptions\n"
        f"assert PasswordOptions({PASSWORD[:4]!r} + {PASSWORD[4:]!r}).read(ask=False)\n"
        "sys.stdout.buffer.write(pathlib.Path('/proc/self/cmdline').read_bytes())\n"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program, *words, "after"], capture_output=True, check=True
    ).stdout
    assert PASSWORD.encode() not in printed
    assert printed.endswith(b"x" * len(PASSWORD) + b"\0after\0")


# ---- bad input ----


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--image", ""], "--image is required on Kubernetes; for a notebook on this machine use"),
        (["--name", "Mpi_Dist"], "invalid job name 'Mpi_Dist': use lowercase letters, digits"),
        (["--data", "pvc"], "invalid --data 'pvc': expected CLAIM:PATH, for example"),
        (["--data", "work:/work"], "claim work not found in namespace default"),
        (
            ["--gpu-mem", ""],
            "no amount given: use --gpu-mem 4 for a slice, --gpus 1",
        ),
        (["--gpu-mem", "1000MiB"], "the exact size 1000MiB is requested by HAMi's names, and this"),
        (["--idle", "soon"], "invalid --idle 'soon': expected a duration such as 30m, 10h or 7d"),
        (["--idle", "5s"], "--idle must be at least 60s, got 5s"),
        (["--directory", "/tmp"], "--directory is for a notebook on this machine: leave it out"),
        (["--tls-secret", "s"], "--tls-secret requires --ingress HOST"),
        (
            ["--toleration", "a=b=c"],
            "invalid --toleration 'a=b=c': expected all, KEY or K=V:EFFECT",
        ),
        (["--local"], "--local selects this machine, but another option selects a cluster"),
    ],
)
def test_nothing_is_created_when_the_input_is_bad(
    run: Run, server: FakeApiServer, words: list[str], sentence: str
) -> None:
    """One sentence each."""
    done = run(*CREATE, *words)
    assert done.exit_code != 0
    assert done.stderr.startswith(f"fenka: {sentence}"), done.stderr
    assert done.stderr.count("\n") == 1
    assert not server.writes


@pytest.mark.parametrize("kind", ["jobs", "jobsets", "deployments", "services"])
def test_notebook_is_refused_when_its_name_is_taken(
    run: Run, server: FakeApiServer, kind: str
) -> None:
    """By a job of fenka, or by anything else."""
    server.discovered.add("/apis/jobset.x-k8s.io/v1alpha2")
    server.put(kind, {"metadata": {"name": "nb", "namespace": "default", "labels": {JOB: "nb"}}})
    assert "job nb already exists in namespace default: " in run(*CREATE).stderr
    server.put(kind, {"metadata": {"name": "nb", "namespace": "default"}})
    assert "nb, which is not fenka's, already exists" in run(*CREATE).stderr
    assert not server.writes


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--service", "NodePort"], "--service is for a notebook on a cluster: leave it out"),
        (
            ["--data", "a:/b"],
            "--data is for a notebook on a cluster: leave it out, or use --cluster",
        ),
        (["--dry-run"], "--dry-run is for a notebook on a cluster: leave it out, or use --cluster"),
    ],
)
def test_options_of_a_cluster_are_refused_when_the_notebook_runs_here(
    words: list[str], sentence: str
) -> None:
    """They would do nothing."""
    done = fenka("notebook", "--local", "--gpu-mem", "4", *words)
    assert (done.exit_code, done.stderr.startswith(f"fenka: {sentence}")) == (2, True)


def test_missing_right_is_explained(run: Run, server: FakeApiServer) -> None:
    """Test that a missing right is explained."""
    server.forbidden.add("secrets")
    assert run(*CREATE).stderr == (
        "fenka: user alice may not create secrets in namespace default: ask for the ClusterRole "
        "fenka-user\n"
    )
    assert not server.writes


# ---- the address ----


@pytest.mark.parametrize(
    ("service", "status", "address"),
    [
        ("LoadBalancer", {"ip": "39.100.193.19"}, "http://39.100.193.19/lab"),
        ("LoadBalancer", {"hostname": "lb.example.com"}, "http://lb.example.com/lab"),
        ("NodePort", {}, "http://192.168.1.214:32285/lab"),
        (
            "ClusterIP",
            {},
            "http://localhost:8888/lab after kubectl port-forward -n default service/nb 8888:80",
        ),
    ],
)
def test_address_is_printed_when_the_notebook_answers(
    run: Run, server: FakeApiServer, service: str, status: Json, address: str
) -> None:
    """By the type of its Service."""
    server.put("nodes", node("sd-cluster-04", address="192.168.1.214"))

    async def act(request: web.Request) -> None:
        """Do what the cluster's controllers do."""
        if request.method == "PATCH":
            made = server.get("services", "nb", "default")
            port = made["spec"]["ports"][0]
            if service != "ClusterIP":
                port["nodePort"] = 32285
            ingress = {"loadBalancer": {"ingress": [status]}} if status else {}
            server.put("services", {**made, "status": ingress})
            a_pod(server, node="sd-cluster-04")

    server.after = act
    printed = ok(run(*CREATE, "--service", service))
    assert printed.splitlines()[-1] == f"nb: {address}"
    shown = ok(run("get", "nb"))
    assert f"\n\nNotebook:\n  {address}\n" in shown
    assert json.loads(ok(run("get", "nb", "-o", "json")))["address"] == address
    assert ok(run("list", "-T", "notebook")).splitlines()[1].split()[:3] == [
        "nb",
        "RUNNING",
        "NOTEBOOK",
    ]


def test_node_port_is_printed_when_no_external_address_comes(
    run: Run, server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clusters without load balancers never give one."""
    monkeypatch.setattr(cluster_submission, "EXTERNAL_ADDRESS_S", 0.0)
    server.put("nodes", node("sd-cluster-04", address="192.168.1.214"))
    ok(run(*CREATE, "--detach", "--service", "LoadBalancer"))
    made = server.get("services", "nb", "default")
    made["spec"]["ports"][0]["nodePort"] = 32285
    server.put("services", made)
    a_pod(server, node="sd-cluster-04")
    ok(run("stop", "nb"))
    done = run("start", "nb")
    assert done.stdout.splitlines()[-1] == "nb: http://192.168.1.214:32285/lab"
    assert done.stderr == "nb: its Service has no external address yet\n"


def test_reason_is_printed_while_the_notebook_waits(run: Run, server: FakeApiServer) -> None:
    """The sentence of fenka why, then what becomes of the pod; not more than the given time."""
    server.put("nodes", node("a", resources={"aliyun.com/gpu-mem": 14}))
    a_pod(server, ready=False, limits={"aliyun.com/gpu-mem": 4})
    done = run(*CREATE, "--timeout", "0")
    assert done.exit_code == 75
    assert done.stderr.startswith("nb: waits for its slice: ")
    assert "nb does not answer after 0 s" in done.stderr
    assert "it stays, see fenka get nb" in done.stderr
    assert root(server)["spec"]["replicas"] == 1


@pytest.mark.parametrize("words", [[], ["--idle", "2h"]])
def test_reason_is_printed_when_no_pod_can_be_created(
    run: Run, server: FakeApiServer, words: list[str]
) -> None:
    """An exceeded quota, for example: Deployments have it as a condition, Jobs as an event."""
    quota = 'pods "nb-" is forbidden: exceeded quota'

    async def act(request: web.Request) -> None:
        """Do what the cluster's controllers do."""
        if request.method != "PATCH":
            return
        if words:
            event = {
                "metadata": {"name": "nb.1", "namespace": "default"},
                "involvedObject": {"uid": root(server, "jobs")["metadata"]["uid"]},
                "type": "Warning",
                "message": quota,
            }
            server.put("events", event)
        else:
            failed = condition("ReplicaFailure", message=quota)
            server.put("deployments", {**root(server), "status": {"conditions": [failed]}})

    server.after = act
    done = run(*CREATE, *words, "--timeout", "0")
    assert f"nb: {quota}\n" in done.stderr


def test_wait_ends_when_the_pod_cannot_start(run: Run, server: FakeApiServer) -> None:
    """An image without Jupyter, for example."""
    state = {"name": "main", "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    server.put("nodes", node("a"))
    pod = member("nb", "notebook", name="nb-x", node="a", status={"containerStatuses": [state]})
    server.put("pods", pod)
    done = run(*CREATE)
    assert (done.exit_code, done.stderr) == (
        1,
        "fenka: nb does not start, its pod nb-x is in CrashLoopBackOff: see fenka logs nb and fenka get "
        "nb -e\n",
    )


# ---- stop and start ----


@pytest.mark.parametrize(
    ("words", "kind", "running", "stopped"),
    [
        ([], "deployments", {"replicas": 1}, {"replicas": 0}),
        (["--idle", "2h"], "jobs", {"suspend": False}, {"suspend": True}),
    ],
)
def test_notebook_is_stopped_and_started(
    run: Run, server: FakeApiServer, words: list[str], kind: str, running: Json, stopped: Json
) -> None:
    """Its root, its claims and its address stay."""
    ok(run(*CREATE, *words, "--detach"))
    uid = root(server, kind)["metadata"]["uid"]
    assert ok(run("stop", "nb")) == "nb: stopped\n"
    assert root(server, kind)["spec"].items() >= stopped.items()
    shown = ok(run("get", "nb"))
    assert "STATUS: STOPPED" in shown
    assert "Note: fenka start nb starts it again" in shown
    assert ok(run("stop", "nb")) == "nb: stopped\n"
    assert ok(run("start", "nb", "--detach")) == "nb: started, see `fenka get nb`\n"
    assert root(server, kind)["spec"].items() >= running.items()
    assert owners(server) == {uid}
    assert run("start", "nb").stderr == "fenka: notebook nb runs already: see fenka get nb\n"


def test_new_run_is_owned_by_the_root_when_an_idle_notebook_is_started(
    run: Run, server: FakeApiServer
) -> None:
    """So the password, the Service and its address stay, and one deletion removes all."""
    ok(run(*CREATE, "--idle", "2h", "--detach"))
    first = root(server, "jobs")
    complete(server, "nb")
    assert ok(run("list")).splitlines()[1].split()[:2] == ["nb", "STOPPED"]
    ok(run("prune", "--since", "1s"))
    server.writes.clear()
    ok(run("start", "nb", "--detach"))
    assert len(server.writes) == 1
    second = server.get("jobs", "nb-run-2", "default")
    (owner,) = second["metadata"]["ownerReferences"]
    assert owner == {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "name": "nb",
        "uid": first["metadata"]["uid"],
        "controller": True,
    }
    assert second["spec"]["template"] == first["spec"]["template"]
    assert owners(server) == {first["metadata"]["uid"]}
    (line,) = ok(run("list")).splitlines()[1:]
    assert line.split()[:2] == ["nb", "PENDING"]
    a_pod(server, node="a")
    assert "nb-notebook-0" in ok(run("get", "nb"))
    assert "RUNNING" in ok(run("get", "nb"))
    assert run("start", "nb").stderr == "fenka: notebook nb runs already: see fenka get nb\n"


def test_earlier_runs_are_removed_when_a_notebook_is_started_again(
    run: Run, server: FakeApiServer
) -> None:
    """All but the root, which owns everything."""
    ok(run(*CREATE, "--idle", "2h", "--detach"))
    complete(server, "nb")
    ok(run("start", "nb", "--detach"))
    complete(server, "nb-run-2")
    assert ok(run("list")).splitlines()[1].split()[:2] == ["nb", "STOPPED"]
    ok(run("start", "nb", "--detach"))
    assert {job["metadata"]["name"] for job in server.all("jobs")} == {"nb", "nb-run-3"}
    ok(run("stop", "nb"))
    assert server.get("jobs", "nb-run-3", "default")["spec"]["suspend"] is True
    ok(run("delete", "nb"))
    assert ("jobs", "default", "nb") not in server.objects


def test_notebook_is_started_once_when_two_users_start_it(run: Run, server: FakeApiServer) -> None:
    """The name of the run decides."""
    ok(run(*CREATE, "--idle", "2h", "--detach"))
    complete(server, "nb")

    async def be_first(request: web.Request) -> None:
        if request.path.endswith("/jobs") and request.method == "POST":
            server.put("jobs", {"metadata": {"name": "nb-run-2", "namespace": "default"}})

    server.before = be_first
    assert run("start", "nb").stderr == "fenka: notebook nb is being started already\n"


@pytest.mark.parametrize(
    "spec",
    ["", "{", '{"name": "nb"}', '{"name": "nb", "image": "i", "idle": 60, "command": "rm"}'],
)
def test_start_is_refused_when_the_annotation_was_changed(
    run: Run, server: FakeApiServer, spec: str
) -> None:
    """Whoever may write it could run anything as another user's notebook."""
    ok(run(*CREATE, "--idle", "2h", "--detach"))
    complete(server, "nb")
    job = root(server, "jobs")
    job["metadata"]["annotations"]["fenka.io/spec"] = spec
    server.put("jobs", job)
    done = run("start", "nb")
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("fenka: notebook nb cannot be started, because its annotation")
    assert len(server.all("jobs")) == 1


def test_only_notebooks_are_stopped_and_started_on_a_cluster(
    run: Run, server: FakeApiServer
) -> None:
    """A training would begin anew."""
    for command in ("stop", "start"):
        assert run(command, "nothing").stderr == (
            "fenka: job nothing not found in namespace default\n"
        )
    metadata = {
        "name": "train",
        "namespace": "default",
        "uid": "u",
        "labels": {JOB: "train", KIND: "mpi"},
        "creationTimestamp": moment(),
    }
    server.put("jobs", {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata})
    for command in ("stop", "start"):
        assert run(command, "train").stderr == (
            "fenka: train is not a notebook: a training on a cluster is ended by fenka delete train\n"
        )
