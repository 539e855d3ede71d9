"""Keeps a container's programs from cards that are not its lease's, by its own control group.

On cgroup v2 by a device program beside the runtime's. The kernel asks the programs of a group and of all
groups around it, so nothing inside can widen it. The program is found again by its name, and ends with the
group. On v1 by the group's list of devices, which the runtime has filled; nested groups that were made before
a card is opened stay closed there.

A program on the root would close the cards for the whole machine. So the group is opened once, and everything
that is checked and done is done to what was opened.
"""

import ctypes
import errno
import hashlib
import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from fenka import procfs
from fenka.core.errors import FenkaError
from fenka.isolation.sandbox import system_call

CARD_MINORS = range(248)
"""Minor numbers of NVIDIA's cards. Later ones are nodes that all cards share, as nvidiactl is."""

MAX_GROUPS = 4096
"""Nested control groups that are read of one container."""

_PREFIX = "fenka_"
_NAME_BYTES = 15
_BPF = {"x86_64": 321, "aarch64": 280}
_PROG_LOAD, _PROG_ATTACH, _PROG_DETACH, _FD_BY_ID, _INFO_BY_FD, _PROG_QUERY = 5, 8, 9, 13, 15, 16
_TYPE_CGROUP_DEVICE, _CGROUP_DEVICE = 15, 6
_ALLOW_MULTI, _REPLACE = 2, 4
_ATTRIBUTE_BYTES = 128
_MAX_PROGRAMS = 64
"""The kernel's limit on the programs of one group."""

_INFO_BYTES, _INFO_NAME = 232, slice(64, 80)
"""Of struct bpf_prog_info in linux/bpf.h."""

_QUERY_COUNT = 24
"""Offset of the number of programs in the answer to a query."""

_CHARACTER = 2
_DENY, _ALLOW = 0, 1


class DeviceAccessError(FenkaError):
    """The container cannot be kept from other cards' device nodes. The message says why."""


@dataclass(frozen=True, slots=True)
class CardAccess:
    """The cards whose device nodes a container may open. major: of all cards' nodes. minors: of its own."""

    major: int
    minors: frozenset[int] = frozenset()

    @property
    def closed(self) -> list[int]:
        """The minor numbers of all other cards."""
        return [minor for minor in CARD_MINORS if minor not in self.minors]


@dataclass(frozen=True, slots=True)
class ContainerGroup:
    """The control group of a container.

    Attributes:
        path: Below the hierarchy's root.
        init: The container's first process.
        alone: Whether its init is still the only process of it.
        inode: The group's.
    """

    path: str
    init: int
    alone: bool
    inode: int


def probe(hierarchy: Path | None = None) -> int:
    """Return the version of the control groups that can close devices here. Changes nothing.

    hierarchy: the root of the mounted groups; None for the one that `procfs.cgroup` tells of.

    Raises DeviceAccessError, OSError.
    """
    root = hierarchy or procfs.cgroup_directory("")
    if (root / "devices.deny").exists():
        return 1
    if not (root / "cgroup.controllers").exists():
        raise DeviceAccessError(f"no control groups that can close devices are mounted at {root}")
    os.close(_load(b"".join(_instructions(CardAccess(0))), _PREFIX.encode()))
    return 2


def restrict(group: ContainerGroup, access: CardAccess, hierarchy: Path | None = None) -> None:
    """Let a container open no card but its own; change nothing if that is so already.

    Args:
        group: The container's.
        access: What it may open.
        hierarchy: The root of the mounted groups; None for the one that `procfs.cgroup` tells of.

    Raises DeviceAccessError, OSError.
    """
    root = hierarchy or procfs.cgroup_directory("")
    directory = _open(root, group)
    try:
        if _exists(directory, "devices.deny"):
            _set_list(directory, access)
        else:
            _set_program(directory, access)
    finally:
        os.close(directory)


# --- the group --------------------------------------------------------------------------------------


