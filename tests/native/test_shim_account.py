"""One cap over many processes, and what a killed one leaves behind: nothing."""

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
from tests.native.clients import GIB, MIB, OUT_OF_MEMORY, Client, Lease

Make = Callable[..., Lease]


def test_processes_share_one_cap(lease: Lease) -> None:
    """What one holds another cannot have, until it is freed."""
    one, two = lease.start().enter(), lease.start().enter()
    pointer = one.ask("alloc", 3 * GIB).value
    assert two.ask("alloc", 2 * GIB).code == OUT_OF_MEMORY
    assert two.ask("alloc", GIB).code == 0
    assert one.ask("free", pointer).code == 0
    assert two.ask("alloc", 3 * GIB).code == 0


def test_account_lists_its_processes(lease: Lease) -> None:
    """Each process has one line: its PID, start time, namespace and bytes."""
    one, two = lease.start().enter(), lease.start().enter()
    one.ask("alloc", GIB)
    two.ask("alloc", 2 * GIB)
    said = account.read(lease.account)
    assert {p.pid: p.memory_bytes[0] for p in said.processes} == {
        one.process.pid: GIB,
        two.process.pid: 2 * GIB,
    }
    first = next(p for p in said.processes if p.pid == one.process.pid)
    fields = Path(f"/proc/{first.pid}/stat").read_text().rpartition(")")[2].split()
    assert first.start_time == int(fields[19])
    assert first.namespace == Path("/proc/self/ns/pid").stat().st_ino


def test_memory_is_available_when_its_process_was_killed(lease: Lease) -> None:
    """Right after SIGKILL, while the dead one is still a zombie, all is there again."""
    one, two = lease.start().enter(), lease.start().enter()
    assert one.ask("alloc", 4 * GIB).code == 0
    assert two.ask("alloc", GIB).code == OUT_OF_MEMORY
    os.kill(one.process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, one.process.pid, os.WEXITED | os.WNOWAIT)
    assert two.ask("info")[1:] == (4 * GIB, 4 * GIB)
    assert two.ask("alloc", 4 * GIB).code == 0


def test_stopped_process_keeps_its_memory_and_blocks_no_other(lease: Lease) -> None:
    """A process that is stopped is not dead, and holds no lock that another waits for."""
    one, two = lease.start().enter(), lease.start().enter()
    one.ask("alloc", 3 * GIB)
    os.kill(one.process.pid, signal.SIGSTOP)
    assert two.ask("alloc", 2 * GIB).code == OUT_OF_MEMORY
    assert two.ask("alloc", GIB).code == 0
    assert two.ask("info").value == 0
    os.kill(one.process.pid, signal.SIGCONT)


def test_no_memory_leaks_when_processes_are_killed(lease: Lease) -> None:
    """Killed at any moment of their churn, processes leave no byte behind and no slot taken."""
    chance = random.Random(1)
    running: list[Client] = []
    for killed in range(500):
        while len(running) < 4:
            client = lease.start()
            client.enter()
            client.ask("churn", killed)
            running.append(client)
        client = running.pop(chance.randrange(len(running)))
        os.kill(client.process.pid, signal.SIGKILL)
        client.process.wait()
    for client in running:
        client.kill()
    last = lease.start().enter()
    assert last.ask("alloc", 4 * GIB).code == 0
    said = account.read(lease.account)
    assert [p.pid for p in said.processes] == [last.process.pid]
    assert said.memory_bytes[0] == 4 * GIB


def test_cap_holds_when_processes_race(make_lease: Make, tmp_path: Path) -> None:
    """By the driver's own count, six who race for one cap come close to it, and at no instant pass it."""
    lease = make_lease(0.5)
    ledger = tmp_path / "ledger"
    ledger.write_bytes(bytes(16))
    for seed in range(6):
        lease.start(FENKA_NULL_LEDGER=str(ledger)).enter().ask("churn", seed)
    looker = lease.start().enter()
    for _ in range(20_000):
        looker.ask("count")
    most = struct.unpack("<QQ", ledger.read_bytes())[1] << 16
    assert 500 * MIB < most <= 512 * MIB


def test_charges_are_exact_when_threads_race(lease: Lease) -> None:
    """Eight threads that allocate and free at once leave the account at nothing."""
    client = lease.start()
    client.ask("init")
    context = client.ask("context").value
    assert client.ask("threads", context, 8).code == 0
    assert lease.held() == 0
    assert client.ask("alloc", 4 * GIB).code == 0


