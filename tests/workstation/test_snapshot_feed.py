"""One snapshot for all who watch."""

import asyncio

import pytest

from fenka.core.errors import FenkaError
from fenka.workstation.protocol import MachineSnapshot
from fenka.workstation.screens import snapshot_feed
from fenka.workstation.screens.snapshot_feed import SnapshotFeed
from tests.dashboard.machines import machine


class Machine:
    """A machine that counts how often somebody looks at it, and may be lost."""

    def __init__(self) -> None:
        self.looks, self.lost = 0, False

    async def look(self) -> MachineSnapshot:
        """Return a snapshot."""
        self.looks += 1
        await asyncio.sleep(0)
        if self.lost:
            raise FenkaError("no driver")
        return machine()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine, at which nobody looks again only because time has passed."""
    monkeypatch.setattr(snapshot_feed, "PERIOD_S", 1e4)
    monkeypatch.setattr(snapshot_feed, "PAUSE_S", 0.0)
    return Machine()


async def test_all_who_watch_get_the_same(seen: Machine) -> None:
    """However many they are, the machine is looked at once, and not before somebody watches."""
    feed = SnapshotFeed(seen.look)
    feed.on_change()
    await asyncio.sleep(0)
    assert seen.looks == 0
    first, *others = await asyncio.gather(*(feed.after(0) for _ in range(20)))
    assert all(other is first for other in others)
    assert (seen.looks, first.revision) == (1, 1)
    # One that comes later gets it, too.
    assert await feed.after(0) is first


async def test_next_comes_at_a_change(seen: Machine) -> None:
    """Changes while nobody waits are not lost, and several are one."""
    feed = SnapshotFeed(seen.look)
    await feed.after(0)
    waiting = asyncio.create_task(feed.after(1))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    feed.on_change()
    assert (await waiting).revision == 2
    feed.on_change()
    feed.on_change()
    assert (await feed.after(2)).revision == 3
    assert seen.looks == 3


async def test_next_comes_after_a_time_without_changes(
    seen: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures of the driver change without any event."""
    monkeypatch.setattr(snapshot_feed, "PERIOD_S", 0.01)
    feed = SnapshotFeed(seen.look)
    revisions = [(await feed.after(revision)).revision for revision in range(3)]
    assert revisions == [1, 2, 3]


async def test_failure_is_everybodys_and_not_the_end(seen: Machine) -> None:
    """A driver that returns is looked at again."""
    feed = SnapshotFeed(seen.look)
    seen.lost = True
    answers = await asyncio.gather(feed.after(0), feed.after(0), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["no driver"] * 2
    seen.lost = False
    feed.on_change()
    assert (await feed.after(0)).revision == 1


async def test_one_who_leaves_takes_nothing_from_others(seen: Machine) -> None:
    """A page that is closed while it waits."""
    feed = SnapshotFeed(seen.look)
    leaving, staying = asyncio.create_task(feed.after(0)), asyncio.create_task(feed.after(0))
    await asyncio.sleep(0)
    leaving.cancel()
    assert (await staying).revision == 1
