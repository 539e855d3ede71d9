"""The node program keeps a taint while a card is free as a whole, and leaves all other taints alone."""

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.cluster.objects import node_path
from fenka.core.inventory import Card
from fenka.core.request import Slice
from fenka.dialects.base import NVIDIA_GPU
from fenka.dialects.nodes import CORDONED
from fenka.kubernetes.api_client import ApiError, ApiUnreachable
from fenka.node.free_cards import FREE_FOR_S, TAINT, has_free_card
from tests.fakes.in_process import FakeApi
from tests.node.harness import NODE, Json, NodeHarness, card, node_harness
from tests.waiting import until

MARK = {"key": TAINT, "effect": "PreferNoSchedule"}
OTHER = {"key": "k", "effect": "NoExecute", "timeAdded": "2026-01-01T00:00:00Z"}
PATH = node_path(NODE)


def on(library: Path, cards: int = 1, **options: Any) -> Any:
    """Return a shared node with this number of T4s."""
    labels = options.pop("labels", {"gpushare": "true"})
    return node_harness(*map(card, range(cards)), library=library, labels=labels, **options)


def taints(node: NodeHarness) -> list[Json]:
    """Return the Node's taints."""
    written: list[Json] = node.api.objects[PATH].get("spec", {}).get("taints") or []
    return written


def set_taints(node: NodeHarness, *written: Json) -> None:
    """Replace the Node's taints, as another client would."""
    known = node.api.objects[PATH]
    node.api.put(PATH, {**known, "spec": {**known.get("spec", {}), "taints": list(written)}})


async def passed(node: NodeHarness, seconds: float = FREE_FOR_S) -> None:
    """Make a pass, and another one after this time."""
    await node.agent.reconcile()
    node.now += seconds
    await node.agent.reconcile()


async def test_taint_is_there_until_the_last_whole_card_is_used(library: Path) -> None:
    """Two cards: with a slice on each there is none, although 10 units of each are free."""
    async with on(library, cards=2) as node:
        await node.ready()
        set_taints(node, OTHER)
        await passed(node)
        assert taints(node) == [OTHER, MARK]
        node.pod("a", 4, on=0)
        await until(lambda: len(node.node_api.pods) == 1)
        await passed(node)
        assert taints(node) == [OTHER, MARK]
        node.pod("b", 4, on=1)
        await until(lambda: len(node.node_api.pods) == 2)
        # Before the container starts: the pod is bound.
        await until(lambda: taints(node) == [OTHER])


async def test_taint_returns_when_the_card_has_been_free_for_a_while(library: Path) -> None:
    """A card that the next pod takes at once writes nothing."""
    async with on(library) as node:
        await node.ready()
        pod = node.pod("a", 4)
        await node.run(pod)
        await passed(node)
        assert taints(node) == []
        node.delete(pod)
        await until(lambda: not node.node_api.pods)
        await passed(node, FREE_FOR_S - 1)
        assert taints(node) == []
        node.now += 1
        await node.agent.reconcile()
        await until(lambda: taints(node) == [MARK])


async def test_same_taint_is_written_once(library: Path) -> None:
    """Passes are frequent."""
    async with on(library) as node:
        await node.ready()
        await passed(node)
        await until(lambda: node.node_api.node is not None and node.node_api.node.spec.taints)
        await passed(node)
        written = [body for path, body in node.api.patches if path == PATH and "spec" in body]
        assert len(written) == 1


async def test_cordoned_card_is_not_free(library: Path) -> None:
    """Nothing is kept for it, since no pod gets it."""
    async with on(library) as node:
        await node.ready()
        await passed(node)
        await until(lambda: taints(node) == [MARK])
        node.annotate(**{CORDONED: "0"})
        await until(lambda: taints(node) == [])


async def test_whole_cards_count_when_the_node_does_not_share(library: Path) -> None:
    """The kubelet gives nvidia.com/gpu by UUID."""
    async with on(library, labels={"gpushare": "false"}) as node:
        await node.ready(NVIDIA_GPU)
        await passed(node)
        await until(lambda: taints(node) == [MARK])
        pod = node.pod("a", 1, on=None, resource=NVIDIA_GPU)
        await node.kubelet.admit(pod, NVIDIA_GPU)
        await passed(node)
        await until(lambda: taints(node) == [])


