"""What follows the load of a version: KEDA or the gateway, never both, and moves from earlier releases."""

import copy
from typing import Any

import msgspec
import pytest
from aiohttp import web

from fenka.jobs.kubernetes import (
    gateway_insertion,
    load_following,
)
from fenka.jobs.kubernetes.gateway_insertion import GatewayRequest
from tests.fakes.api_server import FakeApiServer
from tests.jobs.kubernetes.test_serving import (
    FIXED,
    RANGE,
    SECOND,
    address,
    cluster,
    deleted,
    deployed,
    left,
    refused,
    replicas,
    scaled,
    updated,
    written,
)

Json = dict[str, Any]
KEDA = "/apis/keda.sh/v1alpha1"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for the gateway and for KEDA's objects without pauses."""
    monkeypatch.setattr(gateway_insertion, "POLL_S", 0.0)
    monkeypatch.setattr(load_following, "POLL_S", 0.0)


def with_keda(server: FakeApiServer) -> None:
    """Install KEDA."""
    server.discovered.add(KEDA)


def by_keda(server: FakeApiServer) -> list[str]:
    """Return the versions that KEDA scales."""
    return [item["metadata"]["name"] for item in server.all("scaledobjects")]


async def test_keda_follows_the_load_where_it_is() -> None:
    """The gateway does not, and has no right to; the object goes with its version."""
    async with cluster() as server:
        with_keda(server)
        reported = list[str]()
        await deployed(server, RANGE, GatewayRequest(report=reported.append))
        assert by_keda(server) == ["bert-v1"]
        assert scaled(server) == {}
        (trigger,) = server.get("scaledobjects", "bert-v1", "team")["spec"]["triggers"]
        assert trigger["metadata"]["scalerAddress"] == "bert-gateway.team:9091"
        assert reported == [
            "KEDA follows the load of version v1: see kubectl get scaledobject bert-v1 -n team"
        ]
        await deleted(server)
        assert left(server) == []


async def test_service_of_the_gateway_leads_to_the_port_that_keda_is_given() -> None:
    """By the name of the port in the gateway's pods."""
    async with cluster() as server:
        with_keda(server)
        await deployed(server, RANGE)
        service = server.get("services", "bert-gateway", "team")["spec"]
        pods = server.get("deployments", "bert-gateway", "team")["spec"]["template"]
        assert service["selector"].items() <= pods["metadata"]["labels"].items()
        ports = {
            port["name"]: port["containerPort"] for port in pods["spec"]["containers"][0]["ports"]
        }
        (port,) = service["ports"]
        assert port["port"] == ports[port["targetPort"]] == 9091


async def test_fenka_scales_beside_keda_when_the_user_says_so() -> None:
    """Until the user says something else; then the other one is removed first."""
    async with cluster() as server:
        with_keda(server)
        await deployed(server, msgspec.structs.replace(RANGE, scaler="fenka"))
        assert (by_keda(server), scaled(server)) == ([], {"v1": (0, 3)})
        await updated(server, image="j")
        assert (by_keda(server), scaled(server)) == ([], {"v1": (0, 3)})
        server.writes.clear()
        await updated(server, scaler="keda")
        assert (by_keda(server), scaled(server)) == (["bert-v1"], {})
        order = written(server)
        assert order.index("services/bert") < order.index("scaledobjects")
        owner = server.get("scaledobjects", "bert-v1", "team")["metadata"]["ownerReferences"][0]
        assert owner["uid"] == server.get("deployments", "bert-v1", "team")["metadata"]["uid"]
        server.writes.clear()
        await updated(server, scaler="fenka")
        assert (by_keda(server), scaled(server)) == ([], {"v1": (0, 3)})
        order = written(server)
        assert order.index("scaledobjects/bert-v1") < order.index("services/bert")


async def test_update_of_a_range_reaches_keda() -> None:
    """The object is changed in place, and removed when the version gets a number."""
    async with cluster() as server:
        with_keda(server)
        await deployed(server, RANGE)
        await updated(server, replicas="1..5", target=9, down_after_s=30)
        spec = server.get("scaledobjects", "bert-v1", "team")["spec"]
        assert (spec["minReplicaCount"], spec["maxReplicaCount"], spec["cooldownPeriod"]) == (
            1,
            5,
            30,
        )
        assert spec["triggers"][0]["metadata"]["target"] == "9"
        await updated(server, replicas="2")
        assert (by_keda(server), scaled(server), replicas(server)["bert-v1"]) == ([], {}, 2)


