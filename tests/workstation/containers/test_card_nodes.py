"""Containers cannot open the device nodes of cards that are not theirs: the real hook and daemon.

The nodes' major number has no driver. So a process that may open one learns that there is no device (ENXIO),
and others that they may not (EPERM).
"""

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fenka import procfs
from fenka.hardware import host_tree
from tests.control_groups import Inside, hierarchies, make_group, remove_programs, unused_major
from tests.workstation.conftest import Workstation, eventually
from tests.workstation.containers.runtime import MiniContainer
from tests.workstation.users import as_root

pytestmark = [
    as_root,
    pytest.mark.skipif(not hierarchies(), reason="no control groups are mounted here"),
]

CARDS = ("--simulate", "T4*2")


@pytest.fixture
def two_cards(station: Workstation) -> Workstation:
    """A daemon with two cards, whose nodes are in its host tree."""
    station.start_fresh(*CARDS)
    devices = station.root / "simulated" / host_tree.LINK / "dev"
    devices.mkdir(parents=True)
    for minor in range(2):
        os.mknod(
            devices / f"nvidia{minor}", stat.S_IFCHR | 0o666, os.makedev(unused_major(), minor)
        )
    return station


class GroupedContainer:
    """A container in a control group of its own, with a second process that tries to open nodes."""

    def __init__(self, station: Workstation, group: Path) -> None:
        self.group = group
        self.devices = station.root / "simulated" / host_tree.LINK / "dev"
        self.container = MiniContainer(station)
        (group / "cgroup.procs").write_text(str(self.container.init))
        self.probe = Inside()

    def start(self, device: str) -> None:
        """Start it, then its second process as `docker exec` would."""
        self.container.start(device)
        self.probe.enter(self.group)

    def opened(self) -> set[int]:
        """Return the cards that it may open."""
        results = {card: self.probe.open(self.devices / f"nvidia{card}") for card in range(2)}
        assert {*results.values()} <= {errno.ENXIO, errno.EPERM}
        return {card for card, result in results.items() if result == errno.ENXIO}

    def cards(self) -> set[int]:
        """Return the cards of its slices, as the daemon says."""
        job = self.container.await_state("running")
        return {piece["card"] for piece in job["slices"]}

    def close(self) -> None:
        """End its processes, if they have not ended."""
        self.probe.end()
        if self.container.program.process.poll() is None:
            self.container.kill()


Start = Callable[[str], GroupedContainer]


@pytest.fixture
def make(two_cards: Workstation) -> Iterator[Start]:
    """Make containers that end with the test."""
    with ExitStack() as opened:

        def start(device: str) -> GroupedContainer:
            group = opened.enter_context(make_group(procfs.cgroup_directory("/")))
            made = GroupedContainer(two_cards, group)
            opened.callback(made.close)
            made.start(device)
            return made

        yield start


def test_container_opens_its_own_card_only(make: Start) -> None:
    """Each of two fills a card."""
    first, second = make("slice=14"), make("slice=14")
    assert first.opened() == first.cards()
    assert second.opened() == second.cards()
    assert first.cards() | second.cards() == {0, 1}


def test_pending_container_opens_no_card_until_its_grant(
    two_cards: Workstation, make: Start
) -> None:
    """Also where the daemon was killed meanwhile: the next one finds what the former has closed."""
    first, _, held, later = (make("slice=14") for _ in range(4))
    assert held.opened() == later.opened() == set()
    freed = first.cards()
    first.close()
    assert held.cards() == freed
    assert held.opened() == freed
    two_cards.kill_daemon()
    assert held.opened() == freed
    held.close()
    two_cards.start(*CARDS)
    assert later.cards() == freed
    assert later.opened() == freed


def test_what_an_engine_has_opened_is_closed_again(two_cards: Workstation, make: Start) -> None:
    """As by `docker update` on cgroup v1, or where programs of a group are removed."""
    container = make("slice=14")
    cards, major = container.cards(), os.major((container.devices / "nvidia0").stat().st_rdev)
    two_cards.kill_daemon()
    if (container.group / "devices.allow").exists():
        for minor in range(2):
            (container.group / "devices.allow").write_text(f"c {major}:{minor} rwm")
    else:
        remove_programs(container.group)
    assert container.opened() == {0, 1}
    two_cards.start(*CARDS)
    eventually(lambda: container.opened() == cards)


