"""Attributes processes to pods and containers by their cgroup, and ends those that outlive their pods."""

import asyncio
import logging
import os
import re
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fenka.cluster.objects import Pod, seconds
from fenka.cluster.queue_snapshot import time_limit_s
from fenka.node.lease.store import Lease, LeaseStore
from fenka.node.node_api import NodeApi
from fenka.procfs import send_signal, start_ticks

if TYPE_CHECKING:  # gRPC is in no workstation's package.
    from fenka.node.kubelet.client import Claim

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


_LOG = logging.getLogger(__name__)

GONE_S = 30.0
"""Programs may run this long after their pod has left the API server: the kubelet ends them meanwhile."""
LATE_S = 5.0
"""The kubelet may be this late with the end of a pod whose grace period is over."""


@dataclass(frozen=True, slots=True)
class _SeenDeletion:
    """A deletion of a pod. timestamp: the API server's. since: when it was seen, by this node's clock."""

    timestamp: str
    since: float


@dataclass(eq=False)
class OverduePods:
    """Kills the processes of leases whose pods should have ended.

    The user who deletes a pod chooses how long the kubelet waits for its programs. A pod that is deleted with
    a long grace period is not ended at its deadline any more, and after a forced deletion its programs run on
    without a pod. A probe may have a grace period of its own. While the kubelet waits for a container whose
    probe has failed, it ends the pod neither at its deadline nor when it is deleted.

    kill: kills the processes of pods, given their UIDs, and returns how many. clock: seconds since the epoch.
    """

    _api: NodeApi
    _store: LeaseStore
    _kill: Callable[[Collection[str]], int]
    _clock: Callable[[], float]
    _gone_since: dict[str, float] = field(default_factory=dict)
    _deletions: dict[str, _SeenDeletion] = field(default_factory=dict)

    async def end(self, _: "Sequence[Claim]") -> None:
        """Kill what is overdue now."""
        now, leases = self._clock(), list(self._store.leases.values())
        uids = {lease.uid for lease in leases}
        gone = {uid for uid in uids if uid not in self._api.pods}
        self._gone_since = {uid: self._gone_since.get(uid, now) for uid in gone}
        overdue = {uid for uid, since in self._gone_since.items() if now - since >= GONE_S}
        overdue |= {
            uid
            for uid in uids - gone
            if (end := ended_at(self._api.pods[uid])) is not None and now >= end + LATE_S
        }
        overdue |= self._outliving_deletion(uids - gone, now)
        killed = await asyncio.to_thread(self._kill, overdue) if overdue else 0
        if killed:
            for name in sorted({lease.pod_name for lease in leases if lease.uid in overdue}):
                _LOG.warning("the programs of %s were killed, since they outlived the pod", name)
            for uid in overdue - gone:
                self._api.pod_event(
                    uid,
                    "FenkaDeadline",
                    "the deadline or the deletion of the pod, and its grace period, are over, so its "
                    "programs were killed",
                )

    def _outliving_deletion(self, uids: Collection[str], now: float) -> set[str]:
        """Return the pods whose grace period has ended since they were deleted.

        The time of a deletion is by the clock of the API server, so what counts is when it was seen here. A
        deletion with a shorter grace period has another time.
        """
        deletions, overdue = dict[str, _SeenDeletion](), set[str]()
        for uid in uids:
            pod, known = self._api.pods[uid], self._deletions.get(uid)
            meta = pod.metadata
            if meta.deletion_timestamp is None or pod.finished:
                continue
            if known is None or known.timestamp != meta.deletion_timestamp:
                known = _SeenDeletion(meta.deletion_timestamp, now)
            deletions[uid] = known
            if now >= known.since + (meta.deletion_grace_period_seconds or 0) + LATE_S:
                overdue.add(uid)
        self._deletions = deletions
        return overdue


def ended_at(pod: Pod) -> float | None:
    """Return when the kubelet has ended the pod, in seconds since 1970; None if it has no deadline."""
    limit, start = time_limit_s(pod), seconds(pod.status.start_time)
    return None if limit is None or start is None or pod.finished else start + limit
