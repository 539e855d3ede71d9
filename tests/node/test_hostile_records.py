"""Tenants gain nothing by what they write on their pods; and the node's report."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fenka.core.inventory import DeviceId
from fenka.core.request import Slice
from fenka.dialects import base, gpushare
from fenka.dialects.lease_records import REPORT, LeaseReport, Lingering, decode_report
from fenka.dialects.resize_records import STATUS, ResizeStatus, encode_status
from fenka.isolation import lease_control
from fenka.kubernetes.api_client import ApiUnreachable
from fenka.node.lease.report import REPORT_AFTER_S
from fenka.node.node_api import NodeApi
from tests.node.harness import NODE, T4_MIB, ContainerFailed, Json, NodeHarness, card
from tests.node.pod_kit import path, ready_node, settled, write
from tests.waiting import until

A, B = card(0).uuid, card(1).uuid


async def seen(node: NodeHarness, name: str, key: str, text: str) -> None:
    """Wait until the node program has read an annotation."""

    def known() -> bool:
        return any(
            pod.metadata.name == name and pod.metadata.annotations.get(key) == text
            for pod in node.node_api.pods.values()
        )

    await until(known)


def forged(pod: Json, card_uuid: str = A) -> str:
    """Return a status of a resize to a whole card that never happened."""
    piece = Slice(0, DeviceId(card_uuid), 15079, 100)
    return encode_status(
        ResizeStatus(
            pod["metadata"]["uid"], (Slice(0, DeviceId(card_uuid), 1077, 0),), {"main": (piece,)}
        )
    )


def pages(node: NodeHarness, name: str) -> list[int]:
    """Return the MiB that programs of the pod may use, by the pages that are complete."""
    return [
        limit.memory_bytes >> 20
        for token in node.store.tokens.values()
        if token.lease and token.lease.pod == name and node.lease_files.is_complete(token.name)
        for limit in lease_control.read(node.lease_files.control(token.name)).limits
    ]


def report(node: NodeHarness) -> LeaseReport:
    """Return the report on the Node."""
    decoded = decode_report(node.api.objects[f"/api/v1/nodes/{NODE}"]["metadata"]["annotations"])
    assert decoded is not None
    return decoded


async def test_forged_status_is_ignored_before_the_first_start(library: Path) -> None:
    """A user knows the pod's UID beforehand by a scheduling gate."""

    async with ready_node(library, T4_MIB, T4_MIB) as node:
        pod = node.pod("a", 1)
        write(node, "a", **{STATUS: forged(pod)})
        await seen(node, "a", STATUS, forged(pod))
        await node.run(pod)
        assert pages(node, "a") == [1077]
        await until(lambda: report(node).pods)
        assert report(node).pods == {pod["metadata"]["uid"]: (Slice(0, A, 1077, 0),)}
        # What was written is not what the node tells others either.
        node.api.put(path("a"), {**node.api.objects[path("a")], "status": {"phase": "Running"}})
        await until(
            lambda: (
                node.api.objects[path("a")]["metadata"]["annotations"].get(STATUS) != forged(pod)
            )
        )
        assert pages(node, "a") == [1077]


async def test_forged_status_is_ignored_when_the_store_was_lost(library: Path) -> None:
    """The control page, which tenants cannot write, says what is in force."""

    async with ready_node(library, T4_MIB, T4_MIB) as node:
        pod = node.pod("a", 1)
        await node.run(pod)
        write(node, "a", **{STATUS: forged(pod)})
        await node.kill()
        for file in (node.root / "state").iterdir():
            file.unlink()
        await node.start()
        await until(lambda: any(token.lease for token in node.store.tokens.values()))
        (token,) = node.store.tokens.values()
        assert token.lease is not None
        assert (token.lease.slices, token.lease.holds) == ([Slice(0, A, 1077, 0)],) * 2
        assert pages(node, "a") == [1077]


async def test_card_is_read_from_the_page_when_the_store_was_lost_and_the_record_changed(
    library: Path,
) -> None:
    """Programs run on the page's card."""

    async with ready_node(library, T4_MIB, T4_MIB) as node:
        pod = node.pod("a", 8)
        await node.run(pod)
        await node.kill()
        moved = {gpushare.IDX: "1", gpushare.ALLOCATION: '{"0":{"1":8}}', base.CARDS: "{}"}
        write(node, "a", **moved)
        for file in (node.root / "state").iterdir():
            file.unlink()
        await node.start()
        await until(lambda: any(token.lease for token in node.store.tokens.values()))
        uid = pod["metadata"]["uid"]
        await until(lambda: uid in report(node).pods)
        assert report(node).pods[uid] == (Slice(0, A, 8616, 0),)


async def test_lease_is_denied_when_the_record_changes_between_two_containers(
    library: Path,
) -> None:
    """Otherwise each would use another record, and the pod would hold both cards."""

    async with ready_node(library, T4_MIB, T4_MIB) as node:
        pod = node.pod("a", {"x": 4, "y": 4})
        write(node, "a", **{gpushare.ALLOCATION: '{"0":{"0":4},"1":{"0":3}}'})
        await until(
            lambda: any(
                pod.metadata.annotations.get(gpushare.ALLOCATION, "").endswith(":3}}")
                for pod in node.node_api.pods.values()
            )
        )
        await node.kubelet.admit(pod)
        await node.kubelet.start_container(pod, "x")
        moved = '{"0":{"1":4},"1":{"1":4}}'
        write(node, "a", **{gpushare.ALLOCATION: moved, gpushare.IDX: "1", base.CARDS: "{}"})
        await seen(node, "a", gpushare.ALLOCATION, moved)
        with pytest.raises(ContainerFailed, match="record was changed after its container x"):
            await node.kubelet.start_container(pod, "y")
        uid = pod["metadata"]["uid"]
        assert {piece.card for piece in report(node).pods[uid]} == {0}


