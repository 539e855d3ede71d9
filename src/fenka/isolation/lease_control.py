"""The control page: the limits of one lease's processes on each card.

The daemon or the node agent writes it; the shim reads it inside the programs. The C header `fenka/lease.h` is
the only definition of its layout.
"""

import mmap
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from fenka import native
from fenka.core.errors import FenkaError
from fenka.core.request import COMPUTE_MODES, ComputeMode

HEADER: Final = native.DIRECTORY / "lease.h"
"""Installed beside the libraries that were built from it."""


def constant(name: str) -> int:
    """Return the value of an integer ``#define`` of the header. Raises KeyError."""
    return native.constants(HEADER)[name]


def layout() -> Any:
    """Return the header's structs as a cffi ``FFI``. Raises FileNotFoundError if nothing was built."""
    return native.structs(HEADER)


_UUID_CHARACTERS = 40


class InvalidControl(FenkaError):
    """A control page, or the content of a new one, is invalid."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The limits of a lease on one card."""

    uuid: str
    """As NVML prints it: ``GPU-`` or ``MIG-`` and 36 characters."""
    memory_bytes: int
    """Hard limit for all processes of the lease together."""
    context_bytes: int = 0
    """Charged once for each process that has a context on the card."""
    compute_percent: int = 100
    """Share of the card's time, 1 to 100; 100 and hard is no limit."""
    compute_mode: ComputeMode = "hard"
    """Meaning of the share."""

    @property
    def unlimited(self) -> bool:
        """Whether nothing limits its use of the card's time."""
        return self.compute_percent == 100 and self.compute_mode == "hard"


@dataclass(frozen=True, slots=True)
class Control:
    """The content of one page. The order of the limits is the order of the programs' devices."""

    lease: str
    """The lease's id: up to 63 bytes of ASCII."""
    limits: tuple[Limit, ...]
    generation: int = 0
    """Even; increases by two with every update in place."""


def _limit_fault(limit: Limit) -> str | None:
    if len(limit.uuid) != _UUID_CHARACTERS or not limit.uuid.isascii() or "\0" in limit.uuid:
        return f"{limit.uuid!r} is not the UUID of a card"
    if not 0 < limit.memory_bytes < 1 << 64:
        return f"{limit.memory_bytes} bytes of memory on {limit.uuid} is not a limit"
    if not 0 <= limit.context_bytes < 1 << 64:
        return f"{limit.context_bytes} bytes for a context on {limit.uuid} is not a size"
    if not 1 <= limit.compute_percent <= 100:
        return f"{limit.compute_percent} % of {limit.uuid} is not 1 to 100 %"
    if limit.compute_mode not in COMPUTE_MODES:
        return f"{limit.compute_mode!r} is not one of {', '.join(COMPUTE_MODES)}"
    return None


def _fault(control: Control) -> str | None:
    uuids = [limit.uuid for limit in control.limits]
    max_cards = constant("FENKA_MAX_CARDS")
    if not 0 < len(control.lease) < 64 or not control.lease.isascii() or "\0" in control.lease:
        return f"the lease id {control.lease!r} is not 1 to 63 ASCII characters"
    if not 1 <= len(uuids) <= max_cards:
        return f"{len(uuids)} cards is not 1 to {max_cards}"
    if len(set(uuids)) < len(uuids):
        return "a card is named twice"
    if control.generation % 2 or not 0 <= control.generation < 1 << 64:
        return f"generation {control.generation} means that the page is half written"
    return next(filter(None, map(_limit_fault, control.limits)), None)


def _validated(control: Control, where: str) -> Control:
    if fault := _fault(control):
        raise InvalidControl(f"{where}: {fault}")
    return control


def _fill(card: Any, limit: Limit) -> None:
    card.uuid = limit.uuid.encode()
    card.memory_bytes = limit.memory_bytes
    card.context_bytes = limit.context_bytes
    card.compute_percent = limit.compute_percent
    card.compute_mode = COMPUTE_MODES.index(limit.compute_mode)


def encode(control: Control) -> bytes:
    """Return the bytes of a page. Raises InvalidControl."""
    ffi = layout()
    _validated(control, "control")
    page = ffi.new("struct fenka_control *")
    page.magic = constant("FENKA_CONTROL_MAGIC")
    page.version = constant("FENKA_LAYOUT_VERSION")
    page.bytes = constant("FENKA_CONTROL_BYTES")
    page.generation = control.generation
    page.lease = control.lease.encode()
    page.card_count = len(control.limits)
    for card, limit in zip(page.cards, control.limits, strict=False):
        _fill(card, limit)
    return bytes(ffi.buffer(page)).ljust(page.bytes, b"\0")


