"""`fenka serve` and `fenka traffic-split` on a cluster: what is printed, refused and passed on."""

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from aiohttp import web

from fenka.cli.workloads import waiting
from fenka.jobs.kubernetes import (
    gateway_insertion,
    update_in_place,
)
from tests.builders import Json, node_json
from tests.cli.command import Completed, fenka
from tests.fakes.api_server import FakeApiServer, in_thread
from tests.training_builders import job_set

Run = Callable[..., Completed]
DEPLOY = ("serve", "custom", "--name", "bert", "--image", "i", "--restful-port", "5000")
V1 = (*DEPLOY, "-v", "v1", "--gpu-mem", "4")
V2 = (*DEPLOY, "-v", "v2", "--gpu-mem", "4")
COMMAND = ("python", "serve.py")


@pytest.fixture(autouse=True)
def a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who has neither a daemon nor a kubeconfig, and polls without pauses."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FENKA_RUNTIME", str(tmp_path / "no-daemon"))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setattr(gateway_insertion, "POLL_S", 0.0)
    monkeypatch.setattr(waiting, "POLL_S", 0.0)


@pytest.fixture
def server() -> FakeApiServer:
    """A cluster with fenka's chart, whose Deployments start at once."""
    server = FakeApiServer()
    published = {"gatewayImage": "fenka:1"}
    server.put(
        "configmaps", {"metadata": {"name": "fenka", "namespace": "kube-public"}, "data": published}
    )

    async def start(_: web.Request) -> None:
        server.run_deployments()

    server.after = start
    return server


@pytest.fixture
def run(server: FakeApiServer, tmp_path: Path) -> Iterator[Run]:
    """Return what runs a command with a kubeconfig that leads to the server, in namespace default."""
    with in_thread(server, tmp_path) as kubeconfig:

        def command(*words: str) -> Completed:
            verbs = 1 if words[0] != "serve" else 3 if words[1] == "update" else 2
            options = ("--kubeconfig", str(kubeconfig), "-n", "default")
            return fenka(*words[:verbs], *options, *words[verbs:])

        yield command


def ok(done: Completed) -> str:
    """Return what a command has printed."""
    assert done.exit_code == 0, done.stderr
    return done.stdout


def reached(server: FakeApiServer, **fields: object) -> None:
    """Give the service addresses, as a cluster does."""
    service = server.get("services", "bert", "default")
    ports = [{**port, "nodePort": 32761} for port in service["spec"]["ports"]]
    spec = {**service["spec"], "clusterIP": "172.28.8.37", **({"ports": ports} if fields else {})}
    server.put("services", {**service, "spec": spec, **fields})


def a_replica(server: FakeApiServer, version: str, name: str, **status: object) -> None:
    """Put a replica's pod there, as its ReplicaSet does."""
    template = server.get("deployments", f"bert-{version}", "default")["spec"]["template"]
    meta = {
        "name": name,
        "namespace": "default",
        "labels": template["metadata"]["labels"],
        "creationTimestamp": "2026-11-22T13:00:00Z",
    }
    containers = [{"name": "custom", "ready": True, "restartCount": 2, "state": {"running": {}}}]
    pod: Json = {
        "metadata": meta,
        "spec": {**template["spec"], "nodeName": "gpu-0"},
        "status": {"phase": "Running", "containerStatuses": containers, **status},
    }
    server.put("pods", pod)


# ---- deploying ----


def test_deployment_is_reported_as_a_service(run: Run, server: FakeApiServer) -> None:
    """One word is a shell's script; the options are the slice, the port and the number."""
    done = run(*V1, "--replicas", "2", "--gpu-core", "30", "python serve.py")
    assert ok(done) == (
        "The service bert has been submitted successfully\n"
        "You can run `fenka serve get bert -v v1` to check the service status\n"
    )
    deployment = server.get("deployments", "bert-v1", "default")
    assert deployment["spec"]["replicas"] == 2
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["sh", "-c", "python serve.py"]
    assert container["resources"]["limits"]["aliyun.com/gpu-mem"] == "4"


def test_version_is_the_time_when_none_is_given(run: Run, server: FakeApiServer) -> None:
    """As in arena."""
    ok(run(*DEPLOY, "--", *COMMAND))
    (deployment,) = server.all("deployments")
    version = deployment["metadata"]["labels"]["servingVersion"]
    assert len(version) == 14
    assert version.isdecimal()


