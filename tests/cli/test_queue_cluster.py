"""A cluster's queue without its scheduler: who waits, behind whom, for what."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from fenka.cli.common_options import Target
from fenka.cli.queue_command import rows_of
from fenka.cluster import queue_snapshot
from fenka.cluster.queue_snapshot import SchedulerOptions
from fenka.core.queue import Fairness
from fenka.views.node_rows import CardRow, NodeRow
from fenka.views.workloads import QueueRow
from tests.builders import node, on_card, pod, sharing, units
from tests.cli.command import fenka
from tests.fakes.api_server import FakeApiServer, Json, in_thread

REFUSED: Json = {
    "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]
}
CREATED = "2026-01-01T00:00:00Z"


def waiting(name: str, count: int, minute: int, **given: Any) -> Json:
    """A pod that was refused."""
    made = pod(name, units(count), status=REFUSED, **given)
    made["metadata"]["creationTimestamp"] = f"2026-01-01T00:{minute:02}:00Z"
    return made


def since(minute: int) -> float:
    """As a row has it."""
    return datetime.fromisoformat(f"2026-01-01T00:{minute:02}:00+00:00").timestamp()


def ask(server: FakeApiServer, folder: Path) -> list[QueueRow]:
    """Over HTTP."""
    with in_thread(server, folder) as kubeconfig:
        return rows_of(Target(kubeconfig=kubeconfig))


def test_rows_are_in_the_order_of_the_queue_when_pods_wait(tmp_path: Path) -> None:
    """By priority and time: two that wait, one that fits now beside them, and nobody who does not wait."""
    holder = pod("holder", units(10), node="a", annotations=on_card(1, 10))
    full = pod("full", units(14), node="a", annotations=on_card(0, 14))
    lost = waiting("lost", 4, 0, spec={"nodeSelector": {"zone": "nowhere"}})
    gated = waiting("gated", 4, 0, spec={"schedulingGates": [{"name": "quota"}]})
    pods = [
        waiting("second", 12, 2),
        waiting("first", 12, 3, spec={"priority": 7}),
        waiting("third", 2, 4),
        waiting("zoned", 4, 5, spec={"nodeSelector": {"zone": "b"}}),
        pod("new", units(4)),
        pod("plain", status=REFUSED),
        waiting("huge", 15, 0),
        *(holder, full, lost, gated),
        pod("holder-b", units(8), node="b", annotations=on_card(0, 8)),
    ]
    server = FakeApiServer.of(
        nodes=[sharing("a", cards=2), sharing("b", labels={"zone": "b"}), node("master")], pods=pods
    )
    found = ask(server, tmp_path)
    memory = "aliyun.com/gpu-mem"
    assert [row.name for row in found if not row.position] == ["gated", "huge", "lost"]
    assert found[:4] == [
        # Cards by the fewest ends: a/0 and a/1 have one each, of 14 and 10; b/0 of 8. All cost the same.
        QueueRow(1, "first", "default", 7, f"12 {memory}", since(3), ["a/0"], None, REASON[0]),
        QueueRow(2, "second", "default", 0, f"12 {memory}", since(2), ["a/1"], None, REASON[0]),
        QueueRow(3, "third", "default", 0, f"2 {memory}", since(4), ["b/0"], None, REASON[1]),
        QueueRow(4, "zoned", "default", 0, f"4 {memory}", since(5), ["b/0"], None, REASON[1]),
    ]


def test_namespace_is_later_when_it_has_used_cards(tmp_path: Path) -> None:
    """By the pods that the API server still shows: one ran for an hour until now, and has finished."""
    now = datetime.now(UTC)

    def ago(seconds: int) -> str:
        return (now - timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")

    ended: Json = {
        "phase": "Succeeded",
        "startTime": ago(3600),
        "conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": ago(0)}],
    }
    done = pod("done", units(14), node="a", annotations=on_card(0, 14), status=ended)
    holder = pod("holder", units(14), node="a", annotations=on_card(0, 14))
    light = waiting("light", 12, 9)
    holder["metadata"]["namespace"] = light["metadata"]["namespace"] = "other"
    heavy = waiting("heavy", 12, 1)
    for it, created in ((done, 3600), (heavy, 3000), (holder, 0), (light, 0)):
        it["metadata"]["creationTimestamp"] = ago(created)
    found = ask(FakeApiServer.of(nodes=[sharing("a")], pods=[done, holder, heavy, light]), tmp_path)
    assert [it.name for it in found] == ["light", "heavy"]
    # half of what was held an hour ago counts: 3600 / ln 2 * (1 - 1/2)
    assert found[1].used_s == pytest.approx(2597, rel=0.02)


REASON = [
    "no GPU fits: 3 of 3 have too little memory",
    "there is room now: it is placed when kube-scheduler tries it again, in seconds",
]


def test_gang_is_one_row_when_its_pods_wait(tmp_path: Path) -> None:
    """One row for its two pods; when both cards do is known."""
    labels = {"pod-group.scheduling.sigs.k8s.io/name": "train"}
    pods = [
        waiting("w0", 8, 1, labels=labels),
        pod("w1", units(8), labels=labels),
        *(
            pod(
                f"h{card}",
                units(10),
                node="a",
                annotations=on_card(card, 10),
                spec={"activeDeadlineSeconds": 10**9, "terminationGracePeriodSeconds": card},
                status={"startTime": CREATED},
            )
            for card in (0, 1)
        ),
    ]
    (row,) = ask(FakeApiServer.of(nodes=[sharing("a", cards=2)], pods=pods), tmp_path)
    assert (row.name, row.asks) == ("train", "2 pods: 16 aliyun.com/gpu-mem")
    assert row.reserved == ["a/0", "a/1"]
    assert row.starts_by == since(0) + 10**9 + 1
    assert row.why.startswith("no GPU fits: 2 of 2 have too little memory")


def test_pod_is_below_the_queue_when_nothing_is_shared(tmp_path: Path) -> None:
    """It is named, so that nobody takes it for placed."""
    (row,) = ask(FakeApiServer.of(nodes=[node("master")], pods=[waiting("p", 4, 1)]), tmp_path)
    assert (row.position, row.name) == (0, "p")
    assert "no node could hold pod p" in row.why


def test_queue_is_ordered_by_the_options_that_the_scheduler_has_published(tmp_path: Path) -> None:
    """Its fairness: with no penalty for a request, the one that was made first comes first."""
    pods = [
        pod("holder", units(14), node="a", annotations=on_card(0, 14), namespace="heavy"),
        waiting("first", 12, 1, namespace="heavy"),
        waiting("second", 12, 2, namespace="light"),
    ]
    for queued, age in zip(pods[1:], (timedelta(minutes=2), timedelta(minutes=1)), strict=True):
        created = datetime.now(UTC) - age
        queued["metadata"]["creationTimestamp"] = created.strftime("%Y-%m-%dT%H:%M:%SZ")
    options = SchedulerOptions("spread", fairness=Fairness(0, 3600, 0))
    meta: Json = {
        "name": "any-scheduler",
        "namespace": "any",
        "labels": dict([queue_snapshot.LABEL.split("=")]),
        "annotations": {queue_snapshot.ANNOTATION: options.encode()},
    }
    for leases, expected in (
        ([], ["second", "first"]),
        ([{"metadata": meta, "spec": {}}], ["first", "second"]),
    ):
        server = FakeApiServer.of(nodes=[sharing("a")], pods=pods, leases=leases)
        assert [row.name for row in ask(server, tmp_path)] == expected


@pytest.mark.parametrize("text", [None, "{"])
def test_queue_says_so_when_the_options_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    """Without the right to list Leases, or where the annotation is damaged, it is by the defaults."""
    labels = dict([queue_snapshot.LABEL.split("=")])
    meta: Json = {
        "name": "l",
        "labels": labels,
        "annotations": {queue_snapshot.ANNOTATION: text},
    }
    server = FakeApiServer.of(
        nodes=[sharing("a")], pods=[waiting("p", 4, 1)], leases=[{"metadata": meta, "spec": {}}]
    )
    if text is None:
        server.forbidden = {"leases"}
    assert [row.name for row in ask(server, tmp_path)] == ["p"]
    assert "its defaults are assumed" in capsys.readouterr().err


def test_queue_says_so_when_two_leases_publish_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who may write Leases in one namespace could choose what everybody sees."""
    leases = [
        {
            "metadata": {
                "name": "l",
                "namespace": namespace,
                "labels": dict([queue_snapshot.LABEL.split("=")]),
                "annotations": {queue_snapshot.ANNOTATION: SchedulerOptions().encode()},
            },
            "spec": {},
        }
        for namespace in ("a-tenant", "fenka-system")
    ]
    server = FakeApiServer.of(nodes=[sharing("a")], pods=[waiting("p", 4, 1)], leases=leases)
    assert [row.name for row in ask(server, tmp_path)] == ["p"]
    error = capsys.readouterr().err
    assert "its defaults are assumed" in error
    assert "a-tenant/l, fenka-system/l" in error


