"""Tells the processes of leases which PID namespaces have ended, so that they empty the slots left there.

A process judges only owners of its own PID namespace. So nobody in the lease judges what ended together
with its namespace: a sandbox such as bubblewrap or apptainer, or a container before its restart. The agent
sees all processes of the machine. `native/include/fenka/lease.h` defines the words that they exchange, and
explains why no living process is taken for dead.

The workstation's daemon and the node's program call `NamespaceReaper.run_once` ten times a second.
Tenants can write, shorten and lock accounts, so these are accessed in place, in bounded pieces, without
waiting.
"""

import contextlib
import os
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from fenka import procfs
from fenka.isolation import account
from fenka.isolation.layout import constant

__all__ = ["PERIOD_S", "NamespaceReaper", "in_initial_namespace", "populated_namespaces"]

PERIOD_S = 0.1
"""Between rounds. Programs wait for an answer for three seconds."""

SCAN_PERIOD_S = 5.0
"""Without a request, so that the memory of ended processes is not shown as used for long."""

REST_FACTOR = 4
"""Times as long as the last round took. Tenants may ask without end, and name namespaces that never were."""

_INITIAL_NAMESPACE = 0xEFFFFFFC
"""Inode of the machine's first PID namespace, whose processes see all others."""


def in_initial_namespace() -> bool:
    """Return whether this process is in the machine's first PID namespace."""
    return _own() == _INITIAL_NAMESPACE


def populated_namespaces(proc: Path = Path("/proc")) -> set[int] | None:
    """Return the inodes of the PID namespaces that have a process.

    Only the caller's own and those below it are seen. None where a process below it cannot be inspected. A
    process in the caller's own namespace needs no inspection.
    """
    found = {_own(proc)}
    for name in filter(str.isdecimal, os.listdir(proc)):
        try:
            if procfs.start_ticks(name, proc) is None:
                continue
            found.add((proc / name / "ns/pid").stat().st_ino)
        except (FileNotFoundError, ProcessLookupError):
            continue
        except PermissionError:
            if _nested(name, proc):
                return None
    return found


def _own(proc: Path = Path("/proc")) -> int:
    return (proc / "self/ns/pid").stat().st_ino


def _nested(pid: str, proc: Path) -> bool:
    """Whether a process is in a namespace below the caller's. True where it cannot be told."""
    try:
        return len(procfs.namespace_pids(pid, proc)) != 1
    except (FileNotFoundError, ProcessLookupError):
        return False


class NamespaceReaper:
    """Answers requests in accounts, and looks at all of them every few seconds."""

    def __init__(
        self,
        populated: Callable[[], set[int] | None] = populated_namespaces,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._populated, self._clock = populated, clock
        self._last_scan = -SCAN_PERIOD_S
        self._not_before = self._last_scan
        self._own = _own()
        self._descendants: set[int] = set()
        """Namespaces that had a process once. They are below the agent's own."""

    def run_once(self, accounts: Iterable[Path]) -> None:
        """Look at the accounts once. Cheap where no process asks, and none is in a namespace of its own."""
        began = self._clock()
        if began < self._not_before:
            return
        everybody = began - self._last_scan >= SCAN_PERIOD_S
        if everybody:
            self._last_scan = began
        with contextlib.ExitStack() as opened:
            words = []
            for path in accounts:
                with contextlib.suppress(OSError, account.InvalidAccount):
                    descriptor = account.open_file(path, os.O_RDWR)
                    opened.callback(os.close, descriptor)
                    it = _AccountWords(descriptor)
                    if everybody or it.asked != it.answered:
                        words.append(it)
            self._process(words)
        self._not_before = self._clock() + (self._clock() - began) * REST_FACTOR

    def _process(self, accounts: "list[_AccountWords]") -> None:
        suspects = []
        for words in accounts:
            with contextlib.suppress(OSError):
                words.reuse()
                suspects += [(words, index) for index in words.foreign(self._own)]
        # Named first, looked at afterwards: who took the index before that is seen by the look.
        named: list[tuple[_AccountWords, int]] = []
        before = self._scan() if suspects else None
        for words, index in suspects:
            inode = words.namespaces[index]
            if before is None or not self._visible(inode):
                continue
            with contextlib.suppress(OSError):
                if inode not in before:
                    words.set_state(index, constant("FENKA_NAMESPACE_RETIRING"))
                    named.append((words, index))
                elif words.states[index]:  # an agent before this one was killed here
                    words.set_state(index, 0)
        now = self._scan() if named else None
        for words, index in named:
            gone = now is not None and words.namespaces[index] not in now
            with contextlib.suppress(OSError):
                words.set_state(index, constant("FENKA_NAMESPACE_ENDED") if gone else 0)
        for words in accounts:
            with contextlib.suppress(OSError):
                words.answer()

    def _scan(self) -> set[int] | None:
        found = self._populated()
        self._descendants |= found or set()
        return found

    def _visible(self, inode: int) -> bool:
        """Whether a process of this namespace would be seen."""
        return in_initial_namespace() or inode in self._descendants


class _AccountWords:
    """The words of one account that the agent and the processes exchange, as they were when it was opened."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.asked = self._word("reap_requested")
        self.answered = self._word("reap_completed")
        # Whatever else the upper halves say: an inode of /proc has 32 bits.
        self.namespaces = [it & 0xFFFFFFFF for it in account.words(descriptor, "pid_namespaces")]
        self.states = account.words(descriptor, "namespace_states")

    def foreign(self, own: int) -> list[int]:
        """Return the indexes of namespaces other than the agent's that are in use, or were being retired."""
        return [
            index
            for index, inode in enumerate(self.namespaces[: constant("FENKA_MAX_NAMESPACES")])
            if inode not in (0, own) and self.states[index] != constant("FENKA_NAMESPACE_ENDED")
        ]

    def reuse(self) -> None:
        """Free the indexes of ended namespaces that no slot's owner has any more."""
        ended = {
            index
            for index, state in enumerate(self.states)
            if state == constant("FENKA_NAMESPACE_ENDED")
        }
        if ended:
            used = {
                identity >> constant("FENKA_IDENTITY_NAMESPACE") & 0xFF
                for identity in account.words(self._descriptor, "identity")
                if identity
            }
            for index in ended - used:
                self._put("pid_namespaces", index, 0)
                self.set_state(index, 0)

    def set_state(self, index: int, state: int) -> None:
        """Write FENKA_NAMESPACE_…, or 0."""
        self._put("namespace_states", index, state)

    def answer(self) -> None:
        """Say that all requests have been acted upon that were made before the account was opened."""
        if self.asked != self.answered:
            self._put("reap_completed", 0, self.asked)

    def _word(self, field: str) -> int:
        (word,) = account.words(self._descriptor, field)
        return word

    def _put(self, field: str, index: int, word: int) -> None:
        os.pwrite(self._descriptor, struct.pack("<Q", word), account.offset(field) + 8 * index)
