"""Test submissions to a cluster: the order of requests, what failures leave, and what is refused."""

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from aiohttp import web

from fenka.cluster import queue_snapshot
from fenka.cluster.queue_snapshot import SchedulerOptions
from fenka.core.errors import FenkaError
from fenka.core.request import InvalidRequest
from fenka.jobs.collection import Contents
from fenka.jobs.kubernetes.checks import SubmissionRefused
from fenka.jobs.kubernetes.submission import submit
from fenka.jobs.training import TrainingSpec
from fenka.kubernetes.api_client import ApiError, ApiUnreachable
from tests.fakes.api_server import FakeApiServer, api_server
from tests.jobs.manifests.trainings import ALONE, FILES, INDEXED, MPI, PYTORCH, TENSORFLOW
from tests.training_builders import foreign_job
from tests.waiting import until

Json = dict[str, Any]
NOW = datetime(2026, 1, 16, 21, 19, tzinfo=UTC)
JOBSET = "/apis/jobset.x-k8s.io/v1alpha2"
MPI_CONTENTS = Contents(key="00" * 32, credentials={"GIT_SYNC_PASSWORD": "secret"})
SIMPLE = msgspec.structs.replace(INDEXED, name="simple")


def changed(spec: TrainingSpec, **fields: Any) -> TrainingSpec:
    """Return the training with other fields."""
    return msgspec.structs.replace(spec, **fields)


def claim(name: str, *modes: str) -> Json:
    """Return a claim."""
    return {"metadata": {"name": name, "namespace": "default"}, "spec": {"accessModes": [*modes]}}


def with_jobset(server: FakeApiServer) -> FakeApiServer:
    """Let the server have JobSet."""
    server.discovered.add(JOBSET)
    return server


async def submitted(
    server: FakeApiServer, spec: TrainingSpec, contents: Contents = MPI_CONTENTS
) -> None:
    """Submit a training."""
    async with server.api() as api:
        await submit(api, "default", spec, contents, NOW)


def written(server: FakeApiServer) -> list[str]:
    """Return the last part of the path of each write, with its kind."""
    return ["/".join(path.split("/")[6:]) or path for path, _ in server.writes]


async def test_root_is_resumed_when_all_that_it_owns_exists() -> None:
    """Test that root is resumed when all that it owns exists."""
    async with api_server() as server:
        await submitted(with_jobset(server), MPI)
        paths = [path for path, _ in server.writes]
        assert paths[0].endswith("/jobsets")
        assert paths[-1].endswith("/jobsets/mpi-dist")
        assert {path.rsplit("/", 1)[1] for path in paths[1:-1]} == {"configmaps", "secrets"}
        root = server.get("jobsets", "mpi-dist", "default")
        assert server.writes[0][1]["spec"]["suspend"] is True
        assert root["spec"]["suspend"] is False
        assert root["metadata"]["annotations"]["fenka.io/submitted"] == "2026-01-16T21:19:00+00:00"
        owned = [*server.all("configmaps"), *server.all("secrets")]
        assert len(owned) == 3
        for item in owned:
            (owner,) = item["metadata"]["ownerReferences"]
            assert (owner["kind"], owner["uid"]) == ("JobSet", root["metadata"]["uid"])


async def test_root_starts_at_once_when_it_owns_nothing() -> None:
    """Test that root starts at once when it owns nothing."""
    async with api_server() as server:
        await submitted(with_jobset(server), SIMPLE, Contents())
        assert len(server.writes) == 1
        root = server.get("jobsets", "simple", "default")
        assert not root["spec"].get("suspend")
        assert "fenka.io/submitted" in root["metadata"]["annotations"]


async def test_indexed_job_is_created_when_the_cluster_has_no_jobset() -> None:
    """Test that indexed job is created when the cluster has no jobset."""
    async with api_server() as server:
        await submitted(server, SIMPLE, Contents())
        assert server.get("jobs", "simple", "default")["spec"]["suspend"] is False
        (service,) = server.all("services")
        assert service["metadata"]["ownerReferences"][0]["kind"] == "Job"


