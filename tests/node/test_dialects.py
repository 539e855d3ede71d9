"""Leases of every dialect on one node, from Allocate to what a container finds."""

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from fenka.core.inventory import DeviceId
from fenka.core.usage import UsageTotals
from fenka.dialects import ack, base, gpu_manager, gpushare, hami, nvidia
from fenka.dialects.registry import DIALECTS, WITH_HAMI, annotation_names
from tests.dialects import made_up
from tests.node.harness import T4_MIB, ContainerFailed, NodeHarness, card, node_harness
from tests.node.pod_kit import limits
from tests.waiting import until


@contextlib.asynccontextmanager
async def two_cards(library: Path, **labels: str) -> AsyncIterator[NodeHarness]:
    """Yield a sharing node with two T4."""
    async with node_harness(card(0), card(1), library=library, labels=labels or None) as node:
        await until(lambda: known(node))
        yield node


def known(node: NodeHarness) -> bool:
    """Return whether the kubelet knows all device lists."""
    plugins = node.program.plugins.values()
    return any(plugin.devices for plugin in plugins) and all(
        len(node.kubelet.devices.get(plugin.resource, ())) == len(plugin.devices)
        for plugin in plugins
    )


def offered(node: NodeHarness) -> dict[str, int]:
    """Return the number of healthy IDs by resource."""
    return {
        name: sum(health == "Healthy" for health in ids.values())
        for name, ids in node.kubelet.devices.items()
        if ids
    }


async def test_sharing_node_offers_the_resources_of_every_dialect(library: Path) -> None:
    """Two T4 have 14 GiB, 100 percent and 15079 // 256 = 58 blocks each. One more label adds whole cards."""

    async with two_cards(library) as node:
        shared = {
            gpushare.MEMORY: 28,
            ack.CORE: 200,
            gpu_manager.CORE: 200,
            gpu_manager.MEMORY: 116,
        }
        await until(lambda: offered(node) == shared)
        node.node(**{"gpushare": "true", "fenka.io/whole-cards": "true"})
        await until(lambda: offered(node) == {**shared, base.NVIDIA_GPU: 2})
        node.node(**{"ack.node.gpu.schedule": "cgpu"})
        await until(lambda: offered(node) == {gpushare.MEMORY: 28})
        node.node(**{"ack.node.gpu.schedule": "default"})
        await until(lambda: offered(node) == {base.NVIDIA_GPU: 2})