def test_user_is_told_how_to_give_a_second_version_requests(run: Run) -> None:
    """Until then it gets none."""
    ok(run(*V1, *COMMAND))
    done = run(*V2, *COMMAND)
    assert ok(done).splitlines()[-1] == (
        "version v2 gets no requests yet: fenka traffic-split --name bert -v v1:WEIGHT -v v2:WEIGHT"
    )


def test_wait_ends_when_all_replicas_accept_requests(run: Run) -> None:
    """It says where they do."""
    done = run(*V1, "--replicas", "2", "--wait", *COMMAND)
    assert ok(done).splitlines()[-1].startswith("bert: 2 of 2 replicas accept requests at ")


def test_wait_says_why_a_replica_does_not_start(
    run: Run, server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler's sentence is the progress line, without what terminals would execute."""
    monkeypatch.setattr(update_in_place, "LOOKS", 1)
    ok(run(*V1, *COMMAND))
    server.after = None
    message = "no card fits\x1b[2J"
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": message,
    }
    a_replica(server, "v1", "bert-v1-x", phase="Pending", conditions=[condition])
    deployment = server.get("deployments", "bert-v1", "default")
    server.put("deployments", {**deployment, "status": {"availableReplicas": 0}})
    update = ("serve", "update", "custom", "--name", "bert", "--image", "j", "--wait")
    done = run(*update, "--timeout", "0")
    assert done.exit_code == 75
    assert "bert: 0 of 1 replicas accept requests: no card fits\\x1b[2J\n" in done.stderr
    assert "it stays, see fenka serve get bert -v v1" in done.stderr


