"""Where distributions put the driver's libraries: one table, and the search for them.

The workstation's daemon, the node program and `fenka doctor` use it. The daemon asks the dynamic linker
first. A library is refused if somebody else could replace it, and if it is not a driver's: 32-bit libraries,
and the stub that CUDA toolkits have for linking. Links are resolved in the root that they belong to, since
those of a driver container are absolute in that container.
"""

import os
import re
import stat
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

import msgspec

from fenka.core.errors import INVALID_INPUT, FenkaError

LIBRARIES: Final = ("libcuda.so.1", "libnvidia-ml.so.1")

MACHINE: Final = os.uname().machine

KERNEL_MODULE: Final = Path("/sys/module/nvidia/version")
"""The version of the loaded kernel module, which the libraries' must equal. The same in containers."""

CONTAINER_ROOT: Final = "run/nvidia/driver"
"""Root directory of GPU Operator's driver container, below the node's."""

DIRECTORIES: Final = (
    ("usr/lib/{machine}-linux-gnu", "Debian, Ubuntu"),
    ("usr/lib/{machine}-linux-gnu/nvidia/current", "Debian, with alternatives"),
    ("usr/lib64", "Red Hat, SUSE, Amazon Linux"),
    ("usr/lib64/nvidia", "Red Hat, older packages"),
    ("usr/lib", "Arch"),
    ("usr/lib/nvidia", "Bottlerocket"),
    ("run/opengl-driver/lib", "NixOS"),
    ("usr/local/glibc/usr/lib", "Talos"),
    ("usr/local/glibc/lib", "Talos, older"),
    ("usr/local/nvidia/lib64", "GKE, in containers"),
    ("home/kubernetes/bin/nvidia/lib64", "GKE, on nodes"),
    ("usr/lib/wsl/lib", "Windows' subsystem for Linux"),
)
"""Directories below a root, in the order of the search, and who uses them."""

PROGRAM_DIRECTORIES: Final = (
    "usr/bin",
    "run/current-system/sw/bin",
    "usr/local/bin",
    "usr/local/nvidia/bin",
    "home/kubernetes/bin/nvidia/bin",
)

_WSL: Final = "usr/lib/wsl/lib"
_VERSIONED: Final = re.compile(r"lib(?:cuda|nvidia-ml)\.so\.(\d+(?:\.\d+)+)")
_MAX_LINKS: Final = 40
_ELF_64: Final = b"\x7fELF\x02\x01"
_ELF_MACHINES: Final = {"x86_64": 62, "aarch64": 183}
_LDCONFIG: Final = "/sbin/ldconfig"
_LDCONFIG_TIMEOUT_S: Final = 20
_LINKER_KIND: Final = {"x86_64": "x86-64", "aarch64": "AArch64"}.get(MACHINE, "")
"""Name of this kind of machine in the dynamic linker's cache."""


class InvalidDriverRoot(FenkaError):
    """The configured directory of the driver cannot be used."""

    exit_code = INVALID_INPUT


class Looked(msgspec.Struct, frozen=True):
    """A directory that was searched. result: what was found, or why that was refused; empty: nothing."""

    directory: str
    who: str
    result: str = ""


@dataclass(frozen=True, slots=True)
class DriverFiles:
    """A driver's libraries. Paths have no links left, and are the node's: see `Search.host`.

    directory: has all of the driver's files. libraries: by the names in LIBRARIES. root: in which links lead.
    """

    directory: Path
    root: Path
    version: str
    libraries: Mapping[str, Path]


@dataclass(frozen=True, slots=True)
class Search:
    """The result of a search.

    Attributes:
        host: where this process sees the node's root. Paths of the others are the node's own.
        looked: All directories, in order.
        found: The complete drivers among them, each version and file once.
        kernel: The version of the kernel's module; empty if none is loaded.
    """

    host: Path
    looked: tuple[Looked, ...]
    found: tuple[DriverFiles, ...]
    kernel: str = ""
    _by_version: Mapping[str, DriverFiles] = field(init=False)

    def __post_init__(self) -> None:
        by_version = {driver.version: driver for driver in reversed(self.found)}
        object.__setattr__(self, "_by_version", by_version)

    @property
    def driver(self) -> DriverFiles | None:
        """The driver of the kernel's version; without a module, or if none has it, the first one."""
        first = self.found[0] if self.found else None
        return self._by_version.get(self.kernel, first)

    def of_version(self, version: str) -> DriverFiles | None:
        """Return the driver of a version."""
        return self._by_version.get(version)

    def here(self, path: Path) -> Path:
        """Return a path of the node's as this process sees it."""
        return self.host / path.relative_to("/")

    @property
    def problem(self) -> str:
        """Return in a sentence what is wrong, or an empty string."""
        if self.driver is None:
            refused = [f"{look.directory}: {look.result}" for look in self.looked if look.result]
            why = f" ({'; '.join(refused)})" if refused else ""
            others = len(self.looked) - 1
            return f"no driver is in {self.looked[0].directory} and {others} other places{why}"
        if self.kernel and self.driver.version != self.kernel:
            return (
                f"the libraries in {self.driver.directory} are {self.driver.version} and the kernel's module "
                f"is {self.kernel}: restart the machine or the driver's container, so that both are the same"
            )
        return ""


