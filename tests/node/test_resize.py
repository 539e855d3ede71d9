"""Resizing a running pod by annotation, on real control pages and accounts, with a kill at every step."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from fenka.cluster.objects import Container, ObjectMeta, Pod, PodSpec
from fenka.core.inventory import Node
from fenka.core.request import Slice
from fenka.dialects.base import SharedNode
from fenka.dialects.resize_records import (
    FINAL,
    REFUSED,
    REQUEST,
    STATUS,
    ResizeStatus,
    decode_status,
    encode_status,
)
from fenka.isolation import lease_control, limit_changes
from fenka.isolation.lease_control import layout
from fenka.kubernetes.api_client import ApiUnreachable
from fenka.node.lease.capacity import NodeCapacity, ResizeRejected, check_growth, peak
from fenka.node.lease.store import LeaseStore
from fenka.node.node_api import NodeApi
from tests.node.harness import ContainerFailed, NodeHarness, card, node_harness
from tests.node.pod_kit import (
    annotations_of,
    dying,
    granted,
    ready_node,
    request,
    running,
    set_phase,
    settled,
    status,
    write,
)
from tests.waiting import until

A = card(0).uuid


def lease(node: NodeHarness, name: str, container: str = "main") -> tuple[str, Any]:
    """Return a container's token, and its lease in the store."""
    return next(
        (token.name, token.lease)
        for token in node.store.tokens.values()
        if token.lease and (token.lease.pod, token.lease.container) == (name, container)
    )


def page(node: NodeHarness, name: str, container: str = "main") -> list[tuple[int, int, str]]:
    """Return MiB, percent and mode that are in force, card by card."""
    limits = lease_control.read(node.lease_files.control(lease(node, name, container)[0])).limits
    return [
        (limit.memory_bytes >> 20, limit.compute_percent, limit.compute_mode) for limit in limits
    ]


def hold(node: NodeHarness, name: str, mib: int) -> None:
    """Have a program of the container, which is this process, hold memory of its first card."""
    slots = node.lease_files.slots(lease(node, name)[0])
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    words = {
        "pid_namespaces": Path("/proc/self/ns/pid").stat().st_ino,
        "identity": os.getpid() | int(stat[19]) << 32,
        "memory": mib << 20,
    }
    with slots.open("r+b") as file:
        for field, word in words.items():
            file.seek(layout().offsetof("struct fenka_account", field))
            file.write(struct.pack("<Q", word))


@pytest.mark.parametrize(
    ("text", "mib", "percent"),
    [
        ("gpu-mem=6", 6462, 0),  # 15079 * 6 // 14
        ("gpu-mem=2", 2154, 0),
        ("gpu-mem=4096MiB", 4096, 0),
        ("gpu-core=40", 4308, 40),
        ("gpu-mem=6,gpu-core=40", 6462, 40),
        ("gpu-mem=2,gpu-core=40", 2154, 40),  # one grows, the other shrinks
        ("main: gpu-mem=14", 15079, 0),
    ],
)
async def test_running_pod_is_resized_as_requested(
    library: Path, text: str, mib: int, percent: int
) -> None:
    """The size is in force on the page, in the store, and on the pod."""

    async with ready_node(library) as node:
        pod = await running(node, "a")
        request(node, "a", text)
        record = await granted(node, "a", text)
        piece = Slice(0, A, mib, percent)
        uid = pod["metadata"]["uid"]
        assert record == ResizeStatus(uid, (piece,), {"main": (piece,)}, text)
        assert page(node, "a") == [(mib, percent or 100, "hard")]
        kept = lease(node, "a")[1]
        assert (kept.slices, kept.holds, kept.resized) == ([piece], [piece], True)
        assert not node.api.events


