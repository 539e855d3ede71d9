"""Which world a screen shows, and the cluster's as it is now.

The local daemon's if its socket answers, else the kubeconfig's cluster; options say otherwise. Lists, no
watches: a screen is looked at once.
"""

import asyncio
import gc
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from fenka.cli.errors import UserError
from fenka.cli.options import Target
from fenka.cluster.snapshot import ClusterSnapshot
from fenka.kubernetes.client import Api, ApiError, ApiUnreachable
from fenka.kubernetes.cluster_reader import read_cluster
from fenka.workstation import paths, protocol
from fenka.workstation.client import DaemonUnavailable, get_snapshot
from fenka.workstation.paths import UnsafeDirectory

T = TypeVar("T")


def local(target: Target) -> protocol.Snapshot | None:
    """This machine's world; None where the cluster is to be shown.

    Raises DaemonUnavailable, UnsafeDirectory, ProtocolMismatch.
    """
    if target.of_cluster:
        return None
    try:
        return get_snapshot(paths.current())
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


def read(target: Target) -> ClusterSnapshot:
    """Return the cluster: nodes, and pods that can hold anything. Raises UserError."""
    return ask(target, read_cluster)


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
