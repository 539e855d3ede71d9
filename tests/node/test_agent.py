"""A lease for whoever holds the ids: every row of the table of cases, against a stand-in kubelet."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from fenka.dialects import gpushare
from fenka.isolation import account, control
from tests.node.node_kit import (
    Json,
    Rig,
    card,
    play,
    rig,
    until,
)


def on(library: Path, story: Callable[[Rig], Awaitable[None]], *cards: int, **options: str) -> None:
    """Run a story on a node with cards of these sizes."""

    async def whole() -> None:
        made = [card(index, mib) for index, mib in enumerate(cards)]
        async with rig(*made, library=library, **options) as node:
            await story(node)

    play(whole())


def cap(given: Json) -> list[tuple[str, int]]:
    """Cards and MiB of a started container, from its control page."""
    page = control.read(Path(given["mounts"]["/run/fenka/lease"]) / "control")
    return [(it.uuid, it.memory_bytes >> 20) for it in page.limits]


def test_registers_and_starts_a_pod(library: Path) -> None:
    """S1's first pod: 4 units of a T4 are 4308 MiB, with the contract's environment."""

    async def story(node: Rig) -> None:
        await node.ready()
        assert len(node.kubelet.free()) == 14
        pod = node.pod("a", 4)
        given = await node.run(pod)
        assert cap(given) == [(card(0).uuid, 4308)]
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

    on(library, story)


def test_equal_pods_do_not_swap_cards(library: Path) -> None:
    """Two pods of equal size, admitted in the other order than they were placed."""

    async def story(node: Rig) -> None:
        await node.ready()
        a, b = node.pod("a", 4, on=0), node.pod("b", 4, on=1)
        await node.kubelet.admit(b)
        await node.kubelet.admit(a)
        for pod, index in ((a, 0), (b, 1)):
            given = await node.kubelet.start_container(pod, "main")
            assert cap(given) == [(card(index).uuid, 4308)]

    on(library, story, 15079, 15079)
