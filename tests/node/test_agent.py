"""The node program against a fake kubelet: a lease for each container that holds device IDs."""

import asyncio
import contextlib
from datetime import UTC, datetime
from pathlib import Path

import pytest

from fenka.dialects import base, gpushare
from fenka.hardware import unlimited_drivers
from fenka.isolation import account
from fenka.node import program
from fenka.node.lease.pod_processes import GONE_S, LATE_S
from fenka.node.lease.reconciler import LONG_TIMEOUT_S
from tests.node.harness import (
    AdmissionFailed,
    ContainerFailed,
    Json,
    NodeHarness,
    card,
    node_harness,
)
from tests.node.pod_kit import memory_limits
from tests.waiting import until


def on(
    library: Path, *cards: int, **labels: str
) -> contextlib.AbstractAsyncContextManager[NodeHarness]:
    """Return a node with cards of these sizes."""
    made = [card(index, mib) for index, mib in enumerate(cards)]
    return node_harness(*made, library=library, labels=labels)


async def test_pod_gets_its_slice_when_the_plugin_is_registered(library: Path) -> None:
    """4 units of a T4 are 4308 MiB. The environment is the contract's."""

    async with on(library) as node:
        await node.ready()
        await until(lambda: not node.agent.problem)
        assert len(node.kubelet.free()) == 14
        pod = node.pod("a", 4)
        given = await node.run(pod)
        assert memory_limits(given) == [(card(0).uuid, 4308)]
        assert given["env"] == {
            "NVIDIA_VISIBLE_DEVICES": card(0).uuid,
            "ALIYUN_COM_GPU_MEM_IDX": "0",
            "ALIYUN_COM_GPU_MEM_POD": "4",
            "ALIYUN_COM_GPU_MEM_DEV": "14",
            "ALIYUN_COM_GPU_MEM_CONTAINER": "4",
        }
        mounts = given["mounts"]
        assert Path(mounts["/etc/ld.so.preload"]).read_text() == "/run/fenka/lease/libfenka.so\n"
        assert mounts["/etc/ld-nix.so.preload"] == mounts["/etc/ld.so.preload"]
        assert account.read(Path(mounts["/run/fenka/account"]) / "slots").processes == ()
        path = "/api/v1/namespaces/default/pods/a"
        await until(
            lambda: node.api.objects[path]["metadata"]["annotations"][gpushare.ASSIGNED] == "true"
        )


async def test_pods_of_equal_size_get_their_own_cards(library: Path) -> None:
    """They are admitted in another order than they were placed."""

    async with on(library, 15079, 15079) as node:
        await node.ready()
        a, b = node.pod("a", 4, on=0), node.pod("b", 4, on=1)
        await node.kubelet.admit(b)
        await node.kubelet.admit(a)
        for pod, index in ((a, 0), (b, 1)):
            given = await node.kubelet.start_container(pod, "main")
            assert memory_limits(given) == [(card(index).uuid, 4308)]


async def test_each_container_gets_its_own_slice_when_a_pod_has_two(library: Path) -> None:
    """gpushare's plugin does not support this."""

    async with on(library) as node:
        await node.ready()
        pod = node.pod("two", {"x": 4, "y": 2})
        await node.kubelet.admit(pod)
        first = await node.kubelet.start_container(pod, "x")
        second = await node.kubelet.start_container(pod, "y")
        sizes = [memory_limits(started) for started in (first, second)]
        assert sizes == [[(card(0).uuid, 4308)], [(card(0).uuid, 2154)]]
        assert [
            container["env"]["ALIYUN_COM_GPU_MEM_CONTAINER"] for container in (first, second)
        ] == ["4", "2"]
        assert [container["env"]["ALIYUN_COM_GPU_MEM_POD"] for container in (first, second)] == [
            "6",
            "6",
        ]
        assert first["mounts"]["/run/fenka/account"] != second["mounts"]["/run/fenka/account"]


