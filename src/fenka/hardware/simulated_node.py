"""A simulated node: a directory with shared memory, a card server, and a driver that uses both.

Programs load ``<directory>/lib/libcuda.so.1`` and ``libnvidia-ml.so.1``. The layout of the shared memory is
read from the C header through cffi, so that it is defined once.
"""

import contextlib
import errno
import fcntl
import filecmp
import mmap
import os
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from fenka import native as built
from fenka.core.errors import INVALID_INPUT
from fenka.core.mig.geometry import TABLES, Geometry, Profile
from fenka.hardware.card_spec import NodeError, SimulatedCard
from fenka.hardware.peer_credentials import peer

_COPY = {
    "A100": (1, 1, 2, 3, 4, 7),
    "H100": (1, 1, 2, 3, 4, 8),
    "B200": (2, 2, 4, 6, 8, 16),
    "A30": (1, 1, 2, 2, 4, 4),
}
"""Copy engines of 1g, double memory, 2g, 3g, 4g, 7g."""
_DECODERS = {
    "A100": (0, 1, 1, 2, 2, 5),
    "H100": (1, 1, 2, 3, 4, 7),
    "B200": (1, 1, 2, 3, 4, 7),
    "A30": (0, 0, 2, 2, 4, 4),
}
"""Decoders in the same order."""
_COLUMNS = {1: 0, 2: 2, 3: 3, 4: 4, 7: 5}

_A100_CHOICE = {
    (1, 1): (6, 4, 5, 0, 1, 2, 3),
    (2, 2): (4, 0, 2),
    (1, 2): (4, 0, 2, 6),
    (3, 4): (4, 0),
}
"""The order in which the driver of an A100 chooses starts, by compute slices and size, as hardware showed."""
_H100_CHOICE = _A100_CHOICE | {(3, 4): (0, 4)}


def family(geometry: Geometry) -> str:
    """Return the model whose engines and choices a model shares."""
    model = geometry.model
    if geometry.compute == 4:
        return "A30"
    if model.startswith("A100"):
        return "A100"
    return "B200" if model.startswith(("B", "GB")) else "H100"


def engines(geometry: Geometry, profile: Profile) -> tuple[int, int, int, int, int]:
    """Return copy engines, decoders, encoders, JPEG and OFA engines."""
    kind = family(geometry)
    plain = min(other.size for other in geometry.profiles if other.compute == profile.compute)
    column = 1 if profile.size > plain else _COLUMNS[profile.compute]
    decoders = max(_DECODERS[kind][column], int(profile.exclusive))
    media = int(profile.exclusive or profile.compute == geometry.compute)
    jpeg = media if kind in ("A100", "A30") else decoders
    return (_COPY[kind][column], decoders, 0, jpeg, media)


def choice(geometry: Geometry, profile: Profile) -> tuple[int, ...]:
    """Return the starts in the order in which the driver chooses."""
    if geometry.compute == 4:
        return profile.starts
    known = _A100_CHOICE if family(geometry) == "A100" else _H100_CHOICE
    return known.get((profile.compute, profile.size), profile.starts)


def fill(target: Any, key: str, *, mirrored: bool) -> None:
    """Write a model's geometry into a card's part of the state file. key: of TABLES."""
    geometry = TABLES[key]
    target.profile_count = len(geometry.profiles)
    target.slices = geometry.compute
    target.axis = max(profile.size for profile in geometry.profiles)
    target.mirrored = mirrored
    target.keeps_mode = family(geometry) in ("A100", "A30") and key != "RTXPRO6000"
    for row, profile in zip(target.profiles, geometry.profiles, strict=False):
        row.name = profile.name.encode()
        row.kind, row.id = profile.enum, profile.profile_id
        row.slices, row.size, row.limit = profile.compute, profile.size, profile.limit
        row.sm_count, row.memory_mib = profile.sms, profile.memory_mib
        row.exclusive = profile.exclusive
        row.engines = engines(geometry, profile)
        row.start_count = len(profile.starts)
        row.starts[0 : len(profile.starts)] = list(profile.starts)
        row.choice[0 : len(profile.starts)] = list(choice(geometry, profile))


NATIVE: Final = built.DIRECTORY / "simulated"
"""Directory of the simulated driver's libraries and card server."""

_FIXED: Final = (
    "uuid", "name", "serial", "pci_bus_id", "memory_bytes", "reserved_bytes", "context_bytes",
    "sm_count", "compute_major", "compute_minor", "idle_power_mw", "power_limit_mw",
    "max_sm_clock_mhz", "max_memory_clock_mhz", "fan_percent", "unified",
)  # fmt: skip
"""Fields that identify a card. The others change while the node runs."""


class OtherCards(NodeError):
    """A running card server serves other cards there."""


class OtherBuild(NodeError):
    """The card server that runs is another build's: its node has another layout."""


def layout() -> tuple[Any, dict[str, int]]:
    """Return the header's structs as a cffi ``FFI``, and its integer constants."""
    header = NATIVE / "layout.h"
    return built.structs(header), built.constants(header)


