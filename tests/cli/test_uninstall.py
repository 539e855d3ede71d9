"""`fenka uninstall`: a cluster without fenka's chart, and what its programs have left there."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from fenka.cloud.port import OfferKey, Order
from fenka.cloud.simulated_cloud import Prices, Scenario, SimulatedOffer, SimulatedProvider
from fenka.cluster.autoscaling import CAPACITY, GROUP, KEPT_FROM_OTHERS, ORDER, RECLAIMED
from fenka.cluster.objects import QUEUE_GATE
from tests.builders import Json, node_json, pod
from tests.cli.command import Completed, fenka
from tests.fakes.api_server import FakeApiServer, in_thread

NAMESPACE = "fenka-system"
BOUGHT = {ORDER: "t4-a", GROUP: "t4", CAPACITY: "spot"}
FOREIGN = {"key": "team", "value": "a", "effect": "NoSchedule", "timeAdded": "2026-01-01T00:00:00Z"}


def named(name: str, **fields: Any) -> Json:
    """Return an object in fenka's namespace."""
    return {"metadata": {"name": name, "namespace": NAMESPACE}, **fields}


def cluster(*pods: Json, bought: bool = False) -> FakeApiServer:
    """Return a cluster with what fenka has left, and with what is others'."""
    own = node_json("own", 15079, labels={"gpushare": "true", "team": "a"})
    elastic = node_json("elastic", 15079, labels=BOUGHT, annotations=dict(KEPT_FROM_OTHERS))
    elastic["spec"] = {"taints": [FOREIGN, {"key": RECLAIMED, "effect": "NoSchedule"}]}
    return FakeApiServer.of(
        nodes=[own, *([elastic] if bought else [])],
        pods=list(pods),
        leases=[named("fenka-scheduler", spec={}), named("other", spec={})],
        configmaps=[named("fenka-orders", data={}), named("other", data={})],
        secrets=[named("fenka-scheduler-authority", data={}), named("other", data={})],
    )


def uninstall(server: FakeApiServer, folder: Path, *words: str) -> Completed:
    """Run the command."""
    with in_thread(server, folder) as kubeconfig:
        return fenka("uninstall", *words, "--kubeconfig", str(kubeconfig))


def names(server: FakeApiServer, kind: str) -> list[str]:
    """Return the names of the objects of a kind."""
    return [item["metadata"]["name"] for item in server.all(kind)]


def test_nothing_of_fenka_is_left_when_its_chart_is_gone(tmp_path: Path) -> None:
    """Others' labels and objects stay; a second run says that nothing is left."""
    server = cluster()
    result = uninstall(server, tmp_path)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "node own: removed labels gpushare",
        "node own: removed annotations fenka.io/cards",
        "node own: removed its number of cards",
        "lease fenka-system/fenka-scheduler: deleted",
        "configmap fenka-system/fenka-orders: deleted",
        "secret fenka-system/fenka-scheduler-authority: deleted",
    ]
    own = server.get("nodes", "own")
    assert own["metadata"]["labels"] == {"team": "a"}
    assert own["metadata"]["annotations"] == {}
    assert "aliyun.com/gpu-count" not in own["status"]["capacity"]
    for kind in ("leases", "configmaps", "secrets"):
        assert names(server, kind) == ["other"]
    assert uninstall(server, tmp_path).stdout == "nothing of fenka is left\n"


def test_nothing_is_changed_when_it_is_a_dry_run(tmp_path: Path) -> None:
    """It prints the same."""
    server = cluster()
    before = server.version
    preview = uninstall(server, tmp_path, "--dry-run")
    assert server.version == before
    assert preview.stdout == uninstall(server, tmp_path).stdout


def test_nothing_is_removed_while_fenka_runs(tmp_path: Path) -> None:
    """Its programs would write it again."""
    server = cluster()
    server.put("deployments", named("fenka-scheduler"))
    before = server.version
    result = uninstall(server, tmp_path)
    assert (result.exit_code, server.version) == (1, before)
    assert result.stderr == (
        "fenka: fenka still runs in namespace fenka-system: first helm uninstall fenka -n fenka-system\n"
    )


def test_nothing_is_removed_before_the_last_pod_has_ended(tmp_path: Path) -> None:
    """Its program may still write. The pod ends after it was read twice."""
    last = pod("fenka-node-x", namespace=NAMESPACE, labels={"app.kubernetes.io/name": "fenka"})
    server = cluster(last)
    reads = []

    async def end_on_second_read(request: web.Request) -> None:
        if request.path.endswith(f"/{NAMESPACE}/pods"):
            reads.append(request.path)
            assert "fenka-scheduler" in names(server, "leases")
            if len(reads) == 2:
                server.remove("pods", "fenka-node-x", NAMESPACE)

    server.before = end_on_second_read
    assert uninstall(server, tmp_path).exit_code == 0
    assert len(reads) == 2
    assert names(server, "leases") == ["other"]


def waiting(name: str, scheduler: str, *gates: str) -> Json:
    """Return a pod without a node."""
    item = pod(name)
    item["spec"] |= {
        "schedulerName": scheduler,
        "schedulingGates": [{"name": gate} for gate in gates],
    }
    return item