@pytest.mark.parametrize("answers", [True, False])
async def test_init_and_app_container_get_leases_when_they_share_ids(
    library: Path, answers: bool
) -> None:
    """The checkpoint may repeat the tokens, or have only the IDs."""

    async with on(library) as node:
        node.kubelet.hide_answers = not answers
        await node.ready()
        pod = node.pod("init", 4, init={"prepare": 4})
        await node.kubelet.admit(pod)
        for name in ("prepare", "main"):
            assert memory_limits(await node.kubelet.start_container(pod, name)) == [
                (card(0).uuid, 4308)
            ]
        assert len(node.store.tokens) == 2


async def test_app_container_gets_its_lease_when_it_reuses_part_of_the_init_containers_ids(
    library: Path,
) -> None:
    """The init container requests more."""

    async with on(library) as node:
        await node.ready()
        pod = node.pod("init", 2, init={"prepare": 6})
        await node.kubelet.admit(pod)
        assert memory_limits(await node.kubelet.start_container(pod, "prepare")) == [
            (card(0).uuid, 6462)
        ]
        assert memory_limits(await node.kubelet.start_container(pod, "main")) == [
            (card(0).uuid, 2154)
        ]


async def test_slice_has_unlimited_drivers_only_when_its_pod_says_so(library: Path) -> None:
    """By default a slice lacks OpenCL; another value than a boolean is named at the start."""

    async with on(library, 15079, 15079) as node:
        await node.ready()
        for name, value in (("plain", ""), ("allowed", "true"), ("wrong", "yes")):
            annotations = {unlimited_drivers.ALLOWED: value} if value else {}
            pod = node.asking(name, {gpushare.MEMORY: 1}, annotations=annotations)
            if name == "wrong":
                with pytest.raises(ContainerFailed, match="'yes': write true or false"):
                    await node.run(pod)
            else:
                await node.run(pod)
        leases = {lease.pod: lease.unlimited_drivers for lease in node.store.leases.values()}
        assert leases == {"plain": False, "allowed": True}


async def test_container_has_a_limit_per_card_when_it_has_several(library: Path) -> None:
    """The limits are in the order of the cards."""

    async with on(library, 15079, 16384) as node:
        await node.ready()
        given = await node.run(node.pod("wide", 8, on=(0, 1)))
        assert memory_limits(given) == [(card(0).uuid, 4308), (card(1).uuid, 4096)]
        assert given["env"]["NVIDIA_VISIBLE_DEVICES"] == f"{card(0).uuid},{card(1).uuid}"


async def test_container_keeps_its_lease_when_it_restarts(library: Path) -> None:
    """The specification is written once."""

    async with on(library) as node:
        await node.ready()
        pod = node.pod("a", 4)
        given = await node.run(pod)
        spec = next(node.kubelet.cdi.glob("*.json")).stat()
        assert await node.kubelet.start_container(pod, "main") == given
        assert next(node.kubelet.cdi.glob("*.json")).stat() == spec


async def test_lease_is_bound_by_podresources_when_there_is_no_checkpoint(library: Path) -> None:
    """The checkpoint is the kubelet's internal file."""

    async with on(library) as node:
        node.kubelet.checkpoint = False
        (node.kubelet.plugins / "kubelet_internal_checkpoint").unlink()
        await node.ready()
        assert memory_limits(await node.run(node.pod("a", 4))) == [(card(0).uuid, 4308)]


async def test_token_is_collected_when_its_pod_was_deleted_before_it_was_bound(
    library: Path,
) -> None:
    """Its IDs go to another pod, which gets a token of its own."""

    async with on(library, 15079, 15079) as node:
        await node.ready()
        gone = node.pod("gone", 4, on=None)
        await node.kubelet.admit(gone)
        node.delete(gone)
        node.kubelet.forget(gone)
        b = node.pod("b", 4, on=1)
        assert memory_limits(await node.run(b)) == [(card(1).uuid, 4308)]
        assert len(node.store.tokens) == 2
        node.now += 61
        node.program.trigger()
        await until(lambda: len(node.store.tokens) == 1)
        assert memory_limits(await node.kubelet.start_container(b, "main")) == [
            (card(1).uuid, 4308)
        ]