@pytest.mark.parametrize("spec", [SIMPLE, MPI])
async def test_kueue_resumes_the_root_when_a_queue_is_named(spec: TrainingSpec) -> None:
    """Its label comes last, because Kueue may admit the job at once."""
    async with api_server() as server:
        await submitted(with_jobset(server), changed(spec, queue="team"))
        root = server.get("jobsets", spec.name, "default")
        assert root["spec"]["suspend"] is True
        assert root["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
        assert "kueue.x-k8s.io/queue-name" not in server.writes[0][1]["metadata"]["labels"]


@pytest.mark.parametrize("step", range(4))
async def test_only_a_suspended_root_is_left_when_the_client_is_killed(step: int) -> None:
    """Everything else is owned by it, so that one deletion removes all."""
    async with api_server() as server:
        answered, released = 0, asyncio.Event()

        async def never(request: web.Request) -> None:
            nonlocal answered
            if request.method == "POST" and "dryRun" not in request.query:
                answered += 1
                if answered > step:
                    await released.wait()

        server.after = never
        task = asyncio.create_task(submitted(with_jobset(server), MPI))
        await until(lambda: answered > step)
        root = server.get("jobsets", "mpi-dist", "default")
        assert root["spec"]["suspend"] is True
        assert "fenka.io/submitted" not in root["metadata"]["annotations"]
        for kind in ("configmaps", "secrets", "services", "jobs"):
            for item in server.all(kind):
                assert item["metadata"]["ownerReferences"][0]["uid"] == root["metadata"]["uid"]
        task.cancel()
        released.set()


@pytest.mark.parametrize("step", range(1, 5))
async def test_nothing_is_left_when_a_request_fails(step: int) -> None:
    """The garbage collector removes what the root owns."""
    async with api_server() as server:
        number = 0

        async def fail(request: web.Request) -> web.Response | None:
            nonlocal number
            if request.method in ("POST", "PATCH") and "dryRun" not in request.query:
                number += 1
                if number == step + 1:
                    return web.json_response({"message": "no space", "code": 500}, status=500)
            return None

        server.before = fail
        with pytest.raises(ApiError, match="no space"):
            await submitted(with_jobset(server), MPI)
        assert not server.all("jobsets")
        uid = server.history[0].object["metadata"]["uid"]
        for item in (*server.all("configmaps"), *server.all("secrets")):
            assert item["metadata"]["ownerReferences"][0]["uid"] == uid


async def test_root_is_deleted_when_the_user_interrupts() -> None:
    """Test that root is deleted when the user interrupts."""
    async with api_server() as server:
        released = asyncio.Event()

        async def hold(request: web.Request) -> None:
            if request.path.endswith("/secrets") and "dryRun" not in request.query:
                await released.wait()

        server.after = hold
        task = asyncio.create_task(submitted(with_jobset(server), MPI))
        await until(lambda: server.all("secrets"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        released.set()
        assert not server.all("jobsets")


async def test_user_is_told_what_is_left_when_the_root_cannot_be_deleted() -> None:
    """Test that user is told what is left when the root cannot be deleted."""
    async with api_server() as server:

        async def fail(request: web.Request) -> web.Response | None:
            if request.method in ("PATCH", "DELETE"):
                return web.json_response({"message": "no space", "code": 500}, status=500)
            return None

        server.before = fail
        with pytest.raises(FenkaError) as raised:
            await submitted(with_jobset(server), MPI)
    assert str(raised.value) == (
        "job mpi-dist was created and could not be completed or deleted: it is suspended, delete it by "
        "fenka delete mpi-dist (no space)"
    )


@pytest.mark.parametrize("hami", [True, False, None])
async def test_hamis_names_are_used_when_the_scheduler_reads_them(hami: bool | None) -> None:
    """It publishes that. Users of one namespace may not read it, and other requests need no look."""
    spec = changed(SIMPLE, gpu_mem="4000MiB")
    async with api_server() as server:
        options = {queue_snapshot.ANNOTATION: SchedulerOptions(hami=bool(hami)).encode()}
        name, _, value = queue_snapshot.LABEL.partition("=")
        meta = {"name": "l", "namespace": "x", "labels": {name: value}, "annotations": options}
        server.put("leases", {"metadata": meta, "spec": {}})
        if hami is None:
            server.forbidden.add("leases")
        if hami:
            await submitted(with_jobset(server), spec, Contents())
            (job,) = server.get("jobsets", "simple", "default")["spec"]["replicatedJobs"]
            (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
            assert container["resources"]["limits"]["nvidia.com/gpumem"] == "4000"
        else:
            with pytest.raises(
                InvalidRequest, match="the exact size 4000MiB is requested by HAMi's names"
            ):
                await submitted(with_jobset(server), spec, Contents())
            assert not server.writes
        server.requests.clear()
        await submitted(server, changed(SIMPLE, name="other", gpu_mem="4"), Contents())
        assert not any("leases" in request for request in server.requests)


def taken(name: str) -> str:
    """Return the sentence about a name that a job has."""
    return (
        f"job {name} already exists in namespace default: delete it (fenka delete {name}) or choose "
        "another --name"
    )


async def test_one_of_two_users_succeeds_when_both_submit_the_same_name() -> None:
    """The other one is told that it is taken, and what the first has created stays."""
    async with api_server() as server:
        checked = asyncio.Barrier(2)

        async def meet(request: web.Request) -> None:
            # Both have seen that the name is free.
            if request.path.endswith("/jobsets") and request.query.get("dryRun"):
                await checked.wait()

        server.before = meet
        both = [submitted(with_jobset(server), MPI) for _ in range(2)]
        results = await asyncio.gather(*both, return_exceptions=True)
        assert sorted(map(str, results)) == ["None", taken("mpi-dist")]
        (root,) = server.all("jobsets")
        assert root["spec"]["suspend"] is False
        for item in (*server.all("configmaps"), *server.all("secrets")):
            assert item["metadata"]["ownerReferences"][0]["uid"] == root["metadata"]["uid"]


@pytest.mark.parametrize("first", ["jobs", "jobsets"])
async def test_name_has_one_job_when_users_submit_it_as_different_kinds(first: str) -> None:
    """The later one sees the earlier one, and removes what it has created."""
    alone = changed(ALONE, name="x", code="", config_file=[], priority="")
    specs = {"jobs": alone, "jobsets": changed(MPI, name="x")}
    second = "jobs" if first == "jobsets" else "jobsets"
    async with api_server() as server:

        async def wait(request: web.Request) -> None:
            # Both have seen that the name is free.
            if request.path.endswith(f"/{second}") and "dryRun" not in request.query:
                await until(first_done.done)

        server.before = wait
        contents = {"jobs": Contents(), "jobsets": MPI_CONTENTS}
        late = asyncio.create_task(submitted(with_jobset(server), specs[second], contents[second]))
        first_done = asyncio.create_task(submitted(server, specs[first], contents[first]))
        results = await asyncio.gather(first_done, late, return_exceptions=True)
        assert list(map(str, results)) == ["None", taken("x")]
        assert [len(server.all(kind)) for kind in (first, second)] == [1, 0]


async def test_job_stays_when_the_other_kind_cannot_be_looked_for() -> None:
    """It runs already."""
    async with api_server() as server:

        async def fail(request: web.Request) -> web.Response | None:
            created = server.all("jobsets")
            if created and request.method == "GET":
                return web.json_response({"message": "too busy", "code": 429}, status=429)
            return None

        server.before = fail
        await submitted(with_jobset(server), SIMPLE, Contents())
        assert server.all("jobsets")


@pytest.mark.parametrize("other", [False, True])
async def test_deletion_is_reported_when_it_meets_the_submission(other: bool) -> None:
    """Another job that has received the name meanwhile stays."""
    async with api_server() as server:

        async def delete(request: web.Request) -> web.Response | None:
            if request.method == "PATCH":
                server.remove("jobsets", "mpi-dist", "default")
                if other:
                    new = {"name": "mpi-dist", "namespace": "default", "uid": "new"}
                    server.put("jobsets", {"metadata": new})
                    return web.json_response({"message": "another uid", "code": 404}, status=404)
            if request.method == "DELETE" and other:
                return web.json_response({"message": "another uid", "code": 409}, status=409)
            return None

        server.before = delete
        with pytest.raises(SubmissionRefused) as raised:
            await submitted(with_jobset(server), MPI)
        assert str(raised.value) == "job mpi-dist was deleted while it was being submitted"
        assert len(server.all("jobsets")) == other


@pytest.mark.parametrize(
    ("spec", "kind", "name"),
    [
        (MPI, "ConfigMap", "mpi-dist-mpi"),
        (MPI, "Job", "mpi-dist-worker-0"),
        (INDEXED, "Service", "equal"),
    ],
)
async def test_name_is_refused_when_objects_of_a_deleted_job_are_left(
    spec: TrainingSpec, kind: str, name: str
) -> None:
    """The garbage collector has not removed them yet: `fenka delete` finds no job."""
    async with api_server() as server:
        meta = {"name": name, "namespace": "default", "labels": {"fenka.io/job": spec.name}}
        server.put(f"{kind.lower()}s", {"metadata": meta})
        if spec is MPI:
            with_jobset(server)
        with pytest.raises(SubmissionRefused) as raised:
            await submitted(server, spec)
        assert str(raised.value) == (
            f"{kind} {name} of job {spec.name} already exists in namespace default: if a job of this name "
            "was deleted just now, submit again in a moment, else choose another --name"
        )
        assert not server.writes


@pytest.mark.parametrize("spec", [MPI, SIMPLE])
async def test_training_is_refused_when_another_operators_job_has_its_name(
    spec: TrainingSpec,
) -> None:
    """Else screens would have two jobs of one name."""
    async with api_server() as server:
        server.groups = {"kubeflow.org": ["v1"]}
        server.put("tfjobs", foreign_job(spec.name, "TFJob", []))
        sentence = (
            f"TFJob {spec.name}, which is not fenka's, already exists in namespace default: choose "
            "another --name"
        )
        with pytest.raises(SubmissionRefused, match=sentence):
            await submitted(server, spec)
        assert not server.writes


@pytest.mark.parametrize(
    ("spec", "objects", "sentence"),
    [
        (
            MPI,
            {
                "jobsets": [
                    {"metadata": {"name": "mpi-dist", "labels": {"fenka.io/job": "mpi-dist"}}}
                ]
            },
            "job mpi-dist already exists in namespace default: delete it (fenka delete mpi-dist) or choose "
            "another --name",
        ),
        (
            MPI,
            {"jobs": [{"metadata": {"name": "mpi-dist"}}]},
            "Job mpi-dist, which is not fenka's, already exists in namespace default: choose another --name",
        ),
        (
            MPI,
            {"services": [{"metadata": {"name": "mpi-dist"}}]},
            "Service mpi-dist, which is not fenka's, already exists in namespace default: choose another "
            "--name",
        ),
        (
            changed(SIMPLE, priority="nope"),
            {},
            "priority class 'nope' not found: list them with kubectl get priorityclasses",
        ),
        (
            changed(SIMPLE, backfill=True),
            {},
            "priority class 'fenka-backfill' not found: list them with kubectl get priorityclasses",
        ),
        (
            changed(SIMPLE, data=["training-data:/data"]),
            {},
            "claim training-data not found in namespace default",
        ),
        (
            changed(SIMPLE, data=["../secrets/x:/data"]),
            {},
            "invalid --data '../secrets/x': name a claim by lowercase letters, digits, '-' and '.'",
        ),
        (
            changed(SIMPLE, data=["training-data:/data"]),
            {"persistentvolumeclaims": [claim("training-data", "ReadWriteOnce")]},
            "claim training-data is ReadWriteOnce and cannot be mounted on several nodes: use a "
            "ReadWriteMany claim or --workers 1",
        ),
        (
            changed(SIMPLE, workers=1, data=["logs:/logs"], tensorboard=True, logdir="/logs"),
            {"persistentvolumeclaims": [claim("logs", "ReadWriteOnce")]},
            "claim logs is ReadWriteOnce and cannot be mounted by TensorBoard on another node: use a "
            "ReadWriteMany claim or leave out --tensorboard",
        ),
    ],
)
async def test_training_is_refused_in_one_sentence(
    spec: TrainingSpec, objects: Json, sentence: str
) -> None:
    """And nothing is created."""
    async with api_server() as server:
        for kind, items in objects.items():
            for item in items:
                server.put(kind, {**item, "metadata": {"namespace": "default", **item["metadata"]}})
        with pytest.raises(FenkaError) as raised:
            await submitted(with_jobset(server), spec)
        assert str(raised.value) == sentence
        assert not server.writes


@pytest.mark.parametrize(
    ("spec", "modes"),
    [
        (changed(SIMPLE, data=["a:/data"]), ["ReadWriteMany"]),
        (changed(SIMPLE, data=["a:/data"]), ["ReadWriteOnce", "ReadOnlyMany"]),
        (changed(SIMPLE, data=["a:/data"], workers=1), ["ReadWriteOnce"]),
        # The launcher does not mount it.
        (changed(MPI, data=["a:/data"], workers=1), ["ReadWriteOnce"]),
    ],
)
async def test_claim_is_accepted_when_all_its_pods_can_mount_it(
    spec: TrainingSpec, modes: list[str]
) -> None:
    """Test that claim is accepted when all its pods can mount it."""
    async with api_server() as server:
        server.put("persistentvolumeclaims", claim("a", *modes))
        await submitted(with_jobset(server), spec)


async def test_job_of_one_object_is_created_without_a_dry_run() -> None:
    """Its creation is the check. A request less shortens the time until the program runs."""
    async with api_server() as server:
        plain = TrainingSpec(kind="pytorch", name="plain", image="i", command=["true"])
        await submitted(server, plain, Contents())
        posts = [request for request in server.requests if request.startswith("POST")]
        assert posts == ["POST /apis/batch/v1/namespaces/default/jobs"]


@pytest.mark.parametrize(
    ("spec", "contents"),
    [(MPI, MPI_CONTENTS), (TENSORFLOW, Contents()), (PYTORCH, Contents()), (ALONE, FILES)],
)
async def test_all_objects_are_checked_before_any_is_created(
    spec: TrainingSpec, contents: Contents
) -> None:
    """The Jobs of a JobSet are among them: its controller would create them later."""
    async with api_server() as server:
        for name in ("training-data", "logs", "states"):
            server.put("persistentvolumeclaims", claim(name, "ReadWriteMany"))
        for name in ("fenka-backfill", "high"):
            server.put("priorityclasses", {"metadata": {"name": name}})
        checked = list[str]()

        async def note(request: web.Request) -> None:
            if request.query.get("dryRun") == "All":
                assert not server.writes
                body = json.loads(await request.read())
                checked.append(f"{body['kind']} {body['metadata']['name']}")

        server.before = note
        await submitted(with_jobset(server), spec, contents)
        names = {
            f"{item['kind']} {item['metadata']['name']}"
            for kind in ("jobs", "jobsets", "configmaps", "secrets", "services", "deployments")
            for item in server.all(kind)
        }
        assert names <= set(checked)
        assert len(checked) == len(set(checked))
        jobs = {name for name in checked if name.startswith("Job ")}
        assert len(jobs) == {"mpi-dist": 2, "tf-dist": 4, "torch-dist": 1, "alone": 1}[spec.name]


async def test_nothing_is_created_when_the_server_rejects_a_dry_run() -> None:
    """Test that nothing is created when the server rejects a dry run."""
    async with api_server() as server:
        server.forbidden.add("secrets")
        with pytest.raises(ApiError, match="secrets is forbidden"):
            await submitted(with_jobset(server), MPI)
        assert not server.writes


async def test_submission_goes_on_when_a_webhook_allows_no_dry_run() -> None:
    """Test that submission goes on when a webhook allows no dry run."""
    async with api_server() as server:

        async def refuse(request: web.Request) -> web.Response | None:
            if "dryRun" in request.query:
                message = "admission webhook x does not support dry run"
                return web.json_response({"message": message, "code": 400}, status=400)
            return None

        server.before = refuse
        await submitted(with_jobset(server), MPI)
        assert server.get("jobsets", "mpi-dist", "default")["spec"]["suspend"] is False


async def test_nothing_is_created_when_the_server_does_not_answer() -> None:
    """Test that nothing is created when the server does not answer."""
    async with api_server() as server:
        await server.stop()
        with pytest.raises(ApiUnreachable):
            await submitted(server, MPI)
        await server.start()


@pytest.mark.parametrize("spec", [SIMPLE, MPI])
async def test_user_is_told_how_to_find_out_when_the_answer_about_the_root_is_lost(
    spec: TrainingSpec,
) -> None:
    """The job exists. It runs if it owns nothing, and is suspended otherwise."""
    async with api_server() as server:

        async def lose(request: web.Request) -> None:
            if request.path.endswith("/jobsets") and "dryRun" not in request.query:
                assert request.transport is not None
                request.transport.close()

        server.after = lose
        with pytest.raises(SubmissionRefused) as raised:
            await submitted(with_jobset(server), spec, Contents())
        (root,) = server.all("jobsets")
        assert bool(root["spec"].get("suspend")) is (spec is MPI)
    assert str(raised.value).endswith(
        f": fenka get {spec.name} tells whether job {spec.name} was created"
    )