def _open(root: Path, group: ContainerGroup) -> int:
    """Return a descriptor of a group after all checks. Raises DeviceAccessError, OSError."""
    parts = [part for part in group.path.split("/") if part]
    if not parts or ".." in parts:
        raise DeviceAccessError("it has no control group of its own")
    directory = os.open(
        root.joinpath(*parts), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    )
    try:
        _check(root, directory, group)
    except BaseException:
        os.close(directory)
        raise
    return directory


def _check(root: Path, directory: int, group: ContainerGroup) -> None:
    opened, top = os.fstat(directory), root.stat()
    if opened.st_dev != top.st_dev or not _exists(directory, "cgroup.procs"):
        raise DeviceAccessError("what should be its control group is none")
    version_2 = _exists(directory, "cgroup.type")
    # Only groups that are no root have these files; those of v1 lack the other one.
    if opened.st_ino == top.st_ino or not (version_2 or _exists(directory, "devices.deny")):
        raise DeviceAccessError("its control group is the machine's")
    if _exists(directory, "release_agent"):
        raise DeviceAccessError("its control group is the machine's")
    if opened.st_ino != group.inode:
        raise DeviceAccessError("its control group was made again")
    members = set(_members(directory))
    if os.getpid() in members:
        raise DeviceAccessError("the fenka daemon is in its control group")
    if group.init not in members:
        raise DeviceAccessError("its first process has left its control group")
    if group.alone and members != {group.init}:
        raise DeviceAccessError("other programs are in its control group")


def _members(directory: int) -> Iterator[int]:
    """Yield the processes of a group and of those below it; 0 for those that are not seen. Raises OSError."""
    for number, (_, _, _, below) in enumerate(os.fwalk(".", dir_fd=directory)):
        if number == MAX_GROUPS:
            raise DeviceAccessError(f"it has more than {MAX_GROUPS} control groups")
        try:
            yield from map(int, _read(below, "cgroup.procs").split())
        except OSError as why:
            # Those of a threaded group are in the list of a group above it; others may have ended.
            if why.errno not in (errno.EOPNOTSUPP, errno.ENODEV, errno.ENOENT):
                raise


def _exists(directory: int, name: str) -> bool:
    return os.access(name, os.F_OK, dir_fd=directory)


def _read(directory: int, name: str) -> bytes:
    with open(
        name, "rb", opener=lambda path, flags: os.open(path, flags, dir_fd=directory)
    ) as file:
        return file.read()


# --- cgroup v1 --------------------------------------------------------------------------------------


def _set_list(directory: int, access: CardAccess) -> None:
    for name, minors in (("devices.deny", access.closed), ("devices.allow", sorted(access.minors))):
        file = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
        try:
            for minor in minors:
                os.write(file, f"c {access.major}:{minor} rwm".encode())
        finally:
            os.close(file)
    # A denied device stays open by an entry for all minor numbers. A list that allows all devices has
    # exceptions, which it does not show.
    for line in _read(directory, "devices.list").decode().splitlines():
        kind, number, rights = line.split()
        all_minors = number in ("*:*", f"{access.major}:*")
        if kind == "c" and all_minors and set(rights) & set("rw"):
            raise DeviceAccessError(
                f"its engine gives it all devices of one kind ({line}): leave out --device-cgroup-rule"
            )


# --- cgroup v2 --------------------------------------------------------------------------------------


def _set_program(directory: int, access: CardAccess) -> None:
    """Replace our program by the one of this access, without a moment between them. Raises OSError."""
    code = b"".join(_instructions(access))
    name = (_PREFIX + hashlib.sha256(code).hexdigest()).encode()[:_NAME_BYTES]
    with ExitStack() as opened:
        ours = _own_programs(directory, opened)
        others = [program for program, its_name in ours.items() if its_name != name]
        if len(others) == len(ours):
            program = _load(code, name)
            opened.callback(os.close, program)
            former = others.pop() if others else None
            flags = _ALLOW_MULTI | (0 if former is None else _REPLACE)
            words = directory, program, _CGROUP_DEVICE, flags, former or 0
            _bpf(_PROG_ATTACH, struct.pack("=IIIII", *words))
        for other in others:
            _bpf(_PROG_DETACH, struct.pack("=IIII", directory, other, _CGROUP_DEVICE, 0))