async def test_default_follows_the_cluster_when_keda_comes_and_goes() -> None:
    """At the next update."""
    async with cluster() as server:
        await deployed(server, RANGE)
        with_keda(server)
        await updated(server, image="j")
        assert (by_keda(server), scaled(server)) == (["bert-v1"], {})
        server.discovered.clear()
        server.remove("scaledobjects", "bert-v1", "team")
        await updated(server, image="k")
        assert scaled(server) == {"v1": (0, 3)}


async def test_range_is_refused_when_the_user_may_not_use_keda() -> None:
    """One sentence names the right, and the way without it."""
    async with cluster() as server:
        with_keda(server)
        server.forbidden.add("scaledobjects")
        assert await refused(deployed(server, RANGE)) == (
            "KEDA follows the load of services here, and you may not get, create, patch, delete "
            "scaledobjects.keda.sh in namespace team: ask an administrator for that right, or use "
            "--scaler fenka"
        )
        assert not server.writes
        await deployed(server, msgspec.structs.replace(RANGE, scaler="fenka"))
        assert scaled(server) == {"v1": (0, 3)}


async def test_version_of_keda_is_not_taken_over_when_its_user_may_not_stop_keda() -> None:
    """Both would set its number of replicas."""
    async with cluster() as server:
        with_keda(server)
        await deployed(server, RANGE)
        meta = {"name": "keda-hpa-bert-v1", "namespace": "team"}
        server.put("horizontalpodautoscalers", {"metadata": meta})
        server.forbidden.add("scaledobjects")
        assert await refused(updated(server, scaler="fenka")) == (
            "KEDA follows the load of version v1, and you may not read or delete scaledobjects.keda.sh in "
            "namespace team: have somebody delete ScaledObject bert-v1"
        )
        assert scaled(server) == {}