def _state(directory: Path, spec: tuple[SimulatedCard, ...]) -> Any:
    """Return the state file's content as a cffi buffer."""
    ffi, constants = layout()
    if not 1 <= len(spec) <= constants["FENKA_NODE_CARDS"]:
        raise NodeError(f"a node has 1 to {constants['FENKA_NODE_CARDS']} cards, not {len(spec)}")
    state = ffi.new("struct fenka_node *")
    state.magic = constants["FENKA_NODE_MAGIC"]
    state.version = constants["FENKA_NODE_VERSION"]
    state.card_count = len(spec)
    state.driver_version = spec[0].driver_version.encode()
    major, minor = spec[0].cuda_version.split(".")
    state.cuda_version = int(major) * 1000 + int(minor) * 10
    state.topology = constants[f"FENKA_NODE_{spec[0].topology.upper()}"]
    state.cpus = os.cpu_count() or 1
    for index, card in enumerate(spec):
        _fill(state.cards[index], directory, index, card)
        state.faults[index].ecc = card.model.ecc
        state.mig[index].pci_device = card.model.pci_device
        if card.model.mig:
            fill(state.mig[index], card.model.mig, mirrored=card.mig_mirrored)
    return ffi.buffer(state)


def _fill(target: Any, directory: Path, index: int, card: SimulatedCard) -> None:
    model = card.model
    generated = uuid.uuid5(uuid.NAMESPACE_URL, f"fenka:{directory.resolve()}:{index}:{model.key}")
    target.uuid = (card.uuid or f"GPU-{generated}").encode()
    target.name = card.name.encode()
    target.serial = f"{int(generated) % 10**13:013d}".encode()
    target.pci_bus_id = f"00000000:{index + 1:02X}:00.0".encode()
    target.memory_bytes = card.memory_mib << 20
    target.reserved_bytes = card.reserved_mib << 20
    target.context_bytes = card.context_mib << 20
    target.sm_count = model.sm_count
    target.compute_major, target.compute_minor = model.compute_capability
    target.idle_power_mw = model.idle_power_w * 1000
    target.power_limit_mw = model.power_limit_w * 1000
    target.max_sm_clock_mhz = model.sm_clock_mhz
    target.max_memory_clock_mhz = model.memory_clock_mhz
    target.fan_percent = model.fan_percent
    target.unified = model.unified


def write_state(directory: Path, spec: tuple[SimulatedCard, ...]) -> None:
    """Write the cards to the node's state file. Raises NodeError, OtherBuild, OtherCards, OSError."""
    _replace(directory, bytes(_state(directory, spec)))


def _replace(directory: Path, content: bytes) -> None:
    """Replace the file, unless a server uses it: then the cards must be the same."""
    path = directory / "state"
    with _locked(path) as current:
        if current is not None:
            if not _same_layout(current, content):
                raise OtherBuild(
                    f"a card server of another build serves {directory}: end it with `fenka sim stop`, which "
                    "takes the cards of its programs"
                )
            if _fixed(current) != _fixed(content):
                raise OtherCards(
                    f"a card server already serves other cards in {directory}: "
                    "end its programs and that server first (`fenka sim stop`), or use another directory"
                )
            return
        with tempfile.NamedTemporaryFile(dir=directory, delete=False) as file:
            # Trailing zeros are a hole, which takes no memory on a tmpfs.
            file.write(content.rstrip(b"\0"))
            file.truncate(len(content))
            # Programs of any user write their counters here.
            os.fchmod(file.fileno(), 0o666)
        Path(file.name).replace(path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bytes | None]:
    """Hold the lock that a card server takes. If a server has it, yield the file's content instead."""
    try:
        # Does not block, whatever kind of file this is.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    with open(descriptor, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield file.read()
        else:
            yield None


def _same_layout(one: bytes, other: bytes) -> bool:
    ffi, _ = layout()
    if len(one) != len(other):
        return False
    states = [ffi.cast("struct fenka_node *", ffi.from_buffer(content)) for content in (one, other)]
    return len({(state.magic, state.version) for state in states}) == 1


def _fixed(content: bytes) -> tuple[object, ...]:
    ffi, _ = layout()
    state = ffi.cast("struct fenka_node *", ffi.from_buffer(content))
    cards = [
        tuple(_plain(ffi, getattr(state.cards[index], name)) for name in _FIXED)
        for index in range(state.card_count)
    ]
    return (ffi.string(state.driver_version), state.cuda_version, state.topology, *cards)


def _plain(ffi: Any, value: Any) -> object:
    return value if isinstance(value, int) else ffi.string(value)


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
            _link_libraries(directory / "lib", native, spec[0].driver_version)
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


def _link_libraries(folder: Path, native: Path, version: str) -> None:
    """Give the libraries all names of a real driver's: for loaders, linkers and NVIDIA's tools.

    The name with the version is a file of its own, since nvidia-ctk reads the version from the name of the
    file that a link leads to.
    """
    for library in _LIBRARIES:
        stem = library.removesuffix(".1")
        for name in (stem, library):
            _link(folder / name, native / library)
        copy = folder / f"{stem}.{version}"
        for other in folder.glob(f"{stem}.*"):
            if other not in (copy, folder / library):
                other.unlink()  # of another version
        if not copy.is_file() or not filecmp.cmp(copy, native / library, shallow=False):
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                shutil.copy(native / library, Path(temporary) / "copy")
                (Path(temporary) / "copy").replace(copy)


def _link(link: Path, target: Path) -> None:
    if not (link.is_symlink() and link.readlink() == target):
        with tempfile.TemporaryDirectory(dir=link.parent) as temporary:
            (Path(temporary) / "link").symlink_to(target)
            (Path(temporary) / "link").replace(link)
