"""`fenka nodes` and `fenka admin groups`: whole screens, and what is said where there is nothing to show."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from fenka.cli.admin.elastic import nodes_table
from fenka.cluster import autoscaling
from fenka.cluster.autoscaling import (
    AutoscalerStatus,
    ElasticNodeStatus,
    OfferStatus,
    OrderRecord,
    Slot,
)
from fenka.core.nodes.case import Capacity
from fenka.views.node_summaries import NodeSummary
from fenka.workstation import client
from tests.builders import node, on_card, pod, sharing, units
from tests.cli.command import Completed, fenka
from tests.cli.test_queue import snapshot_of
from tests.fakes.api_server import FakeApiServer, Json, in_thread

GOLDEN = Path(__file__).parent / "golden"
NOW = 1_800_000_000.0
NAMESPACE = "fenka-system"
GN6I = "ecs.gn6i-c4g1.xlarge"


@pytest.fixture(autouse=True)
def fixed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the screens be made at NOW."""
    monkeypatch.setattr("fenka.cli.admin.elastic.time", SimpleNamespace(time=lambda: NOW))


def moment(at: float) -> str:
    """Return a time as Kubernetes writes it."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def offer(zone: str, price: float, **given: Any) -> OfferStatus:
    """Return an offer of the spot group."""
    made = OfferStatus("t4-spot", GN6I, zone, "spot", price, 11.63, 0, 0, 10)
    return msgspec.structs.replace(made, **given)


OFFERS = (
    offer("cn-beijing-g", 3.49, nodes=2),
    offer("cn-beijing-h", 4.1, state="out of stock", again_at=NOW + 150),
    OfferStatus(
        "t4", GN6I, "cn-beijing-g", "on-demand", 11.6301, None, 0, 1, 4, cards=1, again_at=NOW - 5
    ),
)
"""The second is the contract's; the third's price has four decimals, and its back-off is over."""

IN_USE = ElasticNodeStatus("t4-spot", "in use", NOW - 600, protected_until=NOW + 48 * 60 + 30)
IDLE = ElasticNodeStatus("t4-spot", "idle", NOW - 7 * 60 - 3, NOW + 3 * 60 + 2)


def order(*slots: Slot, **given: Any) -> OrderRecord:
    """Return an order of the on-demand group."""
    made = OrderRecord("t4", GN6I, "cn-beijing-g", "on-demand", slots, "asked", 11.63, NOW - 40)
    return msgspec.structs.replace(made, **given)


def elastic(name: str, group: str = "t4-spot", capacity: Capacity = "spot") -> Json:
    """Return a node that was bought 12 minutes ago, with one T4."""
    labels = {autoscaling.GROUP: group, autoscaling.CAPACITY: capacity}
    made = sharing(name, labels={**labels, autoscaling.ORDER: f"{group}-1"})
    made["metadata"]["creationTimestamp"] = moment(NOW - 12 * 60 - 30)
    return made


def config_map(name: str, data: Mapping[str, str], namespace: str = NAMESPACE) -> Json:
    """Return a ConfigMap."""
    return {"metadata": {"name": name, "namespace": namespace}, "data": dict(data)}


def cluster(
    status: AutoscalerStatus | None,
    orders: Mapping[str, OrderRecord] | None = None,
    **objects: list[Json],
) -> FakeApiServer:
    """Return a cluster whose autoscaler has published this, and renewed its lease just now."""
    maps = [config_map("fenka", {"autoscalerNamespace": NAMESPACE}, "kube-public")]
    if status is not None:
        maps.append(
            config_map("fenka-autoscaler", {"status": msgspec.json.encode(status).decode()})
        )
    if orders is not None:
        written = {name: msgspec.json.encode(each).decode() for name, each in orders.items()}
        maps.append(config_map("fenka-orders", written))
    lease = {
        "metadata": {"name": "fenka-autoscaler", "namespace": NAMESPACE},
        "spec": {"renewTime": moment(NOW - 1)},
    }
    return FakeApiServer.of(configmaps=maps, leases=[lease], **objects)


def run(server: FakeApiServer, folder: Path, *words: str) -> Completed:
    """Run a command with this cluster."""
    with in_thread(server, folder) as kubeconfig:
        return fenka(*words, "--kubeconfig", str(kubeconfig))


NODES = [elastic("cn-beijing.i-2ze8a"), elastic("cn-beijing.i-2ze8b"), sharing("own")]
PODS = [
    pod("a", units(14), node="cn-beijing.i-2ze8a", annotations=on_card(0, 14)),
]
STATUS = AutoscalerStatus(OFFERS, {"cn-beijing.i-2ze8a": IN_USE, "cn-beijing.i-2ze8b": IDLE})
ORDERS = {
    "t4-spot-1": order(Slot("offering", "i-2ze8a", "cn-beijing.i-2ze8a"), group="t4-spot"),
    "t4-2": order(Slot("failed")),
    "t4-3": order(Slot("asked")),
}


@pytest.mark.parametrize("screen", ["groups", "nodes"])
def test_screen_is_that_of_the_documentation(screen: str, tmp_path: Path) -> None:
    """A node in use, an idle one, one that is on its way, an offer that is out of stock."""
    result = run(cluster(STATUS, ORDERS, nodes=NODES, pods=PODS), tmp_path, screen)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == (GOLDEN / f"{screen}.txt").read_text()


def test_data_have_times_and_amounts_as_numbers(tmp_path: Path) -> None:
    """For programs; YAML has the same."""
    server = cluster(STATUS, ORDERS, nodes=NODES, pods=PODS)
    offers = json.loads(run(server, tmp_path, "groups", "-o", "json").stdout)
    assert offers[1] == msgspec.to_builtins(OFFERS[1])
    rows = json.loads(run(server, tmp_path, "nodes", "-o", "json").stdout)
    assert rows[0] == {
        "name": "cn-beijing.i-2ze8a",
        "group": "t4-spot",
        "capacity": "spot",
        "order": "t4-spot-1",
        "created_at": NOW - 12 * 60 - 30,
        "cards": 1,
        "free": 0,
        "total": 14,
        "state": "in use",
        "since": NOW - 600,
        "until": None,
        "protected_until": NOW + 48 * 60 + 30,
    }
    assert (rows[2]["name"], rows[2]["group"], rows[2]["state"]) == ("own", "", "ready")
    assert (rows[3]["name"], rows[3]["state"], rows[3]["created_at"]) == ("", "starting", NOW - 40)
    text = run(server, tmp_path, "nodes", "-o", "yaml").stdout
    assert msgspec.yaml.decode(text.encode()) == rows


def test_whole_cards_are_counted_when_a_node_does_not_share_them(tmp_path: Path) -> None:
    """Of the node's two cards one is held."""
    labels = {autoscaling.GROUP: "a10", autoscaling.CAPACITY: "on-demand"}
    whole = node("whole", labels=labels, resources={"nvidia.com/gpu": 2})
    empty = node("empty", labels=labels)
    holder = pod("p", {"nvidia.com/gpu": 1}, node="whole")
    server = cluster(AutoscalerStatus(), nodes=[whole, empty], pods=[holder])
    lines = run(server, tmp_path, "nodes").stdout.splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["empty", "a10", "on-demand", "-", "-", "-", "not", "reported", "yet"],
        ["whole", "a10", "on-demand", "-", "2", "1/2", "not", "reported", "yet"],
    ]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"state": "in use"}, "in use"),
        ({"state": "in use", "protected_until": NOW + 61}, "in use; protected for 1m"),
        ({"state": "in use", "protected_until": NOW - 1}, "in use"),
        ({"state": "idle", "since": NOW - 59}, "idle for 59s"),
        ({"state": "idle"}, "idle for 0s"),
        ({"state": "idle", "since": NOW - 60, "until": NOW - 2}, "idle for 1m, ends in 0s"),
        ({"state": "taken back", "until": NOW + 299}, "taken back in 4m"),
        ({"state": "taken back"}, "taken back"),
        ({"state": "ending", "until": NOW}, "ending"),
        ({"state": "kept: fenka.io/keep"}, "kept: fenka.io/keep"),
        ({"state": "starting", "order": "t4-3"}, "starting (order t4-3)"),
    ],
)
def test_state_says_how_long_when_that_is_known(fields: dict[str, Any], text: str) -> None:
    """The last column of `fenka nodes`."""
    row = NodeSummary(group="g", capacity="spot", **fields)
    assert nodes_table([row], NOW)[1][-1] == text


