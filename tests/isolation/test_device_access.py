"""A container opens its own cards only: control groups made here, with devices that every kernel has."""

import errno
import os
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path

import pytest

from fenka.isolation.device_access import (
    _ALLOW_MULTI,
    _CGROUP_DEVICE,
    _PROG_ATTACH,
    CardAccess,
    ContainerGroup,
    DeviceAccessError,
    _bpf,
    _instructions,
    _load,
    _own_programs,
    probe,
    restrict,
)
from tests.control_groups import Inside, hierarchies, make_group, unused_major

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make control groups")

MEMORY = 1
"""The major number of /dev/null and others."""

NULL, ZERO, FULL, RANDOM, URANDOM = MINORS = (3, 5, 7, 8, 9)


@pytest.fixture(params=["v1", "v2"])
def hierarchy(request: pytest.FixtureRequest) -> Path:
    """The root of a mounted hierarchy, to which nothing is done."""
    found = hierarchies().get(request.param)
    if found is None:
        pytest.skip(f"no control groups of {request.param} with devices are mounted here")
    return found


@pytest.fixture
def group(hierarchy: Path) -> Iterator[Path]:
    """A control group of the test's own."""
    with make_group(hierarchy) as made:
        yield made


@pytest.fixture
def inside(group: Path) -> Iterator[Inside]:
    """The only process in the group."""
    with Inside() as process:
        process.enter(group)
        yield process


@pytest.fixture
def nodes(tmp_path: Path) -> dict[int, Path]:
    """Twins of /dev/null and others by their minor numbers."""
    made = {minor: tmp_path / f"twin{minor}" for minor in MINORS}
    for minor, path in made.items():
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(MEMORY, minor))
    return made


def container(group: Path, init: int, *, alone: bool = True) -> ContainerGroup:
    """Return a container whose group is directly below the root."""
    return ContainerGroup(f"/{group.name}", init, alone, group.stat().st_ino)


def _is_version_1(group: Path) -> bool:
    return (group / "devices.list").exists()


def opened(inside: Inside, nodes: dict[int, Path]) -> set[int]:
    """Return the minor numbers that it can open; the others are refused by the kernel."""
    results = {minor: inside.open(path) for minor, path in nodes.items()}
    assert {*results.values()} <= {0, errno.EPERM}
    return {minor for minor, result in results.items() if not result}


def test_container_opens_exactly_its_cards(
    group: Path, inside: Inside, nodes: dict[int, Path]
) -> None:
    """Whatever it had before; who is outside opens all."""
    subsets = chain.from_iterable(combinations(MINORS, size) for size in range(len(MINORS) + 1))
    with Inside() as outside:
        for minors in subsets:
            access = CardAccess(MEMORY, frozenset(minors))
            restrict(container(group, inside.pid), access, group.parent)
            assert opened(inside, nodes) == set(minors)
        assert opened(outside, nodes) == set(MINORS)


def test_nothing_inside_widens_it(
    group: Path, inside: Inside, nodes: dict[int, Path], tmp_path: Path
) -> None:
    """Neither a node of its own, with CAP_MKNOD, nor a nested group, made before or after."""
    (group / "before").mkdir()
    restrict(container(group, inside.pid), CardAccess(MEMORY, frozenset({NULL})), group.parent)
    (group / "after").mkdir()
    assert inside.make_node(tmp_path / "null", MEMORY, NULL) == 0
    assert inside.make_node(tmp_path / "full", MEMORY, FULL) == errno.EPERM
    for nested in ("before", "after"):
        inside.enter(group / nested)
        assert opened(inside, nodes) == {NULL}


def test_probe_names_the_version_and_changes_nothing(hierarchy: Path, tmp_path: Path) -> None:
    """It loads a program on version 2, and attaches it nowhere."""
    version_1 = (hierarchy / "devices.deny").exists()
    assert probe(hierarchy) == (1 if version_1 else 2)
    if not version_1:
        with ExitStack() as opened_files:
            root = os.open(hierarchy, os.O_RDONLY)
            opened_files.callback(os.close, root)
            assert _own_programs(root, opened_files) == {}
    with pytest.raises(DeviceAccessError, match="no control groups that can close devices"):
        probe(tmp_path)


def test_other_devices_stay_open(group: Path, inside: Inside, tmp_path: Path) -> None:
    """Those of other kinds, and those that all cards share."""
    shared = tmp_path / "shared"
    os.mknod(shared, stat.S_IFCHR | 0o666, os.makedev(MEMORY, 255))
    restrict(container(group, inside.pid), CardAccess(MEMORY), group.parent)
    assert inside.open(Path("/dev/tty")) == errno.ENXIO  # It has no terminal.
    assert inside.open(shared) == errno.ENXIO  # No driver has it.
    assert inside.open(Path("/dev/null")) == errno.EPERM


def test_later_processes_belong_to_the_container(
    group: Path, inside: Inside, nodes: dict[int, Path]
) -> None:
    """As those of `docker exec`, or those that have moved to a nested group.

    On v1, a nested group keeps what was closed when it was made.
    """
    restrict(container(group, inside.pid), CardAccess(MEMORY), group.parent)
    (group / "nested").mkdir()
    inside.enter(group / "nested")
    with Inside() as second:
        second.enter(group)
        access = CardAccess(MEMORY, frozenset({ZERO}))
        restrict(container(group, inside.pid, alone=False), access, group.parent)
        assert opened(second, nodes) == {ZERO}
        assert opened(inside, nodes) == (set() if _is_version_1(group) else {ZERO})


