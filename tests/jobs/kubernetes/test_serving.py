"""Services on a cluster: what is created and changed in which order, what failures leave, what is refused."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
import pytest
from aiohttp import web

from fenka.cluster.service_objects import read_scaling
from fenka.core.errors import FenkaError
from fenka.core.request import InvalidRequest
from fenka.jobs.collection import Contents
from fenka.jobs.kubernetes import (
    gateway_insertion,
    service_changes,
    update_in_place,
)
from fenka.jobs.kubernetes.checks import SubmissionRefused
from fenka.jobs.kubernetes.gateway_insertion import GatewayRequest
from fenka.jobs.kubernetes.service_deployment import deploy
from fenka.jobs.service import ServiceSpec
from fenka.kubernetes.api_client import ApiError
from fenka.kubernetes.reader import read_services
from fenka.views.cluster_workloads import service_versions
from tests.fakes.api_server import FakeApiServer, api_server
from tests.waiting import until

Json = dict[str, Any]
NOW = datetime(2026, 11, 22, 13, 0, tzinfo=UTC)
LATER = NOW.timestamp() + 3600
FIXED = ServiceSpec(
    name="bert", version="v1", image="i", gpu_mem="3", restful_port=5000, command=["serve"]
)
SECOND = msgspec.structs.replace(FIXED, version="v2")
RANGE = msgspec.structs.replace(FIXED, replicas="0..3")
PUBLISHED = {
    "metadata": {"name": "fenka", "namespace": "kube-public"},
    "data": {"gatewayImage": "fenka:1", "priorityClass": "fenka-serving"},
}
KINDS = (
    "deployments",
    "services",
    "horizontalpodautoscalers",
    "scaledobjects",
    "configmaps",
    "serviceaccounts",
    "roles",
    "rolebindings",
)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for the gateway and for new replicas without pauses."""
    monkeypatch.setattr(gateway_insertion, "POLL_S", 0.0)
    monkeypatch.setattr(update_in_place, "POLL_S", 0.0)


@contextlib.asynccontextmanager
async def cluster() -> AsyncIterator[FakeApiServer]:
    """A cluster with fenka's chart, whose Deployments start at once."""
    async with api_server() as server:
        server.put("configmaps", PUBLISHED)

        async def run(_: web.Request) -> None:
            server.run_deployments()

        server.after = run
        yield server


async def deployed(
    server: FakeApiServer, spec: ServiceSpec, options: GatewayRequest | None = None
) -> None:
    """Deploy a version."""
    async with server.api() as api:
        await deploy(api, "team", spec, Contents(), options or GatewayRequest(), NOW)


async def updated(server: FakeApiServer, version: str = "", **fields: Any) -> None:
    """Change fields of a version."""

    def change(spec: ServiceSpec) -> ServiceSpec:
        return msgspec.structs.replace(spec, **fields)

    async with server.api() as api:
        await service_changes.update(api, "team", "bert", version, change, GatewayRequest())


async def deleted(server: FakeApiServer, version: str = "") -> None:
    """Delete a version or the service, and what they owned."""
    async with server.api() as api:
        await service_changes.delete(api, "team", "bert", version)
    server.collect_garbage()


async def split(server: FakeApiServer, **weights: int) -> None:
    """Divide the requests."""
    async with server.api() as api:
        await service_changes.split(api, "team", "bert", weights)


async def listed(server: FakeApiServer) -> list[tuple[str, str]]:
    """Return the versions that `list` shows, with their notes."""
    async with server.api() as api:
        versions = service_versions(await read_services(api, "team"), LATER)
    return [(each.version, each.note) for each in versions]


def left(server: FakeApiServer) -> list[str]:
    """Return the objects of the namespace, by kind and name."""
    return sorted(
        f"{kind}/{item['metadata']['name']}"
        for kind in KINDS
        for item in server.all(kind)
        if item["metadata"].get("namespace") == "team"
    )


def replicas(server: FakeApiServer) -> dict[str, int]:
    """Return the number of replicas of each Deployment."""
    return {
        item["metadata"]["name"]: item["spec"]["replicas"] for item in server.all("deployments")
    }


def address(server: FakeApiServer) -> Json:
    """Return the Service of all versions."""
    return server.get("services", "bert", "team")


def weights(server: FakeApiServer) -> Json:
    """Return the weights as the gateway reads them."""
    found: Json = json.loads(address(server)["metadata"]["annotations"]["fenka.io/traffic"])
    return found


