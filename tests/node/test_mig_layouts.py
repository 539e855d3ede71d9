"""Layouts that labels of the node name: reached around what is in use, and their state on the Node."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from fenka.hardware import nvml_mig
from fenka.node.mig_layouts import CONFIG, STATE
from tests.node.harness import NODE, NodeHarness
from tests.node.mig_kit import (
    administrator_creates,
    administrator_destroys,
    end,
    layout,
    mig_node,
    mig_pod,
    place_id,
    run,
    states,
)
from tests.waiting import WAIT_S

LAYOUTS = """version: v1
mig-configs:
  balanced:
  - {device-filter: ["0x233010DE"], devices: all, mig-enabled: true, mig-devices: {1g.10gb: 7}}
  - {devices: all, mig-enabled: true, mig-devices: {1g.5gb: 2, 2g.10gb: 1, 3g.20gb: 1}}
  seven: [{devices: [0], mig-enabled: true, mig-devices: {7g.40gb: 1}}]
  whole: [{devices: all, mig-enabled: false}]
  halves: [{devices: all, mig-enabled: true, mig-devices: {3g.20gb: 3}}]
  other: [{device-filter: "0x233010DE", devices: all, mig-enabled: true}]
  ninth: [{devices: [9], mig-enabled: true}]
"""
BALANCED = ["0 2g.10gb", "2 1g.5gb", "3 1g.5gb", "4 3g.20gb"]


def labels(name: str, kind: str = "static") -> dict[str, str]:
    """Return labels of a node that is to have a layout."""
    return {"gpushare": "true", "fenka.io/mig": kind, CONFIG: name}


def state(node: NodeHarness) -> str | None:
    """Return the state label of the Node."""
    found: str | None = node.api.objects[f"/api/v1/nodes/{NODE}"]["metadata"]["labels"].get(STATE)
    return found


def relabel(node: NodeHarness, **changed: str) -> None:
    """Change labels of the Node, as kubectl does."""
    node.label(**{**node.api.objects[f"/api/v1/nodes/{NODE}"]["metadata"]["labels"], **changed})


def notes(node: NodeHarness) -> list[str]:
    """Return the notes of events about layouts."""
    return [each["note"] for each in node.api.events if each["reason"] == "FenkaMigConfig"]


async def eventually(node: NodeHarness, condition: Callable[[], object]) -> None:
    """Let time pass on the node until a condition holds."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            node.now += 1
            node.program.trigger()
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def static_node(
    library: Path, folder: Path, name: str, *, divided: bool = True, kind: str = "static"
) -> AsyncIterator[NodeHarness]:
    """Run a node with an A100 whose labels name a layout."""
    file = folder / "config.yaml"
    file.write_text(LAYOUTS)
    async with mig_node(library, divided=divided, layouts=file, **labels(name, kind)) as node:
        yield node


async def test_whole_card_gets_its_layout_whose_instances_pods_use(
    library: Path, tmp_path: Path
) -> None:
    """They stay after their pods."""
    async with static_node(library, tmp_path, "balanced", divided=False) as node:
        await eventually(node, lambda: state(node) == "success")
        assert layout(node) == BALANCED
        assert states(node) == dict.fromkeys(BALANCED, "own")
        pod = mig_pod(node, "a", place_id(node, "3g.20gb", 4))
        started = await run(node, pod)
        assert started["env"]["NVIDIA_VISIBLE_DEVICES"].startswith("MIG-")
        end(node, pod)
        await eventually(node, lambda: not node.store.tokens)
        assert (layout(node), state(node), notes(node)) == (BALANCED, "success", [])


async def test_instance_in_use_stays_until_its_pod_has_ended(library: Path, tmp_path: Path) -> None:
    """The rest changes now; meanwhile it takes no new pods, and its container is not touched."""
    async with static_node(library, tmp_path, "balanced") as node:
        await eventually(node, lambda: state(node) == "success")
        pod = mig_pod(node, "a", place_id(node, "3g.20gb", 4))
        await run(node, pod)
        (before,) = node.store.leases.values()
        relabel(node, **{CONFIG: "seven"})
        await eventually(node, lambda: layout(node) == ["4 3g.20gb"])
        await eventually(node, lambda: states(node) == {"4 3g.20gb": "unhealthy"})
        assert state(node) == "pending"
        assert "0/4 3g.20gb is held by default/a" in notes(node)[-1]
        assert list(node.store.leases.values()) == [before]
        await node.kill()
        await node.start()
        end(node, pod)
        await eventually(node, lambda: state(node) == "success")
        assert layout(node) == ["0 7g.40gb"]
        relabel(node, **{CONFIG: "whole"})
        await eventually(node, lambda: (state(node), states(node)) == ("success", {}))
        mode = nvml_mig.mig_mode(node.hardware.cards[0].uuid)
        assert mode is not None
        assert not mode.enabled