async def test_files_are_removed_when_the_pod_is_gone(library: Path) -> None:
    """They stay while a process of the pod lives."""

    async with on(library) as node:
        await node.ready()
        pod = node.pod("a", 4)
        await node.run(pod)
        node.living.add(pod["metadata"]["uid"])
        node.delete(pod)
        node.kubelet.forget(pod)
        await node.agent.reconcile()
        assert node.files()
        node.living.clear()
        node.program.trigger()
        await until(lambda: not node.files() and not list((node.root / "state").iterdir()))


async def test_finished_pod_releases_its_slice_for_good(library: Path) -> None:
    """A Job's pod stays in the API server and in the kubelet's checkpoint after its end."""

    async with on(library) as node:
        await node.ready()
        pod = node.pod("job", 4)
        await node.run(pod)
        node.api.put(
            "/api/v1/namespaces/default/pods/job", {**pod, "status": {"phase": "Succeeded"}}
        )
        await until(lambda: not node.files())
        await node.agent.reconcile()
        assert not node.files()
        assert not node.store.tokens


async def successor_of_a_living_pod(node: NodeHarness) -> Json:
    """Return a pod that was admitted to a card whose last pod was deleted by force and still runs."""
    old = node.pod("old", 14, on=0)
    await node.run(old)
    node.living.add(old["metadata"]["uid"])
    node.delete(old)
    node.kubelet.forget(old)
    new = node.pod("new", 4, on=0)
    await node.kubelet.admit(new)
    return new


async def test_lease_is_denied_while_a_force_deleted_pod_still_runs(library: Path) -> None:
    """The denial ends when the pod's processes have ended."""

    async with on(library, 15079, 15079) as node:
        await node.ready()
        new = await successor_of_a_living_pod(node)
        start = asyncio.create_task(node.kubelet.start_container(new, "main"))

        def is_denied() -> bool:
            node.now += LONG_TIMEOUT_S
            return start.done()

        await until(is_denied)
        with pytest.raises(ContainerFailed, match="still held by default/old"):
            await start
        node.living.clear()
        await node.agent.reconcile()
        assert memory_limits(await node.kubelet.start_container(new, "main")) == [
            (card(0).uuid, 4308)
        ]


async def test_programs_are_killed_when_their_pod_has_left_the_api_server(library: Path) -> None:
    """Whatever grace period it was deleted with; the kubelet has 30 s to end them."""

    async with on(library) as node:
        await node.ready()
        node.kills = True
        gone, stays = node.pod("gone", 4), node.pod("stays", 4)
        for pod in (gone, stays):
            await node.run(pod)
            node.living.add(pod["metadata"]["uid"])
        node.delete(gone)
        await until(lambda: gone["metadata"]["uid"] not in node.node_api.pods)
        node.kubelet.forget(gone)
        await node.agent.reconcile()
        assert len(node.living) == 2
        node.now += GONE_S
        await node.agent.reconcile()
        assert node.living == {stays["metadata"]["uid"]}
        await until(lambda: len(node.store.tokens) == 1)


async def test_programs_are_killed_when_the_deadline_and_the_grace_of_their_pod_are_over(
    library: Path,
) -> None:
    """The kubelet does not look at the deadline of a pod that is being deleted."""

    async with on(library) as node:
        await node.ready()
        node.kills = True
        start = datetime.fromtimestamp(node.now, UTC)
        limits: Json = {"activeDeadlineSeconds": 60, "terminationGracePeriodSeconds": 10}
        pods = [node.pod("limited", 4, **limits), node.pod("unlimited", 4)]
        for pod in pods:
            await node.run(pod)
            node.living.add(pod["metadata"]["uid"])
            name = pod["metadata"]["name"]
            pod["metadata"] |= {
                "deletionTimestamp": "2100-01-01T00:00:00Z",
                "deletionGracePeriodSeconds": 1_000_000,
            }
            status = {"phase": "Running", "startTime": start.isoformat()}
            node.api.put(f"/api/v1/namespaces/default/pods/{name}", {**pod, "status": status})
        limited, unlimited = (pod["metadata"]["uid"] for pod in pods)
        await until(lambda: node.node_api.pods[unlimited].status.start_time)
        node.now += 74
        await node.agent.reconcile()
        assert node.living == {limited, unlimited}
        node.now += 1
        await node.agent.reconcile()
        assert node.living == {unlimited}