def scaled(server: FakeApiServer) -> dict[str, tuple[int, int]]:
    """Return the versions that the gateway scales, with their ranges. It has the rights for them only."""
    policies = read_scaling(address(server)["metadata"].get("annotations", {}))
    rules = server.get("roles", "bert-gateway", "team")["rules"]
    scales = [rule for rule in rules if rule["resources"] == ["deployments/scale"]]
    rights = {name for rule in scales for name in rule["resourceNames"]}
    assert rights == {f"bert-{version}" for version in policies}
    assert all(rule["verbs"] == ["get", "patch"] for rule in scales)
    return {version: (policy.least, policy.most) for version, policy in policies.items()}


def written(server: FakeApiServer) -> list[str]:
    """Return the end of the path of each write."""
    return ["/".join(path.split("/namespaces/team/")[1:]) for path, _ in server.writes]


async def refused(action: Any) -> str:
    """Return the sentence with which something is refused."""
    with pytest.raises(FenkaError) as error:
        await action
    return str(error.value)


# ---- the first version ----


async def test_version_has_replicas_when_all_that_it_owns_exists() -> None:
    """Before, its Deployment has none."""
    async with cluster() as server:
        await deployed(server, msgspec.structs.replace(FIXED, replicas="2"))
        assert left(server) == ["deployments/bert-v1", "services/bert", "services/bert-v1"]
        assert written(server)[0] == "deployments"
        assert written(server)[-1] == "deployments/bert-v1"
        assert server.writes[0][1]["spec"]["replicas"] == 0
        assert replicas(server) == {"bert-v1": 2}
        assert address(server)["spec"]["selector"]["fenka.io/role"] == "replica"
        pod = server.get("deployments", "bert-v1", "team")["spec"]["template"]["spec"]
        assert pod["priorityClassName"] == "fenka-serving"
        assert await listed(server) == [("v1", "")]


async def test_range_has_a_gateway_that_may_scale_it() -> None:
    """Clients connect to the gateway, which exists before the first replica."""
    async with cluster() as server:
        reported = list[str]()
        await deployed(server, RANGE, GatewayRequest(replicas=2, report=reported.append))
        assert replicas(server) == {"bert-v1": 1, "bert-gateway": 2}
        assert address(server)["spec"]["selector"]["fenka.io/role"] == "gateway"
        assert scaled(server) == {"v1": (0, 3)}
        order = written(server)
        assert order.index("deployments/bert-gateway") < order.index("deployments/bert-v1")
        assert order.index("roles/bert-gateway") < order.index("services/bert")
        assert order[-2:] == ["services/bert", "deployments/bert-v1"]
        assert reported == [
            "the gateway follows the load of version v1: see kubectl logs -n team -l "
            "servingName=bert,fenka.io/role=gateway"
        ]
        await deleted(server)
        assert left(server) == []


@pytest.mark.parametrize("spec", [FIXED, RANGE])
async def test_nothing_holds_a_card_when_the_client_is_killed(spec: ServiceSpec) -> None:
    """Whatever the last request was: `list` reports the version, and `delete` leaves nothing."""
    writes = 0
    async with cluster() as server:
        await deployed(server, spec)
        writes = len(server.writes)
    for step in range(1, writes):
        async with cluster() as server:
            async with killed_after(server, step, lambda: deployed(server, spec)):
                assert replicas(server)["bert-v1"] == 0
            ((version, note),) = await listed(server)
            assert version == "v1"
            assert note.startswith(
                "its deployment was interrupted, and it will not start: delete it"
            )
            await deleted(server)
            assert left(server) == [], step


@contextlib.asynccontextmanager
async def killed_after(
    server: FakeApiServer, writes: int, action: Callable[[], Any]
) -> AsyncIterator[None]:
    """Run the block when a client has been killed that had made this many changes."""
    reached, forever, before = asyncio.Event(), asyncio.Event(), server.after

    async def kill(request: web.Request) -> None:
        if before is not None:
            await before(request)
        if len(server.writes) >= writes:
            reached.set()
            await forever.wait()

    server.after = kill
    task = asyncio.create_task(action())
    done = asyncio.create_task(reached.wait())
    await asyncio.wait([task, done], return_when=asyncio.FIRST_COMPLETED)
    server.after = before
    state = {key: json.dumps(value) for key, value in server.objects.items()}
    yield
    # What the client would do after an interruption is undone: it is dead.
    forever.set()
    task.cancel()
    await asyncio.gather(task, done, return_exceptions=True)
    server.objects = {key: json.loads(value) for key, value in state.items()}


@pytest.mark.parametrize("path", ["services", "roles", "deployments/bert-v1"])
async def test_nothing_is_left_when_a_request_fails(path: str) -> None:
    """The garbage collector removes what the version owned."""
    async with cluster() as server:

        async def fail(request: web.Request) -> web.Response | None:
            if (
                request.path.endswith(path)
                and request.method in ("POST", "PATCH")
                and not request.query
            ):
                return web.json_response({"message": "no space", "code": 500}, status=500)
            return None

        server.before = fail
        with pytest.raises(ApiError, match="no space"):
            await deployed(server, RANGE)
        server.collect_garbage()
        assert left(server) == []