@pytest.mark.parametrize("labels", [{"zone": "a"}, {"gpushare": "true"}])
async def test_no_taint_where_nothing_is_offered_or_it_is_off(
    library: Path, labels: dict[str, str]
) -> None:
    """A node without a label, or a program with --no-free-cards-taint. An old taint is removed."""
    async with on(library, labels=labels, labelled_only=True, taint="zone" in labels) as node:
        set_taints(node, OTHER, MARK)
        await until(lambda: taints(node) == [OTHER])
        await passed(node)
        assert taints(node) == [OTHER]


async def test_taint_goes_with_the_program(library: Path) -> None:
    """Nobody would remove it. It does not come back while the last containers are served."""
    async with on(library) as node:
        await node.ready()
        set_taints(node, OTHER)
        await passed(node)
        await until(lambda: taints(node) == [OTHER, MARK])
        await until(
            lambda: node.node_api.node is not None and len(node.node_api.node.spec.taints) == 2
        )
        leaving = asyncio.create_task(node.agent.drain())
        await until(lambda: taints(node) == [OTHER])
        await passed(node)
        assert taints(node) == [OTHER]
        leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaving


async def test_taint_goes_with_the_program_when_its_removal_is_refused_once(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Node has changed meanwhile, and no pass follows."""
    async with on(library) as node:
        await node.ready()
        await passed(node)
        await until(lambda: node.node_api.node and node.node_api.node.spec.taints)
        write, refusals = node.node_api.set_taint, [ApiError(409, "Conflict", "another version")]

        async def racing(key: str, effect: str | None) -> None:
            if refusals:
                raise refusals.pop()
            await write(key, effect)

        monkeypatch.setattr(node.node_api, "set_taint", racing)
        await node.agent._taint.end()
        assert taints(node) == []
        assert not refusals


async def test_anothers_taint_stays_when_it_is_written_in_between(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write is refused, and the next pass repeats it with the other's taint."""
    async with on(library) as node:
        await node.ready()
        await node.agent.reconcile()
        node.now += FREE_FOR_S
        races, get = 1, FakeApi.get

        async def racing(api: FakeApi, path: str, kind: type[Any], **query: Any) -> Any:
            nonlocal races
            read = await get(api, path, kind, **query)
            if path == PATH and races:
                races -= 1
                set_taints(node, OTHER)
            return read

        monkeypatch.setattr(FakeApi, "get", racing)
        await node.agent.reconcile()
        assert not races
        await until(lambda: taints(node) == [OTHER, MARK])


@pytest.mark.parametrize("error", [ApiUnreachable("away"), ApiError(403, "Forbidden", "no")])
async def test_pods_start_when_the_taint_cannot_be_written(
    library: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It is only a preference."""
    async with on(library) as node:
        await node.ready()

        async def refused(*_: Any) -> None:
            raise error

        monkeypatch.setattr(node.node_api, "set_taint", refused)
        await passed(node)
        assert taints(node) == []
        await node.run(node.pod("a", 4))


CARDS = st.lists(st.tuples(st.booleans(), st.booleans()), max_size=4)


@given(CARDS, st.lists(st.integers(0, 3)), st.sets(st.integers(0, 3)))
def test_free_card_is_open_and_held_by_nobody(
    states: list[tuple[bool, bool]], held: list[int], exclusive: set[int]
) -> None:
    """By the definition, card by card."""
    cards: list[Card] = [
        replace(card(index), healthy=healthy, cordoned=cordoned)
        for index, (healthy, cordoned) in enumerate(states)
    ]
    slices = [Slice(index, card(index).uuid, 1, 0) for index in held]
    free = [
        index
        for index, (healthy, cordoned) in enumerate(states)
        if healthy and not cordoned and index not in held and index not in exclusive
    ]
    assert has_free_card(cards, slices, {card(index).uuid for index in exclusive}) == bool(free)
