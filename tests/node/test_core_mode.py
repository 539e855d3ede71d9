"""The mode of a pod's compute on its node: on the control page, when it is resized, and after crashes."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fenka.core.request import Slice
from fenka.dialects import ack, gpu_manager, gpushare, lease_records
from fenka.dialects.base import CORE_MODE
from fenka.dialects.resize_records import REFUSED
from fenka.isolation import lease_control
from fenka.node.lease.store import Lease
from tests.node.harness import NODE, Json, NodeHarness, card
from tests.node.pod_kit import (
    annotations_of,
    granted,
    ready_node,
    request,
    set_phase,
    write,
)
from tests.waiting import until

A = card(0).uuid
BOTH = (gpushare.MEMORY, ack.CORE)


async def started(node: NodeHarness, name: str, percent: int, mode: str = "") -> Json:
    """Run a pod of 4 units with this percentage in a mode."""
    limits = {gpushare.MEMORY: 4, ack.CORE: percent} if percent else {gpushare.MEMORY: 4}
    pod = node.asking(name, limits, annotations={CORE_MODE: mode} if mode else None)
    await node.run(pod, *(BOTH if percent else BOTH[:1]))
    set_phase(node, name, "Running")
    return pod


@contextlib.asynccontextmanager
async def one_card(library: Path) -> AsyncIterator[NodeHarness]:
    """Yield a node with a T4 whose kubelet knows units and percentages."""
    async with ready_node(library) as node:
        await node.ready(ack.CORE)
        yield node


def lease(node: NodeHarness, name: str) -> tuple[str, Lease]:
    """Return the pod's token and lease."""
    return next((token, each) for token, each in node.store.leases.items() if each.pod == name)


def page(node: NodeHarness, name: str) -> tuple[int, str]:
    """Return the percentage and the mode that are in force."""
    (limit,) = lease_control.read(node.lease_files.control(lease(node, name)[0])).limits
    return limit.compute_percent, limit.compute_mode


@pytest.mark.parametrize(
    ("percent", "mode", "in_force", "reserved"),
    [
        (80, "", (80, "hard"), 80),
        (80, "hard", (80, "hard"), 80),
        (80, "soft", (80, "soft"), 80),
        (80, "weight", (80, "weight"), 0),
        (100, "weight", (100, "weight"), 0),
        (100, "soft", (100, "hard"), 100),  # a whole card's time is no limit
        (0, "", (100, "hard"), 0),
    ],
)
async def test_page_has_the_mode_and_the_lease_holds_what_is_reserved(
    library: Path, percent: int, mode: str, in_force: tuple[int, str], reserved: int
) -> None:
    """The node reports to the scheduler what is reserved."""
    async with one_card(library) as node:
        pod = await started(node, "a", percent, mode)
        assert page(node, "a") == in_force
        _, made = lease(node, "a")
        assert made.slices == [Slice(0, A, 4308, percent)]
        assert made.holds == [Slice(0, A, 4308, reserved)]
        key = f"/api/v1/nodes/{NODE}"

        def reported() -> tuple[Slice, ...]:
            annotations = node.api.objects[key]["metadata"]["annotations"]
            report = lease_records.decode_report(annotations) or lease_records.EMPTY_REPORT
            return report.pods.get(pod["metadata"]["uid"], ())

        await until(lambda: reported() == (Slice(0, A, 4308, reserved),))


async def test_weights_take_no_room_from_shares(library: Path) -> None:
    """A share of 60 starts, and grows to 80, beside weights of 80 by names that the kubelet counts apart."""
    async with one_card(library) as node:
        await started(node, "training", 80, "weight")
        limits = {gpu_manager.CORE: 60, gpu_manager.MEMORY: 16}
        pod = node.asking("service", limits)
        await node.run(pod, gpu_manager.CORE, gpu_manager.MEMORY)
        set_phase(node, "service", "Running")
        request(node, "service", "gpu-core=80")
        await granted(node, "service", "gpu-core=80")
        assert (page(node, "service"), page(node, "training")) == ((80, "hard"), (80, "weight"))
        request(node, "training", "gpu-mem=11")
        await until(lambda: REFUSED in annotations_of(node, "training"))
        assert "11847 do not fit" in annotations_of(node, "training")[REFUSED]


@pytest.mark.parametrize("mode", ["soft", "weight"])
async def test_mode_stays_when_the_share_is_resized(library: Path, mode: str) -> None:
    """Also when there was no share meanwhile."""
    async with one_card(library) as node:
        await started(node, "a", 20, mode)
        for text, in_force in (
            ("gpu-core=80", (80, mode)),
            ("gpu-core=0", (100, "hard")),
            ("gpu-core=30,gpu-mem=6", (30, mode)),
        ):
            request(node, "a", text)
            await granted(node, "a", text)
            assert page(node, "a") == in_force
        _, made = lease(node, "a")
        assert made.slices == [Slice(0, A, 6462, 30)]
        assert made.holds == [Slice(0, A, 6462, 0 if mode == "weight" else 30)]


@pytest.mark.parametrize("mode", ["soft", "weight"])
@pytest.mark.parametrize("lost", [False, True], ids=["restarted", "without its store"])
async def test_mode_stays_when_the_program_is_killed(
    library: Path, mode: str, *, lost: bool
) -> None:
    """From the store, or else from the page, whatever the pod's owner has written since."""
    async with one_card(library) as node:
        await started(node, "a", 20, mode)
        request(node, "a", "gpu-core=80")
        await granted(node, "a", "gpu-core=80")
        before, _ = lease(node, "a")
        await node.kill()
        if lost:
            (node.root / "state" / f"{before}.json").unlink()
            if mode == "weight":
                write(node, "a", **{CORE_MODE: "hard"})
        await node.start()
        await until(lambda: before in node.store.leases)
        assert page(node, "a") == (80, mode)
        request(node, "a", "gpu-core=60")
        await granted(node, "a", "gpu-core=60")
        assert page(node, "a") == (60, mode)


async def test_mode_stays_when_the_annotation_is_changed_later(library: Path) -> None:
    """The pod's owner can write it, and nothing more is reserved."""
    async with one_card(library) as node:
        await started(node, "a", 80, "weight")
        write(node, "a", **{CORE_MODE: "hard"})
        request(node, "a", "gpu-core=90")
        await granted(node, "a", "gpu-core=90")
        assert page(node, "a") == (90, "weight")
        assert lease(node, "a")[1].holds == [Slice(0, A, 4308, 0)]