async def test_user_is_told_what_is_left_when_a_version_cannot_be_deleted() -> None:
    """It has no replicas."""
    async with cluster() as server:

        async def fail(request: web.Request) -> web.Response | None:
            if request.method in ("PATCH", "DELETE"):
                return web.json_response({"message": "no space", "code": 500}, status=500)
            return None

        server.before = fail
        assert await refused(deployed(server, FIXED)) == (
            "version v1 of service bert was created and could not be completed or deleted: delete it by "
            "fenka serve delete bert -v v1 (no space)"
        )


# ---- further versions ----


async def test_second_version_gets_a_gateway_that_is_ready_before_clients_use_it() -> None:
    """The first version serves all requests until somebody divides them."""
    async with cluster() as server:
        await deployed(server, FIXED)
        before = server.get("deployments", "bert-v1", "team")["spec"]
        reported = list[str]()
        server.writes.clear()
        await deployed(server, SECOND, GatewayRequest(report=reported.append))
        assert replicas(server) == {"bert-v1": 1, "bert-v2": 1, "bert-gateway": 1}
        assert server.get("deployments", "bert-v1", "team")["spec"] == before
        assert weights(server) == {"v1": 100, "v2": 0}
        changed = [body for path, body in server.writes if path.endswith("/services/bert")]
        assert "selector" in changed[-1]["spec"]
        order = written(server)
        switched = len(order) - 1 - order[::-1].index("services/bert")
        assert order.index("deployments/bert-gateway") < switched
        assert order[-1] == "deployments/bert-v2"