def test_nodes_on_their_way_are_shown_until_they_join(tmp_path: Path) -> None:
    """One line for each node of an order that is neither there nor gone."""
    slots = [Slot(state) for state in ("written", "asked", "known", "ending", "gone", "failed")]
    orders = {"b": order(*slots), "a": order(Slot("joined", "i-1", "there"), Slot("known", "i-2"))}
    there = elastic("there", "t4")
    lines = run(
        cluster(AutoscalerStatus(), orders, nodes=[there]), tmp_path, "nodes"
    ).stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["there", "-", "-", "-", "-", "-"]
    assert [line.split()[-1] for line in lines[2:]] == ["a)", "b)", "b)", "b)", "ending"]


def test_groups_need_an_autoscaler(tmp_path: Path) -> None:
    """The chart publishes where it is."""
    result = run(FakeApiServer.of(nodes=NODES), tmp_path, "groups")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("fenka: no autoscaler is installed: set autoscaler.enabled")


def test_nodes_need_no_autoscaler(tmp_path: Path) -> None:
    """Columns about groups are left out where no node has one."""
    cordoned = sharing("parked")
    cordoned["spec"]["unschedulable"] = True
    held = pod("a", units(4), node="own", annotations=on_card(0, 4))
    bare = node("bare", labels={"gpushare": "true"})
    server = FakeApiServer.of(nodes=[sharing("own"), cordoned, bare], pods=[held])
    result = run(server, tmp_path, "nodes")
    assert (result.exit_code, result.stderr) == (0, "")
    assert [line.split() for line in result.stdout.splitlines()] == [
        ["NAME", "AGE", "CARDS", "FREE", "STATE"],
        ["bare", "-", "-", "-", "ready,", "offers", "no", "cards"],
        ["own", "-", "1", "10/14", "ready"],
        ["parked", "-", "1", "14/14", "ready,", "cordoned"],
    ]