async def test_programs_are_killed_when_the_grace_of_their_deleted_pod_is_over(
    library: Path,
) -> None:
    """A probe's own grace, up to a day or more, keeps the kubelet from ending them."""

    async with on(library) as node:
        await node.ready()
        node.kills = True
        pod = node.pod("stubborn", 4)
        uid = pod["metadata"]["uid"]
        await node.run(pod)
        node.living.add(uid)

        async def delete(grace_s: int, until_s: str) -> None:
            pod["metadata"] |= {
                "deletionTimestamp": f"2000-01-01T00:00:{until_s}Z",
                "deletionGracePeriodSeconds": grace_s,
            }
            status = {"status": {"phase": "Running"}}
            node.api.put("/api/v1/namespaces/default/pods/stubborn", {**pod, **status})

            def is_seen() -> bool:
                meta = node.node_api.pods[uid].metadata
                return bool(meta.deletion_timestamp == pod["metadata"]["deletionTimestamp"])

            await until(is_seen)
            await node.agent.reconcile()

        # The API server's clock may be another one than the node's.
        await delete(600, "20")
        node.now += 300
        await node.agent.reconcile()
        assert node.living == {uid}
        # It is deleted again, with a shorter grace, which begins now.
        await delete(10, "10")
        node.now += 10 + LATE_S - 1
        await node.agent.reconcile()
        assert node.living == {uid}
        node.now += 1
        await node.agent.reconcile()
        assert not node.living


async def test_start_waits_until_the_programs_of_a_force_deleted_pod_have_ended(
    library: Path,
) -> None:
    """A denied start would be repeated by the kubelet much later."""

    async with on(library, 15079, 15079) as node:
        await node.ready()
        new = await successor_of_a_living_pod(node)
        start = asyncio.create_task(node.kubelet.start_container(new, "main"))
        await node.agent.reconcile()
        assert not start.done()
        node.living.clear()
        assert memory_limits(await start) == [(card(0).uuid, 4308)]


async def test_lease_is_denied_when_two_schedulers_gave_away_the_same_card(library: Path) -> None:
    """Only one of the pods fits on card 0."""

    async with on(library, 15079, 15079) as node:
        await node.ready()
        await node.run(node.pod("a", 10, on=0))
        with pytest.raises(ContainerFailed, match="must wait until they end"):
            await node.run(node.pod("b", 10, on=0))


@pytest.mark.parametrize(
    ("spec", "annotations", "sentence"),
    [
        (
            {"schedulerName": "other"},
            None,
            "not placed by fenka's scheduler extender (schedulerName other",
        ),
        ({}, {"ALIYUN_COM_GPU_MEM_IDX": "7"}, "card 7 is not one of the 1 of its node"),
        ({}, {"ALIYUN_COM_GPU_MEM_IDX": "x"}, "not the index of a card"),
        ({"runtimeClassName": "gvisor"}, {"ALIYUN_COM_GPU_MEM_IDX": "0"}, "another kernel"),
        ({"runtimeClassName": "safe"}, {"ALIYUN_COM_GPU_MEM_IDX": "0"}, "another kernel"),
        (
            {},
            {"ALIYUN_COM_GPU_MEM_IDX": "0", "kubernetes.io/config.mirror": "m"},
            "static pod",
        ),
        (
            {},
            {"scheduler.framework.gpushare.allocation": '{"0":{"0":3}}'},
            "gives container main 3 units, it asks for 4",
        ),
    ],
)
async def test_denial_is_a_sentence_in_the_pods_event(
    library: Path, spec: Json, annotations: Json | None, sentence: str
) -> None:
    """The user reads what to do."""

    async with on(library) as node:
        await node.ready()
        node.api.objects["/apis/node.k8s.io/v1/runtimeclasses/safe"] = {
            "metadata": {},
            "handler": "kata-qemu",
        }
        pod = node.pod("p", 4, on=None, **spec)
        pod["metadata"]["annotations"] = annotations or {}
        node.api.put("/api/v1/namespaces/default/pods/p", pod)
        with pytest.raises(ContainerFailed) as refused:
            await node.run(pod)
        assert sentence in str(refused.value)
        assert not list(node.kubelet.cdi.glob("*.json"))