async def test_later_request_changes_only_what_it_names(library: Path) -> None:
    """The size stays when the request is removed."""

    async with ready_node(library) as node:
        await running(node, "a")
        for text, mib, percent in (
            ("gpu-mem=6", 6462, 100),
            ("gpu-core=30", 6462, 30),
            ("gpu-mem=2,gpu-core=0", 2154, 100),
        ):
            request(node, "a", text)
            await granted(node, "a", text)
            assert page(node, "a") == [(mib, percent, "hard")]
        request(node, "a", None)
        await node.agent.reconcile()
        await node.agent.reconcile()
        assert page(node, "a") == [(2154, 100, "hard")]


async def test_pass_writes_nothing_when_the_request_is_already_granted(library: Path) -> None:
    """Neither to the API server nor to the control page."""

    async with ready_node(library) as node:
        await running(node, "a")
        request(node, "a", "gpu-mem=6")
        await granted(node, "a", "gpu-mem=6")
        await node.end_passes()
        await settled(node)
        written = len(node.api.patches)
        generation = lease_control.read(node.lease_files.control(lease(node, "a")[0])).generation
        for _ in range(3):
            await node.agent.reconcile()
        assert len(node.api.patches) == written
        assert (
            lease_control.read(node.lease_files.control(lease(node, "a")[0])).generation
            == generation
        )


@pytest.mark.parametrize(
    ("text", "sentence", "final"),
    [
        (
            "gpu-mem=11",
            "card 0 has 15079 MiB, of which default/b hold 4308: 11847 do not fit",
            None,
        ),
        ("gpu-mem=15", "card 0 has 15079 MiB: 15360 MiB are more than all of it", "true"),
        ("gpu-mem=1", "the lease's programs hold 2000 MiB of it", None),
        ("gpu-core=30,gpu-mem=1", "the lease's programs hold 2000 MiB of it", None),
        ("other: gpu-mem=6", "the pod has no container other with a slice of a card", "true"),
        ("6", "'6' is not understood: write gpu-mem=6", "true"),
    ],
)
async def test_request_is_rejected_with_a_sentence_when_it_is_impossible(
    library: Path, text: str, sentence: str, final: str | None
) -> None:
    """It is on the pod and in an event. Nothing changes, and a better request removes it."""

    async with ready_node(library) as node:
        await running(node, "a")
        await running(node, "b")
        hold(node, "a", 2000)
        request(node, "a", text)
        await until(lambda: REFUSED in annotations_of(node, "a"))
        assert sentence in annotations_of(node, "a")[REFUSED]
        assert annotations_of(node, "a").get(FINAL) == final
        await until(lambda: node.api.events)
        (event,) = node.api.events
        assert (event["reason"], event["note"]) == (
            "FenkaNotResized",
            annotations_of(node, "a")[REFUSED],
        )
        assert page(node, "a") == [(4308, 100, "hard")]
        assert lease(node, "a")[1].slices == [Slice(0, A, 4308, 0)]
        record = status(node, "a")
        assert record is None or record.slices == (Slice(0, A, 4308, 0),)
        await settled(node)
        written = len(node.api.patches)
        for _ in range(3):
            await node.agent.reconcile()
        assert len(node.api.patches) == written
        assert len(node.api.events) == 1
        request(node, "a", "gpu-mem=5")
        await granted(node, "a", "gpu-mem=5")
        await until(lambda: not {REFUSED, FINAL} & annotations_of(node, "a").keys())


async def test_request_is_rejected_when_the_account_is_invalid(library: Path) -> None:
    """Tenants can write the account. Without it nothing says what is used."""

    async with ready_node(library) as node:
        await running(node, "a")
        node.lease_files.slots(lease(node, "a")[0]).write_text("x")
        for text in ("gpu-mem=2", "gpu-mem=6"):
            request(node, "a", text)
            await until(
                lambda: "does not begin as an account" in annotations_of(node, "a").get(REFUSED, "")
            )
            assert page(node, "a") == [(4308, 100, "hard")]
            write(node, "a", **{REQUEST: None, REFUSED: None})