async def test_clients_stay_at_the_replicas_when_the_gateway_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The new version is not deployed, and the gateway is removed."""
    monkeypatch.setattr(gateway_insertion, "GATEWAY_START_S", 0.0)
    async with cluster() as server:
        await deployed(server, FIXED)
        server.after = None
        assert await refused(deployed(server, SECOND)) == (
            "gateway bert-gateway does not start within 0 s: see kubectl describe deployment "
            "bert-gateway -n team"
        )
        server.collect_garbage()
        assert left(server) == ["deployments/bert-v1", "services/bert", "services/bert-v1"]
        assert address(server)["spec"]["selector"]["fenka.io/role"] == "replica"


async def test_nothing_is_left_of_the_gateway_when_the_user_may_not_give_it_its_rights() -> None:
    """A dry run does not tell: the API server refuses a RoleBinding before its Role exists."""
    async with cluster() as server:
        await deployed(server, FIXED)

        async def forbid(request: web.Request) -> web.Response | None:
            if request.method == "POST" and request.path.endswith("rolebindings"):
                return web.json_response({"message": "no rights", "code": 403}, status=403)
            return None

        server.before = forbid
        for action in (deployed(server, SECOND), updated(server, replicas="1..4")):
            assert await refused(action) == "no rights"
            server.collect_garbage()
            assert left(server) == ["deployments/bert-v1", "services/bert", "services/bert-v1"]


@pytest.mark.slow
async def test_first_version_is_unharmed_when_the_client_is_killed() -> None:
    """After any request: clients reach a version or a ready gateway, and the next attempt succeeds."""
    writes = 0
    async with cluster() as server:
        await deployed(server, FIXED)
        first = len(server.writes)
        await deployed(server, SECOND)
        writes = len(server.writes)
    for step in range(first + 1, writes):
        async with cluster() as server:
            await deployed(server, FIXED)
            async with killed_after(server, step, lambda: deployed(server, SECOND)):
                assert replicas(server)["bert-v1"] == 1
                assert replicas(server)["bert-v2"] == 0
                if address(server)["spec"]["selector"]["fenka.io/role"] == "gateway":
                    assert server.get("deployments", "bert-gateway", "team")["status"][
                        "availableReplicas"
                    ]
            assert [version for version, note in await listed(server) if note] == ["v2"]
            await deleted(server, "v2")
            await deployed(server, SECOND)
            assert replicas(server) == {"bert-v1": 1, "bert-v2": 1, "bert-gateway": 1}
            assert address(server)["spec"]["selector"]["fenka.io/role"] == "gateway"
            assert "roles/bert-gateway" in left(server)
            await deleted(server)
            assert left(server) == [], step


async def test_withdrawn_version_leaves_the_other_unharmed() -> None:
    """Its share goes to the others before its replicas end; the gateway stays."""
    async with cluster() as server:
        await deployed(server, FIXED)
        await deployed(server, SECOND)
        await split(server, v1=90, v2=10)
        assert weights(server) == {"v1": 90, "v2": 10}
        server.writes.clear()
        await deleted(server, "v2")
        assert weights(server) == {"v1": 100}
        assert written(server) == ["services/bert", "deployments/bert-v2"]
        assert replicas(server) == {"bert-v1": 1, "bert-gateway": 1}
        assert "services/bert-v2" not in left(server)
        # What the deleted version owned with the other one is the other one's.
        await deleted(server)
        assert left(server) == []


async def test_version_with_all_requests_is_not_withdrawn() -> None:
    """Nobody would answer them."""
    async with cluster() as server:
        await deployed(server, FIXED)
        await deployed(server, SECOND)
        assert await refused(deleted(server, "v1")) == (
            "version v1 gets all requests of service bert: move them first, by fenka traffic-split --name "
            "bert -v v2:100"
        )
        assert "bert-v1" in replicas(server)


async def test_weights_of_others_keep_their_proportion_when_a_version_is_added_or_withdrawn() -> (
    None
):
    """The sum stays 100."""
    async with cluster() as server:
        for name in ("v1", "v2", "v3"):
            await deployed(server, msgspec.structs.replace(FIXED, version=name))
        await split(server, v1=50, v2=25, v3=25)
        await deployed(server, msgspec.structs.replace(FIXED, version="v4"))
        assert weights(server) == {"v1": 50, "v2": 25, "v3": 25, "v4": 0}
        await deleted(server, "v3")
        assert weights(server) == {"v1": 67, "v2": 33, "v4": 0}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"v1": 1, "v2": 1}', [50, 50]),
        ('{"v2": 10, "gone": 90}', [0, 100]),
        ('{"v1": -1, "v2": 101}', [None, None]),
    ],
)
async def test_screens_show_percent_of_the_requests_when_weights_are_written_by_hand(
    text: str, expected: list[int | None]
) -> None:
    """The gateway takes weights relative to each other, and only those of versions that exist."""
    async with cluster() as server:
        await deployed(server, FIXED)
        await deployed(server, SECOND)
        address(server)["metadata"]["annotations"] = {"fenka.io/traffic": text}
        async with server.api() as api:
            versions = service_versions(await read_services(api, "team"), LATER)
        assert [each.share for each in versions] == expected


async def test_weights_of_another_user_are_kept_when_a_version_is_added_at_the_same_time() -> None:
    """Somebody divides the requests after the service was read."""
    async with cluster() as server:
        await deployed(server, FIXED)
        await deployed(server, SECOND)
        third = msgspec.structs.replace(FIXED, version="v3")
        await while_created(server, "deployments", '{"v1": 40, "v2": 60}', deployed(server, third))
        assert weights(server) == {"v1": 40, "v2": 60, "v3": 0}


async def while_created(server: FakeApiServer, kind: str, text: str, action: Any) -> None:
    """Do something; another user sets the weights when an object of this kind is created."""
    before = server.after

    async def split_now(request: web.Request) -> None:
        if request.method == "POST" and request.path.endswith(kind) and not request.query:
            item = address(server)
            item["metadata"]["annotations"] = {"fenka.io/traffic": text}
            server.put("services", item)
        if before is not None:
            await before(request)

    server.after = split_now
    await action
    server.after = before


async def test_version_is_not_withdrawn_when_another_user_has_just_divided_the_requests() -> None:
    """It may get all of them now, or the others none."""
    async with cluster() as server:
        await deployed(server, FIXED)
        await deployed(server, SECOND)

        async def split_first(request: web.Request) -> None:
            if request.method == "PATCH":
                item = address(server)
                item["metadata"]["annotations"] = {"fenka.io/traffic": '{"v2": 100}'}
                server.put("services", item)

        server.before = split_first
        assert await refused(deleted(server, "v2")) == (
            "service bert was changed by somebody else at this moment: look at it (fenka serve list), and "
            "try again"
        )
        assert weights(server) == {"v2": 100}
        assert "bert-v2" in replicas(server)


@pytest.mark.parametrize("text", ["[]", "{", '{"v1": "x"}', '{"v1": -1}', "[" * 5000, ""])
async def test_hostile_weights_do_not_hinder_changes(text: str) -> None:
    """Somebody wrote the annotation by hand. Weights that nobody can read are equal ones."""
    async with cluster() as server:
        await deployed(server, FIXED)
        address(server)["metadata"]["annotations"] = {"fenka.io/traffic": text}
        await listed(server)
        await deployed(server, SECOND)
        assert weights(server) == {"v1": 100, "v2": 0}


# ---- what is refused ----


async def test_version_is_refused_when_it_exists() -> None:
    """Two users may choose the same name: the second one changes nothing."""
    async with cluster() as server:
        await deployed(server, FIXED)
        server.writes.clear()
        assert await refused(deployed(server, FIXED)) == (
            "version v1 of service bert already exists in namespace team: use fenka serve update, delete it "
            "(fenka serve delete bert -v v1) or choose another --version"
        )
        assert not server.writes


async def test_one_of_two_users_with_one_name_succeeds_when_both_deploy_at_once() -> None:
    """The other one's sentence names the version, and nothing of it is left."""
    async with cluster() as server:
        results = await asyncio.gather(
            deployed(server, FIXED), deployed(server, FIXED), return_exceptions=True
        )
        assert [type(result) for result in results if result] == [SubmissionRefused]
        assert left(server) == ["deployments/bert-v1", "services/bert", "services/bert-v1"]
        assert replicas(server) == {"bert-v1": 1}


