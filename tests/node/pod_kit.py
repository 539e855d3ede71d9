"""Pods on a node of the harness: their annotations and limits, and how the program dies meanwhile."""

import contextlib
from collections.abc import AsyncIterator
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

import pytest

from fenka.dialects.resize_records import REFUSED, REQUEST, ResizeStatus, decode_status
from fenka.isolation import lease_control
from tests.node.harness import T4_MIB, Json, NodeHarness, card, node_harness
from tests.waiting import eventually, until


@contextlib.asynccontextmanager
async def ready_node(library: Path, *sizes: int) -> AsyncIterator[NodeHarness]:
    """Yield a node with cards of these sizes; by default a T4, which has 14 units."""
    cards = [card(index, mib) for index, mib in enumerate(sizes or (T4_MIB,))]
    async with node_harness(*cards, library=library) as node:
        await node.ready()
        yield node


def limits(started: Json) -> list[tuple[str, int, int]]:
    """Return UUID, MiB and percent of each card of a started container, from its control page."""
    page = Path(started["mounts"]["/run/fenka/lease"]) / "control"
    return [
        (limit.uuid, limit.memory_bytes >> 20, limit.compute_percent)
        for limit in lease_control.read_interrupted(page).limits
    ]


def memory_limits(started: Json) -> list[tuple[str, int]]:
    """Return UUID and MiB of each card of a started container."""
    return [(uuid, mib) for uuid, mib, _ in limits(started)]


def path(name: str) -> str:
    """Return the path of a pod."""
    return f"/api/v1/namespaces/default/pods/{name}"


async def running(node: NodeHarness, name: str, units: Any = 4, at: Any = 0, **spec: Any) -> Json:
    """Create a pod and start all its containers."""
    pod = node.pod(name, units, on=at, **spec)
    await node.kubelet.admit(pod)
    for container in (*pod["spec"]["initContainers"], *pod["spec"]["containers"]):
        await node.kubelet.start_container(pod, container["name"])
    set_phase(node, name, "Running")
    return pod


def set_phase(node: NodeHarness, name: str, phase: str) -> None:
    """Set the pod's phase, as its kubelet does."""
    node.api.put(path(name), {**node.api.objects[path(name)], "status": {"phase": phase}})


def write(node: NodeHarness, name: str, **annotations: str | None) -> None:
    """Write annotations on a pod, as its user does."""
    old = node.api.objects[path(name)]
    merged = {**old["metadata"]["annotations"], **annotations}
    kept = {key: value for key, value in merged.items() if value is not None}
    node.api.put(path(name), {**old, "metadata": {**old["metadata"], "annotations": kept}})


def annotations_of(node: NodeHarness, name: str) -> dict[str, str]:
    """Return the pod's annotations."""
    annotations: dict[str, str] = node.api.objects[path(name)]["metadata"]["annotations"]
    return annotations


def request(node: NodeHarness, name: str, text: str | None) -> None:
    """Write or remove the request to resize a pod."""
    write(node, name, **{REQUEST: text})


def status(node: NodeHarness, name: str) -> ResizeStatus | None:
    """Return the recorded status of the pod."""
    return decode_status(annotations_of(node, name))


async def granted(node: NodeHarness, name: str, text: str) -> ResizeStatus:
    """Wait until the request is granted, and return the status."""
    await until(lambda: (current := status(node, name)) is not None and current.request == text)
    assert REFUSED not in annotations_of(node, name)
    current = status(node, name)
    assert current is not None
    return current


async def settled(node: NodeHarness) -> None:
    """Wait until a pass writes nothing: what the passes before it wrote has come back to the program."""

    async def is_settled() -> bool:
        written = len(node.api.patches)
        await node.agent.reconcile()
        return len(node.api.patches) == written

    await eventually(is_settled)


class Killed(Exception):
    """The process ends here."""


def dying(
    patched: pytest.MonkeyPatch, owner: Any, name: str, *, after: bool, times: int = 1
) -> list[str]:
    """End the process from the given call of a step on. Return the names of the steps that ended it.

    after: whether it ends when the step is done, and not before it.
    """
    true = getattr(owner, name)
    calls: list[str] = []
    killed: list[str] = []

    def end_at_last() -> None:
        if len(calls) >= times:
            killed.append(name)
            raise Killed(name)

    def step(*arguments: Any, **options: Any) -> Any:
        calls.append(name)
        if not after:
            end_at_last()
        result = true(*arguments, **options)
        end_at_last()
        return result

    async def asynchronous_step(*arguments: Any, **options: Any) -> Any:
        calls.append(name)
        if not after:
            end_at_last()
        result = await true(*arguments, **options)
        end_at_last()
        return result

    patched.setattr(owner, name, asynchronous_step if iscoroutinefunction(true) else step)
    return killed