async def test_request_is_rejected_when_the_card_has_no_compute_left(library: Path) -> None:
    """A card has 100 %."""

    async with ready_node(library) as node:
        await running(node, "a")
        await running(node, "b")
        request(node, "a", "gpu-core=60")
        await granted(node, "a", "gpu-core=60")
        request(node, "b", "gpu-core=50")
        await until(lambda: REFUSED in annotations_of(node, "b"))
        assert annotations_of(node, "b")[REFUSED] == (
            "card 0 has 100 % of its time, of which default/a hold 60: 50 do not fit"
        )
        request(node, "a", "gpu-core=50")
        await granted(node, "a", "gpu-core=50")
        await granted(node, "b", "gpu-core=50")


async def test_rejected_request_is_granted_when_there_is_room(library: Path) -> None:
    """It stays on the pod, and each pass tries again."""

    async with ready_node(library) as node:
        await running(node, "a")
        b = await running(node, "b", 10)
        request(node, "a", "gpu-mem=8")
        await until(lambda: REFUSED in annotations_of(node, "a"))
        node.delete(b)
        node.kubelet.forget(b)
        await granted(node, "a", "gpu-mem=8")


async def test_request_is_rejected_when_a_placed_pod_needs_the_room(library: Path) -> None:
    """The kubelet has not admitted that pod yet."""

    async with ready_node(library) as node:
        await running(node, "a")
        node.pod("coming", 8)
        request(node, "a", "gpu-mem=8")
        await until(lambda: REFUSED in annotations_of(node, "a"))
        assert "of which default/coming hold 8616" in annotations_of(node, "a")[REFUSED]


async def test_lease_is_denied_when_a_resized_pod_takes_the_room(library: Path) -> None:
    """The capacity check counts the new size."""

    async with ready_node(library) as node:
        await running(node, "a")
        request(node, "a", "gpu-mem=8")
        await granted(node, "a", "gpu-mem=8")
        with pytest.raises(ContainerFailed, match="are still held by default/a"):
            await node.run(node.pod("b", 8))


async def test_containers_are_resized_by_their_names(library: Path) -> None:
    """The pod holds the sum, also in the leases of its other tokens."""

    async with ready_node(library) as node:
        await running(node, "two", {"x": 4, "y": 2})
        request(node, "two", "gpu-mem=6")
        await until(lambda: REFUSED in annotations_of(node, "two"))
        assert annotations_of(node, "two")[REFUSED] == (
            "the pod has 2 containers with a slice (x, y): name one, as in x: gpu-mem=6"
        )
        text = "x: gpu-mem=2; y: gpu-mem=6,gpu-core=20"
        request(node, "two", text)
        record = await granted(node, "two", text)
        assert record.containers == {
            "x": (Slice(0, A, 2154, 0),),
            "y": (Slice(0, A, 6462, 20),),
        }
        assert record.slices == (Slice(0, A, 8616, 20),)
        assert [lease(node, "two", container)[1].holds for container in "xy"] == [
            [*record.slices]
        ] * 2
        assert page(node, "two", "x") == [(2154, 100, "hard")]
        assert page(node, "two", "y") == [(6462, 20, "hard")]


async def test_request_without_a_name_is_for_the_app_container_when_there_is_an_init_container(
    library: Path,
) -> None:
    """The init container has ended. Its slice still counts for the pod's peak."""

    async with ready_node(library) as node:
        await running(node, "a", 4, init={"prepare": 6})
        request(node, "a", "gpu-mem=2")
        record = await granted(node, "a", "gpu-mem=2")
        assert page(node, "a") == [(2154, 100, "hard")]
        assert record.slices == (Slice(0, A, 6462, 0),)


async def test_every_card_is_resized_when_the_container_has_several(library: Path) -> None:
    """The size is in the units of each card."""

    async with ready_node(library, 15079, 16384) as node:
        await running(node, "wide", 8, (0, 1))
        request(node, "wide", "gpu-mem=6")
        await granted(node, "wide", "gpu-mem=6")
        assert [size[0] for size in page(node, "wide")] == [6462, 6144]