async def test_service_is_refused_when_its_objects_are_not_its_own() -> None:
    """Nothing is created, and the other objects stay as they are."""
    for kind, name in (("services", "bert"), ("deployments", "bert-v1"), ("services", "bert-v1")):
        async with cluster() as server:
            server.put(
                kind, {"metadata": {"name": name, "namespace": "team"}, "spec": {"replicas": 1}}
            )
            word = kind.removesuffix("s").capitalize()
            assert (await refused(deployed(server, FIXED))).startswith(
                f"{word} {name}, which service bert needs, already exists in namespace team"
            )
            assert not server.writes


async def test_version_is_refused_when_clients_could_not_reach_it() -> None:
    """The service's address has certain ports."""
    async with cluster() as server:
        await deployed(server, FIXED)
        other = msgspec.structs.replace(SECOND, port=5001)
        assert await refused(deployed(server, other)) == (
            "service bert has the ports http-serving, and this version grpc-serving, http-serving: give it "
            "the same by --restful-port and --port"
        )


async def test_version_is_refused_when_the_services_address_is_of_another_type() -> None:
    """All versions have one address. Who names no type takes it as it is."""
    async with cluster() as server:
        await deployed(server, msgspec.structs.replace(FIXED, service="NodePort"))
        other = msgspec.structs.replace(SECOND, service="LoadBalancer")
        assert await refused(deployed(server, other)) == (
            "service bert is of type NodePort, not LoadBalancer: leave out --service, or choose another "
            "--name"
        )
        await deployed(server, SECOND)


async def test_gateway_is_refused_when_its_image_is_unknown() -> None:
    """An option names it."""
    async with cluster() as server:
        server.remove("configmaps", "fenka", "kube-public")
        assert await refused(deployed(server, RANGE)) == (
            "this service needs a gateway, whose image this cluster does not publish: upgrade fenka's chart, "
            "or use --gateway-image IMAGE"
        )
        assert not server.writes
        await deployed(server, RANGE, GatewayRequest("other:2"))
        pod = server.get("deployments", "bert-gateway", "team")["spec"]["template"]["spec"]
        assert pod["containers"][0]["image"] == "other:2"


async def test_service_is_refused_when_its_claim_is_for_one_node() -> None:
    """Its replicas may be on several."""
    spec = msgspec.structs.replace(FIXED, replicas="2", data=["models:/m"])
    async with cluster() as server:
        assert await refused(deployed(server, spec)) == "claim models not found in namespace team"
        claim = {"metadata": {"name": "models", "namespace": "team"}, "spec": {}}
        server.put("persistentvolumeclaims", claim)
        assert await refused(deployed(server, spec)) == (
            "claim models is ReadWriteOnce and cannot be mounted on several nodes: use a ReadWriteMany claim "
            "or --replicas 1"
        )


async def test_changes_are_refused_when_there_is_no_such_service_or_version() -> None:
    """Nothing is written."""
    async with cluster() as server:
        for action in (deleted(server), split(server, v1=100), updated(server)):
            assert await refused(action) == "service bert not found in namespace team"
        await deployed(server, FIXED)
        server.writes.clear()
        missing = "service bert has no version v3: existing versions are v1"
        for action in (deleted(server, "v3"), split(server, v3=100), updated(server, "v3")):
            assert await refused(action) == missing
        assert not server.writes


# ---- updates ----


