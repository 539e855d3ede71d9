"""Screens of a cluster with divided cards: instances below the old columns, and `fenka mig list`."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from fenka.cli.compat import inspect_gpushare
from fenka.core.inventory import Card, DeviceId
from fenka.core.mig.geometry import TABLES, Place
from fenka.dialects.mig_records import DividedCard, InstanceState, encode_instances
from fenka.dialects.nodes import encode_inventory
from tests.builders import Json, node, on_card, pod, units
from tests.cli.command import fenka
from tests.fakes.api_server import FakeApiServer, in_thread

GOLDEN = Path(__file__).parent / "golden"
A100, A30 = TABLES["A100-40G"], TABLES["A30"]


@pytest.fixture(autouse=True)
def no_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No daemon and no kubeconfig but what a test names."""
    monkeypatch.setenv("FENKA_RUNTIME", str(tmp_path / "no-daemon"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KUBECONFIG", raising=False)


def instances(*places: tuple[str, int]) -> dict[str, str]:
    """Return the annotation of a pod that has these instances of card 0."""
    listed = [{"card": "GPU-0", "start": start, "profile": name} for name, start in places]
    return {"fenka.io/instance": json.dumps(listed)}


def a100s() -> Json:
    """A node of two A100s of 40960 MiB, 40 units each, of which card 0 is divided.

    Its 3g.20gb at 4 is fenka's, 1g.5gb at 3 an administrator's.
    """
    cards = [Card(i, DeviceId(f"GPU-{i}"), "A100", 40960) for i in range(2)]
    there: Mapping[Place, InstanceState] = {
        Place(A100.by_name["3g.20gb"], 4): "own",
        Place(A100.by_name["1g.5gb"], 3): "foreign",
    }
    divided = DividedCard(DeviceId("GPU-0"), A100, True, there)
    return node(
        "a100",
        address="10.0.0.1",
        resources={"aliyun.com/gpu-mem": 80, "nvidia.com/mig-1g.5gb": 7},
        annotations={
            "fenka.io/cards": encode_inventory(cards, 1024),
            "fenka.io/instances": encode_instances([divided]),
        },
        labels={"gpushare": "true", "fenka.io/mig": "on-demand.0"},
    )


def a30() -> Json:
    """A node that shares instances alone. Its second card is given whole."""
    divided = DividedCard(DeviceId("GPU-9"), A30, True, {})
    cards = [Card(i, DeviceId(f"GPU-{9 - i}"), "A30", 24576) for i in range(2)]
    return node(
        "a30",
        address="10.0.0.2",
        resources={"nvidia.com/mig-1g.6gb": 4, "nvidia.com/gpu": 1},
        annotations={
            "fenka.io/cards": encode_inventory(cards, 1024),
            "fenka.io/instances": encode_instances([divided]),
        },
        labels={"fenka.io/mig": "on-demand"},
    )


def pods() -> list[Json]:
    """Two slices in the 3g.20gb, 4 and 5 of its 19 units; a 2g.10gb that is not created yet; whole cards.

    The slice of 5 units has 20096 * 5 // 19 = 5288 MiB.
    """
    inside = {"fenka.io/inside": "mig", **instances(("3g.20gb", 4))}
    return [
        pod("a", units(4), node="a100", annotations={**on_card(0, 4), **inside}),
        pod("b", units(5), node="a100", annotations={**on_card(0, 5), **inside}, namespace="team"),
        pod(
            "whole",
            {"nvidia.com/mig-2g.10gb": 1},
            node="a100",
            annotations=instances(("2g.10gb", 0)),
        ),
        pod("exclusive", {"nvidia.com/gpu": 1}, node="a30"),
        pod("undivided", units(10), node="a100", annotations=on_card(1, 10)),
    ]


def run(folder: Path, *arguments: str) -> str:
    """Return what `fenka` prints of this cluster."""
    server = FakeApiServer.of(nodes=[a100s(), a30(), node("cpu")], pods=pods())
    with in_thread(server, folder) as kubeconfig:
        result = fenka(*arguments, "--kubeconfig", str(kubeconfig))
    assert result.exit_code == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("words", "golden"),
    [
        ("top node", "mig-top-node.txt"),
        ("top node -s", "mig-top-node-s.txt"),
        ("top node -s -d a100", "mig-top-node-s-d.txt"),
        ("top node --layout arena a100", "mig-top-node-arena.txt"),
        ("inspect a100", "mig-inspect.txt"),
        ("inspect", "mig-inspect-all.txt"),
        ("mig list", "mig-list.txt"),
    ],
)
def test_screens_show_instances_of_divided_cards(words: str, golden: str, tmp_path: Path) -> None:
    """The old columns stay; card 0 has the 39 units of a 7g.40gb. Below is a row for each instance."""
    assert run(tmp_path, *words.split()) == (GOLDEN / golden).read_text()


def test_data_of_nodes_has_instances_and_what_else_fits(tmp_path: Path) -> None:
    """A pod's slice counts 4 of the 19 units of its instance, and its card is not held whole."""
    first, second, cpu = json.loads(run(tmp_path, "top", "node", "-o", "json"))
    assert [each["allocated"] for each in first["cards"]] == [4 + 5 + 9, 10]
    assert (first["whole"], second["whole"]) == (0, 1)
    assert first["free"] == {"0": {"1g.5gb": 1}}
    assert second["free"] == {"0": {"1g.6gb": 4, "2g.12gb": 2, "4g.24gb": 1}}
    assert (cpu["instances"], cpu["free"]) == ([], {})
    slices = {each["profile"]: each["slices"] for each in first["instances"]}
    assert slices["3g.20gb"] == [
        {"holder": "default/a", "memory_mib": 4230, "compute": 0},
        {"holder": "team/b", "memory_mib": 5288, "compute": 0},
    ]


def test_list_has_the_cards_of_each_node_as_data(tmp_path: Path) -> None:
    """An instance is named by its place."""
    first, second = json.loads(run(tmp_path, "mig", "list", "-o", "json"))
    assert (first["name"], second["name"]) == ("a100", "a30")
    (card,) = first["cards"]
    assert [(each["uuid"], each["jobs"]) for each in card["instances"]] == [
        ("GPU-0/0/2g.10gb", ["default/whole"]),
        ("GPU-0/3/1g.5gb", []),
        ("GPU-0/4/3g.20gb", ["default/a", "team/b"]),
    ]


def test_list_needs_a_cluster_or_a_daemon() -> None:
    """One sentence that names both."""
    result = fenka("mig", "list")
    assert result.exit_code == 1
    assert "no fenka daemon answers at" in result.stderr
    assert "no cluster can be reached by" in result.stderr


def test_plugin_shows_instances_as_the_command_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`kubectl inspect gpushare` and `fenka inspect` are the same."""
    server = FakeApiServer.of(nodes=[a100s()], pods=pods())
    with in_thread(server, tmp_path) as kubeconfig, pytest.raises(SystemExit):
        inspect_gpushare.main(["a100", "--kubeconfig", str(kubeconfig)])
    assert capsys.readouterr().out == (GOLDEN / "mig-inspect.txt").read_text()
