"""`fenka top node` on a cluster: arena's screens, of both its generations."""

import json
from pathlib import Path

import pytest

from tests.builders import T4_MIB, node, node_json, on_card, pod, sharing, units
from tests.cli.command import fenka
from tests.fakes.api_server import FakeApiServer, in_thread

GOLDEN = Path(__file__).parent / "golden"
WIRE = GOLDEN / "wire"

MASTER = node(
    "cn-zhangjiakou.192.168.0.138",
    address="192.168.0.138",
    labels={"node-role.kubernetes.io/master": ""},
)
T4 = sharing("cn-zhangjiakou.192.168.3.184", address="192.168.3.184")
NOTEBOOKS = [
    pod(name, units(4), node=T4["metadata"]["name"], annotations=on_card(0, 4))
    for name in (
        "tf-notebook-7cf4575d78-9gxzd",
        "tf-notebook-2-7b4d68d8f7-wxlff",
        "tf-notebook-3-86c48d4c7d-lk9h8",
    )
]


@pytest.fixture(autouse=True)
def no_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No daemon and no kubeconfig but what a test names."""
    monkeypatch.setenv("FENKA_RUNTIME", str(tmp_path / "no-daemon"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KUBECONFIG", raising=False)


def run(server: FakeApiServer, folder: Path, *arguments: str) -> str:
    """What `fenka` prints, asking this server."""
    with in_thread(server, folder) as kubeconfig:
        result = fenka(*arguments, "--kubeconfig", str(kubeconfig))
    assert result.exit_code == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("arguments", "golden"),
    [
        (["-s"], "top-node-s.txt"),
        (["-s", "-d"], "top-node-s-d.txt"),
        ([], "top-node.txt"),
    ],
)
def test_top_node_screens_are_the_articles(
    arguments: list[str], golden: str, tmp_path: Path
) -> None:
    """Three notebooks on one T4, read from a cluster that runs gpushare itself."""
    server = FakeApiServer.of(nodes=[T4, MASTER], pods=NOTEBOOKS)
    assert run(server, tmp_path, "top", "node", *arguments) == (GOLDEN / golden).read_text()


def test_top_node_shows_what_pods_of_hami_hold(tmp_path: Path) -> None:
    """Whoever placed them: docs/from/hami.md lets readers check a node by it."""
    running = pod(
        "p",
        {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 4096, "nvidia.com/gpucores": 30},
        node="a",
        annotations={"hami.io/vgpu-devices-allocated": "GPU-a-0,NVIDIA,4096,30:;"},
    )
    server = FakeApiServer.of(nodes=[node_json("a", T4_MIB, unit_mib=1077)], pods=[running])
    (row,) = json.loads(run(server, tmp_path, "top", "node", "-o", "json"))
    # A unit of this card has 15079 / 14 MiB.
    assert [(each["name"], each["core"]) for each in row["programs"]] == [("p", {"0": 30})]
    assert round(row["cards"][0]["allocated"], 1) == 3.8


def test_top_node_is_the_articles_while_nodes_come_and_go(tmp_path: Path) -> None:
    """No card; two nodes whose cards both workers hold whole; one of them is not ready yet."""
    card = {"nvidia.com/gpu": 1}
    cpu = node("cn-beijing.i-2zec8yxlrlzfyvxxxxxx", address="192.168.1.115")
    first = node("cn-beijing.i-2ze8eum1gl34a", address="192.168.3.145", resources=card)
    second = node("cn-beijing.i-2ze8eum1gl34b", address="192.168.3.146", resources=card)
    workers = [
        pod(f"mpi-dist-worker-{number}", card, node=each["metadata"]["name"])
        for number, each in enumerate((first, second))
    ]
    joining = node("cn-beijing.i-2ze8eum1gl34b", address="192.168.3.146", ready="False")
    screens = [
        run(FakeApiServer.of(nodes=nodes, pods=pods), tmp_path, "top", "node")
        for nodes, pods in (
            ([cpu], []),
            ([first, joining, cpu], workers[:1]),
            ([first, second, cpu], workers),
        )
    ]
    assert "\n".join(screens) == (GOLDEN / "top-node-elastic.txt").read_text()


def given() -> FakeApiServer:
    """What arena was given when its golden screens were taken."""
    return FakeApiServer.of(**json.loads((WIRE / "arena-top.json").read_text()))


def stable(golden: str) -> str:
    """arena's screen with its pods by name: `multi-1` before `svc-1`."""
    lines = golden.splitlines(keepends=True)
    for number in range(len(lines) - 1):
        if "svc-1" in lines[number] and "multi-1" in lines[number + 1]:
            lines[number : number + 2] = [lines[number + 1], lines[number]]
    return "".join(lines)


