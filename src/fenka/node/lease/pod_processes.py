"""Whose a process is, by the one thing that a container cannot change: its cgroup."""

import contextlib
import os
import re
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path

from fenka.isolation.processes import start_ticks
from fenka.node.lease.store import Token

_POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})")
_CONTAINER = re.compile(r"[0-9a-f]{64}")


def place_of(pid: int, proc: Path = Path("/proc")) -> tuple[str, str]:
    """UID of the pod and id of the container that a process is in; empty strings for one of the host.

    systemd's cgroup driver writes _ for -, and a static pod's UID has neither.
    """
    try:
        # A container may give cgroups below its own names that are no text.
        text = os.fsdecode((proc / str(pid) / "cgroup").read_bytes())
    except OSError:
        return "", ""
    pod = _POD.search(text)
    if pod is None:
        return "", ""
    containers = _CONTAINER.findall(text, pod.end())
    return pod[1].replace("_", "-"), containers[0] if containers else ""


class Owners:
    """Which token a process is of. names: containers by the id of their runtime, as far as the API server
    knows them: that is a moment after their processes run."""

    def __init__(
        self, tokens: Iterable[Token], names: Mapping[str, str], proc: Path = Path("/proc")
    ) -> None:
        self._of_pod: dict[str, list[Token]] = {}
        for token in tokens:
            if token.lease is not None:
                self._of_pod.setdefault(token.lease.uid, []).append(token)
        self._names, self._proc = names, proc

    def of(self, pid: int) -> list[Token]:
        """One where that is certain; all of its pod's while nobody names its container; none of others."""
        uid, container = place_of(pid, self._proc)
        candidates = self._of_pod.get(uid, [])
        name = self._names.get(container)
        named = [it for it in candidates if it.lease and it.lease.container == name]
        return named or candidates


def living_pods(proc: Path = Path("/proc")) -> set[str]:
    """UIDs of the pods that have a process that is not a zombie."""
    found: set[str] = set()
    for name in os.listdir(proc):
        if name.isdecimal():
            uid, _ = place_of(int(name), proc)
            if uid and uid not in found and start_ticks(name, proc) is not None:
                found.add(uid)
    return found


def kill(pid: int, pod: str, proc: Path = Path("/proc")) -> bool:
    """End a process if it is still one of this pod; whether it was sent the signal."""
    with contextlib.suppress(OSError):
        # The number may be another process's by now: hold it, then look again.
        descriptor = os.pidfd_open(pid)
        try:
            if place_of(pid, proc)[0] == pod:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                return True
        finally:
            os.close(descriptor)
    return False
