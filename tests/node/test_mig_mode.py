"""Cards are switched to MIG and back when nobody holds them, as the node's label says."""

from pathlib import Path

from fenka.dialects import base
from fenka.dialects.base import NVIDIA_GPU
from fenka.dialects.mig_records import INSTANCES
from fenka.mig.manager import is_enabled
from fenka.procfs import process_name
from tests.hardware.client import Client
from tests.node.harness import NODE, NodeHarness
from tests.node.mig_kit import (
    ON_DEMAND,
    administrator_creates,
    administrator_destroys,
    end,
    mig_node,
    mig_pod,
    place_id,
    published,
    run,
)
from tests.waiting import until

WHOLE = {"gpushare": "true", "fenka.io/whole-cards": "true"}


def divided(node: NodeHarness) -> list[bool]:
    """Return which cards are in MIG mode."""
    return [
        card.uuid in node.program.instances.geometries and is_enabled(card.uuid)
        for card in node.hardware.cards
    ]


def closed(node: NodeHarness) -> bool:
    """Return whether the Node shows a divided card on which nothing is created."""
    return any(not card.on_demand for card in published(node))


def events(node: NodeHarness) -> set[str]:
    """Return the notes of all events about MIG."""
    return {event["note"] for event in node.api.events if event["reason"] == "FenkaMig"}


async def test_idle_cards_are_divided_after_the_scheduler_was_told(library: Path) -> None:
    """A card without MIG stays whole; divided ones are withheld from those who want whole cards."""
    async with mig_node(library, "A100-40G,T4,A30", divided=False, layouts=None, **WHOLE) as node:
        await node.ready(NVIDIA_GPU)
        assert (divided(node), len(node.kubelet.free(NVIDIA_GPU))) == ([False] * 3, 3)
        assert INSTANCES not in node.api.objects[f"/api/v1/nodes/{NODE}"]["metadata"]["annotations"]
        node.label(**WHOLE, **{"fenka.io/mig": "on-demand"})
        await until(lambda: len(published(node)) == 2)
        assert (closed(node), divided(node)) == (True, [False] * 3)
        await until(lambda: len(node.program.closed.published) == 2)
        node.now += 10
        node.program.trigger()
        await until(lambda: divided(node) == [True, False, True])
        await until(lambda: not closed(node))
        await until(lambda: len(node.kubelet.free(NVIDIA_GPU)) == 1)
        annotations = node.api.objects[f"/api/v1/nodes/{NODE}"]["metadata"]["annotations"]
        assert all(card.uuid in annotations[base.CARDS] for card in node.hardware.cards)
        expected = {
            *("nvidia.com/mig-1g.5gb", "nvidia.com/mig-1g.5gb.me", "nvidia.com/mig-1g.10gb"),
            *("nvidia.com/mig-1g.6gb", "nvidia.com/mig-1g.6gb.me"),
        }
        await until(lambda: {name for name in node.kubelet.devices if "mig-1g" in name} == expected)


async def test_card_stays_whole_while_a_pod_holds_it(library: Path) -> None:
    """Also one that has no lease yet. The event says who, and the card is divided when it has ended."""
    async with mig_node(library, divided=False, gpushare="true") as node:
        pod = node.pod("a", 4)
        node.label(**ON_DEMAND)
        reason = "enable MIG on card 0: default/a must end"
        await until(lambda: reason in events(node))
        await node.run(pod)
        node.now += 60
        node.program.trigger()
        await until(lambda: node.store.leases)
        assert (divided(node), published(node)) == ([False], ())
        end(node, pod)
        await until(lambda: len(node.program.closed.published) == 1)
        node.now += 10
        node.program.trigger()
        await until(lambda: divided(node) == [True])


async def test_card_is_opened_again_when_a_pod_arrives_before_it_is_divided(library: Path) -> None:
    """The scheduler had decided before it was told."""
    async with mig_node(library, divided=False, gpushare="true") as node:
        node.label(**ON_DEMAND)
        await until(lambda: len(node.program.closed.published) == 1)
        pod = node.pod("a", 4)
        await node.run(pod)
        await until(lambda: not node.program.closed.published and not published(node))
        assert divided(node) == [False]


async def test_card_stays_whole_while_a_process_has_it_open(library: Path) -> None:
    """The driver must not switch it later by itself, while a pod has the card."""
    async with mig_node(library, divided=False, gpushare="true") as node:
        client = Client(node.hardware.simulated.library_dir).enter()  # type: ignore[attr-defined]
        node.label(**ON_DEMAND)
        await until(lambda: len(node.program.closed.published) == 1)
        node.now += 10
        node.program.trigger()
        name = process_name(client.pid)
        reason = f"enable MIG on card 0: process {client.pid} ({name}) has card 0 open"
        await until(lambda: reason in events(node))
        client.kill()
        await until(lambda: not published(node))
        assert divided(node) == [False]
        node.now += 61
        node.program.trigger()
        await until(lambda: len(node.program.closed.published) == 1)
        node.now += 10
        node.program.trigger()
        await until(lambda: divided(node) == [True])


async def test_card_becomes_whole_when_no_instance_is_left(library: Path) -> None:
    """Neither a pod's nor an administrator's."""
    async with mig_node(library) as node:
        pod = mig_pod(node, "a", place_id(node, "2g.10gb", 0))
        await run(node, pod)
        foreign = administrator_creates(node, "1g.5gb", 6)
        node.program.instances.trigger()
        node.label(**{**ON_DEMAND, "fenka.io/mig": "off"})
        await until(lambda: closed(node))
        end(node, pod)
        reason = (
            "disable MIG on card 0: its instances are in use; "
            "destroy 0/6 1g.5gb is an administrator's, destroy it with nvidia-smi mig"
        )
        await until(lambda: reason in events(node))
        administrator_destroys(node, foreign)
        node.program.instances.trigger()
        await until(lambda: len(node.program.closed.published) == 1)
        assert divided(node) == [True]
        node.now += 10
        node.program.trigger()
        await until(lambda: divided(node) == [False])
        await until(lambda: not published(node))


async def test_cards_stay_as_they_are_without_the_label(library: Path) -> None:
    """MIG mode is an administrator's choice then; the Node shows it."""
    async with mig_node(library, gpushare="true") as node:
        await until(lambda: len(published(node)) == 1)
        node.now += 100
        node.program.trigger()
        await until(lambda: not node.agent.problem)
        assert (closed(node), divided(node), node.program.closed.published) == (
            True,
            [True],
            set(),
        )
