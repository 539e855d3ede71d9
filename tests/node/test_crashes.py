"""The program is killed before and after every change on disk: nothing is lost, and nothing leaks."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from fenka.isolation import sandbox
from fenka.node.lease import files, store
from fenka.node.lease.files import LeaseFiles
from fenka.node.lease.store import LeaseStore
from tests.node.harness import ContainerFailed, NodeHarness, card, node_harness
from tests.node.pod_kit import dying, memory_limits
from tests.waiting import WAIT_S, until

pytestmark = pytest.mark.slow

MAKING = [
    (store, "write_atomically"),
    (store, "fsync_directory"),
    (LeaseStore, "put"),
    (LeaseFiles, "make"),
    (LeaseFiles, "remove"),
    (files, "create_lease"),
    (files, "specification"),
    (files, "write_atomically"),
]
REMOVING = [
    (LeaseFiles, "remove"),
    (sandbox, "unmount_all"),
    (shutil, "rmtree"),
    (LeaseStore, "drop"),
]


async def starts(node: NodeHarness, pod: Any) -> None:
    """Start the container as the kubelet does, until it works."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                given = await node.kubelet.start_container(pod, "main")
            except ContainerFailed:
                await asyncio.sleep(0.05)
            else:
                assert memory_limits(given) == [(card(0).uuid, 4308)]
                return


async def ends_without_a_trace(node: NodeHarness, pod: Any) -> None:
    """Delete the pod, and wait until all its files are gone."""
    node.delete(pod)
    node.kubelet.forget(pod)
    await until(lambda: not node.files() and not list((node.root / "state").glob("*.json")))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("owner", "name"), MAKING)
async def test_lease_is_completed_when_the_program_was_killed_while_making_it(
    library: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: bool
) -> None:
    """One limit is in force."""

    async with node_harness(card(0), library=library) as node:
        await node.ready()
        pod = node.pod("a", 4)
        with monkeypatch.context() as patched:
            called = dying(patched, owner, name, after=after)
            try:
                await node.kubelet.admit(pod)
                await node.kubelet.start_container(pod, "main")
            except (grpc.aio.AioRpcError, ContainerFailed):
                pass
            assert called
            await node.kill()
        await node.start()
        await node.ready()
        if not node.kubelet.entries:
            await node.kubelet.admit(pod)
        await starts(node, pod)
        node.now += 61  # whatever token the kubelet never heard of
        await ends_without_a_trace(node, pod)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("owner", "name"), REMOVING)
async def test_lease_is_removed_when_the_program_was_killed_while_removing_it(
    library: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: bool
) -> None:
    """Other leases stay."""

    async with node_harness(card(0), library=library) as node:
        await node.ready()
        other, pod = node.pod("other", 4), node.pod("a", 4)
        for each in (other, pod):
            await node.run(each)
        with monkeypatch.context() as patched:
            called = dying(patched, owner, name, after=after)
            node.delete(pod)
            node.kubelet.forget(pod)
            await until(lambda: called)
            await node.kill()
        await node.start()
        await until(lambda: len(list((node.root / "state").glob("*.json"))) == 1)
        await until(lambda: len(node.files()) == 2)
        await node.ready()
        await starts(node, other)
        await ends_without_a_trace(node, other)


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b'{"name":"\xff"}', b"\0" * 300])
def test_store_sets_a_file_aside_when_it_is_damaged(tmp_path: Path, content: bytes) -> None:
    """The others are read."""
    LeaseStore(tmp_path).issue("aliyun.com/gpu-mem", ["u1"], name="whole")
    (tmp_path / "a.json").write_bytes(content)
    after = LeaseStore(tmp_path)
    (complaint,) = after.load()
    assert complaint.startswith(f"{tmp_path}/a.json is invalid and was renamed to a.damaged: ")
    assert list(after.tokens) == ["whole"]
    assert LeaseStore(tmp_path).load() == []
