"""MIG instances of pods: created where the scheduler says, leased, and destroyed after their pods."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from fenka.core.inventory import DeviceId
from fenka.core.mig.geometry import Profile
from fenka.core.request import Slice
from fenka.dialects.base import NVIDIA_GPU
from fenka.dialects.resize_records import REFUSED
from fenka.hardware import nvml_mig
from fenka.hardware.driver_edits import LIBRARY_DIRECTORIES
from fenka.hardware.nvml import GpuProcess, Hardware, Xid
from fenka.isolation.driver_usage import ActivityTracker
from fenka.node.driver import NodeDriver
from fenka.node.instance_device import InstanceDevice
from fenka.node.lease.store import Lease
from fenka.node.monitor.metrics import Exporter
from fenka.node.monitor.monitor import Monitor, ViolationPolicy
from fenka.node.monitor.usage import Usage
from tests.hardware.client import Client
from tests.hardware.trees import install_driver
from tests.node.harness import ContainerFailed, NodeHarness
from tests.node.mig_kit import (
    ON_DEMAND,
    administrator_creates,
    administrator_destroys,
    admit,
    end,
    inside_pod,
    layout,
    mig_node,
    mig_pod,
    place_id,
    run,
    started,
    states,
)
from tests.node.pod_kit import annotations_of, granted, limits, request, set_phase
from tests.node.test_monitor import FakeXids, card_monitor
from tests.waiting import until


def advertised(node: NodeHarness) -> dict[str, int]:
    """Return the number of device IDs of each profile."""
    return {
        name.removeprefix("nvidia.com/mig-"): len(ids)
        for name, ids in node.kubelet.devices.items()
        if "/mig-" in name
    }


@pytest.mark.parametrize("spec", ["A100-40G", "mirrored"])
async def test_whole_instance_is_created_at_its_place_and_destroyed_after_the_pod(
    library: Path, spec: str
) -> None:
    """The container is limited to the instance, and the Node shows what there is."""
    async with mig_node(library, spec) as node:
        expected = {
            **{"1g.5gb": 7, "1g.5gb.me": 1, "1g.10gb": 4, "2g.10gb": 3},
            **{"3g.20gb": 2, "4g.20gb": 1, "7g.40gb": 1},
        }
        await until(lambda: advertised(node) == expected)
        pod = mig_pod(node, "a", place_id(node, "3g.20gb", 4))
        started = await run(node, pod)
        assert layout(node) == ["4 3g.20gb"]
        ((uuid, mib, percent),) = limits(started)
        assert (uuid[:4], mib, percent) == ("MIG-", 20096, 100)
        assert started["env"]["NVIDIA_VISIBLE_DEVICES"] == uuid
        await until(lambda: states(node) == {"4 3g.20gb": "own"})
        (lease,) = node.store.leases.values()
        assert [each.uuid for each in lease.slices] == [place_id(node, "3g.20gb", 4)]
        assert [(each.uuid, each.generation) for each in lease.instances.values()] == [(uuid, 1)]
        end(node, pod)
        await until(lambda: not states(node))
        assert (layout(node), node.program.instances.manager.keeper.records) == ([], ())
        assert not node.store.tokens


async def test_slices_of_two_pods_share_an_instance(library: Path) -> None:
    """Percent are of the whole card on pods, and of the instance's own time on the page: 15 of 38 is 39."""
    async with mig_node(library) as node:
        place = place_id(node, "3g.20gb", 4)
        asked = {"aliyun.com/gpu-mem": 9, "aliyun.com/gpu-core.percentage": 15}
        pods = [inside_pod(node, name, place, asked) for name in "ab"]
        pages = [limits(await run(node, pod)) for pod in pods]
        assert pages[0] == pages[1]
        ((uuid, mib, percent),) = pages[0]
        assert (uuid[:4], mib, percent) == ("MIG-", 20096 * 9 // 19, 39)
        assert layout(node) == ["4 3g.20gb"]
        end(node, pods[0])
        await until(lambda: len(node.store.tokens) == 1)
        assert layout(node) == ["4 3g.20gb"]
        end(node, pods[1])
        await until(lambda: not layout(node))


async def test_start_is_refused_when_an_administrator_has_the_place(library: Path) -> None:
    """The instance stays, and the Node shows it."""
    async with mig_node(library) as node:
        pod = mig_pod(node, "a", place_id(node, "3g.20gb", 4))
        administrator_creates(node, "1g.5gb", 5)
        await admit(node, pod)
        with pytest.raises(
            ContainerFailed,
            match=r"0/4 3g.20gb cannot be created: 0/5 1g.5gb is an administrator's",
        ):
            await node.kubelet.start_container(pod, "main")
        await until(lambda: states(node) == {"5 1g.5gb": "foreign"})
        assert layout(node) == ["5 1g.5gb"]
        end(node, pod)
        await until(lambda: not node.store.tokens)
        assert layout(node) == ["5 1g.5gb"]


async def test_instance_stays_while_a_process_uses_it(library: Path) -> None:
    """The Node says that it is leaving. Another pod at its place starts when it has gone."""
    async with mig_node(library) as node:
        pod = mig_pod(node, "a", place_id(node, "3g.20gb", 4))
        ((uuid, _, _),) = limits(await run(node, pod))
        simulated = node.hardware.simulated  # type: ignore[attr-defined]
        client = Client(simulated.library_dir, CUDA_VISIBLE_DEVICES=uuid).enter()
        end(node, pod)
        await until(lambda: states(node) == {"4 3g.20gb": "leaving"})
        other = mig_pod(node, "b", place_id(node, "2g.10gb", 4))
        await admit(node, other)
        starting = asyncio.create_task(node.kubelet.start_container(other, "main"))
        await until(lambda: len(node.store.leases) == 1)
        assert layout(node) == ["4 3g.20gb"]
        client.kill()
        # The pass that destroys it may create the other at once, so an empty card may not be seen.
        await until(lambda: layout(node) != ["4 3g.20gb"])
        node.now += 2
        ((_, mib, _),) = limits(await starting)
        assert (mib, layout(node)) == (9984, ["4 2g.10gb"])


async def test_others_start_while_the_driver_is_slow(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes go on, too; the instance's own pod starts when the driver has answered."""
    slow, real = threading.Event(), nvml_mig.create_gpu_instance

    def create(card: str, profile: Profile, start: int) -> int:
        slow.wait()
        return real(card, profile, start)

    monkeypatch.setattr(nvml_mig, "create_gpu_instance", create)
    async with mig_node(library, "A100-40G,T4") as node:
        first = mig_pod(node, "a", place_id(node, "1g.5gb", 0))
        await admit(node, first)
        starting = asyncio.create_task(node.kubelet.start_container(first, "main"))
        await until(lambda: node.program.instances.manager.keeper.records)
        try:
            second = node.pod("b", 4, on=1)
            assert limits(await node.run(second))[0][1] == 4308
            node.delete(second)
            node.kubelet.forget(second)
            node.program.trigger()
            await until(lambda: len(node.store.leases) == 1)
            assert not starting.done()
        finally:
            slow.set()
        assert limits(await starting)[0][1] == 4864


async def test_instance_is_made_again_when_an_administrator_destroyed_it(library: Path) -> None:
    """The restarted container has one with another number, though its UUID is the same."""
    async with mig_node(library) as node:
        pod = mig_pod(node, "a", place_id(node, "2g.10gb", 2))
        before = limits(await run(node, pod))
        (record,) = node.program.instances.manager.keeper.records
        assert record.gpu_instance is not None
        administrator_destroys(node, record.gpu_instance)
        node.program.instances.trigger()
        await until(lambda: states(node) == {"2 2g.10gb": "unhealthy"} or layout(node))
        assert limits(await started(node, pod)) == before
        (lease,) = node.store.leases.values()
        assert [each.generation for each in lease.instances.values()] == [2]
        assert layout(node) == ["2 2g.10gb"]


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        (("4g.20gb", 0), r"instance 0/0 4g.20gb has the place of instance 0/2 1g.5gb, which is .*"),
        (
            ("1g.5gb", 2),
            r"instance 0/2 1g.5gb has 4864 MiB, of which 4864 MiB are still held by d.*",
        ),
        (("1g.5gb", 9), r".*'GPU-.*/9/1g.5gb' is none that its node can have: delete the pod, .*"),
        (("5g.25gb", 0), r".*/0/5g.25gb' is none that its node can have: delete the pod, .*"),
    ],
)
async def test_start_is_refused_when_the_record_cannot_be(
    library: Path, second: tuple[str, int], sentence: str
) -> None:
    """Anybody can write a pod's annotation; the pod that holds the place keeps it."""
    async with mig_node(library) as node:
        await run(node, mig_pod(node, "a", place_id(node, "1g.5gb", 2)))
        pod = mig_pod(node, "b", place_id(node, *second))
        limits_of = pod["spec"]["containers"][0]["resources"]["limits"]
        if not any(name in node.kubelet.devices for name in limits_of):
            pod["spec"]["containers"][0]["resources"]["limits"] = {"nvidia.com/mig-1g.5gb": "1"}
        await admit(node, pod)
        with pytest.raises(ContainerFailed, match=sentence):
            await node.kubelet.start_container(pod, "main")
        assert layout(node) == ["2 1g.5gb"]


