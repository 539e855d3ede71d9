"""The state file of a simulated node: its cards, in the layout of the simulated driver's shared memory."""

import contextlib
import fcntl
import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from fenka import native as built
from fenka.hardware import mig_models
from fenka.hardware.spec import NodeError, SimulatedCard

NATIVE: Final = built.DIRECTORY / "simulated"
"""Directory of the simulated driver's libraries and card server."""

_FIXED: Final = (
    "uuid", "name", "serial", "pci_bus_id", "memory_bytes", "context_bytes", "sm_count",
    "compute_major", "compute_minor", "idle_power_mw", "power_limit_mw", "max_sm_clock_mhz",
    "max_memory_clock_mhz", "fan_percent",
)  # fmt: skip
"""Fields that identify a card. The others change while the node runs."""


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
    for index, card in enumerate(spec):
        _fill(state.cards[index], directory, index, card)
        state.faults[index].ecc = card.model.ecc
        state.mig[index].pci_device = card.model.pci_device
        if card.model.mig:
            mig_models.fill(state.mig[index], card.model.mig, mirrored=card.mig_mirrored)
    return ffi.buffer(state)


def _fill(target: Any, directory: Path, index: int, card: SimulatedCard) -> None:
    model = card.model
    generated = uuid.uuid5(uuid.NAMESPACE_URL, f"fenka:{directory.resolve()}:{index}:{model.key}")
    target.uuid = (card.uuid or f"GPU-{generated}").encode()
    target.name = card.name.encode()
    target.serial = f"{int(generated) % 10**13:013d}".encode()
    target.pci_bus_id = f"00000000:{index + 1:02X}:00.0".encode()
    target.memory_bytes = card.memory_mib << 20
    target.context_bytes = card.context_mib << 20
    target.sm_count = model.sm_count
    target.compute_major, target.compute_minor = model.compute_capability
    target.idle_power_mw = model.idle_power_w * 1000
    target.power_limit_mw = model.power_limit_w * 1000
    target.max_sm_clock_mhz = model.sm_clock_mhz
    target.max_memory_clock_mhz = model.memory_clock_mhz
    target.fan_percent = model.fan_percent


def write_state(directory: Path, spec: tuple[SimulatedCard, ...]) -> None:
    """Write the cards to the node's state file. Raises NodeError, OtherBuild, OSError."""
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
                raise NodeError(
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
    return (ffi.string(state.driver_version), state.cuda_version, *cards)


def _plain(ffi: Any, value: Any) -> object:
    return value if isinstance(value, int) else ffi.string(value)