async def test_capacity_check_counts_what_every_container_may_use(library: Path) -> None:
    """An init container's slice of a card may be larger than the pod's record says."""

    async with ready_node(library, T4_MIB, T4_MIB) as node:
        await node.run(node.pod("there", 8, on=0))
        pod = node.pod("a", {"x": 2, "y": 8}, on=1, init={"prepare": 16})
        uneven = {
            gpushare.ALLOCATION: '{"0":{"0":2},"1":{"1":8}}',
            base.CARDS: "{}",
        }
        write(node, "a", **uneven)
        await seen(node, "a", gpushare.ALLOCATION, uneven[gpushare.ALLOCATION])
        await node.kubelet.admit(pod)
        with pytest.raises(ContainerFailed, match="are still held by default/there"):
            await node.kubelet.start_container(pod, "prepare")


async def test_forged_mirror_annotation_is_ignored(library: Path) -> None:
    """Any user can write it, and a finalizer keeps such a pod."""

    async with ready_node(library, T4_MIB, T4_MIB) as node:
        victim = node.pod("victim", 4)
        del node.api.objects[path("victim")]
        impostor = node.pod("impostor", 4, on=None)
        # The API server lists it first.
        impostor["metadata"]["annotations"]["kubernetes.io/config.mirror"] = victim["metadata"][
            "uid"
        ]
        node.api.put(path("impostor"), impostor)
        node.api.put(path("victim"), victim)
        await node.kill()
        await node.start()
        await node.ready()
        await node.run(victim)
        assert pages(node, "victim") == [4308]


async def test_denied_pod_is_reported_when_it_is_denied_for_a_minute(library: Path) -> None:
    """The report says whether it could start elsewhere, and ends when it runs."""

    async with ready_node(library, T4_MIB, T4_MIB) as node:
        holder = node.pod("holder", 8)
        await node.run(holder)
        late, foreign = node.pod("late", 8), node.pod("foreign", 1, on=None)
        for pod in (late, foreign):
            with pytest.raises(ContainerFailed):
                await node.run(pod)
        await node.agent.reconcile()
        assert not report(node).refused
        node.now += REPORT_AFTER_S
        await node.agent.reconcile()
        refused = report(node).refused
        uids = late["metadata"]["uid"], foreign["metadata"]["uid"]
        assert [refused[uid].movable for uid in uids] == [True, False]
        assert "still held by default/holder" in refused[uids[0]].sentence
        node.delete(holder)
        node.kubelet.forget(holder)
        await until(lambda: pages(node, "late"))
        await until(lambda: set(report(node).refused) == {uids[1]})
        node.delete(foreign)
        node.kubelet.forget(foreign)
        await until(lambda: not report(node).refused)


async def test_pod_is_reported_as_lingering_when_its_processes_outlive_it(library: Path) -> None:
    """It was deleted by force: the card is still in use, but quotas do not count it."""

    async with ready_node(library, T4_MIB, T4_MIB) as node:
        pod = node.pod("a", 8)
        await node.run(pod)
        uid = pod["metadata"]["uid"]
        node.living.add(uid)
        node.delete(pod)
        node.kubelet.forget(pod)
        await until(lambda: uid in report(node).lingering)
        assert report(node).pods == {}
        assert report(node).lingering == {uid: Lingering("default/a", (Slice(0, A, 8616, 0),))}
        node.living.clear()
        node.program.trigger()
        await until(lambda: not report(node).lingering)


async def test_report_is_written_before_the_container_starts(library: Path) -> None:
    """A later pass writes nothing."""

    async with ready_node(library, T4_MIB, T4_MIB) as node:
        pod = node.pod("a", 4)
        await node.run(pod)
        assert pod["metadata"]["uid"] in report(node).pods
        await settled(node)
        written = len(node.api.patches)
        for _ in range(3):
            await node.agent.reconcile()
        assert len(node.api.patches) == written
        node.annotate(**{REPORT: "x"})
        await until(lambda: _readable(node))


def _readable(node: NodeHarness) -> bool:
    text = node.api.objects[f"/api/v1/nodes/{NODE}"]["metadata"]["annotations"][REPORT]
    return bool(text != "x")


@pytest.mark.parametrize("how", ["away", "silent"])
async def test_container_starts_when_the_report_cannot_be_written(
    library: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The capacity check protects other pods. The report is written later."""

    async with ready_node(library, T4_MIB, T4_MIB) as node:
        with monkeypatch.context() as patched:

            async def fails(*_: Any) -> str:
                if how == "silent":
                    await asyncio.Event().wait()
                raise ApiUnreachable("away")

            patched.setattr(NodeApi, "write_report", fails)
            pod = node.pod("a", 4)
            await node.run(pod)
            assert pages(node, "a") == [4308]
        if how == "away":
            node.program.trigger()
            await until(lambda: pod["metadata"]["uid"] in report(node).pods)
