"""Which of two worlds a command is about: this machine with its daemon, or the kubeconfig's cluster."""

import sys
from typing import TYPE_CHECKING

from fenka.cli.common_options import Target, cluster_configured
from fenka.workstation import paths

if TYPE_CHECKING:
    from fenka.workstation.protocol import MachineSnapshot


def _on_terminal() -> bool:
    return sys.stdout.isatty() and sys.stderr.isatty()


def announce(target: Target, *, here: bool) -> None:
    """Print on a terminal which world is shown, if there is another one and nothing has selected one.

    here: whether this machine is shown.
    """
    if target.local or target.of_cluster or not _on_terminal():
        return
    if here and cluster_configured():
        line = "this machine; --cluster or FENKA_WORLD=cluster shows the kubeconfig's cluster"
    elif not here and paths.current().answers():
        line = "the kubeconfig's cluster; --local or FENKA_WORLD=machine shows this machine"
    else:
        return
    print(f"# {line}", file=sys.stderr, flush=True)


def snapshot_here(target: Target, *, required: bool = False) -> "MachineSnapshot | None":
    """Return the state of this machine's daemon; None if the cluster is to be shown.

    required: Raise DaemonUnavailable, UnsafeDirectory if no daemon answers, as with `--local`.

    Raises ProtocolMismatch.
    """
    if target.of_cluster:
        return None
    from fenka.workstation.client import DaemonUnavailable, get_snapshot

    try:
        snapshot = get_snapshot(paths.current())
    except (DaemonUnavailable, paths.UnsafeDirectory):
        if target.local or required:
            raise
        return None
    announce(target, here=True)
    return snapshot


def runs_here(target: Target, namespace: str = "") -> bool:
    """Return whether a command is about trainings of this machine, as where no cluster is configured."""
    return target.local or not (target.of_cluster or namespace or cluster_configured())
