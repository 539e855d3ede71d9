"""A lease that is resized under running programs."""

import os
import signal
from collections.abc import Callable

import pytest

from fenka.isolation import lease_control
from fenka.isolation.lease_control import Limit
from fenka.isolation.limit_changes import InUse, resize
from tests.native.clients import CARDS, GIB, OUT_OF_MEMORY, Lease

Make = Callable[..., Lease]


def to(lease: Lease, *gib: float) -> None:
    """So much of each card."""
    limits = tuple(Limit(u, int(g * GIB)) for u, g in zip(CARDS, gib, strict=False))
    resize(lease.control, lease.account, limits)


def test_next_allocation_follows_the_new_limit(make_lease: Make) -> None:
    """In every process, on the right card, up and down, and in what they are told of the card."""
    lease = make_lease(2, 2)
    one, two = lease.start().enter(), lease.start().enter(1)
    assert one.ask("alloc", 3 * GIB).code == OUT_OF_MEMORY
    to(lease, 4, 1)
    assert one.ask("alloc", 3 * GIB).code == 0
    assert two.ask("alloc", 2 * GIB).code == OUT_OF_MEMORY
    assert two.ask("info")[1:] == (GIB, GIB)
    to(lease, 3, 2)
    assert one.ask("alloc", 1).code == OUT_OF_MEMORY
    assert one.ask("info")[1:] == (0, 3 * GIB)
    assert two.ask("alloc", 2 * GIB).code == 0


def test_held_memory_stays_when_the_limit_shrinks_below_it(lease: Lease) -> None:
    """The refusal leaves the programs what they had; once one has ended, the same is granted."""
    one, two = lease.start().enter(), lease.start().enter()
    one.ask("alloc", GIB)
    two.ask("alloc", 2 * GIB)
    with pytest.raises(
        InUse, match="cannot shrink to 2048 MiB: the lease's programs hold 3072 MiB"
    ):
        to(lease, 2)
    assert one.ask("info")[1:] == (GIB, 4 * GIB)
    os.kill(two.process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, two.process.pid, os.WEXITED | os.WNOWAIT)  # dead, but still a zombie
    to(lease, 2)
    assert one.ask("alloc", GIB).code == 0
    assert one.ask("alloc", GIB).code == OUT_OF_MEMORY


def test_last_limit_holds_when_an_update_was_interrupted(lease: Lease) -> None:
    """An agent killed in the middle of writing: programs keep what they saw, and the next one mends it."""
    one = lease.start().enter()
    before = lease.control.read_bytes()
    torn = lease_control.encode(
        lease_control.Control("test", (Limit(CARDS[0], 8 * GIB),), generation=2)
    )
    with lease.control.open("r+b") as file:
        file.write(torn[:16] + b"\x01" + torn[17:])
    assert before != lease.control.read_bytes()
    assert one.ask("alloc", 5 * GIB).code == OUT_OF_MEMORY
    assert one.ask("alloc", 4 * GIB).code == 0
    to(lease, 5)
    assert one.ask("alloc", GIB).code == 0
