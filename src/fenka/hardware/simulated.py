"""A simulated node: a directory with shared memory, a card server, and a driver that uses both.

Programs load ``<directory>/lib/libcuda.so.1`` and ``libnvidia-ml.so.1``. The layout of the shared memory is
read from the C header through cffi, so that it is defined once.
"""

import contextlib
import errno
import mmap
import os
import selectors
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from fenka.core.errors import INVALID_INPUT
from fenka.hardware.peer_credentials import peer
from fenka.hardware.simulated_state import NATIVE, layout, write_state
from fenka.hardware.spec import NodeError, SimulatedCard

_LIBRARIES: Final = ("libcuda.so.1", "libnvidia-ml.so.1")
_DEADLINE_S: Final = 10.0
_HELLO: Final = b"N"
_WELCOME_BYTES: Final = 16
# node.h: struct node_command and struct node_answer.
_HELLO_COMMAND: Final = b"X"
_COMMAND: Final = struct.Struct("=IIq")
_ANSWER: Final = struct.Struct("=iI")
_REFUSALS: Final = {
    errno.EOPNOTSUPP: "card {card} has no ECC memory, which could count errors",
    errno.EBUSY: "card {card} is in use, so it cannot be reset: end its programs first",
    errno.EINVAL: "{value} is not possible for that: XIDs are 1 to 65535, temperatures 0 to 200",
    errno.EPERM: "only the user whose simulated node it is may change its cards",
}


class NoSuchCard(NodeError):
    """The simulated node has no card of that index or UUID."""

    exit_code = INVALID_INPUT