def test_gang_is_shown_when_its_launcher_requests_no_card(tmp_path: Path) -> None:
    """The launcher counts among those that start together; no card is shown for it."""
    labels = {
        "pod-group.scheduling.sigs.k8s.io/name": "train",
        "pod-group.scheduling.sigs.k8s.io/min-available": "3",
    }
    workers = [waiting(f"w{number}", 8, 1, labels=labels) for number in (0, 1)]
    full = [pod(f"h{card}", units(10), node="a", annotations=on_card(card, 10)) for card in (0, 1)]
    nodes = [sharing("a", cards=2)]
    launcher = pod("launcher", labels=labels)
    (below,) = ask(FakeApiServer.of(nodes=nodes, pods=[*workers, *full]), tmp_path)
    assert (below.position, below.why) == (0, "gang train is incomplete: 2 of its 3 pods exist")
    (row,) = ask(FakeApiServer.of(nodes=nodes, pods=[*workers, launcher, *full]), tmp_path)
    assert (row.name, row.asks) == ("train", "2 pods: 16 aliyun.com/gpu-mem")


@pytest.mark.parametrize(("label", "card"), [("spread", "a/1"), ("binpack", "a/0")])
def test_queue_places_by_the_nodes_placement_label_when_there_is_room(
    tmp_path: Path, label: str, card: str
) -> None:
    """Of two cards one is in use: a node that spreads gives the other one."""
    nodes = [sharing("a", cards=2, labels={"ack.node.gpu.placement": label})]
    pods = [waiting("p", 4, 1), pod("h", units(4), node="a", annotations=on_card(0, 4))]
    (row,) = ask(FakeApiServer.of(nodes=nodes, pods=pods), tmp_path)
    assert row.reserved == [card]