async def test_whole_card_is_divided_when_its_pods_have_ended(
    library: Path, tmp_path: Path
) -> None:
    """It takes no new ones meanwhile."""
    async with static_node(library, tmp_path, "", divided=False, kind="off") as node:
        await node.ready()
        pod = node.pod("a", 4)
        await node.run(pod)
        relabel(node, **labels("balanced"))
        await eventually(node, lambda: state(node) == "pending")
        await eventually(node, lambda: notes(node))
        assert notes(node) == [f"{CONFIG} pending: enable MIG on card 0: default/a must end"]
        card = node.hardware.cards[0].uuid
        assert card in node.program.instances.closed
        end(node, pod)
        await eventually(node, lambda: state(node) == "success")
        assert (layout(node), node.program.instances.closed) == (BALANCED, frozenset())


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("none", "no configuration is called 'none': the file has balanced, halves, "),
        ("halves", "A100-SXM4-40GB cannot be divided into 3x 3g.20gb at once"),
        ("other", "device-filter 0x233010DE matches no card: here are 0x20B010DE"),
        ("ninth", "there is no card 9: here are 0"),
    ],
)
async def test_layout_fails_with_one_event_when_the_node_cannot_have_it(
    library: Path, tmp_path: Path, name: str, sentence: str
) -> None:
    """Nothing changes; a right one is obeyed afterwards."""
    async with static_node(library, tmp_path, "balanced") as node:
        await eventually(node, lambda: state(node) == "success")
        relabel(node, **{CONFIG: name})
        await eventually(node, lambda: state(node) == "failed" and notes(node))
        node.now += 100
        node.program.trigger()
        await eventually(node, lambda: state(node) == "failed")
        (note,) = notes(node)
        assert sentence in note
        assert layout(node) == BALANCED
        assert states(node) == dict.fromkeys(BALANCED, "own")
        relabel(node, **{CONFIG: "seven"})
        await eventually(node, lambda: state(node) == "success")
        assert layout(node) == ["0 7g.40gb"]


async def test_step_is_repeated_when_the_driver_refuses_it(library: Path, tmp_path: Path) -> None:
    """After a while; until then the reason is on the Node."""
    async with static_node(library, tmp_path, "", kind="off") as node:
        hardware: Any = node.hardware
        hardware.simulated.fail_mig(0, 1)
        refused_at = node.now
        relabel(node, **labels("seven"))
        await eventually(node, lambda: state(node) == "failed" and notes(node))
        assert "cannot be created: its place is taken" in notes(node)[-1]
        assert node.now < refused_at + 60
        await eventually(node, lambda: state(node) == "success")
        assert node.now > refused_at + 60
        assert (layout(node), len(notes(node))) == (["0 7g.40gb"], 1)


async def test_file_is_read_again_when_it_is_wrong_or_changes(
    library: Path, tmp_path: Path
) -> None:
    """An absent one and one that is no YAML are failures with a sentence."""
    async with static_node(library, tmp_path, "balanced") as node:
        await eventually(node, lambda: state(node) == "success")
        file = tmp_path / "config.yaml"
        file.write_text("[")
        await eventually(node, lambda: state(node) == "failed" and notes(node))
        assert "the file is no YAML" in notes(node)[-1]
        file.unlink()
        await eventually(node, lambda: len(notes(node)) == 2)
        assert "the ConfigMap that node.mig.config names must have it" in notes(node)[-1]
        file.write_text(LAYOUTS.replace("2g.10gb: 1, 3g.20gb: 1", "3g.20gb: 1"))
        await eventually(node, lambda: state(node) == "success")
        assert layout(node) == BALANCED[1:]


async def test_administrators_instance_stays_and_is_named(library: Path, tmp_path: Path) -> None:
    """The layout is complete when it has gone."""
    async with static_node(library, tmp_path, "", kind="off") as node:
        gpu = administrator_creates(node, "1g.5gb", 6)
        relabel(node, **labels("seven"))
        await eventually(node, lambda: state(node) == "pending" and notes(node))
        assert "0/6 1g.5gb is an administrator's" in notes(node)[-1]
        assert layout(node) == ["6 1g.5gb"]
        administrator_destroys(node, gpu)
        node.program.instances.trigger()
        await eventually(node, lambda: state(node) == "success")
        assert layout(node) == ["0 7g.40gb"]


async def test_node_without_the_label_keeps_what_it_has(library: Path, tmp_path: Path) -> None:
    """Labels of NVIDIA's mig-manager alone are not fenka's."""
    async with static_node(library, tmp_path, "balanced") as node:
        await eventually(node, lambda: state(node) == "success")
        node.label(**{"gpushare": "true", "fenka.io/mig": "static", STATE: "success"})
        await eventually(node, lambda: state(node) is None)
        node.label(**{"gpushare": "true", CONFIG: "seven", STATE: "failed"})
        node.now += 100
        node.program.trigger()
        await asyncio.sleep(0.1)
        assert (layout(node), state(node)) == (BALANCED, "failed")


async def test_instances_of_a_layout_go_when_the_node_is_divided_on_demand_again(
    library: Path, tmp_path: Path
) -> None:
    """As soon as no pod holds them; then pods get other ones in their places."""
    async with static_node(library, tmp_path, "balanced") as node:
        await eventually(node, lambda: state(node) == "success")
        pod = mig_pod(node, "a", place_id(node, "3g.20gb", 4))
        await run(node, pod)
        node.label(**{"gpushare": "true", "fenka.io/mig": "on-demand"})
        await eventually(node, lambda: layout(node) == ["4 3g.20gb"])
        await run(node, mig_pod(node, "b", place_id(node, "4g.20gb", 0)))
        end(node, pod)
        await eventually(node, lambda: layout(node) == ["0 4g.20gb"])
