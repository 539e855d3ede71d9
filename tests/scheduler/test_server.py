"""The extender over HTTP, edge by edge as gpushare's contract has them, and what it says besides."""

import json
from functools import partial
from typing import Any

import msgspec
import pytest

from fenka import __version__
from fenka.dialects import gpushare
from fenka.scheduler.replica import Settings
from fenka.views.node_rows import NodeRow
from fenka.views.workloads import QueueRow
from tests.builders import T4_MIB, node_json, on_card, pod_json
from tests.fakes.api_server import FakeApiServer
from tests.scheduler.harness import SchedulerHarness, put_pod, scheduler
from tests.waiting import until

NODE = node_json("n", T4_MIB)
PREFIX = "/gpushare-scheduler"


async def raw(
    one: SchedulerHarness, method: str, path: str, body: bytes | None = None
) -> tuple[int, str]:
    """Status and text."""
    url = one.url + path
    async with one.session.request(method, url, data=body, allow_redirects=False) as answer:
        return answer.status, await answer.text()


async def test_server_answers_4xx_when_the_request_is_not_of_the_protocol() -> None:
    """Paths, methods and bodies that are no requests."""

    async with scheduler(NODE) as (_, one):
        rows: list[tuple[str, str, bytes | None, int]] = [
            ("GET", f"{PREFIX}/filter", None, 405),
            ("GET", f"{PREFIX}/bind", None, 405),
            ("POST", f"{PREFIX}/inspect", b"{}", 405),
            ("POST", f"{PREFIX}/filter/", b"{}", 307),
            ("GET", "/", None, 404),
            ("GET", f"{PREFIX}/nothing", None, 404),
            ("POST", f"{PREFIX}/filter", None, 400),
            ("POST", f"{PREFIX}/bind", None, 400),
            ("POST", f"{PREFIX}/prioritize", b"{", 400),
            ("POST", f"{PREFIX}/preempt", b"[]", 400),
            ("GET", "/healthz", None, 200),
            ("GET", "/readyz", None, 200),
        ]
        for method, path, body, status in rows:
            assert (await raw(one, method, path, body))[0] == status, (method, path)
        assert await raw(one, "GET", "/version") == (200, __version__)
        assert (await raw(one, "POST", f"{PREFIX}/filter"))[1] == "Please send a request body"


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("{", "truncated"),
        ("[]", "Expected `object`"),
        ("{}", "arg or pod is nil"),
        ('{"Pod": null}', "arg or pod is nil"),
        ('{"Pod": {}}', "cannot get node names"),
        ('{"Pod": {"spec": []}, "NodeNames": []}', "Expected `object`"),
        ('{"Pod": {}, "NodeNames": [1]}', "Expected `str`"),
        ("[" * 5000, "Expected"),
        ("\x00", "malformed"),
    ],
)
async def test_filter_answers_200_when_the_body_is_invalid(body: str, error: str) -> None:
    """Whatever came."""

    async with scheduler(NODE) as (_, one):
        status, text = await raw(one, "POST", f"{PREFIX}/filter", body.encode())
        answer = json.loads(text)
        assert status == 200
        assert list(answer) == [
            "Nodes",
            "NodeNames",
            "FailedNodes",
            "FailedAndUnresolvableNodes",
            "Error",
        ]
        assert error in answer["Error"]


async def test_filter_answers_in_kind_when_nodes_or_names_are_sent() -> None:
    """Nodes are returned as they were sent."""

    async with scheduler(NODE) as (_, one):
        pod = pod_json("p", 4)
        answer = await one.post("filter", {"pod": pod, "NODENAMES": ["n", "m"]})
        assert answer["NodeNames"] == ["n"]
        assert answer["Nodes"] is None
        assert answer["FailedAndUnresolvableNodes"] == {"m": 'node "m" not found'}
        # As Go writes what was never set.
        nulls = {"metadata": {"name": "p", "creationTimestamp": None}, "spec": {"containers": None}}
        assert (await one.post("filter", {"Pod": nulls, "NodeNames": ["x"]}))["NodeNames"] == ["x"]
        sent = {"metadata": {"name": "n"}, "unknown": {"kept": 1}}
        other = {"metadata": {"name": "m"}}
        answer = await one.post("filter", {"Pod": pod, "Nodes": {"items": [sent, other]}})
        assert answer["Nodes"] == {"metadata": {}, "items": [sent]}


async def test_prioritize_answers_a_list_of_hosts_and_scores() -> None:
    """A list of host and score."""

    async with scheduler(node_json("a", T4_MIB), node_json("b", T4_MIB)) as (_, one):
        body = {"Pod": pod_json("p", 4), "NodeNames": ["b", "a"]}
        assert await one.post("prioritize", body) == [
            {"Host": "b", "Score": 0},
            {"Host": "a", "Score": 10},
        ]