@pytest.mark.parametrize(
    ("arguments", "golden"),
    [
        ([], "arena-top-node.txt"),
        (["-d"], "arena-top-node-d.txt"),
        (["-m", "s"], "arena-top-node-m-s.txt"),
    ],
)
def test_arena_layout_is_todays_arenas(arguments: list[str], golden: str, tmp_path: Path) -> None:
    """Given what arena was given, fenka prints what it printed."""
    screen = run(given(), tmp_path, "top", "node", "--layout", "arena", *arguments)
    assert screen == stable((WIRE / golden).read_text())


def test_arena_layout_shows_exclusive_nodes(tmp_path: Path) -> None:
    """One kind: its own foot, and no column that tells kinds apart."""
    screen = run(given(), tmp_path, "top", "node", "--layout", "arena", "-m", "e")
    assert screen.splitlines() == [
        "NAME    IPADDRESS  ROLE    STATUS  GPU(Total)  GPU(Allocated)",
        "excl-1  10.0.0.21  <none>  Ready   8           2",
        "-" * 99,
        "Allocated/Total GPUs of nodes which own resource nvidia.com/gpu In Cluster:",
        "2/8 (25.0%)",
    ]


def test_arena_layout_calls_nodes_without_cards_normal(tmp_path: Path) -> None:
    """arena lists every node there; that is a slip."""
    screen = run(given(), tmp_path, "top", "node", "--layout", "arena", "-m", "none")
    assert [line.split()[0] for line in screen.splitlines()[:2]] == ["NAME", "cpu-1"]


def test_arena_layout_has_arenas_json_keys(tmp_path: Path) -> None:
    """arena's keys, memory in bytes, no newline at the end."""
    text = run(given(), tmp_path, "top", "node", "--layout", "arena", "-o", "json")
    assert text == (GOLDEN / "top-node-arena.json").read_text()
    shown = json.loads(text)
    assert list(shown) == ["gpuExclusiveNodes", "gpuShareNodes", "gpuTopologyNodes", "normalNodes"]
    share = shown["gpuShareNodes"][0]
    # 15 GiB = 16106127360 bytes
    assert share["devices"][3]["totalGPUMemory"] == 16106127360
    assert share["instances"][1]["gpuMemoryAllocation"] == {"0": 2, "1": 2, "2": 2, "3": 2}


def test_arena_layout_shows_gib_when_a_node_counts_mib(tmp_path: Path) -> None:
    """arena takes every number for GiB; a T4 in MiB has 14.7 of them."""
    screen = run(
        FakeApiServer.of(nodes=[sharing("m", 15079)]), tmp_path, "top", "node", "--layout", "arena"
    )
    assert "0.0/14.7 GiB" in screen


def test_top_node_shows_exclusive_unhealthy_and_unreachable_nodes(tmp_path: Path) -> None:
    """The optional columns and feet of the old layout."""
    whole = node("whole", resources={"nvidia.com/gpu": 3}, capacity={"nvidia.com/gpu": 4})
    away = node("away", resources={"nvidia.com/gpu": 2}, ready="False")
    pods = [pod("train", {"nvidia.com/gpu": 2}, node="whole")]
    screen = run(FakeApiServer.of(nodes=[whole, away], pods=pods), tmp_path, "top", "node")
    assert screen.splitlines() == [
        "NAME   IPADDRESS  ROLE    STATUS    GPU(Total)  GPU(Allocated)  GPU(Unhealthy)",
        "away   10.0.0.1   <none>  notReady  2           0               0",
        "whole  10.0.0.1   <none>  ready     4           2               1",
        "-" * 99,
        "Allocated/Total GPUs In Cluster:",
        "2/6 (33%)",
        "Allocated/Total GPUs(Active) In Cluster:",
        "2/4 (50%)",
        "Unhealthy/Total GPUs In Cluster:",
        "1/6 (16%)",
    ]


def test_top_node_details_show_pods_with_whole_cards(tmp_path: Path) -> None:
    """Who takes cards whole, and the share of the node that is taken."""
    nodes = [node("whole", resources={"nvidia.com/gpu": 4}), node("cpu")]
    pods = [pod("train", {"nvidia.com/gpu": 1}, node="whole")]
    screen = run(FakeApiServer.of(nodes=nodes, pods=pods), tmp_path, "top", "node", "-d")
    assert screen == (GOLDEN / "top-node-d.txt").read_text()


def test_top_node_shows_cards_that_a_health_daemon_reports(tmp_path: Path) -> None:
    """Cards that gpushare's ConfigMap names are unhealthy."""
    named = {
        "metadata": {"name": "unhealthy-gpu-a", "namespace": "kube-system"},
        "data": {"gpus": "1"},
    }
    server = FakeApiServer.of(nodes=[sharing("a", cards=2)], configmaps=[named])
    assert json.loads(run(server, tmp_path, "top", "node", "-o", "json"))[0]["unhealthy"] == 1
    server.forbidden = {"configmaps"}
    assert json.loads(run(server, tmp_path, "top", "node", "-o", "json"))[0]["unhealthy"] == 0