async def test_update_replaces_what_pods_are_made_of() -> None:
    """Fields that are given up disappear, and defaults of the API server are added by it again."""
    spec = msgspec.structs.replace(FIXED, label={"a": "1"}, selector={"zone": "a"}, cpu="2")
    async with cluster() as server:
        await deployed(server, spec)
        template = server.get("deployments", "bert-v1", "team")["spec"]["template"]
        template["spec"]["dnsPolicy"] = "ClusterFirst"
        await updated(server, label={}, selector={}, image="j", replicas="3")
        deployment = server.get("deployments", "bert-v1", "team")
        pod = deployment["spec"]["template"]
        assert "a" not in pod["metadata"]["labels"]
        assert pod["metadata"]["labels"]["servingName"] == "bert"
        assert "nodeSelector" not in pod["spec"]
        assert "dnsPolicy" not in pod["spec"]
        assert pod["spec"]["containers"][0]["image"] == "j"
        assert pod["spec"]["priorityClassName"] == "fenka-serving"
        assert deployment["spec"]["replicas"] == 3
        assert '"image":"j"' in deployment["metadata"]["annotations"]["fenka.io/spec"]


def a_new_replica(server: FakeApiServer, **fields: Any) -> None:
    """Bring a replica of v1 that has no node. fields: more of its status."""
    template = server.get("deployments", "bert-v1", "team")["spec"]["template"]
    meta = {"name": "bert-v1-new", "namespace": "team", "labels": template["metadata"]["labels"]}
    server.put("pods", {"metadata": meta, "spec": template["spec"], "status": fields})


UNSCHEDULABLE = {
    "conditions": [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "full"}
    ]
}


@contextlib.asynccontextmanager
async def full_cluster(**fields: Any) -> AsyncIterator[FakeApiServer]:
    """A cluster on which an update of v1 makes a replica that waits. fields: more of its status."""
    async with cluster() as server:
        await deployed(server, FIXED)
        server.put("deployments", server.get("deployments", "bert-v1", "team"))

        async def run(request: web.Request) -> None:
            if request.method == "PATCH":
                deployment = server.get("deployments", "bert-v1", "team")
                status = {"replicas": 2, "updatedReplicas": 1, "availableReplicas": 1}
                server.put("deployments", {**deployment, "status": status})
                a_new_replica(server, **fields)

        server.after = run
        yield server


def surges(server: FakeApiServer) -> bool:
    """Return whether a new replica starts before an old one ends."""
    strategy = server.get("deployments", "bert-v1", "team")["spec"]["strategy"]["rollingUpdate"]
    assert strategy["maxSurge"] + strategy["maxUnavailable"] == 1
    return bool(strategy["maxSurge"])


@pytest.mark.parametrize(
    ("status", "changed", "surging"),
    [
        (UNSCHEDULABLE, {"image": "j"}, False),
        # kube-scheduler makes room for it.
        ({**UNSCHEDULABLE, "nominatedNodeName": "n"}, {"image": "j"}, True),
        # Where an old one has ended it may not fit either.
        (UNSCHEDULABLE, {"gpu_mem": "5"}, True),
        (UNSCHEDULABLE, {"selector": {"zone": "none"}}, True),
        ({}, {"image": "j"}, True),
    ],
)
async def test_old_replica_ends_first_when_there_is_no_room_for_both(
    status: Json, changed: Json, surging: bool
) -> None:
    """Only if its successor certainly fits in its place."""
    async with full_cluster(**status) as server:
        await updated(server, **changed)
        assert surges(server) == surging


@pytest.mark.parametrize("surge", [True, False])
async def test_user_decides_which_replica_is_first_when_an_option_says_so(surge: bool) -> None:
    """The next update decides anew."""
    async with full_cluster(**UNSCHEDULABLE) as server, server.api() as api:

        async def update(image: str, choice: bool | None) -> None:
            def change(spec: ServiceSpec) -> ServiceSpec:
                return msgspec.structs.replace(spec, image=image)

            await service_changes.update(
                api, "team", "bert", "", change, GatewayRequest(), surge=choice
            )

        await update("j", surge)
        assert surges(server) == surge
        server.after = None
        server.run_deployments()
        server.remove("pods", "bert-v1-new", "team")
        await update("k", None)
        assert surges(server)


async def test_update_is_undone_and_done_again() -> None:
    """The Deployment remembers what it was before."""
    async with cluster() as server, server.api() as api:

        async def image() -> str:
            spec = await service_changes.undo(api, "team", "bert", "", GatewayRequest())
            pod = server.get("deployments", "bert-v1", "team")["spec"]["template"]["spec"]
            assert pod["containers"][0]["image"] == spec.image
            return spec.image

        await deployed(server, FIXED)
        assert await refused(image()) == (
            "version v1 of service bert has not been updated: there is nothing to undo"
        )
        await updated(server, image="j")
        await updated(server, image="j")
        assert await image() == "i"
        assert await image() == "j"