def test_peak_is_exact_when_threads_and_processes_race(lease: Lease, tmp_path: Path) -> None:
    """It is at least what the driver counted at any instant, and neither a free nor a refusal changes it."""
    ledger = tmp_path / "ledger"
    ledger.write_bytes(bytes(16))
    pair = [lease.start(FENKA_NULL_LEDGER=str(ledger)) for _ in range(2)]
    for client in pair:
        assert client.ask("init").code == 0
        client.send("threads", client.ask("context").value, 4)
    assert [client.answer().code for client in pair] == [0, 0]
    most = struct.unpack("<QQ", ledger.read_bytes())[1] << 16
    assert 0 < most <= account.read(lease.account).peak_bytes[0] < 3 * GIB
    pointers = [
        client.ask("alloc", size * GIB).value for client, size in zip(pair, (1, 2), strict=True)
    ]
    assert account.read(lease.account).peak_bytes[0] == 3 * GIB
    assert pair[0].ask("alloc", 2 * GIB).code == OUT_OF_MEMORY
    for client, pointer in zip(pair, pointers, strict=True):
        assert client.ask("free", pointer).code == 0
    assert pair[0].ask("alloc", 2 * GIB).code == 0
    assert account.read(lease.account).peak_bytes[0] == 3 * GIB


def test_only_one_process_gets_the_whole_cap(lease: Lease, tmp_path: Path) -> None:
    """Two who take and give back the whole cap as fast as they can are each granted it, but never both."""
    ledger = tmp_path / "ledger"
    ledger.write_bytes(bytes(16))
    pair = [lease.start(FENKA_NULL_LEDGER=str(ledger)).enter() for _ in range(2)]
    for client in pair:
        client.send("fight", 4 * GIB, 5_000_000)
    assert all(client.answer().value > 0 for client in pair)
    assert struct.unpack("<QQ", ledger.read_bytes()) == (0, 4 * GIB >> 16)


def test_forked_child_has_its_own_slot(lease: Lease) -> None:
    """A child neither spends from the parent's slot nor, dying, takes the parent's charge along."""
    client = lease.start().enter()
    client.ask("alloc", 2 * GIB)
    assert client.ask("child", 3 * GIB).code == OUT_OF_MEMORY
    assert client.ask("child", 2 * GIB).code == 0
    assert client.ask("info").value == 2 * GIB
    assert lease.held() == 2 * GIB


def test_slot_is_empty_after_exec(lease: Lease) -> None:
    """The new program of the same PID does not inherit what the old one held."""
    client = lease.start().enter()
    client.ask("alloc", 3 * GIB)
    client.send("exec")
    client.enter()
    assert lease.held() == 0
    assert client.ask("alloc", 4 * GIB).code == 0
    assert len(account.read(lease.account).processes) == 1


def put(path: Path, name: str, index: int, word: int) -> None:
    """Writes one word of the account, as a program could."""
    offset = layout().offsetof("struct fenka_account", name) + 8 * index
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(struct.pack("<Q", word))


@pytest.mark.parametrize("namespace_index", [7, 255], ids=["another", "none"])
def test_process_of_another_pid_namespace_is_not_reaped(lease: Lease, namespace_index: int) -> None:
    """A PID that means nothing here is left alone: its memory stays counted."""
    put(lease.account, "pid_namespaces", 7, 12345)
    put(lease.account, "slots_used", 0, 1)
    put(lease.account, "identity", 0, 4_000_000 | namespace_index << 23 | 1 << 32)
    put(lease.account, "memory", 0, 3 * GIB)
    client = lease.start().enter()
    assert client.ask("alloc", 2 * GIB).code == OUT_OF_MEMORY
    assert client.ask("info").value == GIB


NEW_TIME = ("unshare", "--user", "--map-root-user", "--time", "--boottime", "100000")


def test_process_of_another_time_namespace_is_not_reaped(lease: Lease) -> None:
    """It reads other start times than we do: both live, and what one holds stays counted for the other."""
    if subprocess.run([*NEW_TIME, "true"], capture_output=True, check=False).returncode:
        pytest.skip("the kernel allows no time namespace here")
    here = lease.start().enter()
    here.ask("alloc", 3 * GIB)
    there = lease.start(0, *NEW_TIME, "--fork", "--kill-child").enter()
    assert there.ask("alloc", 2 * GIB).code == OUT_OF_MEMORY
    assert there.ask("alloc", GIB).code == 0
    assert here.ask("alloc", GIB).code == OUT_OF_MEMORY
    assert lease.held() == 4 * GIB
    assert len({p.time_namespace for p in account.read(lease.account).processes}) == 2


def test_slot_is_reaped_when_its_pid_was_reused(lease: Lease) -> None:
    """A slot whose PID lives, but began at another time, is a dead one's."""
    with_slot = lease.start().enter()  # claims slot 0 and the first namespace
    alive = os.getpid()
    put(lease.account, "slots_used", 0, 8)
    put(lease.account, "identity", 5, alive | 1 << 32)
    put(lease.account, "memory", 5, 3 * GIB)
    assert with_slot.ask("alloc", 4 * GIB).code == 0


def test_slot_is_reaped_when_the_reclaiming_process_died(lease: Lease) -> None:
    """A slot left half emptied by a process that was killed meanwhile is emptied by the next."""
    client = lease.start().enter()
    put(lease.account, "slots_used", 0, 8)
    put(lease.account, "identity", 3, 4_194_000 | 1 << 22 | 1 << 32)
    put(lease.account, "memory", 3, 3 * GIB)
    assert client.ask("alloc", 4 * GIB).code == 0
