"""`fenka list`, `get`, `top job`, `delete` and `prune` on a cluster."""

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from fenka.cluster.queue_snapshot import POSITION
from fenka.cluster.training_objects import JOB
from tests.builders import Json, gang_labels, node, on_card, pod, sharing, units
from tests.cli.command import Completed
from tests.cli.workloads.conftest import Run
from tests.fakes.api_server import FakeApiServer
from tests.training_builders import batch_job, foreign_job, job_set, member

GOLDEN = Path(__file__).parents[1] / "golden" / "jobs"
MPI = {"launcher": 1, "worker": 2}


def ago(minutes: float) -> str:
    """Return the time of some minutes ago, as Kubernetes writes it."""
    return datetime.fromtimestamp(time.time() - minutes * 60, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def put(server: FakeApiServer, *objects: Json) -> None:
    """Put objects there by their kinds."""
    for item in objects:
        server.put(f"{item['kind'].lower()}s", item)


def an_mpi_job(name: str = "mpi-dist", minutes: float = 10.5, **given: Any) -> Json:
    """Return a job with two workers that was submitted some minutes ago."""
    return job_set(name, roles=MPI, created=ago(minutes), **given)


def running(name: str = "mpi-dist", on: str = "a", minutes: float = 10.5) -> list[Json]:
    """Return the pods of such a job, which run."""
    return [
        member(name, "launcher", node=on, created=ago(minutes)),
        member(name, "worker", 0, node=on, created=ago(minutes)),
        member(name, "worker", 1, node=on, created=ago(minutes)),
    ]


# ---- the article ----


def arena_pods(nodes: dict[str, str], phase: str, minutes: float) -> list[Json]:
    """Return the pods of arena's MPIJob: their nodes by the last part of their names."""
    pods = []
    for suffix, on in nodes.items():
        made = member(
            "mpi-dist", "any", name=f"mpi-dist-{suffix}", node=on, phase=phase, created=ago(minutes)
        )
        made["metadata"]["labels"] = {
            "release": "mpi-dist",
            "mpi_job_name": "mpi-dist",
            "mpi_role_type": suffix.partition("-")[0],
        }
        pods.append(made)
    return pods


RUNNING_ON = {
    "launcher-lpfvg": "n145",
    "worker-0": "n145",
    "worker-1": "n146",
}


@pytest.mark.parametrize(
    ("golden", "minutes", "status", "pods"),
    [
        ("article-pending.txt", 6.5, {}, ({"worker-0": "", "worker-1": ""}, "Pending")),
        ("article-running.txt", 10.5, {"launcherStatus": "Active"}, (RUNNING_ON, "Running")),
        (
            "article-succeeded.txt",
            13.5,
            {"launcherStatus": "Succeeded"},
            ({"launcher-lpfvg": "gone"}, "Succeeded"),
        ),
    ],
)
def test_arenas_own_job_is_shown_as_in_the_article(
    run: Run,
    server: FakeApiServer,
    golden: str,
    minutes: float,
    status: Json,
    pods: tuple[dict[str, str], str],
) -> None:
    """Its three pictures, byte for byte: an MPIJob of arena's operator."""
    server.groups = {"kubeflow.org": ["v1alpha1"]}
    if status.get("launcherStatus") == "Succeeded":
        status = {**status, "completionTime": ago(minutes - 12.5)}
    job = foreign_job("mpi-dist", "MPIJob", None, status=status, created=ago(minutes))
    nodes = [node("n145", address="192.168.3.145"), node("n146", address="192.168.3.146")]
    put(server, job, *arena_pods(*pods, minutes), *nodes)
    assert run("get", "mpi-dist") == Completed(0, (GOLDEN / golden).read_text(), "")


def test_own_job_has_the_articles_three_pictures(run: Run, server: FakeApiServer) -> None:
    """The same with fenka's objects, whose instances keep their names over restarts."""

    def expected(golden: str) -> str:
        text = (GOLDEN / golden).read_text().replace("launcher-lpfvg", "launcher-0")
        return (
            text.replace("INSTANCE                 NODE", "INSTANCE             NODE")
            .replace("-worker-0        ", "-worker-0    ")
            .replace("-worker-1        ", "-worker-1    ")
        )

    put(server, node("n145", address="192.168.3.145"), node("n146", address="192.168.3.146"))
    put(server, an_mpi_job(minutes=6.5))
    put(server, *(member("mpi-dist", "worker", index, created=ago(6.5)) for index in (0, 1)))
    assert run("get", "mpi-dist").stdout == expected("article-pending.txt")

    put(server, an_mpi_job(), *running(on="n145"))
    put(server, member("mpi-dist", "worker", 1, node="n146", created=ago(10.5)))
    assert run("get", "mpi-dist").stdout == expected("article-running.txt")

    end = {"type": "Completed", "status": "True", "lastTransitionTime": ago(1)}
    put(server, an_mpi_job(minutes=13.5, conditions=[end]))
    put(server, member("mpi-dist", "launcher", node="gone", phase="Succeeded", created=ago(13.5)))
    assert run("get", "mpi-dist").stdout == expected("article-succeeded.txt")


# ---- reading ----


def test_list_reads_each_kind_once_however_many_jobs_there_are(
    run: Run, server: FakeApiServer
) -> None:
    """500 jobs of three pods: one LIST a kind."""
    server.put("nodes", sharing("a"))
    for number in range(500):
        put(server, an_mpi_job(f"j{number}"), *running(f"j{number}"))
    lines = run("list").stdout.splitlines()
    assert (len(lines), {line.split()[1] for line in lines[1:]}) == (501, {"RUNNING"})
    assert sorted(server.requests) == [
        "GET /api/v1/namespaces/default/pods",
        "GET /api/v1/namespaces/default/services",
        "GET /api/v1/nodes",
        "GET /apis/apps/v1/namespaces/default/deployments",
        "GET /apis/batch/v1/namespaces/default/jobs",
        "GET /apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets",
    ]


def test_list_shows_a_namespace_or_all(run: Run, server: FakeApiServer) -> None:
    """`-A`, and the option of the namespace before the context's."""
    put(server, batch_job("here", "pytorch", "worker"))
    put(server, batch_job("there", "tensorflow", "chief", namespace="other", uid="t"))
    assert [line.split()[0] for line in run("list").stdout.splitlines()] == ["NAME", "here"]
    rows = run("list", "-A").stdout.splitlines()
    assert [row.split()[:2] for row in rows[1:]] == [["default", "here"], ["other", "there"]]


def test_cluster_without_jobset_has_jobs_of_one_pod(run: Run, server: FakeApiServer) -> None:
    """A kind that does not exist has no objects."""
    server.absent = {"jobsets"}
    put(server, batch_job("one", "pytorch", "worker"))
    assert run("list").stdout.splitlines()[1].split()[:3] == ["one", "PENDING", "PYTORCHJOB"]


def test_child_jobs_of_a_job_set_are_no_jobs_of_their_own(run: Run, server: FakeApiServer) -> None:
    """They have the label of the job, and JobSet's."""
    child = batch_job("mpi-dist-worker-0", "mpi", "worker")
    child["metadata"]["labels"] |= {JOB: "mpi-dist", "jobset.sigs.k8s.io/jobset-name": "mpi-dist"}
    put(server, an_mpi_job(), child)
    assert len(run("list").stdout.splitlines()) == 2


def test_user_with_rights_in_a_namespace_alone_sees_his_jobs(
    run: Run, server: FakeApiServer
) -> None:
    """Neither nodes nor Services can be listed: addresses are those of the pods' hosts."""
    server.forbidden = {"nodes", "services"}
    pod = member("one", "worker", node="a", status={"hostIP": "10.0.0.9"})
    put(server, batch_job("one", "pytorch", "worker"), pod)
    assert run("list").stdout.splitlines()[1].split()[-1] == "10.0.0.9"


def test_user_without_rights_is_told_what_to_ask_for(run: Run, server: FakeApiServer) -> None:
    """One sentence that names the right and the role."""
    server.forbidden = {"jobsets"}
    assert run("list") == Completed(
        1,
        "",
        "fenka: user alice may not list jobsets in namespace default: ask for the ClusterRole fenka-user\n",
    )


def test_user_of_one_namespace_is_told_to_leave_out_the_others(
    run: Run, server: FakeApiServer
) -> None:
    """`-A` asks for all of them."""
    server.forbidden = {"jobsets"}
    assert run("list", "-A") == Completed(
        1,
        "",
        "fenka: user alice may not list jobsets in all namespaces: leave out -A, or ask for the ClusterRole "
        "fenka-user there\n",
    )


def test_foreign_job_whose_status_cannot_be_read_is_left_out(
    run: Run, server: FakeApiServer
) -> None:
    """Some CRDs accept any status; that of one tenant must not hide the jobs of others."""
    server.groups = {"kubeflow.org": ["v1", "v2beta1"]}
    broken = foreign_job("broken", "TFJob", None)
    broken["status"] = {"conditions": "none"}
    put(server, broken, foreign_job("good", "TFJob", []))
    assert [line.split()[0] for line in run("list").stdout.splitlines()] == ["NAME", "good"]


@pytest.mark.parametrize("at", ["9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:59", "soon"])
def test_foreign_job_is_shown_when_its_times_are_in_no_calendar(
    run: Run, server: FakeApiServer, at: str
) -> None:
    """Kinds without a schema store any."""
    server.groups = {"kubeflow.org": ["v1"]}
    end = {"type": "Failed", "status": "True", "lastTransitionTime": at}
    put(server, foreign_job("t", "TFJob", [end]))
    for words in (("list",), ("get", "t", "-o", "json"), ("top", "job", "t")):
        assert run(*words).exit_code == 0
    lines = run("get", "t", "--layout", "arena").stdout.splitlines()
    assert "EndTime:     N/A" in lines or at == "soon"


def test_foreign_job_is_shown_when_another_is_nested_without_end(
    run: Run, server: FakeApiServer
) -> None:
    """A kind without a schema stores whatever its tenants write."""
    server.groups = {"kubeflow.org": ["v1"]}

    async def answer(request: web.Request) -> web.StreamResponse | None:
        if not request.path.endswith("/tfjobs"):
            return None
        deep = json.dumps(foreign_job("deep", "TFJob", [])).replace(
            '"spec": {}', f'"spec": {"[" * 9_990}{"]" * 9_990}'
        )
        good = json.dumps(foreign_job("good", "TFJob", []))
        return web.Response(text=f'{{"items":[{deep},{good}]}}', content_type="application/json")

    server.before = answer
    assert [line.split()[0] for line in run("list").stdout.splitlines()] == ["NAME", "deep", "good"]


def test_job_is_shown_when_its_template_has_no_time(run: Run, server: FakeApiServer) -> None:
    """Webhooks in Go write null there; it would hide all jobs of the namespace."""
    job = an_mpi_job()
    for replicated in job["spec"]["replicatedJobs"]:
        replicated["template"]["metadata"] = {"creationTimestamp": None}
    put(server, job)
    assert len(run("list").stdout.splitlines()) == 2


def test_pods_of_other_programs_are_read_by_their_labels_alone(
    run: Run, server: FakeApiServer
) -> None:
    """A cluster has many more pods than those of jobs."""
    server.groups = {"trainer.kubeflow.org": ["v1alpha1"]}
    pod = member("t", "node", name="t-node-0")
    pod["metadata"]["labels"].pop(JOB)
    put(server, foreign_job("t", "TrainJob", []), pod)
    selectors: list[str] = []

    async def record(request: web.Request) -> None:
        if request.path.endswith("/pods"):
            selectors.append(request.query.get("labelSelector", "all"))

    server.before = record
    assert "t-node-0" in run("get", "t").stdout
    # A job that waits is read again with its position, for which all pods are read.
    before = selectors[: selectors.index("all")]
    assert [words for words in dict.fromkeys(before) if "servingName=t" not in words] == [
        f"{JOB}=t",
        f"jobset.sigs.k8s.io/jobset-name=t,!{JOB}",
    ]


def test_own_job_precedes_a_foreign_one_of_the_same_name(run: Run, server: FakeApiServer) -> None:
    """`-T` selects the other."""
    server.groups = {"kubeflow.org": ["v1"]}
    put(server, an_mpi_job("j"), foreign_job("j", "TFJob", []))
    assert json.loads(run("get", "j", "-o", "json").stdout)["trainer"] == "mpijob"
    assert json.loads(run("get", "j", "-T", "tf", "-o", "json").stdout)["foreign"] is True


def test_tensorboard_of_arenas_job_is_shown(run: Run, server: FakeApiServer) -> None:
    """Its Service is not of fenka's labels."""
    server.groups = {"kubeflow.org": ["v1"]}
    labels = {"release": "t", "role": "tensorboard"}
    service = {
        "kind": "Service",
        "metadata": {"name": "t-tensorboard", "namespace": "default", "labels": labels},
        "spec": {"type": "NodePort", "ports": [{"port": 6006, "nodePort": 31234}]},
    }
    put(server, foreign_job("t", "TFJob", []), service, node("a"))
    shown = json.loads(run("get", "t", "-o", "json").stdout)
    assert shown["tensorboard"] == "http://10.0.0.1:31234"


def test_cards_are_unknown_when_the_user_may_not_list_nodes(
    run: Run, server: FakeApiServer
) -> None:
    """Nothing tells him how many units a card has."""
    pods = [member("j", "worker", 0, units(4), node="a", annotations=on_card(0, 4))]
    put(server, job_set("j", "pytorch", roles={"worker": 1}), *pods, sharing("a"))
    server.forbidden = {"nodes"}
    lines = run("top", "job", "--layout", "arena").stdout.splitlines()
    assert lines[1].split()[4:6] == ["N/A", "N/A"]
    assert lines[-1] == "Total Allocated/Requested GPUs of Training Jobs: N/A/N/A"
    lines = run("top", "job").stdout.splitlines()
    assert (lines[5].rstrip(), lines[-1].rstrip()) == ("N/A", "N/A")


def test_evicted_instance_is_no_failed_one(run: Run, server: FakeApiServer) -> None:
    """Its program did nothing wrong."""
    evicted = {"conditions": [{"type": "DisruptionTarget", "status": "True"}]}
    pods = [member("j", "worker", 0, node="a", phase="Failed", status=evicted)]
    put(server, job_set("j", "pytorch", roles={"worker": 2}), *pods)
    assert run("get", "j").stdout.splitlines()[-1].split()[1] == "EVICTED"


def test_slices_of_running_pods_are_shown_with_their_cards(run: Run, server: FakeApiServer) -> None:
    """Their node's report or their record names the card; nothing measures them here."""
    pods = [
        member("j", "worker", index, units(4), node="a", annotations=on_card(0, 4))
        for index in range(3)
    ]
    put(server, job_set("j", "pytorch", roles={"worker": 3}), *pods, sharing("a"))
    lines = run("get", "j", "-g", "--layout", "arena").stdout.splitlines()
    assert lines[-3].split() == ["j-worker-1", "10.0.0.1", "0.3", "0", "N/A", "N/A"]
    assert lines[-1] == "  Allocated/Requested GPUs of Job: 0.9/0.9"


def waiting(name: str, **given: Any) -> list[Json]:
    """Return a job of two pods for which there is no room, and its pods."""
    message = "0/1 nodes are available: 1 no GPU fits; position 8 of 12 in the queue"
    refusal = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    status = {"phase": "Pending", "conditions": [{**refusal, "message": message}]}
    labels = gang_labels(f"pytorchjob-{name}", 2)
    pods = [
        member(
            *(name, "worker", index, units(8)),
            status=status,
            labels=labels,
            annotations={POSITION: "9"},
            **given,
        )
        for index in range(2)
    ]
    return [job_set(name, "pytorch", roles={"worker": 2}), *pods]


def position(run: Run, *words: str) -> int | None:
    """Return the position in the queue that a command prints of a job."""
    answer = json.loads(run(*words, "-o", "json").stdout)
    place: int | None = (answer[0] if isinstance(answer, list) else answer)["queuePosition"]
    return place


def test_position_of_a_job_is_that_in_the_queue(run: Run, server: FakeApiServer) -> None:
    """Gangs and single pods, behind those of other namespaces; tables do not need it."""
    put(server, sharing("a"), *waiting("second", created=ago(5)), *waiting("first", created=ago(9)))
    put(server, batch_job("alone", "pytorch", "worker"), an_mpi_job("runs"), *running("runs"))
    refused = waiting("any")[1]["status"]
    put(server, member("alone", "worker", limits=units(14), status=refused, created=ago(3)))
    put(server, pod("other", units(14), namespace="other", status=refused))
    server.get("pods", "other", "other")["metadata"]["creationTimestamp"] = ago(7)
    for name, expected in {"first": 1, "second": 3, "alone": 4, "runs": None}.items():
        assert position(run, "get", name) == expected
        assert position(run, "top", "job", name) == expected
    server.requests.clear()
    run("get", "runs")
    run("list", "-o", "json")
    assert "GET /api/v1/pods" not in server.requests


def test_position_is_the_published_one_when_the_queue_may_not_be_read(
    run: Run, server: FakeApiServer
) -> None:
    """Users of one namespace: the scheduler has published it on a pod, and nothing else is printed."""
    put(server, *waiting("j"), batch_job("gated", "pytorch", "worker"), member("gated", "worker"))

    async def refuse(request: web.Request) -> web.Response | None:
        if request.path in ("/api/v1/pods", "/api/v1/nodes") or "coordination" in request.path:
            return web.json_response({"message": "forbidden", "code": 403}, status=403)
        return None

    server.before = refuse
    assert run("get", "j", "-o", "json").stderr == ""
    assert (position(run, "get", "j"), position(run, "get", "gated")) == (9, None)


def test_positions_of_all_jobs_are_the_published_ones(run: Run, server: FakeApiServer) -> None:
    """Reading the whole queue would make a list of many jobs slower."""
    put(server, sharing("a"), *waiting("j"))
    assert (position(run, "get", "j"), position(run, "list")) == (1, 9)


def test_events_are_those_of_the_job_and_its_pods(run: Run, server: FakeApiServer) -> None:
    """The oldest first; events of other objects with the same names are not shown."""

    def event(name: str, kind: str, uid: str, reason: str, minutes: float) -> Json:
        return {
            "kind": "Event",
            "metadata": {"name": name, "namespace": "default", "creationTimestamp": ago(minutes)},
            "involvedObject": {"kind": kind, "name": uid, "uid": uid},
            "type": "Normal",
            "reason": reason,
            "message": "text",
        }

    put(server, an_mpi_job(), *running())
    put(
        server,
        event("a", "Pod", "u-mpi-dist-worker-0-0-x7k2p", "Pulled", 3.5),
        event("b", "JobSet", "root-mpi-dist", "Created", 9.5),
        event("c", "Pod", "another", "Killed", 1),
    )
    lines = run("get", "mpi-dist", "-e").stdout.splitlines()
    assert [line.split() for line in lines[lines.index("Events:") + 3 :]] == [
        ["jobset/root-mpi-dist", "Normal", "9m", "[Created]", "text"],
        ["pod/u-mpi-dist-worker-0-0-x7k2p", "Normal", "3m", "[Pulled]", "text"],
    ]
    put(server, batch_job("quiet", "pytorch", "worker"))
    assert run("get", "quiet", "-e").stdout.endswith("Events:\n  No events for resources\n")


QUOTA = (
    'pods "mpi-dist-worker-0-0-" is forbidden: exceeded quota: team, requested: nvidia.com/gpu=1'
)


def failed_create(job: str, at: str) -> Json:
    """Return the event about a Job whose pod the API server has refused."""
    return {
        "kind": "Event",
        "metadata": {"name": f"e-{job}", "namespace": "default", "creationTimestamp": at},
        "involvedObject": {"kind": "Job", "name": job, "uid": f"child-{job}"},
        "type": "Warning",
        "reason": "FailedCreate",
        "message": f"Error creating: {QUOTA}",
        "lastTimestamp": at,
    }


def test_reason_is_shown_when_pods_cannot_be_created(run: Run, server: FakeApiServer) -> None:
    """The JobSet says nothing of it: its Job's event does."""
    put(server, an_mpi_job(), failed_create("mpi-dist-worker-0", ago(5)))
    sentence = f"its pods cannot be created: {QUOTA}"
    assert run("list").stdout.splitlines()[2:] == ["", f"mpi-dist: {sentence}"]
    assert run("get", "mpi-dist").stdout.splitlines()[-1] == f"Note: {sentence}"
    assert json.loads(run("get", "mpi-dist", "-o", "json").stdout)["why"] == QUOTA
    assert "[FailedCreate] Error creating" in run("get", "-e", "mpi-dist").stdout
    assert len(run("list", "--layout", "arena").stdout.splitlines()) == 2


@pytest.mark.parametrize(
    ("job", "minutes"),
    [("mpi-dist-worker-0", 20), ("mpi-dist-other-0", 5), ("mpi-dist-worker-x", 5), ("other", 5)],
)
def test_reason_is_of_this_job_when_others_cannot_be_created(
    run: Run, server: FakeApiServer, job: str, minutes: float
) -> None:
    """An earlier job of the same name, and jobs of similar names."""
    put(server, an_mpi_job(), failed_create(job, ago(minutes)))
    assert len(run("list").stdout.splitlines()) == 2


def test_reason_is_gone_when_all_pods_exist(run: Run, server: FakeApiServer) -> None:
    """Events stay for an hour."""
    pods = [member("mpi-dist", "launcher"), *running()[1:]]
    put(server, an_mpi_job(), *pods, failed_create("mpi-dist-worker-0", ago(5)))
    assert len(run("list").stdout.splitlines()) == 2


def test_interrupted_submission_is_reported(run: Run, server: FakeApiServer) -> None:
    """A root object that was never resumed."""
    put(server, an_mpi_job(suspend=True))
    assert run("get", "mpi-dist").stdout.splitlines() == [
        "STATUS: QUEUING",
        "NAMESPACE: default",
        "TRAINING DURATION: 10m",
        "",
        "NAME  STATUS  TRAINER  AGE  INSTANCE  NODE",
        "",
        "Note: its submission was interrupted, and it will not start: delete it (fenka delete mpi-dist) and "
        "submit it again",
    ]


@pytest.mark.parametrize("name", ["nothing", "no/thing", "a,b", "", "../pods"])
@pytest.mark.parametrize("verb", ["get", "logs", "delete", "attach"])
def test_job_that_does_not_exist_is_one_sentence(
    run: Run, server: FakeApiServer, verb: str, name: str
) -> None:
    """Whatever is typed as a name; exit code 1."""
    put(server, an_mpi_job())
    assert run(verb, name) == Completed(
        1, "", f"fenka: job or service {name} not found in namespace default\n"
    )
    assert not server.writes


def test_invalid_namespace_is_one_sentence(run: Run, server: FakeApiServer) -> None:
    """It would be another path at the API server."""
    result = run("list", "-n", "../../nodes")
    assert (result.exit_code, result.stdout, server.requests) == (1, "", [])
    assert result.stderr.startswith("fenka: invalid namespace '../../nodes'")


# ---- delete and prune ----


def deletions(server: FakeApiServer) -> list[str]:
    """Return the paths that were deleted."""
    return [path for path, _ in server.writes]


def test_delete_is_one_request_for_each_job(run: Run, server: FakeApiServer) -> None:
    """Of the root object, with its UID; the garbage collector does the rest."""
    put(server, an_mpi_job("a"), batch_job("b", "pytorch", "worker"), an_mpi_job("c"))
    result = run("del", "a", "b")
    assert result.stdout.splitlines() == [
        "The training job a has been deleted successfully",
        "The training job b has been deleted successfully",
    ]
    assert server.writes == [
        (
            f"/apis/{group}/namespaces/default/{kind}/{name}",
            {"propagationPolicy": "Background", "preconditions": {"uid": f"root-{name}"}},
        )
        for group, kind, name in (
            ("jobset.x-k8s.io/v1alpha2", "jobsets", "a"),
            ("batch/v1", "jobs", "b"),
        )
    ]


def test_delete_goes_on_after_a_job_that_does_not_exist(run: Run, server: FakeApiServer) -> None:
    """The others are deleted, and the exit code is 1."""
    put(server, an_mpi_job("a"))
    assert run("delete", "x", "a", "y") == Completed(
        1,
        "The training job a has been deleted successfully\n",
        "fenka: job or service x not found in namespace default; job or service y not found in namespace "
        "default\n",
    )


def test_foreign_job_is_never_deleted(run: Run, server: FakeApiServer) -> None:
    """The sentence says how to."""
    server.groups = {"kubeflow.org": ["v1"]}
    put(server, foreign_job("t", "TFJob", []))
    result = run("delete", "t")
    assert (result.exit_code, server.writes) == (1, [])
    assert result.stderr.endswith("use kubectl delete tfjob t -n default\n")


def test_prune_deletes_jobs_that_ended_some_time_ago(run: Run, server: FakeApiServer) -> None:
    """Neither those that run, nor those that ended lately, nor those of other programs."""
    server.groups = {"kubeflow.org": ["v1"]}
    for name, kind, minutes in (
        ("old", "Completed", 130),
        ("bad", "Failed", 130),
        ("new", "Failed", 5),
    ):
        end = {"type": kind, "status": "True", "lastTransitionTime": ago(minutes)}
        put(server, an_mpi_job(name, minutes=minutes + 9, conditions=[end]))
    put(server, an_mpi_job("runs", minutes=900))
    put(server, foreign_job("t", "TFJob", [{"type": "Failed", "status": "True"}], created=ago(900)))
    assert sorted(run("prune", "--since", "2h").stdout.splitlines()) == [
        "The training job bad has been deleted successfully",
        "The training job old has been deleted successfully",
    ]
    assert {path.rpartition("/")[2] for path in deletions(server)} == {"old", "bad"}
    assert run("prune", "--since", "2h").stdout == "no job has ended more than 2h ago\n"


def ended(name: str, **given: Any) -> Json:
    """Return a job that failed two hours ago."""
    end = {"type": "Failed", "status": "True", "lastTransitionTime": ago(120)}
    return an_mpi_job(name, minutes=125, conditions=[end], **given)


def test_prune_deletes_the_others_when_some_cannot_be_deleted(
    run: Run, server: FakeApiServer
) -> None:
    """Somebody else deletes one meanwhile, and for another the user has no right."""
    put(server, *(ended(f"j{number}") for number in range(100)))

    async def answer(request: web.Request) -> web.Response | None:
        if request.method == "DELETE" and request.path.endswith("/j98"):
            return web.json_response({"message": "no right", "code": 403}, status=403)
        if request.method == "DELETE" and request.path.endswith("/j0"):
            return web.json_response({"message": "not found", "code": 404}, status=404)
        return None

    server.before = answer
    assert run("prune", "--since", "1h") == Completed(1, "", "fenka: no right\n")
    assert {item["metadata"]["name"] for item in server.all("jobsets")} == {"j0", "j98"}


def test_delete_leaves_a_later_job_of_the_same_name(run: Run, server: FakeApiServer) -> None:
    """The API server refuses by the UID: the job that was meant is gone."""
    put(server, an_mpi_job("j"))

    async def answer(request: web.Request) -> web.Response | None:
        if request.method == "DELETE":
            return web.json_response({"message": "another uid", "code": 409}, status=409)
        return None

    server.before = answer
    assert run("delete", "j").exit_code == 0


def test_prune_needs_a_time(run: Run, server: FakeApiServer) -> None:
    """Nothing is deleted by a mistyped one."""
    assert run("prune", "--since", "soon") == Completed(
        2, "", "fenka: invalid --since 'soon': expected a duration such as 30m, 10h or 7d\n"
    )
    assert run("prune").exit_code == 2
    assert not server.requests


def test_local_jobs_are_refused_on_a_cluster_only_command(run: Run) -> None:
    """`--local` and a kubeconfig contradict each other."""
    assert run("list", "--local").exit_code == 2