def test_other_programs_of_the_group_stay(nodes: dict[int, Path]) -> None:
    """Those of its runtime: the kernel asks all of them. Ours is one, however often it is replaced."""
    if "v2" not in hierarchies():
        pytest.skip("only cgroup v2 has device programs")
    with make_group(hierarchies()["v2"]) as group, Inside() as inside, ExitStack() as opened_files:
        inside.enter(group)
        directory = os.open(group, os.O_RDONLY)
        opened_files.callback(os.close, directory)
        code = b"".join(_instructions(CardAccess(MEMORY, frozenset({NULL, ZERO}))))
        runtimes = _load(code, b"runtime")
        opened_files.callback(os.close, runtimes)
        attach = struct.pack("=IIIII", directory, runtimes, _CGROUP_DEVICE, _ALLOW_MULTI, 0)
        _bpf(_PROG_ATTACH, attach)
        for minors in ({FULL}, {ZERO, FULL}, {ZERO, FULL}):
            access = CardAccess(MEMORY, frozenset(minors))
            restrict(container(group, inside.pid), access, group.parent)
            assert opened(inside, nodes) == minors & {NULL, ZERO}
            assert len(_own_programs(directory, opened_files)) == 1


def test_program_never_reaches_the_root(hierarchy: Path, inside: Inside, group: Path) -> None:
    """By no path: one that is empty names the root, and would close cards for the whole machine."""
    top = hierarchy.stat().st_ino
    # What this would close if it were wrong is no device of the machine's.
    access = CardAccess(unused_major())
    paths = ["", "/", "//", ".", "/.", "/..", f"/{group.name}/..", f"../{hierarchy.name}"]
    for path in paths:
        for inode in (top, group.stat().st_ino):
            with pytest.raises(DeviceAccessError, match=r"control group"):
                restrict(ContainerGroup(path, inside.pid, True, inode), access, hierarchy)
    # Where a directory around the hierarchy is taken for its root.
    named = ContainerGroup(f"/{hierarchy.name}", inside.pid, True, top)
    with pytest.raises(DeviceAccessError, match=r"is none|is the machine's"):
        restrict(named, access, hierarchy.parent)
    if not _is_version_1(group):
        with ExitStack() as opened_files:
            root = os.open(hierarchy, os.O_RDONLY)
            opened_files.callback(os.close, root)
            assert _own_programs(root, opened_files) == {}


def test_group_that_is_not_the_containers_is_refused(
    group: Path, inside: Inside, nodes: dict[int, Path], tmp_path: Path
) -> None:
    """Nothing is closed in it."""
    own = container(group, inside.pid)
    with Inside() as stranger:
        for wrong, sentence in (
            (replace(own, init=stranger.pid), "has left"),
            (replace(own, inode=own.inode + 1), "made again"),
        ):
            with pytest.raises(DeviceAccessError, match=sentence):
                restrict(wrong, CardAccess(MEMORY), group.parent)
        (group / "nested").mkdir()
        stranger.enter(group / "nested")
        with pytest.raises(DeviceAccessError, match="other programs"):
            restrict(own, CardAccess(MEMORY), group.parent)
    assert opened(inside, nodes) == set(MINORS)
    (tmp_path / "plain").mkdir()
    plain = ContainerGroup("/plain", inside.pid, True, (tmp_path / "plain").stat().st_ino)
    with pytest.raises(DeviceAccessError, match="is none"):
        restrict(plain, CardAccess(MEMORY), tmp_path)
    with pytest.raises(FileNotFoundError):
        restrict(replace(own, path="/nowhere"), CardAccess(MEMORY), group.parent)
    (tmp_path / "link").symlink_to(group)
    with pytest.raises(NotADirectoryError):
        restrict(replace(own, path="/link"), CardAccess(MEMORY), tmp_path)


DAEMON = """
import sys
from pathlib import Path
from fenka.isolation.device_access import *
sys.stdin.readline()
try:
    path, init, inode, root = sys.argv[1:]
    restrict(ContainerGroup(path, int(init), False, int(inode)), CardAccess(1), Path(root))
except DeviceAccessError as why:
    print(why)
"""


def test_daemon_closes_nothing_around_itself(
    group: Path, inside: Inside, nodes: dict[int, Path]
) -> None:
    """Neither its own group nor one around it, though the container is in there."""
    (group / "service").mkdir()
    for place in (group, group / "service"):
        words = [f"/{group.name}", str(inside.pid), str(group.stat().st_ino), str(group.parent)]
        with subprocess.Popen(
            [sys.executable, "-c", DAEMON, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as daemon:
            (place / "cgroup.procs").write_text(str(daemon.pid))
            said, _ = daemon.communicate("go\n")
        assert said == "the fenka daemon is in its control group\n"
    assert opened(inside, nodes) == set(MINORS)


def test_engine_that_gives_all_devices_of_a_kind_is_refused(
    hierarchy: Path, group: Path, inside: Inside
) -> None:
    """A list of v1 has no exceptions to such an entry."""
    if not _is_version_1(group):
        pytest.skip("a program of v2 needs no list")
    (group / "devices.deny").write_text("a")
    (group / "devices.allow").write_text(f"c {MEMORY}:* rwm")
    with pytest.raises(DeviceAccessError, match="leave out --device-cgroup-rule"):
        restrict(container(group, inside.pid), CardAccess(MEMORY), hierarchy)
    (group / "devices.deny").write_text(f"c {MEMORY}:* rwm")
    (group / "devices.allow").write_text(f"c {MEMORY}:{FULL} rwm")
    (group / "devices.allow").write_text("c *:* m")
    restrict(container(group, inside.pid), CardAccess(MEMORY), hierarchy)
    assert inside.open(Path("/dev/full")) == errno.EPERM