class SimulatedNode:
    """A handle of a node. The node is the directory, and outlives the object.

    An object that has started the node keeps a connection to the card server. Otherwise the server ends half
    a minute after the last program.
    """

    def __init__(self, directory: Path, native: Path = NATIVE) -> None:
        self.directory, self._native = directory, native
        self._server: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    @classmethod
    def create(
        cls, directory: Path, spec: tuple[SimulatedCard, ...], native: Path = NATIVE
    ) -> "SimulatedNode":
        """Make a directory a node with these cards, unless it is one already.

        Args:
            directory: The node's directory.
            spec: Its cards.
            native: Directory of the libraries and the card server, readable by all users of the node.

        Raises:
            NodeError: A running card server serves other cards there, or the directory cannot be written.
            OtherBuild: The card server that runs there is another build's.
        """
        directory = directory.absolute()
        layout()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "lib").mkdir(exist_ok=True)
            for name in _LIBRARIES:
                _link(directory / "lib" / name, native / name)
            write_state(directory, spec)
        except OSError as error:
            raise NodeError(
                f"cannot make a simulated node in {directory}: {error.strerror}"
            ) from None
        return cls(directory, native)

    @property
    def library_dir(self) -> Path:
        """Directory of the driver's libraries: the value for LD_LIBRARY_PATH."""
        return self.directory / "lib"

    @property
    def running(self) -> bool:
        """Whether a card server answers."""
        connection = self._connect()
        if connection is not None:
            connection.close()
        return connection is not None

    def start(self, idle_seconds: int = 30) -> None:
        """Start a card server, in a session of its own, unless one runs.

        idle_seconds: the server ends after this time without any program; 0: never.
        Raises NodeError, with the server's own message, if it does not start within 10 s.
        """
        self._connection = self._connection or self._connect()
        if self._connection is not None:
            return
        failure = self._launch(idle_seconds)
        # Another process may have been faster: then its server is used once it answers.
        deadline = time.monotonic() + (_DEADLINE_S if failure is None else 1.0)
        while self._connection is None:
            self._connection = self._connect()
            if self._connection is None and time.monotonic() > deadline:
                raise NodeError(failure or f"the card server of {self.directory} does not answer")

    def restart(self) -> None:
        """Start a card server if the one that was used has ended. Raises NodeError."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._server is not None and self._server.poll() is not None:
            self._server = None
        self.start()

    def stop(self) -> None:
        """End the card server, if there is one, and wait until it has ended."""
        connection, self._connection = self._connection or self._connect(), None
        if connection is not None:
            with contextlib.closing(connection):
                _end(peer(connection).pid, connection)
        if self._server is not None:
            self._server.wait(_DEADLINE_S)
            self._server = None

    def busy_ns(self, card: int = 0) -> dict[int, int]:
        """Return the device time that each attached process has had on a card, by process ID.

        IDs are those in the card server's PID namespace. Times are exact up to the last use of the card.
        """
        with self._state() as state:
            slots = [state.processes[slot] for slot in range(state.slots_used)]
            # The server's own slot has no process.
            return {slot.pid: slot.busy_ns[card] for slot in slots if slot.generation and slot.pid}

    def past_busy_ns(self, card: int = 0) -> dict[int, int]:
        """Return the same for the last processes that have ended, until their end."""
        with self._state() as state:
            return {
                past.pid: past.busy_ns
                for past in state.past
                if past.generation != 0 and past.card == card
            }

    @contextlib.contextmanager
    def _state(self) -> Iterator[Any]:
        ffi, _ = layout()
        with (
            (self.directory / "state").open("rb") as file,
            mmap.mmap(
                file.fileno(), ffi.sizeof("struct fenka_node"), prot=mmap.PROT_READ
            ) as content,
            ffi.from_buffer(content) as held,
        ):
            yield ffi.cast("struct fenka_node *", held)

    def find(self, card: str) -> int:
        """Return the index of a card that is given by index or UUID. Raises NoSuchCard, NodeError."""
        ffi, _ = layout()
        try:
            content = (self.directory / "state").read_bytes()
        except OSError:
            raise NodeError(f"there is no simulated node in {self.directory}") from None
        if len(content) < ffi.sizeof("struct fenka_node"):
            raise NodeError(f"the simulated node in {self.directory} is another version of fenka's")
        state = ffi.cast("struct fenka_node *", ffi.from_buffer(content))
        for index in range(state.card_count):
            uuid = ffi.string(state.cards[index].uuid).decode()
            if card == str(index) or card.casefold() == uuid.casefold():
                return index
        raise NoSuchCard(
            f"the simulated node has no card {card}: it has {state.card_count}, counted from 0"
        )

    def set_temperature(self, card: int, celsius: int | None) -> None:
        """Set the temperature that a card reports; None restores the one that follows its load.

        This and the following methods raise NodeError if the node cannot do it.
        """
        if celsius is None:
            self._command("NO_TEMPERATURE", card)
        else:
            self._command("TEMPERATURE", card, celsius)

    def raise_xid(self, card: int, number: int) -> None:
        """Report an XID, the driver's number of an error, to all listeners."""
        self._command("XID", card, number)

    def add_ecc_errors(self, card: int, count: int, *, corrected: bool = False) -> None:
        """Count and report errors of the card's memory; uncorrected ones also as XID 48."""
        self._command("ECC_CORRECTED" if corrected else "ECC_UNCORRECTED", card, count)

    def lose(self, card: int) -> None:
        """Remove the card from the bus: XID 79, and from then on only errors."""
        self._command("LOSE", card)

    def recover(self, card: int) -> None:
        """Reset a card: it is not lost, volatile ECC counters are zero, and pending MIG becomes current."""
        self._command("RECOVER", card)

    def set_mig_pending(self, card: int, *, pending: bool) -> None:
        """Let switches of MIG stay pending until `recover`, as in a virtual machine, or no longer."""
        self._command("MIG_PENDING", card, int(pending))

    def fail_mig(self, card: int, count: int) -> None:
        """Let the next creations of instances fail for want of resources."""
        self._command("MIG_FAIL", card, count)

    def _command(self, command: str, card: int, value: int = 0) -> None:
        connection = self._connect(_HELLO_COMMAND)
        if connection is None:
            raise NodeError(
                f"no simulated node runs in {self.directory}: start one, as with "
                f"`fenka daemon --background --simulate T4`"
            )
        _, constants = layout()
        try:
            with connection:
                connection.sendall(_COMMAND.pack(constants[f"FENKA_NODE_{command}"], card, value))
                answer = connection.recv(_ANSWER.size, socket.MSG_WAITALL)
        except OSError:
            answer = b""
        if len(answer) != _ANSWER.size:
            raise NodeError(
                f"the card server of {self.directory} ended during a command: try again"
            )
        code = _ANSWER.unpack(answer)[0]
        if code == errno.EOPNOTSUPP and command.startswith("MIG"):
            raise NodeError(f"card {card} cannot be divided into instances: its model has no MIG")
        if code == errno.ENODEV:
            raise NoSuchCard(f"the simulated node has no card {card}")
        if code:
            raise NodeError(_REFUSALS.get(code, os.strerror(code)).format(card=card, value=value))

    def _launch(self, idle_seconds: int) -> str | None:
        """Start a server. Return None when it is ready, else its error."""
        try:
            self._server = subprocess.Popen(
                [
                    self._native / "fenka-cardserver",
                    self.directory,
                    "--idle-seconds",
                    str(idle_seconds),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise NodeError(f"cannot start the card server: {error.strerror}") from None
        pipe = self._server.stdout
        assert pipe is not None
        output = b""
        with contextlib.closing(pipe), selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while not output.endswith(b"\n") and selector.select(_DEADLINE_S):
                if not (more := os.read(pipe.fileno(), 4096)):
                    break
                output += more
        if output == b"ready\n":
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.wait(1.0)
        sentence = output.decode(errors="replace").strip().removeprefix("fenka-cardserver: ")
        return sentence or self._exit_reason()

    def _exit_reason(self) -> str:
        code = self._server.returncode if self._server else None
        if code == -signal.SIGBUS:
            state = self.directory / "state"
            return f"the card server cannot write {state}: make room on that file system (`df`)"
        how = f"was ended by {signal.Signals(-code).name}" if code and code < 0 else "ended"
        return f"the card server of {self.directory} {how} before it was ready: try again"

    def _connect(self, hello: bytes = _HELLO) -> socket.socket | None:
        """Return a greeted connection; None if no server answers within 10 s."""
        try:
            directory = os.open(self.directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return None
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(_DEADLINE_S)
            # By descriptor: a socket's address holds 108 bytes, and a path may be longer.
            connection.connect(f"/proc/self/fd/{directory}/server.sock")
            connection.sendall(hello)
            welcome = connection.recv(_WELCOME_BYTES, socket.MSG_WAITALL)
            welcomed = len(welcome) == _WELCOME_BYTES
        except OSError:
            welcomed = False
        finally:
            os.close(directory)
        if welcomed:
            return connection
        connection.close()
        return None


def _end(pid: int, connection: socket.socket) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            if pid > 0:
                os.kill(pid, number)
            connection.settimeout(_DEADLINE_S)
            if connection.recv(1) == b"":
                return
        except (ProcessLookupError, ConnectionError):
            return
        except PermissionError:
            raise NodeError(
                f"process {pid}, the card server, belongs to another user and cannot be stopped"
            ) from None
        except TimeoutError:
            continue
    raise NodeError(f"process {pid}, the card server, does not end")


def _link(link: Path, target: Path) -> None:
    if not (link.is_symlink() and link.readlink() == target):
        with tempfile.TemporaryDirectory(dir=link.parent) as temporary:
            (Path(temporary) / "link").symlink_to(target)
            (Path(temporary) / "link").replace(link)