async def test_update_from_a_number_to_a_range_and_back() -> None:
    """The load is followed from when the gateway exists until the number is set. The gateway stays."""
    async with cluster() as server:
        await deployed(server, FIXED)
        await updated(server, replicas="1..4")
        assert scaled(server) == {"v1": (1, 4)}
        assert address(server)["spec"]["selector"]["fenka.io/role"] == "gateway"
        await updated(server, replicas="2..5", target=9)
        assert scaled(server) == {"v1": (2, 5)}
        server.writes.clear()
        await updated(server, replicas="2")
        assert scaled(server) == {}
        assert written(server) == ["services/bert", "roles/bert-gateway", "deployments/bert-v1"]
        assert replicas(server)["bert-v1"] == 2
        await deleted(server)
        assert left(server) == []


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [("2", "1..4"), ("1..4", "2")])
async def test_update_can_be_repeated_when_the_client_is_killed(first: str, then: str) -> None:
    """After any request the replicas serve clients, who reach them or a ready gateway."""
    spec = msgspec.structs.replace(FIXED, replicas=first)
    async with cluster() as server:
        await deployed(server, spec)
        done = len(server.writes)
        await updated(server, replicas=then)
        writes = len(server.writes)
    for step in range(done + 1, writes):
        async with cluster() as server:
            await deployed(server, spec)
            async with killed_after(server, step, lambda: updated(server, replicas=then)):
                assert replicas(server)["bert-v1"] >= 1
                if address(server)["spec"]["selector"]["fenka.io/role"] == "gateway":
                    gateway = server.get("deployments", "bert-gateway", "team")
                    assert gateway["status"]["availableReplicas"]
            await updated(server, replicas=then)
            assert address(server)["spec"]["selector"]["fenka.io/role"] == "gateway"
            assert bool(scaled(server)) == (".." in then)
            await deleted(server)
            assert left(server) == [], step


async def test_update_of_a_range_leaves_the_number_of_replicas_as_it_is() -> None:
    """An update during the peak removes no replica."""
    async with cluster() as server:
        await deployed(server, RANGE)
        server.get("deployments", "bert-v1", "team")["spec"]["replicas"] = 3
        await updated(server, image="j")
        assert replicas(server)["bert-v1"] == 3


async def test_update_is_refused_when_another_user_updates_the_version_at_the_same_time() -> None:
    """Otherwise it would undo the other one's."""
    async with cluster() as server:
        await deployed(server, FIXED)
        first = True

        async def update_first(request: web.Request) -> None:
            nonlocal first
            if request.method == "PATCH" and first:
                first = False
                await updated(server, image="j")

        server.before = update_first
        assert await refused(updated(server, cpu="2")) == (
            "service bert was changed by somebody else at this moment: look at it (fenka serve list), and "
            "try again"
        )
        pod = server.get("deployments", "bert-v1", "team")["spec"]["template"]["spec"]
        assert pod["containers"][0]["image"] == "j"


async def test_update_succeeds_when_its_deployments_status_changes_at_the_same_time() -> None:
    """The change is made again for the newer version of the object."""
    async with cluster() as server:
        await deployed(server, FIXED)
        first = True

        async def roll(request: web.Request) -> None:
            nonlocal first
            if request.method == "PATCH" and first:
                first = False
                server.put("deployments", server.get("deployments", "bert-v1", "team"))

        server.before = roll
        await updated(server, image="j")
        pod = server.get("deployments", "bert-v1", "team")["spec"]["template"]["spec"]
        assert pod["containers"][0]["image"] == "j"


async def test_update_starts_a_replica_when_a_range_no_longer_begins_at_zero() -> None:
    """The gateway leaves a version without replicas alone whose range begins at 1."""
    async with cluster() as server:
        await deployed(server, RANGE)
        server.get("deployments", "bert-v1", "team")["spec"]["replicas"] = 0
        await updated(server, image="j")
        assert replicas(server)["bert-v1"] == 0
        await updated(server, replicas="2..3")
        assert replicas(server)["bert-v1"] == 2


async def test_update_keeps_the_users_autoscaler_when_the_version_has_a_number() -> None:
    """Who scales a version otherwise may call the autoscaler like it."""
    async with cluster() as server:
        await deployed(server, FIXED)
        scaler = {"metadata": {"name": "bert-v1", "namespace": "team"}, "spec": {"maxReplicas": 9}}
        server.put("horizontalpodautoscalers", scaler)
        await updated(server, image="j")
        assert "horizontalpodautoscalers/bert-v1" in left(server)


