"""Leases of every dialect on one node, from Allocate to what a container finds."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from fenka.core.inventory import DeviceId
from fenka.core.usage import UsageTotals
from fenka.dialects import ack, base, gpu_manager, gpushare, hami, nvidia
from fenka.isolation import control
from tests.node.harness import (
    T4_MIB,
    ContainerFailed,
    Json,
    NodeHarness,
    card,
    node_harness,
    play,
    until,
)


def limits(given: Json) -> list[tuple[str, int, int]]:
    """UUID, MiB and percent of each card, as the container's control page says."""
    page = Path(given["mounts"]["/run/fenka/lease"]) / "control"
    return [
        (it.uuid, it.memory_bytes >> 20, it.compute_percent)
        for it in control.read_interrupted(page).limits
    ]


def two_cards(
    library: Path, story: Callable[[NodeHarness], Awaitable[None]], **labels: str
) -> None:
    """On a sharing node with two T4."""

    async def on() -> None:
        async with node_harness(card(0), card(1), library=library, labels=labels or None) as node:
            await until(lambda: known(node))
            await story(node)

    play(on())


def known(node: NodeHarness) -> bool:
    """Whether the kubelet has heard of all that is offered."""
    plugins = node.program.plugins.values()
    return any(it.devices for it in plugins) and all(
        len(node.kubelet.devices.get(it.resource, ())) == len(it.devices) for it in plugins
    )


def offered(node: NodeHarness) -> dict[str, int]:
    """Usable ids, by resource."""
    return {
        name: sum(health == "Healthy" for health in ids.values())
        for name, ids in node.kubelet.devices.items()
        if ids
    }


def test_what_a_sharing_node_offers(library: Path) -> None:
    """Two T4: 14 GiB, 100 percent and 15079 // 256 = 58 blocks each; whole cards by one more label."""

    async def story(node: NodeHarness) -> None:
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

    two_cards(library, story)


def test_three_jobs_of_gpu_manager(library: Path) -> None:
    """S5.2: job1 has a card for itself; 24 blocks of 256 MiB are 15079 * 24 // 58 = 6239 MiB."""

    async def story(node: NodeHarness) -> None:
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

    two_cards(library, story)


def test_containers_of_one_pod_each_have_their_own(library: Path) -> None:
    """gpu-manager asks container by container; with a ceiling what is idle may be used."""

    async def story(node: NodeHarness) -> None:
        pod = node.asking(
            "pair",
            {gpu_manager.CORE: 40, gpu_manager.MEMORY: 24},
            {gpu_manager.CORE: 30, gpu_manager.MEMORY: 8},
            annotations={gpu_manager.CEILING: "80"},
        )
        await node.kubelet.admit(pod, gpu_manager.CORE, gpu_manager.MEMORY)
        first = await node.kubelet.start_container(pod, "c0")
        second = await node.kubelet.start_container(pod, "c1")
        assert [limits(it)[0][1:] for it in (first, second)] == [
            (15079 * 24 // 58, 40),
            (15079 * 8 // 58, 30),
        ]
        leases = [it.lease for it in node.store.tokens.values() if it.lease]
        assert {it.burst_percent for it in leases} == {80}
        # Both hold what their pod holds of the card.
        assert {sum(piece.compute for piece in it.holds) for it in leases} == {70}

    two_cards(library, story)


def test_memory_with_compute_as_in_ack(library: Path) -> None:
    """4 units and 30 percent."""

    async def story(node: NodeHarness) -> None:
        pod = node.asking("a", {gpushare.MEMORY: 4, ack.CORE: 30})
        given = await node.run(pod, gpushare.MEMORY, ack.CORE)
        assert limits(given) == [(card(0).uuid, 4308, 30)]

    two_cards(library, story, **{"ack.node.gpu.schedule": "core_mem"})


def test_no_isolation_where_the_mode_says_so(library: Path) -> None:
    """ACK's `share`: programs limit themselves by what they are told."""

    async def story(node: NodeHarness) -> None:
        given = await node.run(node.asking("a", {gpushare.MEMORY: 4}))
        assert limits(given) == [(card(0).uuid, T4_MIB, 100)]
        assert given["env"]["CGPU_DISABLE"] == "true"
        assert given["env"]["ALIYUN_COM_GPU_MEM_CONTAINER"] == "4"

    two_cards(library, story, **{"ack.node.gpu.schedule": "share"})


def test_whole_cards_beside_slices(library: Path) -> None:
    """The scheduler chose the second card; the kubelet's id is a coin. The node refuses a card twice."""

    async def story(node: NodeHarness) -> None:
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

    two_cards(library, story, gpushare="true", **{"fenka.io/whole-cards": "true"})


def test_who_had_a_whole_card_before_the_node_was_shared(library: Path) -> None:
    """The kubelet chose it; from then on the pod itself says which, and the scheduler can know."""

    async def story(node: NodeHarness) -> None:
        pod = node.pod("old", 1, resource=base.NVIDIA_GPU)
        await node.run(pod, base.NVIDIA_GPU)
        (uuid,) = node.kubelet.entries[0].ids
        node.node(**{"gpushare": "true", "fenka.io/whole-cards": "true"})
        path = "/api/v1/namespaces/default/pods/old"
        await until(lambda: nvidia.RECORD in node.api.objects[path]["metadata"]["annotations"])
        written = node.api.objects[path]["metadata"]["annotations"]
        index = {card(it).uuid: it for it in (0, 1)}[DeviceId(uuid)]
        assert json.loads(written[nvidia.RECORD]) == {"main": [index]}
        assert json.loads(written[base.CARDS]) == {str(index): uuid}
        # Its id is still offered, or the kubelet would not start its container again.
        await until(lambda: offered(node).get(gpushare.MEMORY) == 14)
        assert node.kubelet.devices[base.NVIDIA_GPU][uuid] == "Healthy"
        assert offered(node)[base.NVIDIA_GPU] == 2

    two_cards(library, story, gpushare="false")


def test_hami_names_behind_their_switch(library: Path) -> None:
    """3000 MiB and 30 percent; without the switch nobody would have placed it."""

    async def story(node: NodeHarness) -> None:
        pod = node.asking("h", {hami.COUNT: 1, hami.MEMORY: 3000, hami.CORES: 30})
        await node.kill()
        node.hami = True
        await node.start()
        await until(lambda: offered(node).get(hami.COUNT) == 20)
        given = await node.run(pod, hami.COUNT)
        assert limits(given) == [(card(0).uuid, 3000, 30)]
        assert given["env"]["CUDA_DEVICE_SM_LIMIT"] == "30"

    two_cards(library, story)


def test_what_a_former_process_offered_is_taken_back(library: Path) -> None:
    """The kubelet would count it for minutes: it is told that there is none."""

    async def story(node: NodeHarness) -> None:
        await node.kill()
        path = "/api/v1/nodes/n1"
        capacity = {"capacity": {hami.COUNT: "10"}, "allocatable": {hami.COUNT: "0"}}
        node.api.put(path, {**node.api.objects[path], "status": capacity})
        await node.start()
        await until(lambda: node.kubelet.devices.get(hami.COUNT) == {})
        await until(lambda: offered(node).get(gpushare.MEMORY) == 28)

    two_cards(library, story)
