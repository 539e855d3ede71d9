"""Children that inherited the driver's descriptors keep the memory of a process that has ended."""

import fcntl
import os
import signal
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from fenka.isolation import limit_changes
from tests.native.clients import GIB, OUT_OF_MEMORY, SYSTEM_NOT_READY, Client, Lease
from tests.native.test_shim_account import put
from tests.waiting import wait_until

IdleChild = Callable[..., int]


@pytest.fixture
def idle_child() -> Iterator[IdleChild]:
    """Return a function that forks a child of a client, which ends with the test."""
    children: list[int] = []

    def make(client: Client, *, raw: bool = False) -> int:
        children.append(client.ask("idle", raw).value)
        return children[-1]

    yield make
    for pid in children:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("raw", [False, True], ids=["fork", "clone"])
def test_memory_stays_charged_while_a_forked_child_lives(
    lease: Lease, idle_child: IdleChild, raw: bool
) -> None:
    """The driver frees it with the last copy of its descriptors: so does the account."""
    parent, other = lease.start().enter(), lease.start().enter()
    assert parent.ask("alloc", 3 * GIB).code == 0
    child = idle_child(parent, raw=raw)
    parent.kill()
    assert other.ask("alloc", 2 * GIB).code == OUT_OF_MEMORY
    assert other.ask("info").value == GIB
    assert lease.held() == 3 * GIB
    assert lease.start().enter().ask("alloc", 2 * GIB).code == OUT_OF_MEMORY
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: other.ask("alloc", 4 * GIB).code == 0)


def test_lease_cannot_shrink_below_what_a_forked_child_keeps(
    lease: Lease, idle_child: IdleChild
) -> None:
    """The daemon reads the same locks as programs."""
    parent = lease.start().enter()
    parent.ask("alloc", 3 * GIB)
    child = idle_child(parent)
    parent.kill()
    smaller = tuple(replace(limit, memory_bytes=2 * GIB) for limit in lease.limits)
    with pytest.raises(limit_changes.InUse, match="hold 3072 MiB"):
        limit_changes.check(lease.account, lease.limits, smaller)
    os.kill(child, signal.SIGKILL)

    def shrinks() -> bool:
        try:
            limit_changes.check(lease.account, lease.limits, smaller)
        except limit_changes.InUse:
            return False
        return True

    wait_until(shrinks)


def test_child_of_a_process_without_the_driver_keeps_nothing(
    lease: Lease, idle_child: IdleChild
) -> None:
    """It was forked before the driver was opened, so it has none of its descriptors."""
    parent, other = lease.start(), lease.start().enter()
    idle_child(parent)
    parent.enter().ask("alloc", 4 * GIB)
    parent.kill()
    assert other.ask("alloc", 4 * GIB).code == 0


def test_memory_of_the_previous_program_stays_charged_after_exec(
    lease: Lease, idle_child: IdleChild
) -> None:
    """The same process, another program: what the earlier one's child holds is not free."""
    client = lease.start().enter()
    client.ask("alloc", 3 * GIB)
    idle_child(client)
    client.send("exec")
    client.enter()
    assert client.ask("alloc", 2 * GIB).code == OUT_OF_MEMORY
    assert client.ask("alloc", GIB).code == 0
    assert lease.held() == 4 * GIB


def test_child_that_uses_the_driver_pays_for_itself_and_its_parent(lease: Lease) -> None:
    """It holds its parent's descriptors and its own: after its end both are free."""
    parent = lease.start().enter()
    parent.ask("alloc", 2 * GIB)
    assert parent.ask("child", 2 * GIB).code == 0
    parent.kill()
    assert lease.start().enter().ask("alloc", 4 * GIB).code == 0


def test_slots_are_kept_when_their_namespace_has_ended(lease: Lease, idle_child: IdleChild) -> None:
    """The descriptors may be in another namespace: the locks decide, for programs and for the agent."""
    parent, other = lease.start().enter(), lease.start().enter()
    parent.ask("alloc", 3 * GIB)
    idle_child(parent)
    parent.kill()
    put(lease.account, "namespace_states", 0, 2)  # FENKA_NAMESPACE_ENDED
    assert lease.held() == 3 * GIB
    assert other.ask("alloc", 2 * GIB).code == OUT_OF_MEMORY


def test_gpu_is_refused_when_the_account_cannot_be_locked(lease: Lease) -> None:
    """Without a lock nobody would see the children of the process."""
    lock = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    with lease.account.open("r+b") as file:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, lock)
        client = lease.start()
        assert client.ask("init").code == SYSTEM_NOT_READY
    assert "fenka: no GPU for this process: the account cannot be locked" in client.finish()
