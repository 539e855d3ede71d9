"""`kubectl inspect gpushare`: the original's screens, byte for byte, in a stable order."""

import json
from pathlib import Path

import pytest

from fenka.cli.compat import inspect_gpushare
from fenka.core.inventory import Card, DeviceId
from fenka.dialects.nodes import encode_inventory
from tests.builders import node, on_card, pod, sharing, units
from tests.fakes.api_server import FakeApiServer, in_thread

WIRE = Path(__file__).parent / "golden" / "wire"


def run(server: FakeApiServer, folder: Path, *arguments: str) -> None:
    """The plugin, asking this server."""
    with in_thread(server, folder) as kubeconfig, pytest.raises(SystemExit) as ended:
        inspect_gpushare.main([*arguments, "--kubeconfig", str(kubeconfig)])
    if ended.value.code:
        raise ended.value


@pytest.mark.parametrize("scene", ["s1", "s2"])
@pytest.mark.parametrize("details", [False, True])
def test_inspect_screen_is_the_originals(
    scene: str, details: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Given what the original was given, fenka prints what it printed."""
    given = json.loads((WIRE / f"inspect-{scene}.json").read_text())
    run(FakeApiServer.of(**given), tmp_path, *(["-d"] if details else []))
    golden = WIRE / f"inspect-{scene}{'-d' if details else ''}.txt"
    assert capsys.readouterr().out == golden.read_text()


def test_inspect_shows_each_card_when_two_nodes_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last table of the article's binpack test."""
    nodes = [
        sharing("sd-cluster-05", address="192.168.1.215"),
        sharing("sd-cluster-04", address="192.168.1.214"),
    ]
    pods = [
        pod("a", units(8), node="sd-cluster-04", annotations=on_card(0, 8)),
        pod("b", units(5), node="sd-cluster-04", annotations=on_card(0, 5)),
        pod("c", units(12), node="sd-cluster-05", annotations=on_card(0, 12)),
        pod("over", units(2), node="sd-cluster-05", annotations=on_card(0, 2), phase="Succeeded"),
    ]
    run(FakeApiServer.of(nodes=nodes, pods=pods), tmp_path)
    assert capsys.readouterr().out == (WIRE / "inspect-binpack.txt").read_text()


def test_inspect_shows_pending_units_and_nodes_with_different_cards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Units without a card have a column of their own; cards that are not there are 0/0."""
    nodes = [sharing("a", cards=2), sharing("b")]
    pods = [
        pod("lost", units(3), node="a"),
        pod("odd", units(4), node="a", annotations={"ALIYUN_COM_GPU_MEM_IDX": "x"}),
        pod("fine", units(5), node="b", annotations=on_card(0, 5)),
    ]
    run(FakeApiServer.of(nodes=nodes, pods=pods), tmp_path)
    # a, its address, two cards, 7 pending, 7/28: "a\t10.0.0.1\t0/14\t0/14\t7\t7/28\n" is 28 + 20 long.
    assert capsys.readouterr().out.splitlines() == [
        "NAME  IPADDRESS  GPU0(Allocated/Total)  GPU1(Allocated/Total)  PENDING(Allocated)  "
        "GPU Memory(GiB)",
        "a     10.0.0.1   0/14                   0/14                   7                   7/28",
        "b     10.0.0.1   5/14                   0/0                                        5/14",
        "-" * 48,
        "Allocated/Total GPU Memory In Cluster:",
        "12/42 (28%)  ",
    ]


def test_inspect_details_show_pending_units(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pod without a card is in the last column."""
    run(
        FakeApiServer.of(nodes=[sharing("a")], pods=[pod("lost", units(3), node="a")]),
        tmp_path,
        "-d",
        "a",
    )
    assert capsys.readouterr().out.splitlines()[4:6] == [
        "NAME         NAMESPACE  GPU0(Allocated)  Pending(Allocated)  ",
        "lost         default    0                3                   ",
    ]


def test_inspect_counts_mib_when_the_node_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An inventory tells what each card has; the kubelet's sum is the node's."""
    cards = [Card(0, DeviceId("GPU-a"), "T4", 15079), Card(1, DeviceId("GPU-b"), "P4", 7611)]
    inventory = {"fenka.io/cards": encode_inventory(cards, 1)}
    nodes = [node("m", resources={"aliyun.com/gpu-mem": 22690}, annotations=inventory)]
    pods = [pod("p", units(8065), node="m", annotations=on_card(0, 8065, 15079))]
    run(FakeApiServer.of(nodes=nodes, pods=pods), tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("GPU Memory(MiB)")
    assert lines[1].split() == ["m", "10.0.0.1", "8065/15079", "0/7611", "8065/22690"]


def test_inspect_prints_totals_when_no_node_is_shared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty table, no crash."""
    run(FakeApiServer.of(nodes=[node("cpu")]), tmp_path)
    assert capsys.readouterr().out.splitlines()[-1] == "0/0 (0%)  "


@pytest.mark.parametrize(
    ("node_name", "forbidden", "sentence"),
    [
        ("nobody", set(), 'Failed due to nodes "nobody" not found'),
        (
            "a",
            {"pods"},
            'Failed due to pods is forbidden: User "alice" cannot list resource "pods" in API group "" '
            "at the cluster scope",
        ),
    ],
)
def test_inspect_prints_errors_on_stdout_as_the_original_does(
    node_name: str,
    forbidden: set[str],
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On stdout, with exit code 1."""
    server = FakeApiServer.of(nodes=[sharing("a")])
    server.forbidden = forbidden
    with pytest.raises(SystemExit) as ended:
        run(server, tmp_path, node_name)
    assert ended.value.code == 1
    assert capsys.readouterr().out == f"{sentence}\n"


def test_inspect_fails_when_there_is_no_kubeconfig(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence that names the file."""
    with pytest.raises(SystemExit):
        inspect_gpushare.main(["--kubeconfig", str(tmp_path / "none")])
    out = capsys.readouterr().out
    assert out.startswith("Failed due to no cluster can be reached by")
    assert str(tmp_path / "none") in out


def test_inspect_uses_the_kubeconfig_of_the_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """$KUBECONFIG, which may name several files, as for kubectl."""
    with in_thread(FakeApiServer.of(nodes=[sharing("a")]), tmp_path) as kubeconfig:
        monkeypatch.setenv("KUBECONFIG", f"{tmp_path}/none:{kubeconfig}")
        with pytest.raises(SystemExit):
            inspect_gpushare.main(["-o", "json"])
    assert json.loads(capsys.readouterr().out)[0]["name"] == "a"


def test_inspect_reads_all_pages_when_lists_are_paged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """More nodes than a page has are all shown, by name."""
    names = [f"n{number}" for number in range(7)]
    run(FakeApiServer.of(nodes=[sharing(name) for name in reversed(names)]), tmp_path)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:8]] == names
