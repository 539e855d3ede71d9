"""The agent killed before and after every step that it takes on the disk: nothing is lost, nothing leaks."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from fenka.isolation import syscalls
from fenka.node.lease import files, store
from fenka.node.lease.files import LeaseFiles
from fenka.node.lease.store import LeaseStore
from tests.node.harness import ContainerFailed, NodeHarness, card, node_harness, play, until
from tests.node.test_agent import cap


class Killed(Exception):
    """Here the process ended."""


def dying(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: bool) -> list[str]:
    """From now on every call of this step is the last thing that happens; who was called."""
    true: Callable[..., Any] = getattr(owner, name)
    called: list[str] = []

    def step(*arguments: Any, **options: Any) -> Any:
        called.append(name)
        if after:
            true(*arguments, **options)
        raise Killed(name)

    monkeypatch.setattr(owner, name, step)
    return called


MAKING = [
    (store, "write_atomically"),
    (store, "fsync_directory"),
    (LeaseStore, "put"),
    (LeaseFiles, "make"),
    (LeaseFiles, "remove"),
    (files, "mount_points"),
    (files, "create_lease"),
    (files, "specification"),
    (files, "write_atomically"),
]
REMOVING = [
    (LeaseFiles, "remove"),
    (syscalls, "unmount_all"),
    (shutil, "rmtree"),
    (LeaseStore, "drop"),
]


async def starts(node: NodeHarness, pod: Any) -> None:
    """As the kubelet does: again and again until it works."""
    async with asyncio.timeout(20):
        while True:
            try:
                given = await node.kubelet.start_container(pod, "main")
            except ContainerFailed:
                await asyncio.sleep(0.05)
            else:
                assert cap(given) == [(card(0).uuid, 4308)]
                return


async def ends_without_a_trace(node: NodeHarness, pod: Any) -> None:
    """The pod goes, and all that it had."""
    node.delete(pod)
    node.kubelet.forget(pod)
    await until(lambda: not node.files() and not list((node.root / "state").glob("*.json")))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("owner", "name"), MAKING)
def test_killed_while_a_lease_is_made(
    library: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: bool
) -> None:
    """The next agent finishes it, and one cap is in force."""

    async def story() -> None:
        async with node_harness(card(0), library=library) as node:
            await node.ready()
            pod = node.pod("a", 4)
            with monkeypatch.context() as patched:
                called = dying(patched, owner, name, after)
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

    play(story())


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("owner", "name"), REMOVING)
def test_killed_while_a_lease_is_taken_away(
    library: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: bool
) -> None:
    """The next agent takes away the rest, and others are not touched."""

    async def story() -> None:
        async with node_harness(card(0), library=library) as node:
            await node.ready()
            other, pod = node.pod("other", 4), node.pod("a", 4)
            for it in (other, pod):
                await node.run(it)
            with monkeypatch.context() as patched:
                called = dying(patched, owner, name, after)
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

    play(story())