@pytest.mark.parametrize("nominated", [False, True])
async def test_preemption_helps_only_on_the_nominated_node_when_filter_rejects(
    nominated: bool,
) -> None:
    """kube-scheduler's own count passes, so it would look for victims and find none, which is an error."""

    async with scheduler(NODE) as (server, one):
        holder = put_pod(server, "h", 12, node="n", priority=1, annotations=on_card(0, 12))
        pod = pod_json("p", 4, priority=5)
        pod["status"]["nominatedNodeName"] = "n" if nominated else ""
        pod = server.put("pods", pod)
        await until(lambda: one.knows(holder, pod))
        answer = await one.filter(pod, "n")
        field, other = "FailedNodes", "FailedAndUnresolvableNodes"
        if not nominated:
            field, other = other, field
        assert "too little memory" in answer[field]["n"]
        assert not answer[other]


async def test_preempt_answers_by_uid_when_victims_are_sent_either_way() -> None:
    """Nodes where it does not help are left out; the counted disruptions stay."""

    async with scheduler(NODE, node_json("m", T4_MIB)) as (server, one):
        low = put_pod(
            server, "low", 12, node="n", uid="low", priority=1, annotations=on_card(0, 12)
        )
        high = put_pod(
            server, "high", 12, node="m", uid="high", priority=9, annotations=on_card(0, 12)
        )
        await until(lambda: one.knows(low, high))
        pod = pod_json("new", 10, priority=5)
        body: dict[str, Any] = {
            "Pod": pod,
            "NodeNameToMetaVictims": {
                "n": {"Pods": [{"UID": "low"}], "NumPDBViolations": 2},
                "m": {"Pods": [{"UID": "high"}], "NumPDBViolations": 0},
            },
        }
        expected = {
            "NodeNameToMetaVictims": {"n": {"Pods": [{"UID": "low"}], "NumPDBViolations": 2}}
        }
        assert await one.post("preempt", body) == expected
        whole = {
            "n": {"Pods": [low], "NumPDBViolations": 2},
            "m": {"Pods": [high], "NumPDBViolations": 0},
        }
        assert await one.post("preempt", {"pod": pod, "nodenametovictims": whole}) == expected


async def test_inspect_shows_nodes_cards_and_pods() -> None:
    """Also a card that is overcommitted by somebody else's record."""

    async with scheduler(NODE, node_json("plain")) as (server, one):
        pods = [
            put_pod(server, f"p{i}", 10, node="n", annotations=on_card(0, 10)) for i in range(2)
        ]
        await until(lambda: one.knows(*pods))
        held = [{"name": f"p{i}", "namespace": "default", "usedGPU": 10} for i in range(2)]
        device = {"id": 0, "totalGPU": 14, "usedGPU": 20, "pods": held}
        node = {"name": "n", "totalGPU": 14, "usedGPU": 20, "devs": [device]}
        for path in ("inspect", "inspect/n"):
            status, text = await raw(one, "GET", f"{PREFIX}/{path}")
            assert (status, json.loads(text)) == (200, {"nodes": [node]})
        status, text = await raw(one, "GET", f"{PREFIX}/inspect/gone")
        assert status == 404
        assert json.loads(text) == {"nodes": [], "error": 'node "gone" not found'}


async def test_screens_show_queue_and_nodes_without_what_pods_run() -> None:
    """As `fenka queue` and `fenka top node` show them to users who may list everything."""

    async with scheduler(NODE, node_json("plain")) as (server, one):
        held = put_pod(server, "held", 10, node="n", annotations=on_card(0, 10))
        pod = pod_json("waits", 12)
        pod["status"] = {
            "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]
        }
        pod["spec"]["containers"][0] |= {
            "command": ["secret"],
            "env": [{"name": "A", "value": "secret"}],
        }
        waits = server.put("pods", pod)
        await until(lambda: one.knows(held, waits))
        await until(lambda: bool(one.replica.queue.state.snapshot.entries))
        _, text = await raw(one, "GET", f"{PREFIX}/queue")
        (row,) = msgspec.json.decode(text, type=list[QueueRow])
        assert (row.position, row.name, row.asks) == (1, "waits", "12 aliyun.com/gpu-mem")
        assert (row.reserved, row.why) == (["n/0"], "no GPU fits: 1 of 1 has too little memory")
        _, nodes = await raw(one, "GET", f"{PREFIX}/nodes")
        sharing, plain = msgspec.json.decode(nodes, type=list[NodeRow])
        assert (sharing.name, sharing.allocated, sharing.total) == ("n", 10, 14)
        assert [program.name for program in sharing.programs] == ["held"]
        assert (plain.name, plain.count) == ("plain", 0)
        assert "secret" not in text + nodes


