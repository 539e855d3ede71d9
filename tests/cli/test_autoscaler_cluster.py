"""`fenka autoscaler plan` and `snapshot` on a cluster: a dry run, and the case of it."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fenka.autoscaler.inputs import decode_case
from fenka.cluster.autoscaling import AutoscalerStatus, CloudType, OfferStatus, OrderRecord, Slot
from tests.autoscaler.audit import audit
from tests.builders import Json, node, node_json, on_card, pod, units, unschedulable
from tests.cli.command import Completed, fenka
from tests.fakes.api_server import FakeApiServer, in_thread

NAMESPACE = "fenka-system"
CONFIG = """
cluster: demo
provider: {kind: simulated}
limits: {nodes: 5}
groups:
- name: t4
  types: [gn6i]
  zones: [g, h]
  max: 3
  shape: {cpu: 4, memory: 14Gi, cards: [{model: Tesla T4, memory: 15079MiB}]}
"""
OFFERS = (
    OfferStatus("t4", "gn6i", "g", "on-demand", 4.0, None, 0, 0, 3, "out of stock"),
    OfferStatus("t4", "gn6i", "h", "on-demand", 4.5, None, 0, 0, 3),
)


def waiting(name: str, count: int = 8, **given: Any) -> Json:
    """Return a pod that kube-scheduler has found no node for."""
    return pod(name, units(count), status=unschedulable("0/1 nodes are available"), **given)


def config_map(name: str, data: dict[str, str], namespace: str = NAMESPACE) -> Json:
    """Return a ConfigMap."""
    return {"metadata": {"name": name, "namespace": namespace}, "data": data}


def cluster(*pods: Json, nodes: tuple[Json, ...] = (), **maps: Any) -> FakeApiServer:
    """Return a cluster with an autoscaler, whose ConfigMaps may differ from what it has published."""
    data = {
        "fenka-autoscaler-config": {"config.yaml": CONFIG},
        "fenka-autoscaler": {"status": msgspec.json.encode(AutoscalerStatus(OFFERS)).decode()},
        **{name.replace("_", "-"): each for name, each in maps.items()},
    }
    public = config_map("fenka", {"autoscalerNamespace": NAMESPACE}, "kube-public")
    server = FakeApiServer.of(
        nodes=[node("cpu", resources={"cpu": 4, "memory": "8Gi", "pods": 110}), *nodes],
        pods=list(pods),
        configmaps=[public, *(config_map(name, each) for name, each in data.items())],
    )
    server.absent = {"podgroups"}
    return server


def run(server: FakeApiServer, folder: Path, *words: str) -> Completed:
    """Run a command of the autoscaler."""
    with in_thread(server, folder) as kubeconfig:
        return fenka("autoscaler", *words, "--kubeconfig", str(kubeconfig))


def test_plan_is_what_the_loop_would_buy(tmp_path: Path) -> None:
    """Zone g is out of stock; a card there takes one pod, and one is too large for every card."""
    there = node_json("gpu-1", 15079)
    holder = pod("holder", units(4), node="gpu-1", annotations=on_card(0, 4))
    server = cluster(waiting("a"), waiting("b"), waiting("big", 15), holder, nodes=(there,))
    before = server.version
    result = run(server, tmp_path, "plan", "-o", "json")
    assert (result.exit_code, result.stderr) == (0, "")
    plan = json.loads(result.stdout)
    assert plan["nodes"] == [{"group": "t4:gn6i:h", "count": 1}]
    assert (plan["cost"], plan["optimal"]) == (4.5, True)
    assert {each["node"] for each in plan["placements"]} == {"gpu-1", "new:t4:gn6i:h:0"}
    (unserved,) = plan["unserved"]
    assert unserved["request"] == "default/big"
    assert "too small (14 units, 15 wanted)" in unserved["why"]
    assert server.version == before, "a dry run writes nothing"


def test_plan_is_made_when_a_tenant_asks_for_what_no_card_has(tmp_path: Path) -> None:
    """The others get their node, and the pod its own sentence."""
    server = cluster(waiting("a"), waiting("huge", 1_000_000, namespace="ns"))
    result = run(server, tmp_path, "plan", "-o", "json")
    assert (result.exit_code, result.stderr) == (0, "")
    plan = json.loads(result.stdout)
    assert plan["nodes"] == [{"group": "t4:gn6i:h", "count": 1}]
    why = (
        "no node is bought for its request: 1024000000 MiB of GPU memory is more than any card has"
    )
    assert plan["unserved"] == [{"request": "ns/huge", "count": 1, "why": why}]


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_pods_of_other_schedulers_are_not_planned_for(command: str, tmp_path: Path) -> None:
    """The leader has published which ones it serves."""
    status = {
        "status": msgspec.json.encode(AutoscalerStatus(OFFERS, schedulers=("mine",))).decode()
    }
    own = waiting("a", spec={"schedulerName": "mine"})
    server = cluster(own, waiting("b"), fenka_autoscaler=status)
    words = {"plan": ["autoscaler", "plan"], "simulate": ["simulate", "--add-nodes=t4:gn6i:h=2"]}
    with in_thread(server, tmp_path) as kubeconfig:
        result = fenka(*words[command], "-o", "json", "--kubeconfig", str(kubeconfig))
    plan = json.loads(result.stdout)
    assert [each["request"] for each in plan["placements"]] == ["default/a"]
    assert not plan["unserved"]


def test_plan_counts_pods_that_leave_a_node_which_is_taken_back(tmp_path: Path) -> None:
    """As the loop does: their successors do not exist yet."""
    there = node_json(
        "gpu-1", 15079, taints=[{"key": "fenka.io/reclaimed", "effect": "NoSchedule"}]
    )
    holder = pod("holder", units(4), node="gpu-1", annotations=on_card(0, 4))
    owner = {"kind": "Job", "name": "j", "uid": "j", "controller": True}
    holder["metadata"]["ownerReferences"] = [owner]
    result = run(cluster(holder, nodes=(there,)), tmp_path, "plan", "-o", "json")
    plan = json.loads(result.stdout)
    assert [each["request"] for each in plan["placements"]] == ["default/holder"]
    assert plan["nodes"] == [{"group": "t4:gn6i:h", "count": 1}]


def test_plan_prints_a_table_for_people(tmp_path: Path) -> None:
    """As for a case."""
    lines = run(cluster(waiting("a")), tmp_path, "plan").stdout.splitlines()
    assert lines[:2] == ["NODE             PRICE  PODS", "new:t4:gn6i:h:0  4.5    default/a"]
    assert lines[2].startswith("1 new nodes, 4.5 an hour (the best), planned in ")


def test_plan_names_a_few_of_those_that_are_left_out_for_one_reason(tmp_path: Path) -> None:
    """Not a thousand lines."""
    server = cluster(*(waiting(f"p{number}", 15) for number in range(5)))
    lines = run(server, tmp_path, "plan").stdout.splitlines()
    assert len(lines) == 2
    assert lines[1].startswith(
        "5 of default/p0, default/p1, default/p2 and 2 more left out: 0/2 groups help: "
    )


def test_plan_keeps_to_the_groups_max_over_its_zones(tmp_path: Path) -> None:
    """Three at most, though each zone alone may have three."""
    offers = [msgspec.structs.replace(each, state="ok") for each in OFFERS]
    status = {"status": msgspec.json.encode(AutoscalerStatus(tuple(offers))).decode()}
    server = cluster(*(waiting(str(number)) for number in range(5)), fenka_autoscaler=status)
    plan = json.loads(run(server, tmp_path, "plan", "-o", "json").stdout)
    assert sum(each["count"] for each in plan["nodes"]) == 3
    assert len(plan["unserved"]) == 2


def test_plan_counts_what_is_asked_for_already(tmp_path: Path) -> None:
    """A pod that is planned for needs no other node; another one fits beside it."""
    slot = Slot("asked", pods=("u-default-a",), cards=((0,),))
    order = OrderRecord("t4", "gn6i", "h", "on-demand", (slot,), "asked", 4.5, 0)
    orders = {"t4-1": msgspec.json.encode(order).decode()}
    server = cluster(waiting("a"), waiting("b", 6), fenka_orders=orders)
    plan = json.loads(run(server, tmp_path, "plan", "-o", "json").stdout)
    assert plan["nodes"] == []
    assert [(each["request"], each["node"]) for each in plan["placements"]] == [
        ("default/b", "coming:t4-1:0")
    ]


def test_plan_uses_the_shape_that_the_cloud_describes(tmp_path: Path) -> None:
    """What the leader publishes of it; a T4 has the memory that its driver reports."""
    machine = CloudType(
        name="gn6i", cpu_milli=4000, memory_mib=15000, cards=1, model="T4", card_mib=16384
    )
    offers = tuple(msgspec.structs.replace(each, machine=machine) for each in OFFERS)
    without = CONFIG.partition("  shape:")[0]
    server = cluster(
        waiting("a", 14),
        waiting("b", 15),
        fenka_autoscaler_config={"config.yaml": without},
        fenka_autoscaler={"status": msgspec.json.encode(AutoscalerStatus(offers)).decode()},
    )
    plan = json.loads(run(server, tmp_path, "plan", "-o", "json").stdout)
    assert plan["nodes"] == [{"group": "t4:gn6i:h", "count": 1}]
    assert [each["request"] for each in plan["unserved"]] == ["default/b"]


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            "zones: [g, h]",
            "zones: [g, x]",
            "groups[0].zones[1]: the provider has no x for t4: remove it",
        ),
        (
            "  shape:",
            "  #shape:",
            "groups[0].types[0]: the shape of gn6i is not known: say shape: for it",
        ),
    ],
)
def test_program_refuses_a_configuration_that_the_provider_cannot_serve(
    old: str, new: str, sentence: str, tmp_path: Path
) -> None:
    """It ends with exit code 2, and its pods show the sentence."""
    scenario = tmp_path / "scenario.json"
    offers = [{"group": "t4", "type": "gn6i", "zone": zone} for zone in "gh"]
    market = [{"price": 4.0}]
    scenario.write_text(json.dumps({"offers": [{**each, "market": market} for each in offers]}))
    kind = f"kind: simulated, scenario: {scenario}, state: {tmp_path / 'state'}"
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.replace("kind: simulated", kind).replace(old, new))
    result = run(cluster(), tmp_path, "--config", str(config))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1] == f"fenka: {sentence}"


def test_plan_uses_the_shape_that_was_seen(tmp_path: Path) -> None:
    """The configuration says 14 units; nodes that came have 15."""
    shape = {"cpu_milli": 4000, "memory_mib": 9000, "cards": [{"memory_mib": 16000}]}
    server = cluster(waiting("a", 15), fenka_shapes={"gn6i": json.dumps(shape)})
    plan = json.loads(run(server, tmp_path, "plan", "-o", "json").stdout)
    assert plan["nodes"] == [{"group": "t4:gn6i:h", "count": 1}]


def test_snapshot_is_a_case_whose_plan_is_the_same(tmp_path: Path) -> None:
    """It is read back, and its plan passes the audit."""
    server = cluster(waiting("a"), waiting("b", spec={"nodeSelector": {"zone": "x"}}), waiting("c"))
    result = run(server, tmp_path, "snapshot")
    assert (result.exit_code, result.stderr) == (0, "")
    case = decode_case(result.stdout.encode())
    assert case.why.startswith("cluster demo at 20")
    assert [request.name for request in case.requests] == ["default/a", "default/b", "default/c"]
    path = tmp_path / "case.json"
    path.write_text(result.stdout)
    of_case = json.loads(fenka("autoscaler", "plan", "--case", str(path), "-o", "json").stdout)
    audit(json.loads(result.stdout), of_case)
    of_cluster = json.loads(run(server, tmp_path, "plan", "-o", "json").stdout)
    for field in ("nodes", "placements", "cost"):
        assert of_case[field] == of_cluster[field]


def test_plan_takes_a_configuration_that_is_not_installed(tmp_path: Path) -> None:
    """To see what a change of it would do."""
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.replace("max: 3", "max: 0"))
    server = cluster(waiting("a"))
    plan = json.loads(run(server, tmp_path, "plan", "--config", str(path), "-o", "json").stdout)
    assert (plan["nodes"], len(plan["unserved"])) == ([], 1)


@pytest.mark.parametrize(
    ("maps", "sentence"),
    [
        (
            {"fenka_autoscaler_config": {}},
            "namespace fenka-system has no configuration of an autoscaler: give --config FILE",
        ),
        (
            {"fenka_autoscaler_config": {"config.yaml": "clustr: x"}},
            "clustr is not known: did you mean cluster?",
        ),
        ({"fenka_autoscaler": {}}, "the autoscaler in namespace fenka-system has not published"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "snapshot"])
def test_command_says_what_is_missing(
    command: str, maps: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    """In one sentence."""
    result = run(cluster(waiting("a"), **maps), tmp_path, command)
    assert result.exit_code in (1, 2)
    assert result.stdout == ""
    assert result.stderr.startswith(f"fenka: {sentence}")


@pytest.mark.parametrize("kind", ["pods", "daemonsets", "configmaps"])
def test_command_names_the_role_when_a_right_is_missing(kind: str, tmp_path: Path) -> None:
    """Also if the namespace is given because nothing is published."""
    server = cluster(waiting("a"))
    server.forbidden = {kind}
    result = run(server, tmp_path, "plan", "-n", NAMESPACE)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"fenka: user alice may not list {kind}")
    assert result.stderr.endswith("ask for the ClusterRole fenka-viewer\n")
