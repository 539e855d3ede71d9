"""Which world a screen shows, and the cluster's as it is now.

The local daemon's if its socket answers, else the kubeconfig's cluster; options say otherwise. Lists, no
watches: a screen is looked at once.
"""

import asyncio
import gc
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fenka.cli.errors import UserError
from fenka.cluster.objects import ConfigMap, Node, Pod
from fenka.cluster.state import ClusterState
from fenka.core.errors import INVALID_INPUT
from fenka.dialects import gpushare, node_inventory
from fenka.kubernetes.client import Api, ApiError, ApiUnreachable
from fenka.workstation import paths, protocol
from fenka.workstation.client import DaemonUnavailable
from fenka.workstation.paths import UnsafeDirectory

T = TypeVar("T")

PAGE = 2000
"""Objects a page: a round trip costs more than the server's memory for so many."""

HOLDING = "status.phase!=Succeeded,status.phase!=Failed,spec.nodeName!="
"""Field selector of the pods that can hold anything."""


@dataclass(frozen=True, slots=True)
class Target:
    """The options that say which world. Raises UserError where they contradict each other."""

    local: bool = False
    cluster: bool = False
    kubeconfig: Path | None = None
    context: str | None = None

    def __post_init__(self) -> None:
        if self.local and self.of_cluster:
            raise UserError(
                "--local is this machine, the other options are a cluster", INVALID_INPUT
            )

    @property
    def of_cluster(self) -> bool:
        """Whether a cluster was asked for."""
        return self.cluster or self.kubeconfig is not None or self.context is not None


@dataclass(frozen=True, slots=True)
class Cluster:
    """What the API server says: all nodes and the pods that can hold something of them."""

    nodes: list[Node]
    pods: list[Pod]
    world: ClusterState


def local(target: Target) -> protocol.Snapshot | None:
    """This machine's world; None where the cluster is to be shown.

    Raises DaemonUnavailable, UnsafeDirectory, ProtocolMismatch.
    """
    from fenka.cli.listing import current

    if target.of_cluster:
        return None
    try:
        return current()
    except (DaemonUnavailable, UnsafeDirectory):
        if target.local:
            raise
        return None


def ask(target: Target, question: Callable[[Api], Awaitable[T]]) -> T:
    """Ask the API server. Raises UserError, in one sentence, where there is none or it refuses."""

    async def conversation() -> T:
        async with await Api.connect(_kubeconfig(target), target.context) as api:
            return await question(api)

    # What is read is kept until the screen is printed: to look for garbage in it would take a quarter of
    # the time of a thousand nodes.
    gc.disable()
    try:
        return asyncio.run(conversation())
    except ApiUnreachable as why:
        raise UserError(str(why) if target.of_cluster else _neither(why)) from None
    except ApiError as why:
        raise UserError(str(why)) from None
    finally:
        gc.freeze()
        gc.enable()


def read(target: Target) -> Cluster:
    """Nodes, pods and the cards that a health daemon calls sick."""
    return ask(target, _read)


async def nodes_and_pods(api: Api, node: str | None = None) -> tuple[list[Node], list[Pod]]:
    """Of all nodes, or of one."""
    pods = api.list("/api/v1/pods", Pod, limit=PAGE, fieldSelector=_of(node))
    if node is None:
        (nodes, _), (found, _) = await asyncio.gather(
            api.list("/api/v1/nodes", Node, limit=PAGE), pods
        )
        return nodes, found
    one, (found, _) = await asyncio.gather(api.get(f"/api/v1/nodes/{node}", Node), pods)
    return [one], found


async def sick(api: Api) -> dict[str, frozenset[int]]:
    """Cards by node that gpushare's health daemon has named. Who may not read that knows of none."""
    try:
        maps, _ = await api.list("/api/v1/namespaces/kube-system/configmaps", ConfigMap)
    except ApiError:
        return {}
    prefix = gpushare.UNHEALTHY_CONFIG_MAP
    return {
        it.metadata.name.removeprefix(prefix): node_inventory.parse_indexes(it.data.get("gpus", ""))
        for it in maps
        if it.metadata.name.startswith(prefix)
    }


async def _read(api: Api) -> Cluster:
    (nodes, pods), named = await asyncio.gather(nodes_and_pods(api), sick(api))
    return gathered(nodes, pods, named)


def gathered(
    nodes: list[Node], pods: list[Pod], sick_cards: dict[str, frozenset[int]] | None = None
) -> Cluster:
    """The objects, in the order of all screens, and what they mean."""
    nodes = sorted(nodes, key=lambda it: it.metadata.name)
    pods = sorted(pods, key=lambda it: (it.metadata.namespace, it.metadata.name))
    world = ClusterState(nodes, pods)
    for name, indexes in (sick_cards or {}).items():
        world.set_unhealthy(name, indexes)
    return Cluster(nodes, pods, world)


def namespace(target: Target) -> str:
    """The one that the kubeconfig's context names."""
    import yaml

    named = _kubeconfig(target) or Path("~/.kube/config").expanduser()
    files = [Path(it).expanduser() for it in str(named).split(os.pathsep)]
    configs = [yaml.safe_load(it.read_text()) or {} for it in files if it.is_file()]
    wanted = target.context or next(filter(None, (it.get("current-context") for it in configs)), "")
    for config in configs:
        for context in config.get("contexts") or []:
            if context.get("name") == wanted:
                return str((context.get("context") or {}).get("namespace") or "default")
    return "default"


def _of(node: str | None) -> str:
    return HOLDING if node is None else f"{HOLDING},spec.nodeName={node}"


def _kubeconfig(target: Target) -> Path | None:
    """A kubeconfig that somebody named counts for more than a pod's own service account."""
    if target.kubeconfig is not None:
        return target.kubeconfig
    named = os.environ.get("KUBECONFIG")
    return Path(named) if named else None


def _neither(why: ApiUnreachable) -> str:
    return (
        f"there is nothing to show: no fenka daemon answers at {paths.current().socket} (`fenka daemon` "
        f"starts one), and {why}"
    )