def test_held_container_that_cannot_be_kept_from_cards_is_ended(
    two_cards: Workstation, make: Start
) -> None:
    """Its slice is free again, and the log says why."""
    first, second, held = (make("slice=14") for _ in range(3))
    (procfs.cgroup_directory("/") / "cgroup.procs").write_text(str(held.container.init))
    first.close()
    assert held.container.program.process.wait() != 0
    held.close()
    eventually(lambda: [*two_cards.jobs()] == [second.container.name])
    log = (two_cards.root / "daemon.log").read_text()
    assert f"container {held.container.name} is ended: the container cannot be kept" in log
    assert "its first process has left its control group" in log


def test_closed_nodes_are_open_where_an_engine_has_mounted_them(two_cards: Workstation) -> None:
    """Runtimes mount them where the container's root is no root outside. Others of the same name stay.

    While the slice is pending it may get any card, and its control group closes all.
    """
    two_cards.kill_daemon()
    two_cards.start(*CARDS, "--closed")
    devices = two_cards.root / "simulated" / host_tree.LINK / "dev"
    script = "mkdir -p /run/root/run/fenka /run/root/dev /run/other/dev"
    script += " && mount -t tmpfs -o mode=0755 fenka-lease /run/root/run/fenka"
    nodes = ["root/dev/nvidia0", "root/dev/nvidia1", "other/dev/nvidia0"]
    for node in nodes:
        source = devices / Path(node).name
        script += f" && touch /run/{node} && mount --bind {source} /run/{node}"
    with ExitStack() as opened:
        for cards, pending in ((2, False), (1, True)):
            group = opened.enter_context(make_group(procfs.cgroup_directory("/")))
            container = MiniContainer(two_cards, 1000, f"FENKA_CARDS={cards}", place=script)
            opened.callback(container.kill)
            (group / "cgroup.procs").write_text(str(container.init))
            inside = [Path(f"/proc/{container.init}/root/run/{node}") for node in nodes]
            assert [stat.S_IMODE(node.stat().st_mode) for node in inside] == [0o600] * 3
            assert container.hook("slice=14") == ""
            job = two_cards.jobs()[container.name]
            assert bool(job["slices"]) != pending
            assert [stat.S_IMODE(node.stat().st_mode) for node in inside] == [0o666, 0o666, 0o600]
            numbers = [(devices / node.name).stat().st_rdev for node in inside]
            assert [node.stat().st_rdev for node in inside] == numbers
    with make_group(procfs.cgroup_directory("/")) as group:
        eventually(lambda: not two_cards.jobs())
        container = MiniContainer(two_cards, place=script)
        (group / "cgroup.procs").write_text(str(container.init))
        assert container.hook("slice=4") == ""
        (piece,) = two_cards.jobs()[container.name]["slices"]
        modes = [
            Path(f"/proc/{container.init}/root/run/{node}").stat().st_mode for node in nodes[:2]
        ]
        open_cards = [card for card, mode in enumerate(modes) if stat.S_IMODE(mode) == 0o666]
        assert open_cards == [piece["card"]]
        container.kill()
    two_cards.kill_daemon()
    two_cards.start(*CARDS)
    assert stat.S_IMODE((devices / "nvidia0").stat().st_mode) == 0o644


def test_container_without_a_group_is_refused(two_cards: Workstation) -> None:
    """It could open the other card, which the option accepts."""
    refused = MiniContainer(two_cards)
    sentence = refused.hook("slice=14")
    assert "cannot be kept from other cards' device nodes: it has no control group" in sentence
    assert not two_cards.jobs()
    two_cards.kill_daemon()
    two_cards.start(*CARDS, "--shim-only")
    accepted = MiniContainer(two_cards)
    accepted.start("slice=14")
    accepted.await_state("running")
    assert "--shim-only" in (two_cards.root / "daemon.log").read_text()