async def test_namespaces_share_an_instance_only_when_the_label_says_so(library: Path) -> None:
    """The node checks it, whoever has bound the pod."""
    async with mig_node(library) as node:
        place, asked = place_id(node, "3g.20gb", 4), {"aliyun.com/gpu-mem": 4}
        await run(node, inside_pod(node, "a", place, asked))
        other = inside_pod(node, "b", place, asked, namespace="other")
        await admit(node, other)
        with pytest.raises(ContainerFailed, match=r"has programs of another namespace, and .*"):
            await node.kubelet.start_container(other, "main")
        node.label(**ON_DEMAND, **{"fenka.io/mig-tenancy": "shared"})
        await started(node, other)


async def test_only_the_instance_is_unhealthy_when_an_error_concerns_it_alone(
    library: Path,
) -> None:
    """It takes no new pods. One that is made again at its place is healthy."""
    async with mig_node(library) as node:
        places = [place_id(node, "3g.20gb", 4), place_id(node, "2g.10gb", 0)]
        asked = {"aliyun.com/gpu-mem": 4}
        pods = [
            inside_pod(node, name, place, asked) for name, place in zip("ab", places, strict=True)
        ]
        for pod in pods:
            await run(node, pod)
        record = next(
            each
            for each in node.program.instances.manager.keeper.records
            if each.profile == "3g.20gb"
        )
        xids = FakeXids(
            Xid(record.card, 48, 14),  # an administrator's
            Xid(record.card, 31, record.gpu_instance),  # a program's
            Xid(record.card, 48, record.gpu_instance),
        )
        listening = asyncio.create_task(card_monitor(node).listen(lambda: xids))  # type: ignore[arg-type,return-value]
        await until(lambda: states(node) == {"0 2g.10gb": "own", "4 3g.20gb": "unhealthy"})
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        assert "instance 0/4 3g.20gb is not used: XID 48" in {
            each["note"] for each in node.api.events
        }
        assert node.program.inventory.cards()[0].healthy
        third = inside_pod(node, "c", places[0], asked)
        await admit(node, third)
        with pytest.raises(
            ContainerFailed, match=r"instance 0/4 3g.20gb .* is unhealthy, or its .*"
        ):
            await node.kubelet.start_container(third, "main")
        end(node, pods[0])
        await until(lambda: states(node) == {"0 2g.10gb": "own"})
        await started(node, third)
        await until(lambda: states(node) == {"0 2g.10gb": "own", "4 3g.20gb": "own"})