@pytest.mark.parametrize("words", [("queue",), ("top", "node")])
def test_user_without_rights_is_told_which_role_to_ask_for(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    """The API server's own sentence names no role."""
    server = FakeApiServer.of(nodes=[sharing("a")])
    server.forbidden = {"nodes"}
    with in_thread(server, tmp_path) as kubeconfig:
        result = fenka(*words, "--kubeconfig", str(kubeconfig))
    assert result.exit_code == 1
    assert "may not list nodes: ask for the ClusterRole fenka-queue" in result.stderr


@pytest.mark.parametrize(
    ("words", "shown"),
    [(("queue",), "waits"), (("top", "node"), "10.0.0.11"), (("nodes",), "10/14")],
)
def test_user_who_may_not_list_sees_what_the_scheduler_serves(
    tmp_path: Path, words: tuple[str, ...], shown: str
) -> None:
    """Through the API server's proxy, whose path the chart publishes."""
    served = {
        "queue": [QueueRow(1, "waits", "team", 0, "4 aliyun.com/gpu-mem", since(1))],
        "nodes": [NodeRow("a", "10.0.0.11", "<none>", "ready", True, 0, [CardRow(4.0, 14)])],
    }
    proxied = "/api/v1/namespaces/fenka-system/services/x-read:http/proxy/gpushare-scheduler/"

    async def proxy(request: web.Request) -> web.Response | None:
        if not request.path.startswith(proxied):
            return None
        rows = served[request.path.removeprefix(proxied)]
        return web.Response(body=msgspec.json.encode(rows))

    server = FakeApiServer.of(
        configmaps=[
            {
                "metadata": {"name": "fenka", "namespace": "kube-public"},
                "data": {"screens": "fenka-system/x-read:http"},
            }
        ]
    )
    server.forbidden, server.before = {"nodes", "pods", "leases"}, proxy
    with in_thread(server, tmp_path) as kubeconfig:
        result = fenka(*words, "--kubeconfig", str(kubeconfig))
    assert (result.exit_code, result.stderr) == (0, "")
    assert shown in result.stdout