def search(
    host: Path = Path("/"), configured: str = "", kernel_module: Path = KERNEL_MODULE
) -> Search:
    """Look for drivers.

    Args:
        host: Where this process sees the node's root.
        configured: A root or a directory of libraries of the node's; then no other place is searched.
        kernel_module: The file with the version of the loaded kernel module.

    Raises:
        InvalidDriverRoot: `configured` is not absolute.
    """
    if configured and not configured.startswith("/"):
        raise InvalidDriverRoot(
            f"the driver's directory {configured} is no absolute path: name its root, or the directory of "
            "its libraries, beginning with /"
        )
    looked, found = list[Looked](), list[DriverFiles]()
    for root, directory, who in _places(configured):
        look, driver = _look(host, root, directory, who)
        looked.append(look)
        known = [other.libraries for other in found]
        if driver is not None and driver.libraries not in known:
            found.append(driver)
    return Search(host, tuple(looked), tuple(found), _read_version(kernel_module))


def _places(configured: str) -> Iterator[tuple[str, str, str]]:
    """Yield roots below the host's, directories below them, and who uses these."""
    named = [(directory.format(machine=MACHINE), who) for directory, who in DIRECTORIES]
    if configured:
        root = configured.strip("/")
        yield from ((root, directory, who) for directory, who in [("", "configured"), *named])
        return
    yield from (("", directory, who) for directory, who in named)
    # A driver container's own distribution.
    yield from ((CONTAINER_ROOT, directory, f"GPU Operator, {who}") for directory, who in named[:5])


