"""The screens of scenario S1, byte for byte."""

from pathlib import Path

import pytest

from fenka.cli.screens.top import details_screen, nodes_screen, share_screen
from fenka.views.node_rows import CardRow, NodeRow, ProgramRow

GOLDEN = Path(__file__).parent / "golden"

MASTER = NodeRow("cn-zhangjiakou.192.168.0.138", "192.168.0.138", "master", "ready", False, 0, [])
GPU_NODE = NodeRow(
    "cn-zhangjiakou.192.168.3.184",
    "192.168.3.184",
    "<none>",
    "ready",
    True,
    0,
    [CardRow(12, 14)],
    [
        ProgramRow("tf-notebook-2-7b4d68d8f7-wxlff", "default", {0: 4}),
        ProgramRow("tf-notebook-3-86c48d4c7d-lk9h8", "default", {0: 4}),
        ProgramRow("tf-notebook-7cf4575d78-9gxzd", "default", {0: 4}),
    ],
)


@pytest.mark.parametrize(
    ("golden", "lines"),
    [
        ("top-node.txt", nodes_screen([MASTER, GPU_NODE])),
        ("top-node-s.txt", share_screen([MASTER, GPU_NODE], "GiB")),
        ("top-node-s-d.txt", details_screen([MASTER, GPU_NODE], "GiB")),
    ],
)
def test_top_node_screen_is_the_articles(golden: str, lines: list[str]) -> None:
    """A reader of the article sees the same picture."""
    assert "\n".join(lines) + "\n" == (GOLDEN / golden).read_text()


def test_share_screen_rule_is_as_long_as_the_first_row() -> None:
    """The article's rule is one shorter while 0/14 are allocated (69 against 70)."""
    # 28 + 1 + 13 + 1 + 4 + 1 + 1 + 20 = 69
    empty = NodeRow(GPU_NODE.name, GPU_NODE.address, "<none>", "ready", True, 0, [CardRow(0, 14)])
    assert share_screen([empty], "GiB")[2] == "-" * 69


def test_share_screen_shows_zero_when_a_node_has_fewer_cards() -> None:
    """Unequal nodes line up: a card that is not there is 0/0."""
    two = NodeRow(
        "b", "10.0.0.2", "<none>", "ready", True, 0, [CardRow(1, 8), CardRow(2.5, 8, index=1)]
    )
    one = NodeRow("a", "10.0.0.1", "<none>", "ready", True, 0, [CardRow(0, 4)])
    lines = share_screen([one, two], "GiB")
    assert lines[:3] == [
        "NAME  IPADDRESS  GPU0(Allocated/Total)  GPU1(Allocated/Total)",
        "a     10.0.0.1   0/4                    0/0",
        "b     10.0.0.2   1/8                    2.5/8",
    ]
    assert lines[-1] == "3.5/20 (GiB) (17%)"


def test_top_node_prints_totals_when_there_is_no_node() -> None:
    """Nothing there is shown as nothing, not as a crash."""
    assert nodes_screen([])[-1] == "0/0 (0%)"
    assert share_screen([], "GiB")[-1] == "0/0 (GiB) (0%)"