def test_wait_after_an_update_is_for_replicas_of_the_new_kind(
    run: Run, server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old ones still accept requests."""
    monkeypatch.setattr(update_in_place, "LOOKS", 1)
    ok(run(*V1, *COMMAND))
    server.after = None
    deployment = server.get("deployments", "bert-v1", "default")
    for outdated in ({"updatedReplicas": 0}, {"replicas": 2}, {"observedGeneration": 1}):
        meta = {**deployment["metadata"], "generation": 2}
        status = {**deployment["status"], "observedGeneration": 2, **outdated}
        server.put("deployments", {**deployment, "metadata": meta, "status": status})
        update = ("serve", "update", "custom", "--name", "bert", "--wait", "--timeout", "0")
        done = run(*update)
        assert done.exit_code == 75
        assert "bert: its replicas are being replaced\n" in done.stderr


def test_dry_run_prints_what_is_created(run: Run, server: FakeApiServer) -> None:
    """Nothing more, nothing less, and nothing is created."""
    words = (*V1, "--replicas", "1..3", "--gateway-image", "fenka:1")
    printed = list(yaml.safe_load_all(ok(run(*words, "--dry-run", *COMMAND))))
    assert not server.writes
    ok(run(*words, *COMMAND))
    created = {
        (item["kind"], item["metadata"]["name"])
        for item in server.objects.values()
        if "kind" in item
    }
    assert {(item["kind"], item["metadata"]["name"]) for item in printed} == created


def test_user_is_told_what_follows_the_load(run: Run, server: FakeApiServer) -> None:
    """In one line, with a command that shows it; after an update, too."""
    gateway = (
        "the gateway follows the load of version v1: see kubectl logs -n default -l "
        "servingName=bert,fenka.io/role=gateway\n"
    )
    keda = "KEDA follows the load of version v1: see kubectl get scaledobject bert-v1 -n default\n"
    done = run(*V1, "--replicas", "0..3", *COMMAND)
    assert ok(done)
    assert done.stderr.endswith(gateway)
    server.discovered.add("/apis/keda.sh/v1alpha1")
    done = run("serve", "update", "custom", "--name", "bert", "--image", "j")
    assert ok(done)
    assert done.stderr.endswith(keda)
    done = run("serve", "update", "custom", "--name", "bert", "--scaler", "fenka")
    assert ok(done)
    assert done.stderr.endswith(gateway)
    assert "follows" not in run(*V2, *COMMAND).stderr


def test_dry_run_prints_kedas_object_when_it_is_named(run: Run) -> None:
    """Without a cluster it is unknown whether it has KEDA."""
    words = (*V1, "--replicas", "0..3", "--scaler", "keda", "--dry-run", *COMMAND)
    printed = list(yaml.safe_load_all(ok(run(*words))))
    kinds = {item["kind"]: item for item in printed}
    assert kinds["ScaledObject"]["spec"]["minReplicaCount"] == 0
    assert len(kinds["Role"]["rules"]) == 2
    assert "fenka.io/scaling" not in str(printed)


def test_file_has_the_same_fields(run: Run, server: FakeApiServer, tmp_path: Path) -> None:
    """Options prevail."""
    file = tmp_path / "bert.yaml"
    file.write_text(
        "name: bert\nversion: v1\nimage: i\nrestful-port: 5000\nup-after: 30s\nreplicas: 1..4\n"
        "command: [python, serve.py]\n"
    )
    ok(run("serve", "custom", "-f", str(file), "--replicas", "1..2"))
    text = server.get("services", "bert", "default")["metadata"]["annotations"]["fenka.io/scaling"]
    assert json.loads(text)["v1"] == {
        "least": 1,
        "most": 2,
        "target": 4,
        "up-after": 30.0,
        "down-after": 300.0,
    }


def test_model_servers_have_commands_of_their_own(run: Run, server: FakeApiServer) -> None:
    """arena's short name and spellings work."""
    names = ("--name", "m", "-v", "1", "--image", "i")
    tensorflow = ("--modelName", "m", "--model-path", "/m", "--gpumemory", "3", "--grpc-port", "9")
    ok(run("serve", "tf", *names, *tensorflow))
    (container,) = server.all("deployments")[0]["spec"]["template"]["spec"]["containers"]
    assert container["command"][:2] == ["tensorflow_model_server", "--port=9"]
    server.objects.clear()
    ok(run("serve", "triton", *names, "--model-repository", "/m"))
    (container,) = server.all("deployments")[0]["spec"]["template"]["spec"]["containers"]
    assert container["command"][0] == "tritonserver"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((*V1,), "no command given: write it after --"),
        (("serve", "custom", "--name", "b", "x"), "no port given: use --restful-port or --port"),
        ((*V1, "--replicas", "4..1", "x"), "invalid --replicas '4..1': expected N or MIN..MAX"),
        ((*V1, "--target", "many", "x"), "invalid --target 'many': expected a whole number"),
        ((*V1, "--scaler", "hpa", "x"), "invalid --scaler 'hpa': expected keda or fenka"),
        ((*V1, "--service", "Node", "x"), "invalid --service 'Node': expected LoadBalancer, Nod"),
        ((*V1, "--enable-istio", "x"), "--enable-istio is not supported: use fenka traffic-split"),
        (("serve", "kf", "x"), "serve kf is not supported: use fenka serve custom"),
        (("serve", "tf", "--name", "b"), "fenka serve tensorflow requires --model-name"),
        (
            ("traffic-split", "--name", "b", "-v", "v1:110"),
            "version weights must add up to 100, got",
        ),
        (
            ("traffic-split", "--name", "b", "-v", "v1:100"),
            "service b not found in namespace default",
        ),
        (("serve", "get", "nothing"), "service nothing not found in namespace default"),
        (("serve", "logs", "No thing"), "service No thing not found in namespace default"),
        (("serve", "delete", "../x"), "service ../x not found in namespace default"),
        (("serve", "update", "custom"), "--name is required: the service to change"),
    ],
)
def test_bad_input_is_refused_with_one_sentence(
    run: Run, server: FakeApiServer, words: tuple[str, ...], sentence: str
) -> None:
    """Nothing is created."""
    done = run(*words)
    assert done.exit_code != 0
    assert done.stderr.startswith(f"fenka: {sentence}"), done.stderr
    assert done.stderr.count("\n") == 1
    assert not server.writes


def test_user_without_rights_is_told_whom_to_ask(run: Run, server: FakeApiServer) -> None:
    """The ClusterRole of the chart has them."""
    server.forbidden.add("deployments")
    assert run(*V1, "x").stderr == (
        "fenka: user alice may not list deployments in namespace default: ask for the ClusterRole "
        "fenka-user\n"
    )