def _text(ffi: Any, field: Any) -> str:
    return bytes(ffi.string(field)).decode("ascii", "backslashreplace")


def _limit(ffi: Any, card: Any, where: str) -> Limit:
    if card.compute_mode >= len(COMPUTE_MODES):
        raise InvalidControl(
            f"{where}: compute mode {card.compute_mode} is not known to this version"
        )
    return Limit(
        _text(ffi, card.uuid),
        card.memory_bytes,
        card.context_bytes,
        card.compute_percent,
        COMPUTE_MODES[card.compute_mode],
    )


def _without_feedback(data: bytes) -> bytes:
    """Return the page without what :mod:`fenka.isolation.compute_feedback` writes, which is no limit."""
    ffi = layout()
    copy = bytearray(data)
    page = ffi.from_buffer("struct fenka_control *", copy)
    page.yielding_since = 0
    for card in page.cards[0 : page.card_count]:
        card.feedback_seq = card.feedback_at = card.busy_ns = card.allowed = 0
    ffi.release(page)
    return bytes(copy)


def decode(data: bytes, where: str = "control") -> Control:
    """Decode a page. Raises InvalidControl unless encoding the result gives the same bytes, but for
    feedback."""
    ffi = layout()
    size = constant("FENKA_CONTROL_BYTES")
    if len(data) != size:
        raise InvalidControl(f"{where}: is {len(data)} bytes, a control page has {size}")
    page = ffi.from_buffer("struct fenka_control *", data)
    for name, expected in (
        ("magic", constant("FENKA_CONTROL_MAGIC")),
        ("version", constant("FENKA_LAYOUT_VERSION")),
        ("bytes", size),
    ):
        if (value := getattr(page, name)) != expected:
            raise InvalidControl(f"{where}: {name} is {value:#x}, expected {expected:#x}")
    if page.card_count > constant("FENKA_MAX_CARDS"):
        raise InvalidControl(f"{where}: states {page.card_count} cards")
    limits = tuple(_limit(ffi, c, where) for c in page.cards[0 : page.card_count])
    control = _validated(Control(_text(ffi, page.lease), limits, page.generation), where)
    if encode(control) != _without_feedback(data):
        raise InvalidControl(f"{where}: holds bytes in fields that this version does not know")
    return control


def write(path: Path, control: Control) -> None:
    """Create or replace a page atomically. Raises InvalidControl, OSError.

    Running programs keep the page that they began with. To change their limits, use :func:`update`.
    """
    data = encode(control)
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), 0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read(path: Path) -> Control:
    """Read a page. Raises InvalidControl, OSError."""
    with path.open("rb") as file:
        return decode(file.read(constant("FENKA_CONTROL_BYTES") + 1), str(path))


def update(path: Path, control: Control) -> Control:
    """Change the limits of running programs in place. Return what is in force, with its generation.

    The cards and their order must stay the same, because programs know them by number. The programs' usage is
    not checked (see :func:`fenka.isolation.limit_changes.resize`). There must be one writer at a time. A
    writer that is killed leaves an odd generation, under which programs keep the last limits. The next update
    repairs it.

    Raises InvalidControl, OSError.
    """
    _validated(replace(control, generation=0), "control")
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as page:
        before = _decode_interrupted(bytes(page), path)
        if [c.uuid for c in before.limits] != [c.uuid for c in control.limits]:
            raise InvalidControl(f"{path}: an update cannot change which cards a lease has")
        if before.lease != control.lease:
            raise InvalidControl(
                f"{path}: belongs to lease {before.lease!r}, not {control.lease!r}"
            )
        ffi = layout()
        live = ffi.from_buffer("struct fenka_control *", page, require_writable=True)
        live.generation |= 1
        for card, limit in zip(live.cards, control.limits, strict=False):
            _fill(card, limit)
        live.generation += 1
        after = replace(control, generation=live.generation)
        ffi.release(live)
    return after


def read_interrupted(path: Path) -> Control:
    """Read a page like :func:`read`, also one that a killed writer left incomplete."""
    with path.open("rb") as file:
        return _decode_interrupted(file.read(constant("FENKA_CONTROL_BYTES") + 1), path)


def _decode_interrupted(page: bytes, path: Path) -> Control:
    data = bytearray(page)
    offset = layout().offsetof("struct fenka_control", "generation")
    if offset < len(data):
        data[offset] &= 0xFE
    return decode(bytes(data), str(path))
