"""Finds PID namespaces that have ended, so that the slots of their processes can be emptied.

A process in a lease can only see whether owners in its own PID namespace have ended. The daemon and the node
program see all processes of the machine.
"""

import contextlib
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from fenka import procfs
from fenka.isolation import account
from fenka.isolation.lease_control import constant

PERIOD_S = 0.1
"""Between rounds. Programs wait up to three seconds for an answer."""

SCAN_PERIOD_S = 5.0
"""Between scans without a request, so that memory of ended processes is soon shown as free."""

REST_FACTOR = 4
"""Rest after a round, as a multiple of its duration: tenants may send any number of requests."""


def in_initial_namespace() -> bool:
    """Return whether this process is in the machine's initial PID namespace."""
    return _own() == account.INITIAL_PID_NAMESPACE


def populated_namespaces(proc: Path = Path("/proc")) -> set[int] | None:
    """Return the inodes of the PID namespaces that have a process, or None if not all could be inspected.

    Only the caller's namespace and those nested in it are visible.
    """
    inodes = {_own(proc)}
    for name in filter(str.isdecimal, os.listdir(proc)):
        try:
            if procfs.start_ticks(name, proc) is None:
                continue
            inodes.add((proc / name / "ns/pid").stat().st_ino)
        except (FileNotFoundError, ProcessLookupError):
            continue
        except PermissionError:
            if _nested(name, proc):
                return None
    return inodes


def _own(proc: Path = Path("/proc")) -> int:
    return (proc / "self/ns/pid").stat().st_ino


def _nested(pid: str, proc: Path) -> bool:
    """Return whether a process is in a nested namespace; True if that is unknown."""
    try:
        return len(procfs.namespace_pids(pid, proc)) != 1
    except (FileNotFoundError, ProcessLookupError):
        return False


class NamespaceReaper:
    """Answers requests in accounts, and scans all accounts every few seconds. It runs ten times a second.

    `native/include/fenka/lease.h` defines the words, and explains why no living process is taken for dead.
    Tenants can write, shorten and lock accounts, so these are accessed in place, in bounded pieces, without
    waiting.
    """

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
        """Namespaces in which a process was seen. They are nested in the agent's."""

    def run_once(self, accounts: Iterable[Path]) -> None:
        """Check the accounts once. Cheap without requests and without nested namespaces."""
        now = self._clock()
        if now < self._not_before:
            return
        scan_all = now - self._last_scan >= SCAN_PERIOD_S
        if scan_all:
            self._last_scan = now
        with contextlib.ExitStack() as opened:
            words = []
            for path in accounts:
                with contextlib.suppress(OSError, account.InvalidAccount):
                    descriptor = account.open_file(path, os.O_RDWR)
                    opened.callback(os.close, descriptor)
                    account_words = _AccountWords(descriptor)
                    if scan_all or account_words.requested != account_words.completed:
                        words.append(account_words)
            self._process(words)
        self._not_before = self._clock() + (self._clock() - now) * REST_FACTOR

    def _process(self, accounts: "list[_AccountWords]") -> None:
        suspects = []
        for words in accounts:
            with contextlib.suppress(OSError):
                words.reuse()
                suspects += [(words, index) for index in words.foreign(self._own)]
        # Retiring comes before the second scan, which then sees every process that has taken the index.
        retiring: list[tuple[_AccountWords, int]] = []
        before = self._scan() if suspects else None
        for words, index in suspects:
            inode = words.namespaces[index]
            if before is None or not self._visible(inode):
                continue
            with contextlib.suppress(OSError):
                if inode not in before:
                    words.set_state(index, constant("FENKA_NAMESPACE_RETIRING"))
                    retiring.append((words, index))
                elif words.states[index]:  # an earlier agent was killed at this point
                    words.set_state(index, 0)
        after = self._scan() if retiring else None
        for words, index in retiring:
            ended = after is not None and words.namespaces[index] not in after
            with contextlib.suppress(OSError):
                words.set_state(index, constant("FENKA_NAMESPACE_ENDED") if ended else 0)
        for words in accounts:
            with contextlib.suppress(OSError):
                words.answer()

    def _scan(self) -> set[int] | None:
        inodes = self._populated()
        self._descendants |= inodes or set()
        return inodes

    def _visible(self, inode: int) -> bool:
        """Return whether processes of this namespace are visible."""
        return in_initial_namespace() or inode in self._descendants


class _AccountWords:
    """The words of one account that agent and processes exchange, as of its opening."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.requested = self._word("reap_requested")
        self.completed = self._word("reap_completed")
        # An inode of /proc has 32 bits; the upper halves are ignored.
        self.namespaces = [
            inode & 0xFFFFFFFF for inode in account.words(descriptor, "pid_namespaces")
        ]
        self.states = account.words(descriptor, "namespace_states")

    def foreign(self, own: int) -> list[int]:
        """Return the indexes of namespaces other than the agent's that are in use or retiring."""
        return [
            index
            for index, inode in enumerate(self.namespaces[: constant("FENKA_MAX_NAMESPACES")])
            if inode not in (0, own) and self.states[index] != constant("FENKA_NAMESPACE_ENDED")
        ]

    def reuse(self) -> None:
        """Free the indexes of ended namespaces that no slot uses any more."""
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
        """Set a namespace's state: FENKA_NAMESPACE_…, or 0."""
        self._put("namespace_states", index, state)

    def answer(self) -> None:
        """Mark all requests as completed that were made before the account was opened."""
        if self.requested != self.completed:
            self._put("reap_completed", 0, self.requested)

    def _word(self, field: str) -> int:
        (word,) = account.words(self._descriptor, field)
        return word

    def _put(self, field: str, index: int, word: int) -> None:
        os.pwrite(self._descriptor, struct.pack("<Q", word), account.offset(field) + 8 * index)


_READER = """
import sys
most = int(sys.argv[1])
out = sys.stdout.buffer
for path in sys.stdin.buffer.read().split(b"\\0"):
    try:
        with open(path, "rb") as file:
            text = file.read(most)
    except OSError:
        text = None
    out.write(b"%d\\n" % (-1 if text is None else len(text)) + (text or b""))
    out.flush()
"""


def read_files(
    paths: Sequence[Path], most_bytes: int, timeout_s: float
) -> Mapping[Path, bytes | None]:
    """Return the first bytes of files of /proc, or None for a file that cannot be read.

    A process can block readers of its `environ` and `maps` beyond SIGKILL, by a FUSE server of its own. So a
    child reads, and is abandoned after the deadline. Files from the one that blocks it on are missing.
    """
    if not paths:
        return {}
    words = [sys.executable, "-ISc", _READER, str(most_bytes)]
    # Not used as a context manager, which would wait for its end.
    child = subprocess.Popen(words, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout
    try:
        # A command line holds fewer paths than a user may have processes.
        output, _ = child.communicate(b"\0".join(map(os.fsencode, paths)), timeout_s)
    except subprocess.TimeoutExpired as late:
        output = late.output or b""
        child.kill()
    finally:
        child.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(0)
    return dict(zip(paths, _split(output), strict=False))


def _split(output: bytes) -> list[bytes | None]:
    contents: list[bytes | None] = []
    start = 0
    while (newline := output.find(b"\n", start)) >= 0:
        size = int(output[start:newline])
        start = newline + 1 + max(size, 0)
        if start > len(output):
            break
        contents.append(None if size < 0 else output[newline + 1 : start])
    return contents