def test_user_is_told_whom_to_ask_when_a_gateway_would_have_more_rights(
    run: Run, server: FakeApiServer
) -> None:
    """The API server's own message has several lines."""
    message = (
        'roles.rbac.authorization.k8s.io "bert-gateway" is forbidden: user "alice" (groups=["a"]) is '
        "attempting to grant RBAC permissions not currently held:\n{APIGroups:[discovery.k8s.io]}"
    )

    async def refuse(request: web.Request) -> web.Response | None:
        if request.path.endswith("/roles"):
            return web.json_response({"message": message, "code": 403}, status=403)
        return None

    server.before = refuse
    assert run(*V1, "--replicas", "1..2", "x").stderr == (
        "fenka: user alice may not give a service's gateway its rights: ask for the ClusterRole fenka-user\n"
    )
    assert not server.writes


# ---- looking ----


def test_list_and_get_have_arenas_layout(run: Run, server: FakeApiServer) -> None:
    """Columns are padded to their longest cell."""
    ok(run(*V1, "--service", "NodePort", *COMMAND))
    reached(server, status={})
    server.put("nodes", node_json("gpu-0", 15 * 1024))
    a_replica(server, "v1", "bert-v1-6b9f4-x2x7k")
    assert ok(run("serve", "list")) == (
        "NAME  TYPE    VERSION  DESIRED  AVAILABLE  ADDRESS      PORTS                GPU\n"
        "bert  Custom  v1       1        1          172.28.8.37  RESTFUL:32761->5000  0.3\n"
    )
    lines = ok(run("serve", "get", "bert")).splitlines()
    age = lines.pop(6)
    assert age.startswith("Age:        ")
    assert lines[:9] == [
        "Name:       bert",
        "Namespace:  default",
        "Type:       Custom",
        "Version:    v1",
        "Desired:    1",
        "Available:  1",
        "Address:    172.28.8.37",
        "Port:       RESTFUL:32761->5000",
        "GPU:        0.3",
    ]
    assert lines[9:12] == [
        "",
        "Instances:",
        "  NAME                 STATUS   AGE  READY  RESTARTS  GPU  NODE",
    ]
    assert lines[12] == "  ----                 ------   ---  -----  --------  ---  ----"
    assert lines[13].startswith("  bert-v1-6b9f4-x2x7k  Running  ")
    assert lines[13].endswith("1/1    2         0.3  gpu-0")
    assert lines[14] == ""


def test_list_shows_the_share_of_each_version(run: Run, server: FakeApiServer) -> None:
    """Both have the address of the gateway."""
    ok(run(*DEPLOY, "-v", "v1", "--port", "8500", *COMMAND))
    ok(run(*DEPLOY, "-v", "v2", "--port", "8500", *COMMAND))
    assert ok(run("traffic-split", "--name", "bert", "-v", "v1:90", "-v", "v2:10")) == (
        "bert: v1 90%, v2 10%\n"
    )
    reached(server)
    assert ok(run("serve", "list", "-A")) == (
        "NAMESPACE  NAME  TYPE    VERSION  DESIRED  AVAILABLE  ADDRESS           PORTS\n"
        "default    bert  Custom  v1       1        1          172.28.8.37(90%)  GRPC:8500,RESTFUL:5000\n"
        "default    bert  Custom  v2       1        1          172.28.8.37(10%)  GRPC:8500,RESTFUL:5000\n"
    )
    screen = ok(run("serve", "get", "bert", "-e"))
    assert [line for line in screen.splitlines() if line.startswith("Version:")] == [
        "Version:    v1",
        "Version:    v2",
    ]
    both = json.loads(ok(run("serve", "get", "bert", "-o", "json")))
    assert [version["traffic"] for version in both] == [90, 10]
    document = json.loads(ok(run("serve", "get", "bert", "-v", "v2", "-o", "json")))
    assert (document["version"], document["traffic"], document["type"]) == ("v2", 10, "Custom")
    arenas = {"requestCPUs", "requestGPUs", "requestGPUMemory", "requestGPUCore"}
    assert arenas < document.keys()
    assert all(arenas < instance.keys() for instance in document["instances"])
    assert [each["version"] for each in yaml.safe_load(ok(run("serve", "list", "-o", "yaml")))] == [
        "v1",
        "v2",
    ]
    assert ok(run("serve", "list", "-T", "triton")) == (
        "NAME  TYPE  VERSION  DESIRED  AVAILABLE  ADDRESS  PORTS\n"
    )