async def test_version_stays_kedas_when_keda_does_not_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its finalizer keeps the object while KEDA does not run."""
    monkeypatch.setattr(load_following, "REMOVALS", 3)
    async with cluster() as server:
        with_keda(server)
        await deployed(server, RANGE)

        async def keep(request: web.Request) -> web.Response | None:
            return web.json_response({}) if request.method == "DELETE" else None

        server.before = keep
        assert (await refused(updated(server, scaler="fenka"))).startswith(
            "ScaledObject bert-v1 in namespace team is not removed, because KEDA does not remove its "
        )
        assert scaled(server) == {}


async def test_keda_is_refused_where_it_is_not() -> None:
    """By name; it is no default there."""
    async with cluster() as server:
        assert await refused(deployed(server, msgspec.structs.replace(RANGE, scaler="keda"))) == (
            "--scaler keda requires KEDA, which this cluster does not have: leave it out"
        )
        assert not server.writes


async def test_gateway_scales_several_versions_until_they_are_deleted() -> None:
    """Each has an entry and a right of its own."""
    async with cluster() as server:
        await deployed(server, RANGE)
        await deployed(server, msgspec.structs.replace(SECOND, replicas="1..2"))
        assert scaled(server) == {"v1": (0, 3), "v2": (1, 2)}
        await deleted(server, "v2")
        assert scaled(server) == {"v1": (0, 3)}


@pytest.mark.parametrize(
    "text", ["{", '{"v1": 3}', '{"../x": {"least": 1, "most": 2, "target": 1}}']
)
async def test_invalid_annotation_is_written_again(text: str) -> None:
    """Tenants write it; the gateway scaled nothing by it."""
    async with cluster() as server:
        await deployed(server, RANGE)
        address(server)["metadata"]["annotations"]["fenka.io/scaling"] = text
        await updated(server, replicas="1..4")
        assert scaled(server) == {"v1": (1, 4)}


def earlier_release(server: FakeApiServer) -> None:
    """Make of a service what an earlier release has left: another gateway, and an autoscaler."""
    gateway = server.get("deployments", "bert-gateway", "team")
    (container,) = gateway["spec"]["template"]["spec"]["containers"]
    container["image"] = "fenka:0"
    container["args"] = [word for word in container["args"] if not word.startswith("--scaler")]
    container["args"][container["args"].index("--wait=60")] = "--wait=240"
    gateway["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 300
    gateway["spec"]["template"]["spec"]["containers"].append({"name": "proxy", "image": "mesh"})
    container["ports"] = [port for port in container["ports"] if port["name"] != "scaler"]
    del container["env"]
    server.remove("services", "bert-gateway", "team")
    role = server.get("roles", "bert-gateway", "team")
    role["rules"] = role["rules"][:2]
    address(server)["metadata"].pop("annotations")
    metric = {"type": "External", "external": {"metric": {"name": "fenka_requests"}}}
    meta = {"name": "bert-v1", "namespace": "team"}
    server.put("horizontalpodautoscalers", {"metadata": meta, "spec": {"metrics": [metric]}})


@pytest.mark.parametrize("keda", [False, True])
async def test_update_moves_a_service_of_an_earlier_release(keda: bool) -> None:
    """The gateway is replaced, with its own options, before anything follows the load. Replicas stay."""
    async with cluster() as server:
        await deployed(server, RANGE)
        server.get("deployments", "bert-v1", "team")["spec"]["replicas"] = 3
        earlier_release(server)
        if keda:
            with_keda(server)
        server.writes.clear()
        await updated(server)
        assert not server.all("horizontalpodautoscalers")
        assert replicas(server) == {"bert-v1": 3, "bert-gateway": 1}
        assert (by_keda(server), scaled(server)) == (
            (["bert-v1"], {}) if keda else ([], {"v1": (0, 3)})
        )
        template = server.get("deployments", "bert-gateway", "team")["spec"]["template"]
        container, other = template["spec"]["containers"]
        assert other == {"name": "proxy", "image": "mesh"}
        assert template["spec"]["terminationGracePeriodSeconds"] == 300
        assert container["image"] == "fenka:1"
        assert "--wait=240" in container["args"]
        assert container["args"].count("--scaler=0.0.0.0:9091") == 1
        assert [port["name"] for port in container["ports"]] == ["http-serving", "admin", "scaler"]
        assert container["env"][0]["name"] == "POD_NAME"
        assert "services/bert-gateway" in left(server)
        order = written(server)
        assert order.index("deployments/bert-gateway") < order.index(
            "horizontalpodautoscalers/bert-v1"
        )
        now = copy.deepcopy(template)
        await updated(server)
        assert server.get("deployments", "bert-gateway", "team")["spec"]["template"] == now


async def test_role_of_a_service_without_ranges_is_left_as_it_is() -> None:
    """Earlier releases wrote it otherwise, and its user may not read it."""
    async with cluster() as server:
        await deployed(server, FIXED)
        await deployed(server, SECOND)
        role = server.get("roles", "bert-gateway", "team")
        role["rules"] = [{"apiGroups": [""], "resources": ["services"], "verbs": ["get"]}]
        await deleted(server, "v2")
        assert server.get("roles", "bert-gateway", "team")["rules"] == role["rules"]
        await deployed(server, SECOND)
        server.forbidden.add("roles")
        await deleted(server, "v2")


async def test_autoscaler_of_the_users_own_is_kept_when_a_version_is_updated() -> None:
    """It may be called like the version, and has another metric."""
    async with cluster() as server:
        await deployed(server, RANGE)
        resource = {"type": "Resource", "resource": {"name": "cpu"}}
        other = {"type": "External", "external": {"metric": {"name": "queue"}}}
        meta = {"name": "bert-v1", "namespace": "team"}
        spec = {"metrics": [resource, other]}
        server.put("horizontalpodautoscalers", {"metadata": meta, "spec": spec})
        await updated(server, replicas="2")
        assert "horizontalpodautoscalers/bert-v1" in left(server)


async def test_number_of_replicas_needs_neither_keda_nor_a_right() -> None:
    """Nothing is asked of the cluster about it."""
    async with cluster() as server:
        with_keda(server)
        server.forbidden.add("scaledobjects")
        await deployed(server, FIXED)
        assert not any("keda" in request for request in server.requests)
