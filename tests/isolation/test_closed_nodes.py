"""Device nodes of cards that only leases can open: real nodes and mounts."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.isolation import sandbox
from fenka.isolation.closed_nodes import CLOSED, ClosedNodes, InvalidClosedFile
from tests.control_groups import unused_major

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make device nodes")

MODES = st.lists(st.sampled_from([0o600, 0o660, 0o666, 0o640]), min_size=1, max_size=4)


class Machine:
    """A directory of nodes, and the closing of them."""

    def __init__(self, root: Path) -> None:
        self.root, self.dev = root, root / "dev"
        self.dev.mkdir()

    def make(self, name: str, minor: int, mode: int = 0o666, group: int = 0) -> Path:
        """Make a node, in place of an earlier one."""
        path = self.dev / name
        path.unlink(missing_ok=True)
        os.mknod(path, stat.S_IFCHR, os.makedev(unused_major(), minor))
        os.chown(path, 0, group)
        path.chmod(mode)
        return path

    def nodes(self) -> ClosedNodes:
        """Return them as the next daemon finds them."""
        return ClosedNodes(self.dev, self.root / "own", self.root / "record.json")

    def state(self) -> dict[str, tuple[int, int, int]]:
        """Return mode, group and number of each node."""
        found = {path.name: path.lstat() for path in self.dev.iterdir()}
        return {
            name: (stat.S_IMODE(node.st_mode), node.st_gid, node.st_rdev)
            for name, node in found.items()
        }

    def close(self) -> None:
        """Remove the mount."""
        if (self.root / "own").exists():
            sandbox.unmount_all(self.root / "own", sandbox.unmount)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """An empty one."""
    made = Machine(tmp_path)
    yield made
    made.close()


@given(modes=MODES, kills=st.integers(0, 2))
def test_nodes_are_as_before_after_any_number_of_daemons(
    tmp_path_factory: pytest.TempPathFactory, modes: list[int], kills: int
) -> None:
    """Each daemon that was killed leaves them closed, and the record of what they were."""
    machine = Machine(tmp_path_factory.mktemp("machine"))
    try:
        for minor, mode in enumerate(modes):
            machine.make(f"nvidia{minor}", minor, mode, group=minor)
        before = machine.state()
        for _ in range(kills + 1):
            nodes = machine.nodes()
            nodes.close()
            assert {(mode, group) for mode, group, _ in machine.state().values()} == {(CLOSED, 0)}
            assert nodes.close() == []
        machine.nodes().reopen()
        assert machine.state() == before
        assert sorted(path.name for path in machine.root.iterdir()) == ["dev"]
    finally:
        machine.close()


def test_other_files_stay_as_they_are(machine: Machine) -> None:
    """Nodes that all cards share, links to elsewhere, and files that are no nodes."""
    machine.make("nvidia0", 0)
    shared, other = machine.make("nvidiactl", 255), machine.make("nvidia-fs0", 9)
    target = machine.root / "target"
    target.touch(0o644)
    (machine.dev / "nvidia1").symlink_to(target)
    (machine.dev / "nvidia2").touch(0o644)
    nodes = machine.nodes()
    assert nodes.close() == [machine.dev / "nvidia0"]
    for path in (shared, other):
        assert stat.S_IMODE(path.stat().st_mode) == 0o666
    for path in (target, machine.dev / "nvidia2"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
    copies = list(nodes.copies([0]))
    assert [path.name for path, _ in copies] == ["nvidia0", "nvidiactl"]
    for path, descriptor in copies:
        assert os.fstat(descriptor).st_rdev == path.stat().st_rdev
        assert stat.S_IMODE(os.fstat(descriptor).st_mode) == 0o666
        os.close(descriptor)


def test_node_that_was_made_again_is_closed_and_later_as_it_was_first(machine: Machine) -> None:
    """A lease then gets the new number."""
    machine.make("nvidia0", 0, 0o660, group=7)
    nodes = machine.nodes()
    nodes.close()
    path = machine.make("nvidia0", 5)
    assert nodes.close() == [path]
    ((_, descriptor),) = nodes.copies([0])
    assert os.fstat(descriptor).st_rdev == os.makedev(unused_major(), 5)
    os.close(descriptor)
    nodes.reopen()
    assert machine.state()["nvidia0"][:2] == (0o660, 7)


def test_record_that_was_removed_is_written_again(machine: Machine) -> None:
    """As when the daemon's directory was."""
    machine.make("nvidia0", 0, 0o640)
    nodes = machine.nodes()
    nodes.close()
    (machine.root / "record.json").unlink()
    nodes.record()
    machine.nodes().reopen()
    assert machine.state()["nvidia0"][0] == 0o640


def test_damaged_record_gets_a_sentence_and_opens_nothing(machine: Machine) -> None:
    """Nobody knows what the nodes were."""
    machine.make("nvidia0", 0)
    machine.nodes().close()
    (machine.root / "record.json").write_text('{"nodes": [{"path": 3}]}')
    with pytest.raises(InvalidClosedFile, match="remove it, and set their owner and mode"):
        machine.nodes().reopen()
    assert machine.state()["nvidia0"][0] == CLOSED