def test_services_are_no_jobs(run: Run, server: FakeApiServer) -> None:
    """`fenka list` shows trainings and notebooks."""
    ok(run(*V1, *COMMAND))
    assert json.loads(ok(run("list", "-o", "json"))) == []
    assert server.all("deployments")


def test_logs_are_those_of_the_replica_that_is_named(run: Run, server: FakeApiServer) -> None:
    """Else of the oldest one."""
    ok(run(*V1, *COMMAND))
    for name in ("bert-v1-a", "bert-v1-b"):
        a_replica(server, "v1", name)
        server.logs[name, "custom"] = [f"2026-11-22T13:00:00Z {name} listens"]
    assert ok(run("serve", "logs", "bert")) == "bert-v1-a listens\n"
    assert (
        ok(run("serve", "logs", "bert", "-i", "bert-v1-b", "--tail", "1")) == "bert-v1-b listens\n"
    )
    assert run("serve", "logs", "bert", "-i", "bert-v2-b").stderr == (
        "fenka: version v1 of service bert has no instance bert-v2-b: its instances are bert-v1-a, "
        "bert-v1-b\n"
    )


@pytest.mark.parametrize("code", [0, 7])
def test_attach_runs_a_command_in_a_replica(
    run: Run, server: FakeApiServer, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Its exit code is the command's."""

    async def program(socket: web.WebSocketResponse) -> None:
        await socket.send_bytes(b"\x01hello\n")
        causes = [{"reason": "ExitCode", "message": str(code)}]
        failure = {"status": "Failure", "details": {"causes": causes}}
        status = failure if code else {"status": "Success"}
        await socket.send_bytes(b"\x03" + json.dumps(status).encode())

    reading, writing = os.pipe()
    os.close(writing)
    ok(run(*V1, *COMMAND))
    server.program = program
    with os.fdopen(reading) as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        none = run("serve", "attach", "bert", "--", "id")
        a_replica(server, "v1", "bert-v1-a")
        done = run("serve", "attach", "bert", "--", "id")
    assert none.stderr == (
        "fenka: version v1 of service bert has no replica now: see fenka serve list\n"
    )
    assert (done.exit_code, done.stdout) == (code, "hello\n")


# ---- changing ----


def test_split_changes_a_route_of_the_gateway_api_when_one_is_named(
    run: Run, server: FakeApiServer
) -> None:
    """Rules that lead elsewhere stay as they are, and fenka's own gateway is not asked."""
    ok(run(*V1, *COMMAND))
    ok(run(*V2, *COMMAND))
    split = ("traffic-split", "--name", "bert", "-v", "v1:90", "-v", "v2:10", "--http-route", "web")
    assert run(*split).stderr == (
        "fenka: --http-route requires the Gateway API, which this cluster does not have: leave it out\n"
    )
    server.discovered.add("/apis/gateway.networking.k8s.io/v1")
    assert run(*split).stderr.startswith("fenka: HTTPRoute web not found in namespace default: ")
    other = {"backendRefs": [{"name": "shop", "port": 80}], "matches": [{"path": {"value": "/s"}}]}
    meta = {"name": "web", "namespace": "default"}
    server.put("httproutes", {"metadata": meta, "spec": {"rules": [other]}})
    assert "has no rule that leads to service bert" in run(*split).stderr
    match = {"matches": [{"path": {"value": "/bert"}}]}
    rules = [
        other,
        {**match, "backendRefs": [{"name": "bert", "port": 5000}]},
        {"backendRefs": None},
    ]
    server.put("httproutes", {"metadata": meta, "spec": {"rules": rules}})
    for _ in range(2):
        ok(run(*split))
        changed = server.get("httproutes", "web", "default")["spec"]["rules"]
        assert changed[0] == other
        assert changed[1] == {
            **match,
            "backendRefs": [
                {"kind": "Service", "name": "bert-v1", "port": 5000, "weight": 90},
                {"kind": "Service", "name": "bert-v2", "port": 5000, "weight": 10},
            ],
        }
    weights = server.get("services", "bert", "default")["metadata"]["annotations"]
    assert weights["fenka.io/traffic"] == '{"v1":100,"v2":0}'


def test_update_changes_only_what_is_given(run: Run, server: FakeApiServer) -> None:
    """The rest stays as it was deployed."""
    ok(run(*V1, "-e", "A=1", "--replicas", "2", *COMMAND))
    update = ("serve", "update", "custom", "--name", "bert", "-e", "B=2", "--image", "j")
    assert ok(run(*update)) == "version v1 of service bert: updated\n"
    (container,) = server.get("deployments", "bert-v1", "default")["spec"]["template"]["spec"][
        "containers"
    ]
    values = {each["name"]: each["value"] for each in container["env"]}
    assert (values["A"], values["B"], container["image"]) == ("1", "2", "j")
    assert container["command"] == [*COMMAND]
    assert server.get("deployments", "bert-v1", "default")["spec"]["replicas"] == 2
    wrong = run("serve", "update", "triton", "--name", "bert", "--image", "k")
    assert wrong.stderr == (
        "fenka: version v1 of service bert is of kind custom: use fenka serve update custom\n"
    )


def test_delete_names_what_it_has_deleted(run: Run, server: FakeApiServer) -> None:
    """A version, or services with all of theirs; what does not exist is an error."""
    ok(run(*V1, *COMMAND))
    ok(run(*V2, *COMMAND))
    assert ok(run("serve", "del", "bert", "-v", "v2")) == "version v2 of service bert: deleted\n"
    done = run("serve", "delete", "nothing", "bert")
    assert (done.exit_code, done.stdout) == (1, "service bert: deleted\n")
    assert done.stderr == "fenka: service nothing not found in namespace default\n"
    server.collect_garbage()
    assert not [each for each in server.objects if each[1] == "default"]


def test_wait_says_for_what_when_a_replica_has_not_started(run: Run, server: FakeApiServer) -> None:
    """Not only that replicas are being replaced."""
    ok(run(*V1, "--", *COMMAND))
    deployment = server.get("deployments", "bert-v1", "default")
    server.after = None
    status = {"replicas": 2, "updatedReplicas": 1, "availableReplicas": 1}
    server.put("deployments", {**deployment, "status": status})
    pulling = {"name": "custom", "state": {"waiting": {"reason": "ImagePullBackOff"}}}
    a_replica(server, "v1", "bert-v1-new", phase="Pending", containerStatuses=[pulling])
    done = run("serve", "undo", "bert", "--wait", "--timeout", "0")
    assert "has not been updated" in done.stderr
    words = ("--name", "bert", "--env", "A=1", "--wait", "--timeout", "0")
    done = run("serve", "update", "custom", *words)
    assert done.exit_code
    assert "its replicas are being replaced: bert-v1-new is ImagePullBackOff" in done.stderr


def test_options_say_which_replica_is_first(run: Run, server: FakeApiServer) -> None:
    """By default fenka chooses."""
    ok(run(*V1, "--", *COMMAND))
    for option, surge in (("--no-surge", 0), ("--surge", 1)):
        ok(run("serve", "update", "custom", "--name", "bert", "--env", f"A={surge}", option))
        spec = server.get("deployments", "bert-v1", "default")["spec"]
        assert spec["strategy"]["rollingUpdate"]["maxSurge"] == surge
    done = run("serve", "undo", "bert")
    assert ok(done) == "version v1 of service bert: as before its last update\n"


# ---- beside other workloads ----


def test_ps_lists_what_runs_on_a_cluster_whatever_its_kind(run: Run, server: FakeApiServer) -> None:
    """A job that has ended is shown with -a; of a service each version."""
    ok(run(*V1, "--replicas", "2", *COMMAND))
    reached(server)
    a_replica(server, "v1", "bert-v1-a")
    end = {"type": "Completed", "status": "True", "lastTransitionTime": "2026-11-22T13:00:00Z"}
    server.put("jobsets", job_set("mpi-dist", roles={"launcher": 1}))
    server.put("jobsets", job_set("ended", roles={"launcher": 1}, conditions=[end]))
    lines = [line.split() for line in ok(run("ps")).splitlines()]
    assert lines[0] == ["NAME", "KIND", "VERSION", "STATE", "GPU", "AGE", "NODE", "DETAIL"]
    assert [line[:4] for line in lines[1:]] == [
        ["mpi-dist", "training", "-", "pending"],
        ["bert", "service", "v1", "2/2"],
    ]
    ended = [line.split()[:4] for line in ok(run("ps", "-a")).splitlines()]
    assert ["ended", "training", "-", "succeeded"] in ended
    rows = json.loads(ok(run("ps", "-o", "json")))
    assert [(row["name"], row["kind"], row["user"]) for row in rows] == [
        ("mpi-dist", "training", "default"),
        ("bert", "service", "default"),
    ]
    assert ok(run("ps", "-A")).startswith("NAMESPACE  NAME")


def test_service_is_found_by_its_name_as_a_job_is(run: Run, server: FakeApiServer) -> None:
    """`fenka serve get` and `fenka get` are the same."""
    ok(run(*V1, *COMMAND))
    a_replica(server, "v1", "bert-v1-a")
    server.logs["bert-v1-a", "custom"] = ["2026-11-22T13:00:00Z listens"]
    for words in (("get", "bert", "-o", "json"), ("logs", "bert"), ("get", "bert", "-v", "v1")):
        same, other = (re.sub(r"\d+s", "AGE", ok(run(*verb, *words))) for verb in ((), ("serve",)))
        assert same == other
    assert ok(run("list", "-T", "service")) == ok(run("serve", "list"))
    assert ok(run("wait", "bert")).startswith("bert: 1 of 1 replicas accept requests at ")
    assert ok(run("delete", "bert")) == "service bert: deleted\n"
    assert not server.all("deployments")


def test_kind_is_to_be_chosen_when_two_workloads_have_one_name(
    run: Run, server: FakeApiServer
) -> None:
    """Nothing is deleted before."""
    ok(run(*V1, *COMMAND))
    server.put("jobsets", job_set("bert", roles={"launcher": 1}))
    before = len(server.writes)
    for verb in ("get", "logs", "attach", "wait", "delete"):
        done = run(verb, "bert")
        assert (done.exit_code, done.stdout) == (2 if verb != "delete" else 1, "")
        assert done.stderr == (
            "fenka: bert is the name of a mpijob and a service: choose one by --type mpijob or --type "
            "service\n"
        )
    assert len(server.writes) == before
    assert "Custom" in ok(run("get", "bert", "--type", "service"))
    assert "STATUS: PENDING" in ok(run("get", "bert", "--type", "mpijob"))
    assert ok(run("delete", "bert", "-v", "v1")) == "version v1 of service bert: deleted\n"
    assert "STATUS: PENDING" in ok(run("get", "bert"))


def test_workload_is_found_without_the_right_to_read_those_of_other_kinds(
    run: Run, server: FakeApiServer
) -> None:
    """What cannot be read is named if the name is not found among the rest."""
    ok(run(*V1, *COMMAND))
    server.put("jobsets", job_set("mpi-dist", roles={"launcher": 1}))
    server.forbidden.add("deployments")
    assert "STATUS: PENDING" in ok(run("get", "mpi-dist"))
    assert "may not list deployments" in run("get", "bert").stderr
    server.forbidden = {"jobsets"}
    assert "Custom" in ok(run("get", "bert"))
    assert "may not list jobsets" in run("get", "mpi-dist").stderr
    server.forbidden = {"jobsets", "deployments"}
    assert "may not list" in run("get", "bert").stderr


def test_version_of_what_has_none_is_refused(run: Run) -> None:
    """Jobs have none."""
    done = run("get", "bert", "-T", "mpi", "-v", "v1")
    assert done.stderr == "fenka: only services have versions: leave out --version or --type\n"


def test_pending_replica_is_explained_when_the_service_is_named(
    run: Run, server: FakeApiServer
) -> None:
    """As the pods of a job are."""
    ok(run(*V1, *COMMAND))
    for name, phase in (("bert-v1-a", "Running"), ("bert-v1-b", "Pending")):
        a_replica(server, "v1", name, phase=phase)
        if phase == "Pending":
            pod = server.get("pods", name, "default")
            server.put("pods", {**pod, "spec": {**pod["spec"], "nodeName": ""}})
    assert json.loads(ok(run("why", "bert", "-o", "json")))["pod"] == "bert-v1-b"
    assert "bert-v1-b" not in run("why", "nothing").stdout
