"""The program is killed before and after every change of an instance, a lease or a file."""

import asyncio
import contextlib
import shutil
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fenka.node.lease.files import LeaseFiles
from fenka.node.lease.store import LeaseStore
from tests.killing import INSTANCE_STEPS, KilledAt
from tests.node.harness import Json, NodeHarness
from tests.node.mig_kit import (
    administrator_creates,
    administrator_destroys,
    admit,
    end,
    layout,
    mig_node,
    mig_pod,
    place_id,
    run,
    started,
)
from tests.node.pod_kit import Killed, limits
from tests.waiting import until

STEPS = (
    *INSTANCE_STEPS,
    (LeaseStore, "put"),
    (LeaseStore, "drop"),
    (LeaseFiles, "make"),
    (LeaseFiles, "remove"),
)
MOST = 60
"""More steps than either half of a pod's life has."""


async def until_killed(
    node: NodeHarness, patched: pytest.MonkeyPatch, step: int, life: Callable[[], Awaitable[object]]
) -> bool:
    """Live until a step ends the program, then start it again. Return whether a step did."""
    threads = ThreadPoolExecutor()
    asyncio.get_running_loop().set_default_executor(threads)
    killing = KilledAt(patched, step, STEPS, Killed)
    living = asyncio.ensure_future(life())
    await until(lambda: killing.done or living.done())
    living.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await living
    await node.kill()
    threads.shutdown()  # they end with their process
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor())
    patched.undo()
    await node.start()
    return killing.done


async def ended(node: NodeHarness, pod: Json) -> None:
    """End the pod, and wait until nothing of it is left."""
    end(node, pod)
    await gone(node)


async def gone(node: NodeHarness) -> None:
    """Wait until nothing is left of any pod."""
    await until(lambda: not node.store.tokens and not node.files())
    keeper = node.program.instances.manager.keeper
    await until(lambda: not keeper.records)


@pytest.mark.parametrize("spec", ["A100-40G", "mirrored"])
async def test_pod_gets_its_instance_when_the_program_was_killed_while_making_it(
    library: Path, monkeypatch: pytest.MonkeyPatch, spec: str
) -> None:
    """One instance, at its place; the administrator's, made while no program runs, stays."""
    async with mig_node(library, spec) as node:
        for step in range(MOST):
            pod = mig_pod(node, f"a{step}", place_id(node, "3g.20gb", 4))
            with monkeypatch.context() as patched:

                async def life(pod: Json = pod) -> None:
                    await run(node, pod)

                killed = await until_killed(node, patched, step, life)
            foreign = administrator_creates(node, "1g.5gb", 0)
            if not any(entry.uid == pod["metadata"]["uid"] for entry in node.kubelet.entries):
                await admit(node, pod)
            ((uuid, mib, _),) = limits(await started(node, pod))
            assert (uuid[:4], mib) == ("MIG-", 20096), step
            assert layout(node) == ["0 1g.5gb", "4 3g.20gb"], step
            await ended(node, pod)
            assert layout(node) == ["0 1g.5gb"], step
            administrator_destroys(node, foreign)
            if not killed:
                return
    raise AssertionError("a start has more steps than this test tries")


@pytest.mark.parametrize("spec", ["A100-40G", "mirrored"])
async def test_nothing_is_left_when_the_program_was_killed_while_a_pod_ended(
    library: Path, monkeypatch: pytest.MonkeyPatch, spec: str
) -> None:
    """And the place is given to another pod."""
    async with mig_node(library, spec) as node:
        for step in range(MOST):
            pod = mig_pod(node, f"a{step}", place_id(node, "3g.20gb", 4))
            await run(node, pod)
            with monkeypatch.context() as patched:

                async def life(pod: Json = pod) -> None:
                    await ended(node, pod)

                killed = await until_killed(node, patched, step, life)
            await gone(node)
            assert layout(node) == [], step
            other = mig_pod(node, f"b{step}", place_id(node, "4g.20gb", 0))
            await run(node, other)
            assert layout(node) == ["0 4g.20gb"], step
            await ended(node, other)
            if not killed:
                return
    raise AssertionError("an end has more steps than this test tries")


async def test_instance_stays_when_the_leases_were_lost(library: Path) -> None:
    """The kubelet and the pod's record still say whose it is."""
    async with mig_node(library) as node:
        pod = mig_pod(node, "a", place_id(node, "3g.20gb", 4))
        before = limits(await run(node, pod))
        await node.kill()
        shutil.rmtree(node.root / "state")
        await node.start()
        await until(lambda: any(lease.instances for lease in node.store.leases.values()))
        (lease,) = node.store.leases.values()
        assert [each.generation for each in lease.instances.values()] == [1]
        assert limits(await started(node, pod)) == before
        assert layout(node) == ["4 3g.20gb"]
        await ended(node, pod)