async def test_request_is_pending_until_the_pod_runs(library: Path) -> None:
    """Before that not all of its containers may be known."""

    async with ready_node(library) as node:
        pod = node.pod("a", 4)
        await node.run(pod)
        request(node, "a", "gpu-mem=6")
        await node.agent.reconcile()
        assert page(node, "a") == [(4308, 100, "hard")]
        set_phase(node, "a", "Running")
        await granted(node, "a", "gpu-mem=6")


async def test_request_is_rejected_when_the_node_does_not_isolate(library: Path) -> None:
    """There is no limit to change."""

    async with ready_node(library) as node:
        node.label(**{"gpushare": "true", "cgpu.disable.isolation": "true"})
        seen = node.node_api
        await until(lambda: seen.node is not None and len(seen.node.metadata.labels) == 2)
        await running(node, "a")
        request(node, "a", "gpu-mem=6")
        await until(lambda: REFUSED in annotations_of(node, "a"))
        assert annotations_of(node, "a")[REFUSED].startswith("nothing limits container main")


async def test_request_is_rejected_when_the_pod_holds_whole_cards(library: Path) -> None:
    """There is no part to change."""

    async with node_harness(card(0), library=library, labels={"gpushare": "false"}) as node:
        await node.ready("nvidia.com/gpu")
        pod = node.pod("a", 1, resource="nvidia.com/gpu")
        await node.run(pod, "nvidia.com/gpu")
        set_phase(node, "a", "Running")
        request(node, "a", "gpu-mem=6")
        await until(lambda: REFUSED in annotations_of(node, "a"))
        assert annotations_of(node, "a")[REFUSED] == (
            "the pod holds whole cards: there is nothing to resize"
        )


@pytest.mark.parametrize("forged", ["gone", "less", "more", "nonsense", "another's"])
async def test_forged_status_is_corrected(library: Path, forged: str) -> None:
    """Users can write it. What is in force counts."""

    async with ready_node(library) as node:
        await running(node, "a")
        request(node, "a", "gpu-mem=6")
        true = await granted(node, "a", "gpu-mem=6")
        request(node, "a", None)
        holds = {"less": 10, "more": 15000}.get(forged, 6462)
        pod = "another" if forged == "another's" else true.pod
        text = encode_status(ResizeStatus(pod, (Slice(0, A, holds, 0),), {}, "gpu-mem=6"))
        record = {"gone": None, "nonsense": "{"}.get(forged, text)
        write(node, "a", **{STATUS: record})
        await until(lambda: annotations_of(node, "a").get(STATUS) not in (record, None))
        current = status(node, "a")
        assert current is not None
        assert (current.pod, current.slices, current.containers) == (
            true.pod,
            true.slices,
            true.containers,
        )
        assert page(node, "a") == [(6462, 100, "hard")]


async def test_status_of_another_pod_is_ignored(library: Path) -> None:
    """A pod's template may contain one."""

    async with ready_node(library) as node:
        pod = node.pod("a", 4)
        text = encode_status(
            ResizeStatus("x", (Slice(0, A, 15000, 0),), {"main": (Slice(0, A, 15000, 0),)})
        )
        write(node, "a", **{STATUS: text})
        await node.run(pod)
        assert page(node, "a") == [(4308, 100, "hard")]


async def test_size_is_read_from_the_control_page_when_the_store_was_lost(library: Path) -> None:
    """The checkpoint repeats the token. The pod's record is not used."""

    async with ready_node(library) as node:
        await running(node, "a")
        request(node, "a", "gpu-mem=6")
        await granted(node, "a", "gpu-mem=6")
        request(node, "a", None)
        await node.kill()
        for file in (node.root / "state").iterdir():
            file.write_text("half")
        for file in node.kubelet.cdi.iterdir():
            file.unlink()
        await node.start()
        await until(lambda: any(token.lease for token in node.store.tokens.values()))
        await until(lambda: list(node.kubelet.cdi.glob("*.json")))
        assert lease(node, "a")[1].holds == [Slice(0, A, 6462, 0)]
        assert page(node, "a") == [(6462, 100, "hard")]