def _read_version(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _look(host: Path, root: str, directory: str, who: str) -> tuple[Looked, DriverFiles | None]:
    """Look in one directory. The result says what is wrong with it."""
    place = Path("/") / root / directory
    within = host / root
    libraries, versions = dict[str, Path](), set[str]()
    try:
        for name in LIBRARIES:
            file = resolve(within, Path(directory) / name)
            if file is None:
                continue
            vet(within, file)
            libraries[name] = Path("/") / root / file
            versions.add(_version_of(file, wsl=directory == _WSL))
    except OSError as why:
        return Looked(str(place), who, f"cannot be read ({why.strerror})"), None
    except NotADriver as why:
        return Looked(str(place), who, str(why)), None
    if not libraries:
        return Looked(str(place), who), None
    missing = [name for name in LIBRARIES if name not in libraries]
    if missing:
        return Looked(str(place), who, f"{missing[0]} is missing"), None
    if len(versions) > 1:
        return Looked(str(place), who, f"two versions: {' and '.join(sorted(versions))}"), None
    (version,) = versions
    # Debian links only the main names. The other files are beside the real one.
    real = libraries[LIBRARIES[0]].parent
    driver = DriverFiles(real, Path("/") / root, version, libraries)
    return Looked(str(place), who, f"driver {version}"), driver


class NotADriver(FenkaError):
    """A library is no driver's, or cannot be trusted."""


def resolve(root: Path, path: Path) -> Path | None:
    """Return a path below `root` with all its links followed inside that; None if there is no such file.

    Raises NotADriver if another user could replace a part of it, or for links in a circle. Raises OSError for
    directories that cannot be read.
    """
    done = list[str]()
    todo = [*reversed(path.parts)]
    links = 0
    if not root.is_dir():
        return None
    _check_owner(root, root.stat())
    while todo:
        part = todo.pop()
        if part == "/":
            done.clear()
        elif part == "..":
            del done[-1:]
        elif part != ".":
            here = root.joinpath(*done, part)
            try:
                status = here.lstat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            _check_owner(Path("/").joinpath(*done, part), status)
            if not stat.S_ISLNK(status.st_mode):
                done.append(part)
                continue
            links += 1
            if links > _MAX_LINKS:
                raise NotADriver(f"{path} is a link in a circle")
            todo.extend(reversed(here.readlink().parts))
    return Path(*done)


def _check_owner(path: Path, status: os.stat_result) -> None:
    """Raise NotADriver if another user can replace the file or directory, or what is in it."""
    # A user namespace shows another uid for root.
    trusted = {0, os.geteuid(), os.stat("/").st_uid}
    mode = status.st_mode
    open_to_others = mode & stat.S_IWOTH or (mode & stat.S_IWGRP and status.st_gid != 0)
    if stat.S_ISLNK(mode) or mode & stat.S_ISVTX:
        open_to_others = False
    if status.st_uid not in trusted or open_to_others:
        raise NotADriver(f"not used, because user {status.st_uid} or others can replace {path}")


def vet(root: Path, path: Path) -> None:
    """Raise NotADriver unless a file is a library of this machine, and no stub. Raises OSError."""
    if "stubs" in path.parts:
        raise NotADriver("a stub for linking, of a CUDA toolkit, and no driver")
    if not _is_native(root / path):
        raise NotADriver(f"{path.name} is no library of {MACHINE} machines")


def _is_native(path: Path) -> bool:
    """Return whether the file is for this machine, 64 bits. Raises OSError."""
    with path.open("rb") as file:
        head = file.read(20)
    return head[:6] == _ELF_64 and int.from_bytes(head[18:20], "little") == _ELF_MACHINES.get(
        MACHINE
    )


def _version_of(path: Path, *, wsl: bool) -> str:
    """Return the version in a library's file name. Raises NotADriver."""
    named = _VERSIONED.fullmatch(path.name)
    if named:
        return named[1]
    if wsl:
        return "WSL"
    raise NotADriver(
        f"{path.name} has no version in its name, as libcuda.so.550.54.14 has: a stub, and no driver"
    )


def libraries(beside: Iterable[Path] = (), configured: str = "") -> dict[str, tuple[Path, ...]]:
    """Return this machine's driver libraries by name, with links resolved. The first of each is the driver's.

    The dynamic linker's come first, then `beside`, then the table's. Stubs that the linker would load are
    last: programs must find the proxy in their place, too.

    Args:
        beside: Further directories, such as that of a library that was loaded by its path.
        configured: The driver's root in the options; then the linker's are not the driver's.

    Raises:
        InvalidDriverRoot: `configured` is not absolute.
    """
    here = [driver.libraries for driver in search(configured=configured).found]
    named: dict[str, tuple[Path, ...]] = {}
    for name in LIBRARIES:
        others = [*_linker_cache(name), *(directory / name for directory in beside)]
        usable, refused = _divide(others)
        table = [known[name] for known in here]
        usable = [*table, *usable] if configured else [*usable, *table]
        if usable:
            named[name] = tuple(dict.fromkeys([*usable, *refused]))
    return named


def _divide(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Return the drivers' libraries among the paths, with links followed; and this machine's other ones."""
    usable, refused = list[Path](), list[Path]()
    for path in paths:
        try:
            real = resolve(Path("/"), path.relative_to("/"))
            if real is None:
                continue
            vet(Path("/"), real)
            usable.append(Path("/") / real)
        except (NotADriver, OSError):
            if _is_native(path):
                refused.append(path.resolve())
    return usable, refused


def _linker_cache(name: str) -> Iterator[Path]:
    """Yield the libraries of this name and kind of machine that the dynamic linker knows, in its order."""
    for line in _linker_listing().splitlines():
        description, _, path = line.partition(" => ")
        listed, _, kind = description.strip().partition(" ")
        if listed == name and _LINKER_KIND in kind:
            yield Path(path)


@cache
def _linker_listing() -> str:
    try:
        return subprocess.run(
            [_LDCONFIG, "-p"],
            check=False,
            capture_output=True,
            text=True,
            timeout=_LDCONFIG_TIMEOUT_S,
        ).stdout
    # NixOS has none.
    except (OSError, subprocess.TimeoutExpired):
        return ""


def find_program(search_result: Search, driver: DriverFiles, name: str) -> Path | None:
    """Return the node's path of a driver's program, such as nvidia-smi; None if it has none."""
    for root in (driver.root, Path("/")):
        within = search_result.here(root)
        for directory in PROGRAM_DIRECTORIES:
            try:
                real = resolve(within, Path(directory) / name)
            except (OSError, NotADriver):
                continue
            if real is not None:
                return root / real
    return None
