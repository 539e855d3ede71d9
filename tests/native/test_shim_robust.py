"""Many at once, forks among threads, scribbles in the account: nobody falls, nobody waits."""

import os
import random
import signal
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fenka.isolation import account
from fenka.isolation.lease_control import layout
from tests.native.clients import (
    GIB,
    MIB,
    OUT_OF_MEMORY,
    SYSTEM_NOT_READY,
    Client,
    Lease,
    client,
)

Make = Callable[..., Lease]


def test_three_hundred_processes_get_memory_at_once(lease: Lease) -> None:
    """All get in and get their memory, and leave nothing behind."""
    short = [
        subprocess.Popen(
            [str(client(0))],
            env=lease.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(300)
    ]
    for process in short:
        assert process.stdin
        process.stdin.write(b"init 0 0\ncontext 0 0\nalloc 8388608 0\n")
        process.stdin.flush()
    for process in short:
        assert process.stdout
        assert [process.stdout.readline().split()[0] for _ in range(3)] == [b"0"] * 3
    assert lease.held() == 300 * 8 * MIB
    for process in short:
        assert process.communicate() == (b"", b"")
    last = lease.start().enter()
    assert last.ask("info").value == 4 * GIB
    assert [p.pid for p in account.read(lease.account).processes] == [last.process.pid]


def test_forked_child_works_when_other_threads_allocate(lease: Lease) -> None:
    """A child forked while other threads hold locks gets its memory; the parent's stays right."""
    parent = lease.start()
    parent.ask("init")
    context = parent.ask("context").value
    assert parent.ask("children", context, 100).value == 100
    assert parent.ask("alloc", 4 * GIB).code == 0
    assert lease.held() == 4 * GIB


def offset(field: str, index: int = 0) -> int:
    """Where a word of the account lies."""
    return int(layout().offsetof("struct fenka_account", field)) + 8 * index


def put(path: Path, at: int, *words: int) -> None:
    """Writes words as any program of the lease could."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(struct.pack(f"<{len(words)}Q", *words))


def works(client: Client) -> None:
    """Every call is answered; what it says is the driver's success or out of memory."""
    code, pointer, _ = client.ask("alloc", MIB)
    assert code in (0, OUT_OF_MEMORY)
    assert client.ask("info").code == 0
    if code == 0:
        assert client.ask("free", pointer).code == 0


WORDS = [0, 1, MIB, 1 << 50, 1 << 63, (1 << 64) - 1]


@pytest.mark.parametrize("seed", range(8))
def test_programs_continue_when_the_account_is_corrupted(lease: Lease, seed: int) -> None:
    """Whatever is written over slots, owners and marks, running programs and the reader go on."""
    chance = random.Random(seed)
    running = [lease.start().enter() for _ in range(2)]
    for _ in range(150):
        field, count = chance.choice(
            [("slots_used", 1), ("pid_namespaces", 256), ("identity", 1024), ("memory", 2048)]
        )
        word = chance.choice([*WORDS, chance.getrandbits(64)])
        put(lease.account, offset(field, chance.randrange(count)), word)
        for one in running:
            works(one)
        account.read(lease.account)


def test_account_recovers_when_it_was_zeroed(lease: Lease) -> None:
    """Slots zeroed under a program that holds memory: its frees do not turn into a sum of 2^64."""
    one = lease.start().enter()
    pointer = one.ask("alloc", 3 * GIB).value
    put(lease.account, offset("memory"), *[0] * 1024)
    assert one.ask("free", pointer).code == 0
    assert lease.held() == 0
    assert one.ask("alloc", 4 * GIB).code == 0


@pytest.mark.parametrize("word", [1 << 63, 3 * GIB])
def test_memory_of_a_free_slot_is_reclaimed(lease: Lease, word: int) -> None:
    """A word in a slot without an owner cannot keep the card from those who run."""
    one = lease.start().enter()
    put(lease.account, offset("slots_used"), 16)
    put(lease.account, offset("memory", 9), word)
    assert one.ask("alloc", 4 * GIB).code == 0
    assert lease.held() == 4 * GIB


def test_memory_of_pid_zero_is_reclaimed(lease: Lease) -> None:
    """An owner that no process can be is a dead one."""
    one = lease.start().enter()
    put(lease.account, offset("slots_used"), 16)
    put(lease.account, offset("identity", 9), 1 << 32)
    put(lease.account, offset("memory", 9), 3 * GIB)
    assert one.ask("alloc", 4 * GIB).code == 0


def test_slot_is_zeroed_when_it_is_taken(lease: Lease) -> None:
    """What was left in a free slot is not the next owner's."""
    put(lease.account, offset("memory"), GIB)
    one = lease.start().enter()
    assert lease.held() == 0
    assert one.ask("alloc", 4 * GIB).code == 0


def test_programs_continue_when_the_account_file_grew(lease: Lease) -> None:
    """A file made longer still serves those who have it; a newcomer refuses it."""
    one = lease.start().enter()
    os.truncate(lease.account, lease.account.stat().st_size + 4096)
    assert one.ask("alloc", GIB).code == 0
    assert lease.held() == GIB
    newcomer = lease.start()
    assert newcomer.ask("init").code != 0
    assert "does not have the size of an account" in newcomer.finish()


SHORTER = [0, 1, 4096, 20_000, 300_000]


@pytest.mark.parametrize("size", SHORTER)
def test_programs_continue_when_the_account_was_truncated(lease: Lease, size: int) -> None:
    """Whoever cuts the file off: programs that run go on, keep what they have, and are granted nothing more
    where they notice; a newcomer is told, and the reader reads."""
    one, two = (lease.start().enter() for _ in range(2))
    pointer = one.ask("alloc", GIB).value
    whole = lease.account.stat().st_size
    os.truncate(lease.account, size)
    for program in (one, two):
        for _ in range(3):
            works(program)
    assert one.ask("free", pointer).code == 0
    if size < 4096:  # else what is left of it says enough
        assert one.ask("alloc", MIB).code == OUT_OF_MEMORY
        assert one.ask("info").value == 0
    newcomer = lease.start()
    assert newcomer.ask("init").code != 0
    os.truncate(lease.account, whole)
    for program in (one, two):
        for _ in range(3):
            works(program)
        # A child's exit status has eight bits.
        assert program.ask("child", MIB).code in (0, OUT_OF_MEMORY, SYSTEM_NOT_READY & 255)
        program.finish()
        assert program.process.returncode == 0


def test_programs_continue_when_the_control_page_was_truncated(lease: Lease) -> None:
    """Where isolation is cooperative it is the user's own file: what it said last holds."""
    one = lease.start().enter()
    os.truncate(lease.control, 0)
    assert one.ask("alloc", 4 * GIB).code == 0
    assert one.ask("alloc", MIB).code == OUT_OF_MEMORY


def test_sigbus_of_the_program_reaches_its_own_handler(lease: Lease) -> None:
    """Its handler from before is called for them, and without one it ends, as without the shim."""
    handles, ends = lease.start(), lease.start().enter()
    assert handles.ask("handler").code == 0
    handles.enter()
    os.truncate(lease.account, 0)
    works(handles)
    assert handles.ask("fault").code == 0
    works(handles)
    ends.send("fault")
    ends.finish()
    assert ends.process.returncode == -signal.SIGBUS