def test_container_gets_the_device_files_of_its_instances_and_no_others(tmp_path: Path) -> None:
    """Those of the card, of the GPU instance and of the compute instance."""
    install_driver(tmp_path, str(LIBRARY_DIRECTORIES[0]), "550.1")
    driver = SimpleNamespace(minor=lambda _: 3, version="550.1")
    hardware = cast("Hardware", SimpleNamespace(driver=driver))
    piece = Slice(0, DeviceId("GPU-1/4/3g.20gb"), 20096, 0)
    files = ["/dev/nvidia-caps/nvidia-cap417", "/dev/nvidia-caps/nvidia-cap418"]
    device = InstanceDevice("MIG-1", 1, 38, files)
    lease = Lease("u", "ns", "p", "c", [piece], [piece], {}, instances={piece.uuid: device})
    edits = NodeDriver(tmp_path, tmp_path, None).edits(hardware)(lease)
    assert [str(path) for path in edits.devices] == ["/dev/nvidia3", *files]


async def test_metrics_name_instances(library: Path, tmp_path: Path) -> None:
    """Containers', cards' and instances' own."""
    async with mig_node(library) as node:
        pod = mig_pod(node, "a", place_id(node, "3g.20gb", 4))
        ((uuid, _, _),) = limits(await run(node, pod))
        administrator_creates(node, "1g.5gb", 0)
        node.program.instances.trigger()
        await until(lambda: len(states(node)) == 2)
        process = tmp_path / "7"
        process.mkdir()
        (process / "cgroup").write_text(f"0::/kubepods/pod{pod['metadata']['uid']}/{'ab' * 32}\n")
        usage = Usage(lambda: [GpuProcess(uuid, 7, 50)], node.lease_files, dict, tmp_path)
        exporter, cards = Exporter("n1"), card_monitor(node)
        activity, policy = ActivityTracker(lambda *_: None), ViolationPolicy()
        monitor = Monitor(node.node_api, node.store, cards, usage, exporter, policy, activity)
        await monitor.sample()
        registry = CollectorRegistry()
        registry.register(exporter)
        card = node.hardware.cards[0]
        physical = {"uuid": card.uuid, "index": "0", "model": card.model, "node": "n1"}
        (record,) = node.program.instances.manager.keeper.records
        own = {"gi": str(record.gpu_instance), "ci": "0", "profile": "3g.20gb"}
        container = {"namespace": "default", "pod": "a", "container": "main"}

        def value(name: str, labels: dict[str, str]) -> float | None:
            return registry.get_sample_value(name, labels)

        of_instance = {**physical, "uuid": uuid, **own}
        used = value("fenka_container_gpu_memory_used_bytes", {**container, **of_instance})
        assert used == 50 << 20
        of_card = {**of_instance, "card": card.uuid}
        assert value("fenka_instance_memory_total_bytes", of_card) == 20096 << 20
        assert value("fenka_instance_healthy", of_card) == 1
        assert value("fenka_card_memory_allocated_bytes", physical) == 20096 << 20
        for profile, state in (("3g.20gb", "own"), ("1g.5gb", "foreign")):
            labels = {**physical, "profile": profile, "state": state}
            assert value("fenka_card_instances", labels) == 1
        ratio = value("fenka_card_flexibility_ratio", physical)
        assert ratio is not None
        assert 0 < ratio < 0.5