def test_no_pod_waits_for_fenka_when_it_is_gone(tmp_path: Path) -> None:
    """The gate goes, gates of others stay, and pods of the second scheduler are named, then deleted."""
    running = pod("runs", node="own")
    running["spec"]["schedulerName"] = "fenka"
    server = cluster(
        waiting("gated", "default-scheduler", QUEUE_GATE, "example.com/gate"),
        waiting("second", "fenka", QUEUE_GATE),
        waiting("other", "default-scheduler"),
        running,
    )
    result = uninstall(server, tmp_path)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "pod default/gated: removed the gate fenka.io/queue" in result.stdout
    assert (
        "1 pod would wait for the scheduler fenka indefinitely (default/second): add --end-waiting "
        "to delete them, so that their controllers create them again"
    ) in result.stdout
    gated = server.get("pods", "gated", "default")["spec"]
    assert gated["schedulingGates"] == [{"name": "example.com/gate"}]
    assert not server.get("pods", "second", "default")["spec"].get("schedulingGates")
    preview = uninstall(server, tmp_path, "--end-waiting", "--dry-run").stdout
    assert preview == uninstall(server, tmp_path, "--end-waiting").stdout
    assert preview == "pod default/second: deleted\n"
    assert sorted(names(server, "pods")) == ["gated", "other", "runs"]


def test_bought_nodes_need_a_decision(tmp_path: Path) -> None:
    """They cost money, and other autoscalers leave them alone."""
    server = cluster(bought=True)
    before = server.version
    result = uninstall(server, tmp_path)
    assert (result.exit_code, server.version) == (1, before)
    assert "1 node bought by fenka's autoscaler will run, and cost money" in result.stderr
    assert "(elastic): add --end-nodes --config FILE to end them, or --hand-over" in result.stderr


def test_check_names_bought_nodes_while_fenka_runs(tmp_path: Path) -> None:
    """The chart's hook prints it before the chart is uninstalled."""
    for bought, words in (
        (True, "(elastic): run fenka uninstall with"),
        (False, "no bought nodes"),
    ):
        server = cluster(bought=bought)
        server.put("deployments", named("fenka-scheduler"))
        before = server.version
        result = uninstall(server, tmp_path, "--check")
        assert (result.exit_code, result.stderr, server.version) == (0, "", before)
        assert words in result.stdout


def test_bought_nodes_are_anybodys_when_they_are_handed_over(tmp_path: Path) -> None:
    """Taints of others stay with all their fields."""
    server = cluster(pod("job", node="elastic"), bought=True)
    result = uninstall(server, tmp_path, "--hand-over")
    assert (result.exit_code, result.stderr) == (0, "")
    elastic = server.get("nodes", "elastic")
    assert elastic["metadata"]["labels"] == {}
    assert elastic["metadata"]["annotations"] == {}
    assert elastic["spec"]["taints"] == [FOREIGN]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Return the configuration of a simulated cloud that has launched a machine."""
    key = OfferKey("t4", "gn6i", "g", "on-demand")
    offer = SimulatedOffer("t4", "gn6i", "g", (Prices(4.0),), "on-demand")
    scenario = Scenario((offer,))
    (tmp_path / "cloud.json").write_bytes(msgspec.json.encode(scenario))
    provider = SimulatedProvider(scenario, tmp_path / "state", lambda: 0.0)
    asyncio.run(provider.launch(Order("t4-a", key, 1)))
    text = f"""
cluster: demo
provider: {{kind: simulated, scenario: {tmp_path / "cloud.json"}, state: {tmp_path / "state"}}}
limits: {{nodes: 5}}
groups:
- {{name: t4, types: [gn6i], zones: [g], max: 3, shape: {{cpu: 4, memory: 14Gi, cards: []}}}}
"""
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def test_bought_nodes_end_when_that_is_asked_for(tmp_path: Path, config: Path) -> None:
    """In the cloud and in the cluster, but not while somebody's pods run there."""
    daemon = pod("agent", node="elastic")
    daemon["metadata"]["ownerReferences"] = [{"kind": "DaemonSet", "name": "agent", "uid": "u"}]
    server = cluster(pod("job", node="elastic"), daemon, bought=True)
    before = server.version
    words = ("--end-nodes", "--config", str(config))
    refused = uninstall(server, tmp_path, *words)
    assert (refused.exit_code, server.version) == (1, before)
    assert "pods run on nodes that would end (default/job on elastic)" in refused.stderr
    server.remove("pods", "job", "default")
    result = uninstall(server, tmp_path, *words)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "node elastic: deleted" in result.stdout
    assert names(server, "nodes") == ["own"]
    provider = SimulatedProvider(Scenario(()), tmp_path / "state", lambda: 0.0)
    assert not asyncio.run(provider.instances())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--end-nodes",), "--end-nodes needs the autoscaler's configuration: add --config FILE"),
        (("--end-nodes", "--hand-over"), "--hand-over and --end-nodes exclude each other"),
    ],
)
def test_contradictions_are_refused(words: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    """With one sentence."""
    result = uninstall(cluster(), tmp_path, *words)
    assert (result.exit_code, result.stderr) == (2, f"fenka: {sentence}\n")