async def test_plugin_registers_again_when_the_kubelet_restarts(library: Path) -> None:
    """Leases of running pods stay."""

    async with on(library) as node:
        await node.ready()
        pod = node.pod("a", 4)
        given = await node.run(pod)
        await node.kubelet.restart()
        assert await node.kubelet.start_container(pod, "main") == given
        await node.ready()
        assert len(node.kubelet.free()) == 10
        assert await node.kubelet.start_container(pod, "main") == given


async def test_program_continues_from_its_store_when_it_restarts(library: Path) -> None:
    """Leases of running pods stay."""

    async with on(library) as node:
        await node.ready()
        pod = node.pod("a", 4)
        given = await node.run(pod)
        await node.kill()
        await node.start()
        await node.ready()
        assert await node.kubelet.start_container(pod, "main") == given


async def test_store_is_rebuilt_from_the_checkpoint_when_it_was_lost(library: Path) -> None:
    """The kubelet repeats the plugin's answers, and so the tokens."""

    async with on(library) as node:
        await node.ready()
        pod = node.pod("a", 4)
        given = await node.run(pod)
        await node.kill()
        for path in (node.root / "state").iterdir():
            path.write_text("half")
        await node.start()
        await node.ready()
        assert await node.kubelet.start_container(pod, "main") == given