async def test_update_is_refused_when_the_gateways_name_is_taken() -> None:
    """Clients stay at the replicas, and the other Deployment stays as it is."""
    async with cluster() as server:
        await deployed(server, FIXED)
        meta = {"name": "bert-gateway", "namespace": "team"}
        server.put("deployments", {"metadata": meta, "spec": {"replicas": 1}})
        server.run_deployments()
        before = json.dumps(server.get("deployments", "bert-gateway", "team"))
        assert (await refused(updated(server, replicas="1..4"))).startswith(
            "Deployment bert-gateway, which service bert needs, already exists in namespace team"
        )
        assert json.dumps(server.get("deployments", "bert-gateway", "team")) == before
        assert address(server)["spec"]["selector"]["fenka.io/role"] == "replica"
        assert "fenka.io/scaling" not in address(server)["metadata"].get("annotations", {})


async def test_gateway_stays_when_the_first_of_two_users_who_insert_it_is_interrupted() -> None:
    """The other one's clients go through it, or will."""
    third = msgspec.structs.replace(FIXED, version="v3")
    async with cluster() as server:
        await deployed(server, FIXED)
        # Both wait for the gateway, which does not start yet.
        server.after = None
        tasks = []
        for spec in (SECOND, third):
            tasks.append(asyncio.create_task(deployed(server, spec)))
            await until(partial(owns_gateway, server, f"bert-{spec.version}"))
        interrupted, other = tasks
        interrupted.cancel()
        await asyncio.gather(interrupted, return_exceptions=True)
        server.run_deployments()
        await other
        server.collect_garbage()
        assert address(server)["spec"]["selector"]["fenka.io/role"] == "gateway"
        assert replicas(server)["bert-gateway"] == 1


def owns_gateway(server: FakeApiServer, version: str) -> bool:
    """Return whether a version's Deployment is an owner of a gateway that is being started."""
    for item in server.all("deployments"):
        if item["metadata"]["name"] == "bert-gateway" and item["spec"]["replicas"]:
            return version in {each["name"] for each in item["metadata"]["ownerReferences"]}
    return False


async def test_update_is_refused_for_what_other_objects_depend_on() -> None:
    """Another version has other ports."""
    async with cluster() as server:
        await deployed(server, FIXED)
        server.writes.clear()
        assert await refused(updated(server, restful_port=5001)) == (
            "--restful-port of a version cannot be changed: deploy another version by fenka serve custom"
        )
        assert await refused(updated(server, buffer_timeout_s=90)) == (
            "--buffer-timeout is the gateway's, which is created once: delete the service, and deploy it "
            "again"
        )
        with pytest.raises(InvalidRequest, match="--target must be"):
            await updated(server, target=0)
        assert not server.writes


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is invalid ("),
        ("{", "is invalid ("),
        ("[" * 5000, "is invalid ("),
        ('{"name": "bert"}', "is invalid ("),
        (msgspec.json.encode(SECOND).decode(), "describes another one"),
    ],
)
async def test_update_is_refused_when_the_annotation_is_not_the_versions(
    text: str, reason: str
) -> None:
    """Whoever may edit the Deployment writes its annotations."""
    async with cluster() as server:
        await deployed(server, FIXED)
        annotations = server.get("deployments", "bert-v1", "team")["metadata"]["annotations"]
        annotations["fenka.io/spec"] = text
        sentence = await refused(updated(server, image="j"))
        assert sentence.startswith(
            "version v1 of service bert cannot be changed, because its annotation fenka.io/spec "
        )
        assert reason in sentence
        assert sentence.endswith("delete it (fenka serve delete bert -v v1) and deploy it again")


async def test_objects_that_only_look_like_versions_are_not_shown_or_deleted() -> None:
    """Labels can be written by anybody who may create Deployments."""
    async with cluster() as server:
        await deployed(server, FIXED)
        labels = server.get("deployments", "bert-v1", "team")["metadata"]["labels"]
        for name, version in (("other", "v1"), ("bert-v1-x", "v1"), ("bert-", "")):
            forged = {**labels, "servingVersion": version}
            meta = {"name": name, "namespace": "team", "labels": forged}
            server.put("deployments", {"metadata": meta, "spec": {"replicas": 1}})
        assert await listed(server) == [("v1", "")]
        await deleted(server)
        assert left(server) == ["deployments/bert-", "deployments/bert-v1-x", "deployments/other"]


async def test_owners_are_kept_when_others_change_the_service_at_the_same_time() -> None:
    """The change is made again for the newer version of the object."""
    async with cluster() as server:
        await deployed(server, FIXED)
        conflicts = 2

        async def conflict(request: web.Request) -> web.Response | None:
            nonlocal conflicts
            if request.method == "PATCH" and request.path.endswith("/services/bert") and conflicts:
                conflicts -= 1
                return web.json_response({"message": "changed", "code": 409}, status=409)
            return None

        server.before = conflict
        await deployed(server, SECOND)
        owners = {owner["name"] for owner in address(server)["metadata"]["ownerReferences"]}
        assert owners == {"bert-v1", "bert-v2"}
        await until(lambda: not conflicts)