def test_this_machine_is_the_node_where_its_daemon_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the cards that it leases."""
    monkeypatch.setenv("FENKA_RUNTIME", str(tmp_path))
    monkeypatch.setattr(client, "get_snapshot", lambda _: snapshot_of([]))
    lines = fenka("nodes", "--local").stdout.splitlines()
    assert [line.split()[1:] for line in lines] == [
        ["AGE", "CARDS", "FREE", "STATE"],
        ["-", "-", "-", "ready"],
    ]


@pytest.mark.parametrize(("screen", "exit_code"), [("groups", 1), ("nodes", 0)])
def test_screen_says_so_when_nothing_is_published_yet(
    screen: str, exit_code: int, tmp_path: Path
) -> None:
    """It is installed, and none of its pods has led yet."""
    result = run(cluster(None), tmp_path, screen)
    assert result.exit_code == exit_code
    assert result.stderr.startswith(
        "fenka: the autoscaler in namespace fenka-system has not published anything yet: see whether"
    )


def test_screen_says_so_when_it_is_out_of_date(tmp_path: Path) -> None:
    """It is shown all the same."""
    server = cluster(STATUS)
    server.get("leases", "fenka-autoscaler", NAMESPACE)["spec"]["renewTime"] = moment(NOW - 750)
    result = run(server, tmp_path, "groups")
    assert (result.exit_code, result.stdout) == (0, (GOLDEN / "groups.txt").read_text())
    assert result.stderr.startswith("fenka: no autoscaler has run for 12m, so this is out of date")


def test_screen_is_shown_when_the_lease_may_not_be_read(tmp_path: Path) -> None:
    """Only its age is not known then."""
    server = cluster(STATUS)
    server.forbidden = {"leases"}
    result = run(server, tmp_path, "groups")
    assert (result.exit_code, result.stderr) == (0, "")


def test_screen_says_so_when_there_is_no_node(tmp_path: Path) -> None:
    """A cluster without any node yet."""
    result = run(cluster(STATUS, {}), tmp_path, "nodes")
    assert result.stdout == "the cluster has no node\n"


def test_namespace_is_needed_when_the_chart_does_not_publish_it(tmp_path: Path) -> None:
    """As for a program that is started by hand."""
    server = cluster(STATUS)
    server.remove("configmaps", "fenka", "kube-public")
    assert run(server, tmp_path, "groups").exit_code == 1
    assert run(server, tmp_path, "groups", "-n", NAMESPACE).exit_code == 0


@pytest.mark.parametrize(
    ("screen", "forbidden", "sentence"),
    [
        ("groups", "configmaps", "user alice may not list configmaps in namespace fenka-system"),
        ("nodes", "nodes", "user alice may not list nodes"),
    ],
)
def test_screen_names_the_role_when_a_right_is_missing(
    screen: str, forbidden: str, sentence: str, tmp_path: Path
) -> None:
    """One sentence, of which the end is what to do."""
    server = cluster(STATUS, nodes=NODES)
    server.forbidden = {forbidden}
    result = run(server, tmp_path, screen, "-n", NAMESPACE)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"fenka: {sentence}: ask for the ClusterRole fenka-viewer\n"


@pytest.mark.parametrize("map_", [("fenka-autoscaler", "status"), ("fenka-orders", "t4-\x1b[31m")])
def test_screen_says_so_when_something_else_wrote_the_config_map(
    map_: tuple[str, str], tmp_path: Path
) -> None:
    """In one sentence, without the terminal's escapes."""
    server = cluster(STATUS, {})
    server.put("configmaps", config_map(map_[0], {map_[1]: "{"}))
    result = run(server, tmp_path, "nodes")
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"ConfigMap {map_[0]} is not understood" in result.stderr
    assert "\x1b" not in result.stderr


def test_cards_are_the_planned_ones_until_the_node_offers_them(tmp_path: Path) -> None:
    """The node has joined, and its kubelet knows of no card yet."""
    labels = {autoscaling.GROUP: "t4", autoscaling.ORDER: "t4-3"}
    joined = node("new", labels=labels)
    status = AutoscalerStatus(OFFERS, {"new": ElasticNodeStatus("t4", "starting", NOW - 20)})
    orders = {"t4-3": order(Slot("joined", "i-1", "new"))}
    lines = run(cluster(status, orders, nodes=[joined]), tmp_path, "nodes").stdout.splitlines()
    assert lines[1].split() == ["new", "t4", "-", "-", "1", "-", "starting", "(order", "t4-3)"]