async def test_resize_is_undone_when_a_program_allocates_meanwhile(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that the request changed is undone, including records."""

    async with ready_node(library) as node:
        await running(node, "two", {"x": 4, "y": 2})
        true, calls = limit_changes.resize, 0

        def faster(page: Path, slots: Path, limits: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise limit_changes.InUse("the lease's programs hold too much")
            return true(page, slots, limits)

        monkeypatch.setattr(limit_changes, "resize", faster)
        request(node, "two", "x: gpu-mem=3,gpu-core=50; y: gpu-mem=1")
        await granted(node, "two", "x: gpu-mem=3,gpu-core=50; y: gpu-mem=1")
        # The next pass may grant it at once, so the written patches are checked.
        patched = [body.get("metadata", {}).get("annotations", {}) for _, body in node.api.patches]
        refused = next(
            number for number, annotations in enumerate(patched) if annotations.get(REFUSED)
        )
        assert patched[refused][REFUSED] == "the lease's programs hold too much"
        recorded = [
            decode_status(annotations) for annotations in patched[:refused] if STATUS in annotations
        ]
        assert [(record.slices, record.request) for record in recorded if record] == [
            ((Slice(0, A, 6462, 50),), ""),
            ((Slice(0, A, 6462, 0),), ""),
        ]
        assert page(node, "two", "x") == [(3231, 50, "hard")]
        assert page(node, "two", "y") == [(1077, 100, "hard")]


async def test_growth_is_undone_when_another_pod_is_bound_meanwhile(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That happens during the API call that records the growth."""

    async with ready_node(library) as node:
        await running(node, "a")
        true = NodeApi.annotate

        async def slow(cluster: NodeApi, pod: Pod, annotations: Any) -> None:
            monkeypatch.setattr(NodeApi, "annotate", true)
            await true(cluster, pod, annotations)
            await node.run(node.pod("b", 8))

        monkeypatch.setattr(NodeApi, "annotate", slow)
        request(node, "a", "gpu-mem=8")
        await until(lambda: REFUSED in annotations_of(node, "a"))
        assert "of which default/b hold 8616" in annotations_of(node, "a")[REFUSED]
        record = status(node, "a")
        assert record is not None
        assert record.slices == (Slice(0, A, 4308, 0),)
        assert page(node, "a") == [(4308, 100, "hard")]


async def test_growth_is_delayed_while_the_api_server_is_unreachable(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What shrinks is in force at once. Both are recorded later."""

    async with ready_node(library) as node:
        await running(node, "a")
        await running(node, "b")
        with monkeypatch.context() as patched:

            async def away(*_: Any) -> None:
                raise ApiUnreachable("away")

            patched.setattr(NodeApi, "annotate", away)
            request(node, "a", "gpu-mem=6")
            request(node, "b", "gpu-mem=2")
            await until(lambda: page(node, "b") == [(2154, 100, "hard")])
            await node.agent.reconcile()
            assert page(node, "a") == [(4308, 100, "hard")]
        node.program.trigger()
        await granted(node, "a", "gpu-mem=6")
        await granted(node, "b", "gpu-mem=2")


def holds(node: NodeHarness) -> tuple[int, int, int]:
    """Return the MiB of pod `a`: recorded on it, in the store, and in force."""
    record = status(node, "a")
    files = [json.loads(path.read_text()) for path in (node.root / "state").glob("*.json")]
    (kept,) = (token["lease"] for token in files if token["lease"]["pod"] == "a")
    (limit,) = lease_control.read_interrupted(
        next((node.root / "leases").glob("*/lease/control"))
    ).limits
    return (
        record.slices[0].memory_mib if record else 4308,
        min(kept["slices"][0]["memory_mib"], kept["holds"][0]["memory_mib"]),
        limit.memory_bytes >> 20,
    )


@pytest.mark.parametrize(
    "text", ["gpu-mem=6", "gpu-mem=2", "gpu-mem=2,gpu-core=50", "gpu-mem=6,gpu-core=50"]
)
@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize(
    ("owner", "name"),
    [(NodeApi, "annotate"), (LeaseStore, "put"), (limit_changes, "resize")],
)
async def test_resize_completes_when_the_program_was_killed_at_any_step(  # noqa: PLR0917
    library: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    after: bool,
    times: int,
    owner: Any,
    name: str,
) -> None:
    """What is recorded and what is kept is never less than what is in force; the next agent completes it."""

    async with ready_node(library) as node:
        await running(node, "a")
        with monkeypatch.context() as patched:
            called = dying(patched, owner, name, after=after, times=times)
            request(node, "a", text)

            def done() -> bool:
                record = status(node, "a")
                return record is not None and record.request == text

            await until(lambda: called or done())
            recorded, kept, force = holds(node)
            assert recorded >= force
            assert kept >= force
            await node.kill()
        await node.start()
        record = await granted(node, "a", text)
        expected = 6462 if "6" in text else 2154
        assert holds(node) == (expected, expected, expected)
        assert record.slices[0].compute == (50 if "core" in text else 0)


def test_peak_counts_as_the_scheduler_does() -> None:
    """It is the sum of containers and sidecars, or an init container with the sidecars before it."""
    init = (Container(name="i"), Container(name="s", restart_policy="Always"))
    pod = Pod(
        metadata=ObjectMeta(),
        spec=PodSpec(containers=(Container(name="x"), Container(name="y")), init_containers=init),
    )

    def held(**mib: int) -> list[tuple[int, int]]:
        parts = {name: [Slice(0, A, amount, amount)] for name, amount in mib.items()}
        return [(piece.memory_mib, piece.compute) for piece in peak(parts, pod)]

    assert held(x=3, y=4) == [(7, 7)]
    assert held(x=3, y=4, s=1) == [(8, 8)]
    assert held(x=3, y=4, s=1, i=20) == [(20, 20)]  # the sidecar comes after it
    assert held(x=3, y=4, s=1, i=5) == [(8, 8)]


@pytest.mark.parametrize(
    ("before", "after", "others", "sentence"),
    [
        ((4, 0), (10, 0), {"u": (5079, 0)}, None),
        (
            (4, 0),
            (10001, 0),
            {"u": (5079, 0)},
            "card 0 has 15079 MiB, of which b hold 5079: 10001 do not fit",
        ),
        (
            (4, 0),
            (4, 61),
            {"u": (0, 40)},
            "card 0 has 100 % of its time, of which b hold 40: 61 do not fit",
        ),
        ((4, 0), (4, 60), {"u": (0, 40)}, None),
        # what does not grow is not judged, however full the card is
        ((9000, 80), (9000, 70), {"u": (9000, 80)}, None),
        (
            (1, 0),
            (2, 0),
            dict.fromkeys("vwxyz", (5000, 0)),
            "card 0 has 15079 MiB, of which v, w, x and 2 more hold 25000: 2 do not fit",
        ),
    ],
)
def test_check_growth_rejects_what_does_not_fit_beside_others(
    before: tuple[int, int],
    after: tuple[int, int],
    others: dict[str, tuple[int, int]],
    sentence: str | None,
) -> None:
    """Beside what others hold."""
    held = {uid: [Slice(0, A, *amounts)] for uid, amounts in others.items()}
    share = SharedNode(Node("n", (card(0),)))
    capacity = NodeCapacity(share, {**held, "own": [Slice(0, A, *before)]}, {"u": "b"})
    arguments = "own", [Slice(0, A, *before)], [Slice(0, A, *after)], capacity
    if sentence is None:
        check_growth(*arguments)
        return
    with pytest.raises(ResizeRejected) as why:
        check_growth(*arguments)
    assert str(why.value) == sentence