def test_top_node_shows_the_error_when_an_inventory_is_invalid(tmp_path: Path) -> None:
    """A node whose record is not understood is shown, with the reason."""
    broken = sharing("a", annotations={"fenka.io/cards": "{"})
    screen = run(FakeApiServer.of(nodes=[broken]), tmp_path, "top", "node")
    assert "a: annotation fenka.io/cards of node a is not understood" in screen


def refused(*arguments: str) -> tuple[object, str]:
    """Exit code and sentence of a command that cannot be done."""
    result = fenka(*arguments)
    return result.exit_code, result.stderr


def test_top_node_names_both_when_neither_daemon_nor_cluster_answers() -> None:
    """One sentence that names both."""
    code, sentence = refused("top", "node")
    assert code == 1
    assert sentence.count("\n") == 1
    assert "no fenka daemon answers at" in sentence
    assert "no cluster can be reached by ~/.kube/config" in sentence


def test_top_node_asks_no_cluster_when_local_is_given() -> None:
    """With --local no cluster is asked; with a cluster's options that is a contradiction."""
    assert refused("top", "node", "--local")[1].startswith("fenka: no fenka daemon answers")
    assert refused("top", "node", "--local", "--context", "x")[0] == 2


def test_top_node_fails_when_a_node_is_unknown(tmp_path: Path) -> None:
    """Named nodes must be there."""
    with in_thread(FakeApiServer.of(nodes=[T4]), tmp_path) as kubeconfig:
        code, sentence = refused("top", "node", "b", "--kubeconfig", str(kubeconfig))
    assert (code, sentence) == (1, "fenka: there is no node b\n")


def test_arena_layout_shows_shares_of_compute(tmp_path: Path) -> None:
    """30 percent by ACK's name, 40 by gpu-manager's beside it, and a whole card: 30 + 40 + 100 of 200.

    A weight of 80 reserves nothing.
    """
    gpu = sharing("a", cards=2, resources={"aliyun.com/gpu-core.percentage": 200})
    ack = pod(
        "ack",
        {"aliyun.com/gpu-mem": 4, "aliyun.com/gpu-core.percentage": 30},
        node="a",
        annotations=on_card(0, 4),
    )
    vcuda = pod(
        "vcuda",
        {"tencent.com/vcuda-core": 40, "tencent.com/vcuda-memory": 8},
        node="a",
        annotations={"tencent.com/predicate-gpu-idx-0": "0", "fenka.io/core-mode": "soft"},
    )
    weight = pod(
        "weight",
        {"aliyun.com/gpu-mem": 4, "aliyun.com/gpu-core.percentage": 80},
        node="a",
        annotations={**on_card(0, 4), "fenka.io/core-mode": "weight"},
    )
    whole = pod(
        "whole",
        {"nvidia.com/gpu": 1},
        node="a",
        annotations={"fenka.io/whole-cards": '{"main":[1]}'},
    )
    server = FakeApiServer.of(nodes=[gpu], pods=[ack, vcuda, weight, whole])
    screen = run(server, tmp_path, "top", "node", "--layout", "arena", "-m", "s")
    assert "170/200" in screen
    assert (
        "Allocated/Total GPU Core of nodes which own resource aliyun.com/gpu-core.percentage In Cluster:\n"
        "170/200 (85.0%)"
    ) in screen
    details = run(server, tmp_path, "top", "node", "--layout", "arena", "-d")
    cells = {line.split()[1]: line.split()[-3:] for line in details.splitlines() if "GiB)" in line}
    assert cells["vcuda"][-3:] == ["40", "soft", "gpu0(40)"]
    assert cells["weight"][-2:] == ["80", "weight"]
    assert "gpu1(100)" in details
    assert "  Allocated GPU Core: 170\n" in details
    told = json.loads(run(server, tmp_path, "top", "node", "--layout", "arena", "-o", "json"))
    (item,) = told["gpuShareNodes"]
    assert (item["totalGPUCore"], item["allocatedGPUCore"]) == (200, 170)
    assert {it["name"]: it["requestGPUCore"] for it in item["instances"]} == {
        "ack": 30,
        "vcuda": 40,
        "weight": 0,
        "whole": 100,
    }


def test_missing_kubeconfig_is_one_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is logged beside it."""
    result = fenka("top", "node", "--kubeconfig", str(tmp_path / "none"))
    assert result.exit_code == 1
    assert result.stderr == (
        f"fenka: no cluster can be reached by {tmp_path / 'none'}: there is no such file: "
        "name one by --kubeconfig or KUBECONFIG\n"
    )
    assert not caplog.records