async def test_only_one_request_fails_when_it_hits_a_bug() -> None:
    """The answer is never 5xx."""

    async with scheduler(NODE) as (_, one):

        def broken(*_: object) -> None:
            raise RuntimeError("bug")

        extender, right = one.replica.extender, one.replica.extender.filter
        extender.filter = broken  # type: ignore[method-assign,assignment]
        answer = await one.filter(pod_json("p", 4), "n")
        assert "its log has the reason" in answer["Error"]
        extender.filter = right  # type: ignore[method-assign]
        assert (await one.filter(pod_json("p", 4), "n"))["NodeNames"] == ["n"]


async def test_metrics() -> None:
    """By name, as the page lists them."""

    async with scheduler(NODE) as (server, one):
        pod, waiting = put_pod(server, "p", 4), put_pod(server, "w", 4)
        await until(lambda: one.knows(pod, waiting))
        assert await one.bind(pod, "n") == ""
        _, text = await raw(one, "GET", "/metrics")
        card = '{index="0",model="Tesla T4",node="n",uuid="GPU-n-0"}'
        for line in (
            f"fenka_scheduler_card_memory_bytes{card} {float(T4_MIB * 2**20)!r}",
            'fenka_scheduler_binds_total{outcome="bound"} 1.0',
            'fenka_scheduler_request_seconds_count{verb="bind"} 1.0',
            "fenka_scheduler_leading 1.0",
            "fenka_scheduler_wait_seconds_count 1.0",
            'fenka_scheduler_namespace_waiting_pods{namespace="default"} 1.0',
        ):
            name, value = line.rsplit(" ", 1)
            found = [it for it in text.splitlines() if it.startswith(name)]
            assert found, name
            assert float(found[0].rsplit(" ", 1)[1]) == float(value)
        assert "fenka_scheduler_waiting_oldest_seconds" in text
        assert 'fenka_scheduler_watch_age_seconds{collection="pods"}' in text


async def test_metrics_stay_readable_when_a_card_has_a_hostile_model() -> None:
    """Whoever writes a node's record cannot add lines."""
    hostile, model = node_json("n", T4_MIB), json.dumps('T4\n"} 1')[1:-1]
    annotations = hostile["metadata"]["annotations"]
    annotations.update({key: it.replace("Tesla T4", model) for key, it in annotations.items()})

    async with scheduler(hostile) as (_, one):
        _, text = await raw(one, "GET", "/metrics")
        lines = [it for it in text.splitlines() if it.startswith("fenka_scheduler_card_usable{")]
        labels = r'index="0",model="T4\n\"} 1",node="n",uuid="GPU-n-0"'
        assert lines == [f"fenka_scheduler_card_usable{{{labels}}} 1.0"]


# ---- what people are told by events ----


def notes(server: FakeApiServer, name: str) -> list[str]:
    """Of the events on one object."""
    return [it["note"] for it in server.all("events") if it["regarding"]["name"] == name]


UNSCHEDULABLE = {
    "phase": "Pending",
    "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}],
}


async def test_event_is_posted_when_kube_scheduler_rejects_before_filter() -> None:
    """NodeResourcesFit says no first. One that was asked about has kube-scheduler's own event."""

    async with scheduler(NODE) as (server, one):
        asked = put_pod(server, "asked", 20)
        await until(lambda: one.knows(asked))
        await one.filter(asked, "n")
        for pod in (asked, pod_json("never", 20), pod_json("nothing", 0), pod_json("fits", 4)):
            server.put("pods", {**pod, "status": UNSCHEDULABLE})
        await until(lambda: notes(server, "never"))
        assert notes(server, "never") == [
            "fenka: no GPU fits: 1 of 1 has too little memory; the largest card has 14 units, ask for no more"
        ]
        assert len(server.all("events")) == 1


async def test_event_is_posted_once_when_a_record_is_invalid() -> None:
    """For what the pod asks, and no more: its owner may have written them."""

    async with scheduler(node_json("n", T4_MIB, T4_MIB)) as (server, one):
        bad = pod_json("bad", 4, node="n", annotations={gpushare.IDX: "x"})
        for _ in range(3):
            server.put("pods", bad)
        await until(lambda: notes(server, "bad"))
        (note,) = notes(server, "bad")
        assert "ALIYUN_COM_GPU_MEM_IDX is 'x'" in note
        assert one.held("n", 0) + one.held("n", 1) == T4_MIB * 4 // 14