async def test_slice_inside_an_instance_is_resized_within_it(library: Path) -> None:
    """Its compute stays a share of the whole card: 30 of 38 is 79."""
    async with mig_node(library) as node:
        asked = {"aliyun.com/gpu-mem": 4, "aliyun.com/gpu-core.percentage": 15}
        pod = inside_pod(node, "a", place_id(node, "3g.20gb", 4), asked)
        container = await run(node, pod)
        set_phase(node, "a", "Running")
        request(node, "a", "gpu-mem=8, gpu-core=30")
        status = await granted(node, "a", "gpu-mem=8, gpu-core=30")
        mib = 20096 * 8 // 19
        assert [(each.memory_mib, each.compute) for each in status.slices] == [(mib, 30)]
        assert [each[1:] for each in limits(container)] == [(mib, 79)]
        request(node, "a", "gpu-core=39")
        await until(lambda: REFUSED in annotations_of(node, "a"))
        refused = annotations_of(node, "a")[REFUSED]
        assert refused == "instance 0/4 3g.20gb has 38 % of its time: 39 do not fit"
        assert [each[1:] for each in limits(container)] == [(mib, 79)]


async def test_node_that_shares_no_cards_gives_instances(library: Path) -> None:
    """Its divided card is no whole card, and the others are."""
    labels = {"fenka.io/mig": "on-demand.0"}
    async with mig_node(library, "A100-40G,T4", divided=True, layouts=None, **labels) as node:
        pod = mig_pod(node, "a", place_id(node, "1g.5gb", 6))
        assert limits(await run(node, pod))[0][1] == 4864
        assert layout(node) == ["6 1g.5gb"]
        await until(lambda: node.kubelet.free(NVIDIA_GPU) == [node.hardware.cards[1].uuid])
        assert not node.kubelet.free()
        end(node, pod)
        await until(lambda: not layout(node) and not node.store.tokens)


async def test_container_gets_two_instances_of_one_card(library: Path) -> None:
    """They add up for nobody: each has its own limits, and the pod holds both."""
    async with mig_node(library, "A30") as node:
        pod = mig_pod(node, "a", place_id(node, "1g.6gb", 0), place_id(node, "1g.6gb", 3))
        container = await run(node, pod)
        assert [(uuid[:4], mib) for uuid, mib, _ in limits(container)] == [("MIG-", 5952)] * 2
        assert len({uuid for uuid, *_ in limits(container)}) == 2
        assert layout(node) == ["0 1g.6gb", "3 1g.6gb"]
        (lease,) = node.store.leases.values()
        assert [each.memory_mib for each in lease.holds] == [5952] * 2
        end(node, pod)
        await until(lambda: not layout(node) and not node.store.tokens)


async def test_instances_are_kept_while_their_card_is_lost(library: Path) -> None:
    """Nothing is forgotten, and no instance is given meanwhile."""
    async with mig_node(library) as node:
        first = mig_pod(node, "a", place_id(node, "3g.20gb", 4))
        before = limits(await run(node, first))
        simulated = node.hardware.simulated  # type: ignore[attr-defined]
        simulated.lose(0)
        await asyncio.to_thread(node.health.refresh)
        node.program.instances.trigger()
        second = mig_pod(node, "b", place_id(node, "1g.5gb", 0))
        await node.kubelet.admit(second, "nvidia.com/mig-1g.5gb")
        with pytest.raises(
            ContainerFailed, match=r"instance 0/0 1g.5gb .* is unhealthy, or its .*"
        ):
            await node.kubelet.start_container(second, "main")
        assert states(node) == {"4 3g.20gb": "own"}
        simulated.recover(0)
        await asyncio.to_thread(node.health.refresh)
        node.program.trigger()
        assert limits(await started(node, first)) == before
        await started(node, second)
        assert layout(node) == ["0 1g.5gb", "4 3g.20gb"]
