"""The relay of device plugins: what the kubelet sees while the node program is away."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from fenka.dialects import base, gpu_manager, gpushare
from fenka.node.kubelet import relay
from tests.node.harness import ContainerFailed, NodeHarness, card, node_harness
from tests.node.pod_kit import memory_limits
from tests.waiting import until


@contextlib.asynccontextmanager
async def relayed(library: Path) -> AsyncIterator[NodeHarness]:
    """Run a node of one T4 whose program registers with the relay."""
    async with node_harness(card(0), library=library, relayed=True) as node:
        await node.ready()
        yield node


def schedulable(node: NodeHarness) -> bool:
    """Return whether the scheduler may send pods to the node."""
    meta = node.api.objects["/api/v1/nodes/n1"]["metadata"]
    return '"healthy":true' in meta["annotations"].get(base.CARDS, "")


async def test_pod_is_admitted_and_starts_later_when_the_program_is_killed(library: Path) -> None:
    """The relay keeps the units and answers Allocate; the start waits for the program."""
    async with relayed(library) as node:
        await node.kill()
        pod = node.pod("a", 4)
        await node.kubelet.admit(pod)
        start = asyncio.create_task(node.kubelet.start_container(pod, "main"))
        await node.start()
        assert memory_limits(await start) == [(card(0).uuid, 4308)]


@pytest.mark.parametrize("checkpoint", [True, False])
async def test_pod_starts_when_the_relay_issued_its_token_after_the_program_read_them(
    library: Path, checkpoint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program reads the token's file before it gives up, also without the kubelet's checkpoint."""
    async with relayed(library) as node:
        node.kubelet.checkpoint = checkpoint
        (node.kubelet.plugins / "kubelet_internal_checkpoint").unlink()

        async def fail(_: str, __: Sequence[str]) -> str:
            # As a program that is killed before it stores the token.
            raise RuntimeError

        for plugin in node.program.plugins.values():
            if plugin._leases is not None:
                monkeypatch.setattr(plugin._leases, "allocate", fail)
        pod = node.pod("a", 4)
        await node.kubelet.admit(pod)
        given = await node.kubelet.start_container(pod, "main")
        assert memory_limits(given) == [(card(0).uuid, 4308)]


async def test_units_stay_healthy_when_the_program_restarts(library: Path) -> None:
    """The kubelet never sees an empty list, and keeps the plugin that it knows."""
    async with relayed(library) as node:
        endpoint = node.kubelet.endpoints[gpushare.MEMORY]
        for _ in range(3):
            await node.kill()
            assert len(node.kubelet.free()) == 14
            await node.start()
            await until(lambda: not node.program.agent.problem)
            assert len(node.kubelet.free()) == 14
        assert node.kubelet.endpoints[gpushare.MEMORY] == endpoint


async def test_kubelet_learns_the_units_when_it_restarts_without_the_program(library: Path) -> None:
    """The relay registers again with the last list."""
    async with relayed(library) as node:
        await node.kill()
        await node.kubelet.restart()
        await node.ready()
        assert len(node.kubelet.free()) == 14


async def test_scheduler_sends_no_pods_when_the_relay_or_the_kubelet_is_away(library: Path) -> None:
    """The broken stream tells the program at once, and it registers again with the next one."""
    async with relayed(library) as node:
        await until(lambda: schedulable(node))
        await node.kill_relay()
        await until(lambda: not schedulable(node))
        assert not node.kubelet.free()
        await node.start_relay()
        await until(lambda: schedulable(node))
        await node.kubelet.stop()
        await until(lambda: not schedulable(node))
        await node.kubelet.start()
        await until(lambda: schedulable(node))
        assert memory_limits(await node.run(node.pod("a", 4))) == [(card(0).uuid, 4308)]


async def test_start_is_refused_with_the_programs_sentence(library: Path) -> None:
    """The relay passes it on."""
    async with relayed(library) as node:
        pod = node.pod("a", 4, on=None)
        await node.kubelet.admit(pod)
        with pytest.raises(
            ContainerFailed, match="fenka: no record says on which card this pod is"
        ):
            await node.kubelet.start_container(pod, "main")


async def test_start_is_refused_with_a_sentence_when_the_program_stays_away(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet shows it on the pod, and repeats the start."""
    monkeypatch.setattr(relay, "START_S", 0.01)
    async with relayed(library) as node:
        await node.kill()
        pod = node.pod("a", 4)
        await node.kubelet.admit(pod)
        with pytest.raises(ContainerFailed, match="fenka: the node program on this node does not"):
            await node.kubelet.start_container(pod, "main")


async def test_gpu_managers_resources_are_admitted_when_the_program_is_away(library: Path) -> None:
    """A resource that only accompanies the leased one is answered without a token."""
    async with relayed(library) as node:
        await node.ready(gpu_manager.CORE)
        pod = node.asking("a", {gpu_manager.CORE: 20, gpu_manager.MEMORY: 8})
        await node.kill()
        await node.kubelet.admit(pod, gpu_manager.CORE, gpu_manager.MEMORY)
        start = asyncio.create_task(node.kubelet.start_container(pod, "c0"))
        await node.start()
        assert memory_limits(await start) == [(card(0).uuid, 2079)]