async def test_event_is_posted_when_a_label_closes_a_node_with_pods() -> None:
    """Existing pods stay."""

    async with scheduler(NODE) as (server, one):
        pod = put_pod(server, "p", 4)
        assert await one.bind(pod, "n") == ""
        server.put("nodes", node_json("n", T4_MIB, labels={"gpushare": "false"}))
        await until(lambda: notes(server, "n"))
        (note,) = notes(server, "n")
        assert "gpushare=false takes it out of sharing; 1 of its pods keep what they have" in note
        assert one.held("n") == T4_MIB * 4 // 14


async def test_cards_are_unhealthy_when_gpushares_config_map_lists_them() -> None:
    """What is not an index is ignored; without the ConfigMap all are healthy. By default none is read."""
    nodes, read = node_json("n", T4_MIB, T4_MIB), Settings(unhealthy_maps=True)
    async with scheduler(nodes, settings=read) as (server, one):

        def config_map(gpus: str) -> None:
            meta = {"name": "unhealthy-gpu-n", "namespace": "kube-system"}
            server.put("configmaps", {"metadata": meta, "data": {"gpus": gpus}})

        def healthy() -> list[bool]:
            share = one.replica.cluster.shared_node("n")
            assert share is not None
            return [it.healthy for it in share.node.cards]

        config_map("1,x,")
        await until(lambda: healthy() == [True, False])
        config_map("0, 1")
        await until(lambda: healthy() == [False, False])
        server.remove("configmaps", "unhealthy-gpu-n", "kube-system")
        await until(lambda: healthy() == [True, True])


async def test_node_is_replaced_when_its_uid_changes() -> None:
    """Its UID tells."""

    async with scheduler(NODE) as (server, one):
        server.remove("nodes", "n")
        await until(lambda: one.replica.cluster.node("n") is None)
        again = node_json("n", T4_MIB)
        again["metadata"]["uid"] = "another"
        server.put("nodes", again)
        await until(lambda: one.replica.cluster.shared_node("n") is not None)


# ---- the order ----


def refused(name: str, units: int, minute: int, **rest: Any) -> dict[str, Any]:
    """A pod for which kube-scheduler has found no node."""
    pod = pod_json(name, units, uid=name, **rest)
    pod["metadata"]["creationTimestamp"] = f"2026-01-01T00:{minute:02}:00Z"
    return {**pod, "status": UNSCHEDULABLE}


async def test_later_pod_waits_when_an_earlier_one_is_pending() -> None:
    """From filter to bind, in sentences, events and metrics."""

    async with scheduler(NODE) as (server, one):
        holder = put_pod(server, "h", 8, node="n", annotations=on_card(0, 8))
        head, later = (
            server.put("pods", refused("head", 12, 1)),
            server.put("pods", refused("later", 4, 2)),
        )
        await until(lambda: one.knows(holder, head, later))
        # 6 of 14 units are free: enough for the later one, were it not for the head.
        answer = await one.filter(later, "n")
        assert answer["FailedAndUnresolvableNodes"] == {
            "n": "no GPU fits: 1 of 1 is reserved for requests before it; position 2 of 2 in the queue"
        }
        assert "reserved for requests before it" in await one.bind(later, "n")
        _, text = await raw(one, "GET", "/metrics")
        for line in (
            'fenka_scheduler_waiting_position{namespace="default",pod="head"} 1.0',
            'fenka_scheduler_waiting_position{namespace="default",pod="later"} 2.0',
            'fenka_scheduler_waiting_reasons{reason="memory"} 1.0',
            'fenka_scheduler_waiting_reasons{reason="reserved"} 1.0',
            'fenka_scheduler_waiting_reasons{reason="cpu"} 0.0',
            "fenka_scheduler_bypassed_seconds 0.0",
            "fenka_scheduler_max_penalty_seconds 3600.0",
        ):
            assert line in text.splitlines()
        server.remove("pods", "h", "default")
        await until(lambda: one.held("n") == 0)
        assert (await one.filter(head, "n"))["NodeNames"] == ["n"]
        assert await one.bind(head, "n") == ""
        failed = (await one.filter(later, "n"))["FailedAndUnresolvableNodes"]
        assert "too little memory" in failed["n"]


async def test_event_has_the_position_when_kube_scheduler_counts_too_few_units() -> None:
    """In its event."""

    async with scheduler(NODE) as (server, one):
        put_pod(server, "h", 8, node="n", annotations=on_card(0, 8))
        await until(lambda: one.held("n") > 0)
        for name, units, minute, position in (
            ("first", 12, 1, "1 of 1"),
            ("second", 10, 2, "2 of 2"),
        ):
            server.put("pods", refused(name, units, minute))
            await until(partial(notes, server, name))
            assert notes(server, name) == [
                f"fenka: no GPU fits: 1 of 1 has too little memory; position {position} in the queue"
            ]