async def test_gpu_manager_jobs_get_their_slices(library: Path) -> None:
    """job1 has a whole card. 24 blocks of 256 MiB are 15079 * 24 // 58 = 6239 MiB."""

    async with two_cards(library) as node:
        both = (gpu_manager.CORE, gpu_manager.MEMORY)
        job1 = node.asking("job1", {gpu_manager.CORE: 100, gpu_manager.MEMORY: 64})
        given = await node.run(job1, *both)
        assert limits(given) == [(card(0).uuid, T4_MIB, 100)]
        job2 = node.asking("job2", {gpu_manager.CORE: 40, gpu_manager.MEMORY: 24})
        given = await node.run(job2, *both)
        ((_, mib, percent),) = limits(given)
        assert (mib, percent) == (15079 * 24 // 58, 40)
        path = "/api/v1/namespaces/default/pods/job2"
        await until(
            lambda: (
                node.api.objects[path]["metadata"]["annotations"][gpu_manager.ASSIGNED] == "true"
            )
        )


async def test_each_container_gets_its_own_limits_in_gpu_managers_names(library: Path) -> None:
    """A burst limit allows it to use idle time."""

    async with two_cards(library) as node:
        pod = node.asking(
            "pair",
            {gpu_manager.CORE: 40, gpu_manager.MEMORY: 24},
            {gpu_manager.CORE: 30, gpu_manager.MEMORY: 8},
            annotations={gpu_manager.CEILING: "80"},
        )
        await node.kubelet.admit(pod, gpu_manager.CORE, gpu_manager.MEMORY)
        first = await node.kubelet.start_container(pod, "c0")
        second = await node.kubelet.start_container(pod, "c1")
        assert [limits(each)[0][1:] for each in (first, second)] == [
            (15079 * 24 // 58, 40),
            (15079 * 8 // 58, 30),
        ]
        leases = [token.lease for token in node.store.tokens.values() if token.lease]
        assert {lease.burst_percent for lease in leases} == {80}
        # Both hold what their pod holds of the card.
        assert {sum(piece.compute for piece in lease.holds) for lease in leases} == {70}


async def test_pod_gets_memory_and_compute_in_acks_names(library: Path) -> None:
    """It requests 4 units and 30 percent."""

    async with two_cards(library, **{"ack.node.gpu.schedule": "core_mem"}) as node:
        pod = node.asking("a", {gpushare.MEMORY: 4, ack.CORE: 30})
        given = await node.run(pod, gpushare.MEMORY, ack.CORE)
        assert limits(given) == [(card(0).uuid, 4308, 30)]


async def test_container_has_no_limit_when_the_mode_is_share(library: Path) -> None:
    """In ACK's `share` programs limit themselves."""

    async with two_cards(library, **{"ack.node.gpu.schedule": "share"}) as node:
        given = await node.run(node.asking("a", {gpushare.MEMORY: 4}))
        assert limits(given) == [(card(0).uuid, T4_MIB, 100)]
        assert given["env"]["CGPU_DISABLE"] == "true"
        assert given["env"]["ALIYUN_COM_GPU_MEM_CONTAINER"] == "4"


async def test_whole_card_is_leased_beside_slices(library: Path) -> None:
    """The scheduler chose the second card; the kubelet's ID does not name it."""

    async with two_cards(library, gpushare="true", **{"fenka.io/whole-cards": "true"}) as node:
        await until(lambda: base.NVIDIA_GPU in offered(node))
        await node.run(node.asking("slice", {gpushare.MEMORY: 4}))
        whole = node.asking("whole", {base.NVIDIA_GPU: 1})
        given = await node.run(whole, base.NVIDIA_GPU)
        assert limits(given) == [(card(1).uuid, T4_MIB, 100)]
        assert given["env"] == {"NVIDIA_VISIBLE_DEVICES": card(1).uuid}
        node.placed = UsageTotals()
        twice = node.asking("twice", {base.NVIDIA_GPU: 1})
        await node.kubelet.admit(twice, base.NVIDIA_GPU)
        with pytest.raises(ContainerFailed, match="4308 MiB are still held by default/slice"):
            await node.kubelet.start_container(twice, "c0")


async def test_whole_card_is_recorded_on_its_pod_when_the_node_becomes_shared(
    library: Path,
) -> None:
    """The kubelet chose it. The scheduler learns the card from the pod."""

    async with two_cards(library, gpushare="false") as node:
        pod = node.pod("old", 1, resource=base.NVIDIA_GPU)
        await node.run(pod, base.NVIDIA_GPU)
        (uuid,) = node.kubelet.entries[0].ids
        node.node(**{"gpushare": "true", "fenka.io/whole-cards": "true"})
        path = "/api/v1/namespaces/default/pods/old"
        await until(lambda: nvidia.RECORD in node.api.objects[path]["metadata"]["annotations"])
        written = node.api.objects[path]["metadata"]["annotations"]
        index = {card(index).uuid: index for index in (0, 1)}[DeviceId(uuid)]
        assert json.loads(written[nvidia.RECORD]) == {"main": [index]}
        assert json.loads(written[base.CARDS]) == {str(index): uuid}
        # Its id is still offered, or the kubelet would not start its container again.
        await until(lambda: offered(node).get(gpushare.MEMORY) == 14)
        assert node.kubelet.devices[base.NVIDIA_GPU][uuid] == "Healthy"
        assert offered(node)[base.NVIDIA_GPU] == 2


async def test_hami_names_are_served_when_they_are_enabled(library: Path) -> None:
    """The pod gets 3000 MiB and 30 percent."""

    async with two_cards(library) as node:
        pod = node.asking("h", {hami.COUNT: 1, hami.MEMORY: 3000, hami.CORES: 30})
        await node.kill()
        node.dialects = WITH_HAMI
        await node.start()
        await until(lambda: offered(node).get(hami.COUNT) == 20)
        given = await node.run(pod, hami.COUNT)
        assert limits(given) == [(card(0).uuid, 3000, 30)]
        assert given["env"]["CUDA_DEVICE_SM_LIMIT"] == "30"


async def test_empty_device_list_is_sent_when_the_kubelet_remembers_devices(library: Path) -> None:
    """Otherwise the kubelet would count them for minutes."""

    async with two_cards(library) as node:
        await node.kill()
        path = "/api/v1/nodes/n1"
        capacity = {"capacity": {hami.COUNT: "10"}, "allocatable": {hami.COUNT: "0"}}
        node.api.put(path, {**node.api.objects[path], "status": capacity})
        await node.start()
        await until(lambda: node.kubelet.devices.get(hami.COUNT) == {})
        await until(lambda: offered(node).get(gpushare.MEMORY) == 28)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Add the made-up dialect to the registry."""
    monkeypatch.setattr("fenka.dialects.registry.WITH_HAMI", (*WITH_HAMI, made_up))
    annotation_names.cache_clear()
    yield
    monkeypatch.undo()
    annotation_names.cache_clear()


@pytest.mark.process  # runs `fenka` as a program
@pytest.mark.usefixtures("registered")
async def test_dialect_that_is_registered_is_served_by_the_node(library: Path) -> None:
    """The node program advertises its resource, and a pod gets what the dialect recorded."""

    async with two_cards(library) as node:
        await node.kill()
        node.dialects = (*DIALECTS, made_up)
        await node.start()
        await until(lambda: offered(node).get(made_up.GB) == 30)
        pod = node.asking("m", {made_up.GB: 4})
        given = await node.run(pod, made_up.GB)
        # A card of 15079 MiB has 15 units: 15079 * 4 // 15 = 4021.
        assert limits(given) == [(card(0).uuid, 4021, 100)]
        path = "/api/v1/namespaces/default/pods/m"
        await until(lambda: made_up.ASSIGNED in node.api.objects[path]["metadata"]["annotations"])