async def test_files_are_made_again_when_the_node_rebooted(library: Path) -> None:
    """/run is empty then, and the store is not."""

    async with on(library) as node:
        await node.ready()
        pod = node.pod("a", 4)
        given = await node.run(pod)
        await node.kill()
        for path in node.kubelet.cdi.iterdir():
            path.unlink()
        for path in sorted((node.root / "leases").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        await node.start()
        await node.ready()
        assert await node.kubelet.start_container(pod, "main") == given


@pytest.mark.slow
async def test_every_pod_starts_when_a_hundred_start_at_once(library: Path) -> None:
    """The kubelet admits them one after the other."""

    async with on(library, 51200, 51200) as node:
        node.kubelet.hide_answers = False
        await node.ready()
        pods = [node.pod(f"p{n}", 1, on=n % 2) for n in range(100)]
        for pod in pods:
            await node.kubelet.admit(pod)
        given = await asyncio.gather(*(node.kubelet.start_container(pod, "main") for pod in pods))
        for n, container in enumerate(given):
            assert memory_limits(container) == [(card(n % 2).uuid, 1024)]


async def test_device_list_shrinks_when_a_card_is_unhealthy(library: Path) -> None:
    """Unhealthy are its pods' IDs, and as many free ones as it has other units, until it returns."""

    async with on(library, 15079, 15079) as node:
        await node.ready()
        pod = node.pod("a", 4, on=1)
        await node.run(pod)
        node.hardware.lost.add(card(1).uuid)
        node.health.refresh()
        node.program.trigger()
        held = set(node.kubelet.entries[0].ids)
        await until(
            lambda: (
                sum(
                    health == "Healthy" for health in node.kubelet.devices[gpushare.MEMORY].values()
                )
                == 14
            )
        )
        assert all(node.kubelet.devices[gpushare.MEMORY][device] == "Unhealthy" for device in held)
        path = "/api/v1/nodes/n1"
        inventory = node.api.objects[path]["metadata"]["annotations"][base.CARDS]
        assert '"healthy":false' in inventory
        with pytest.raises(ContainerFailed, match="is unhealthy now"):
            await node.run(node.pod("b", 2, on=1))
        node.hardware.lost.clear()
        node.health.refresh()
        node.program.trigger()
        await until(
            lambda: all(
                health == "Healthy" for health in node.kubelet.devices[gpushare.MEMORY].values()
            )
        )


async def test_free_units_are_removed_when_a_card_is_cordoned(library: Path) -> None:
    """Its pods keep theirs."""

    async with on(library, 15079, 15079) as node:
        await node.ready()
        await node.run(node.pod("a", 4, on=1))
        node.annotate(**{"fenka.io/cordoned": "1"})
        await until(
            lambda: (
                sum(
                    health == "Healthy" for health in node.kubelet.devices[gpushare.MEMORY].values()
                )
                == 18
            )
        )
        held = node.kubelet.entries[0].ids
        assert all(node.kubelet.devices[gpushare.MEMORY][device] == "Healthy" for device in held)


async def test_annotations_reset_a_card_and_forget_a_lost_one(library: Path) -> None:
    """The program removes the reset annotation. A deleted inventory forgets lost cards."""

    async with on(library, 15079, 15079) as node:
        path = "/api/v1/nodes/n1"

        def annotations() -> dict[str, str]:
            annotations: dict[str, str] = node.api.objects[path]["metadata"]["annotations"]
            return annotations

        await node.ready()
        node.health.refresh()
        node.health.report_xid(card(1).uuid, 48)
        node.program.trigger()
        await until(lambda: len(node.kubelet.free()) == 14)
        node.annotate(**{"fenka.io/reset": "1"})
        await until(lambda: len(node.kubelet.free()) == 28)
        await until(lambda: "fenka.io/reset" not in annotations())
        node.hardware.lost.add(card(1).uuid)
        node.health.refresh()
        node.program.trigger()
        await until(lambda: '"healthy":false' in annotations().get(base.CARDS, ""))
        old = node.api.objects[path]
        kept = {key: text for key, text in annotations().items() if key != base.CARDS}
        node.api.put(path, {**old, "metadata": {**old["metadata"], "annotations": kept}})
        await until(lambda: base.CARDS in annotations())
        assert card(1).uuid not in annotations()[base.CARDS]
        await until(lambda: len(node.kubelet.devices[gpushare.MEMORY]) == 14)


async def test_container_has_no_limit_when_the_node_does_not_isolate(library: Path) -> None:
    """cGPU's label: it gets all of the card and a variable, and a second one fits beside it."""

    async with on(library) as node:
        await node.ready()
        node.label(gpushare="true", **{"cgpu.disable.isolation": "true"})
        await until(
            lambda: (
                node.node_api.node
                and "cgpu.disable.isolation" in node.node_api.node.metadata.labels
            )
        )
        for name in ("a", "b"):
            given = await node.run(node.pod(name, 7))
            assert memory_limits(given) == [(card(0).uuid, 15079)]
            assert given["env"]["CGPU_DISABLE"] == "true"
            assert given["env"]["ALIYUN_COM_GPU_MEM_CONTAINER"] == "7"
        assert len(node.kubelet.free()) == 0
        await until(lambda: node.api.events)
        assert node.api.events[0]["reason"] == "FenkaNotIsolated"


async def test_inventory_is_unhealthy_while_the_kubelet_has_no_plugin(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is at the program's end, at its start, and while the kubelet is unavailable."""
    monkeypatch.setattr(program, "ADMISSION_S", 0.2)

    async with on(library) as node:

        def healthy() -> bool:
            meta = node.api.objects["/api/v1/nodes/n1"]["metadata"]
            return '"healthy":true' in meta["annotations"].get(base.CARDS, "")

        await node.ready()
        await until(healthy)
        await node.kubelet.stop()
        (node.kubelet.plugins / "kubelet.sock").unlink(missing_ok=True)
        await until(lambda: not healthy())
        await node.kubelet.start()
        await until(healthy)
        leaving = asyncio.create_task(node.agent.drain())
        await until(lambda: not healthy())
        await node.run(node.pod("late", 4))
        await leaving
        assert not healthy()
        await node.kill()
        await node.start()
        await until(healthy)


async def test_whole_cards_are_served_when_the_node_has_no_label(library: Path) -> None:
    """The lease is the card."""

    async with on(library, 15079, 15079, gpushare="false") as node:
        await node.ready(base.NVIDIA_GPU)
        assert gpushare.MEMORY not in node.kubelet.devices
        pod = node.pod("a", 1, resource=base.NVIDIA_GPU)
        given = await node.run(pod, base.NVIDIA_GPU)
        (uuid,) = node.kubelet.entries[0].ids
        assert memory_limits(given) == [(uuid, 15079)]
        assert given["env"] == {"NVIDIA_VISIBLE_DEVICES": uuid}


async def test_label_makes_the_node_share_its_cards(library: Path) -> None:
    """A card that is held whole is not shared until it is released."""

    async with on(library, 15079, 15079, gpushare="false") as node:
        await node.ready(base.NVIDIA_GPU)
        pod = node.pod("a", 1, resource=base.NVIDIA_GPU)
        await node.run(pod, base.NVIDIA_GPU)
        node.label(gpushare="true")
        await node.ready()
        await until(lambda: not node.kubelet.devices[base.NVIDIA_GPU])
        await until(lambda: len(node.kubelet.free()) == 14)
        (held,) = node.kubelet.entries[0].ids
        index = 0 if held == card(0).uuid else 1
        with pytest.raises(ContainerFailed, match="still held by default/a"):
            await node.run(node.pod("b", 4, on=index))
        node.delete(pod)
        node.kubelet.forget(pod)
        await until(lambda: len(node.kubelet.free()) == 24)


async def test_no_whole_cards_are_offered_when_the_label_is_removed_from_a_labelled_only_node(
    library: Path,
) -> None:
    """The program is about to end, and the kubelet would remember the cards."""

    async with on(library, 15079, gpushare="true") as node:
        node.labelled_only = True
        await node.kill()
        await node.start()
        await node.ready()
        node.label()
        await until(lambda: not node.kubelet.free())
        assert not node.kubelet.devices.get(base.NVIDIA_GPU)
        node.label(gpushare="false")
        await node.ready(base.NVIDIA_GPU)


async def test_node_stays_shared_while_slices_are_held(library: Path) -> None:
    """It accepts no new pods, has an event, and becomes exclusive afterwards."""

    async with on(library) as node:
        await node.ready()
        pod = node.pod("a", 4)
        given = await node.run(pod)
        node.label(gpushare="false")
        await until(lambda: not node.kubelet.free())
        await until(
            lambda: [event for event in node.api.events if event["reason"] == "FenkaStillShared"]
        )
        assert await node.kubelet.start_container(pod, "main") == given
        with pytest.raises(AdmissionFailed):
            await node.run(node.pod("b", 4))
        node.delete(pod)
        node.kubelet.forget(pod)
        await node.ready(base.NVIDIA_GPU)
        await until(lambda: not node.kubelet.devices[gpushare.MEMORY])


async def test_mode_is_kept_when_labels_contradict_each_other(library: Path) -> None:
    """An event says what to do."""

    async with on(library) as node:
        await node.ready()
        node.label(gpushare="true", cgpu="false")
        await until(
            lambda: [event for event in node.api.events if event["reason"] == "FenkaLabels"]
        )
        assert len(node.kubelet.free()) == 14


async def test_inventory_and_card_count_are_restored_when_they_are_removed(library: Path) -> None:
    """The node program writes both again."""

    async with on(library, 15079, 16384) as node:
        await node.ready()
        path = "/api/v1/nodes/n1"
        await until(
            lambda: node.api.objects[path]["status"]["allocatable"].get(gpushare.COUNT) == "2"
        )
        node.node(gpushare="true")
        await until(lambda: node.api.objects[path]["status"]["capacity"].get(gpushare.COUNT) == "2")
        await until(lambda: base.CARDS in node.api.objects[path]["metadata"]["annotations"])
