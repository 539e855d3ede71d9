"""Attributes processes to pods and containers by their cgroup, which a container cannot change."""

import os
import re
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from fenka.node.lease.store import Lease
from fenka.procfs import send_signal, start_ticks

_POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})")
_CONTAINER = re.compile(r"[0-9a-f]{64}")


def pod_and_container(pid: int, proc: Path = Path("/proc")) -> tuple[str, str]:
    """Return the pod's UID and the container's ID of a process; empty strings for a process of the host.

    systemd's cgroup driver writes _ for -, and a static pod's UID has neither.
    """
    try:
        # A container may name its own cgroups with bytes that are not text.
        text = os.fsdecode((proc / str(pid) / "cgroup").read_bytes())
    except OSError:
        return "", ""
    pod = _POD.search(text)
    if pod is None:
        return "", ""
    containers = _CONTAINER.findall(text, pod.end())
    return pod[1].replace("_", "-"), containers[0] if containers else ""


@dataclass(frozen=True, slots=True)
class ProcessOwners:
    """Finds the leases of processes.

    leases: by token. names: containers by their runtime's IDs, as the API server knows them: a moment after
    they start.
    """

    leases: Mapping[str, Lease]
    names: Mapping[str, str]
    proc: Path = Path("/proc")

    def tokens_of(self, pid: int) -> list[str]:
        """Return the token of the process's container; all of its pod's while the container is unknown."""
        uid, container = pod_and_container(pid, self.proc)
        of_pod = [token for token, lease in self.leases.items() if lease.uid == uid]
        name = self.names.get(container)
        return [token for token in of_pod if self.leases[token].container == name] or of_pod


def living_pods(proc: Path = Path("/proc")) -> set[str]:
    """Return the UIDs of the pods that have a process that is not a zombie."""
    uids: set[str] = set()
    for name in os.listdir(proc):
        if name.isdecimal():
            uid, _ = pod_and_container(int(name), proc)
            if uid and uid not in uids and start_ticks(name, proc) is not None:
                uids.add(uid)
    return uids


def kill(pid: int, pod: str) -> bool:
    """Kill a process if it still belongs to this pod. Return whether the signal was sent."""
    return send_signal(pid, signal.SIGKILL, lambda: pod_and_container(pid)[0] == pod)


def kill_pods(uids: Collection[str], proc: Path = Path("/proc")) -> int:
    """Kill all processes of these pods, and return how many signals were sent."""
    count = 0
    for name in os.listdir(proc):
        if name.isdecimal() and (uid := pod_and_container(int(name), proc)[0]) in uids:
            count += start_ticks(name, proc) is not None and kill(int(name), uid)
    return count