def _instructions(access: CardAccess) -> Iterator[bytes]:
    """Yield the program: context in r1, with 16 bits of type, the major and the minor number."""
    minors = sorted(access.minors)
    allow = 2  # Instructions of _DENY between the last test and _ALLOW.
    yield _instruction(0x61, 2, 1, 0)  # r2 = type and kind of access
    yield _instruction(0x57, 2, immediate=0xFFFF)  # r2 &= 0xffff
    yield _instruction(0x61, 3, 1, 4)  # r3 = major
    yield _instruction(0x61, 4, 1, 8)  # r4 = minor
    tests = [(0x55, 2, _CHARACTER), (0x55, 3, access.major), (0x25, 4, CARD_MINORS[-1])]
    tests += [(0x15, 4, minor) for minor in minors]
    for left, (operation, register, value) in zip(reversed(range(len(tests))), tests, strict=True):
        # 0x55: unequal; 0x25: greater; 0x15: equal.
        yield _instruction(operation, register, offset=left + allow, immediate=value)
    for result in (_DENY, _ALLOW):
        yield _instruction(0xB7, 0, immediate=result)  # r0 = result
        yield _instruction(0x95)  # exit


def _instruction(
    operation: int, target: int = 0, source: int = 0, offset: int = 0, immediate: int = 0
) -> bytes:
    return struct.pack("=BBhi", operation, source << 4 | target, offset, immediate)


def _bpf(command: int, attributes: bytes) -> tuple[int, bytes]:
    """Return the result of bpf(2), and the attributes as the kernel leaves them. Raises OSError."""
    number = _BPF.get(os.uname().machine)
    if number is None:
        raise DeviceAccessError("device programs are known on x86-64 and aarch64 only")
    buffer = ctypes.create_string_buffer(attributes, _ATTRIBUTE_BYTES)
    return system_call(number, command, buffer, _ATTRIBUTE_BYTES), buffer.raw


def _load(code: bytes, name: bytes) -> int:
    program, licence = ctypes.create_string_buffer(code), ctypes.create_string_buffer(b"GPL")
    return _bpf(
        _PROG_LOAD,
        struct.pack(
            "=IIQQIIQII16s",
            *(_TYPE_CGROUP_DEVICE, len(code) // 8),
            *(ctypes.addressof(program), ctypes.addressof(licence)),
            *(0, 0, 0, 0, 0, name),
        ),
    )[0]


def _own_programs(directory: int, opened: ExitStack) -> dict[int, bytes]:
    """Return descriptors of our programs on a group, with their names. Raises OSError.

    opened: closes the descriptors.
    """
    ids = (ctypes.c_uint32 * _MAX_PROGRAMS)()
    words = directory, _CGROUP_DEVICE, 0, 0, ctypes.addressof(ids), _MAX_PROGRAMS
    _, answer = _bpf(_PROG_QUERY, struct.pack("=IIIIQI", *words))
    found = dict[int, bytes]()
    for number in ids[: struct.unpack_from("=I", answer, _QUERY_COUNT)[0]]:
        descriptor, _ = _bpf(_FD_BY_ID, struct.pack("=III", number, 0, 0))
        opened.callback(os.close, descriptor)
        info = ctypes.create_string_buffer(_INFO_BYTES)
        _bpf(_INFO_BY_FD, struct.pack("=IIQ", descriptor, _INFO_BYTES, ctypes.addressof(info)))
        name = info.raw[_INFO_NAME].rstrip(b"\0")
        if name.startswith(_PREFIX.encode()):
            found[descriptor] = name
    return found
