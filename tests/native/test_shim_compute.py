"""The compute limit: every way to launch is charged, to the right card, by measured time; and then waits."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fenka.isolation import account, lease_control
from fenka.isolation.compute_feedback import ComputeFeedback
from fenka.isolation.lease_control import Control, Limit, layout
from tests.native.clients import CARDS, GIB, Client, Lease
from tests.native.test_shim_rows import HOOKS, with_role
from tests.waiting import wait_until

Leases = Callable[..., Lease]
MS = 1_000_000


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Leases]:
    """Makes leases of 1 GiB of each of the first cards, with these shares of their time."""
    made: list[Lease] = []

    def make(*percents: int) -> Lease:
        limits = (Limit(u, GIB, 0, p) for u, p in zip(CARDS, percents, strict=False))
        made.append(Lease(tmp_path / f"lease{len(made)}", tuple(limits)))
        return made[-1]

    yield make
    for lease in made:
        lease.close()


def start(lease: Lease, kernel_us: int, card: int = 0) -> Client:
    """A program whose kernels take so long, on this card."""
    client = lease.start_rows(FENKA_NULL_KERNEL_US=str(kernel_us))
    assert client.ask("use -", card).code == 0
    return client


def charged(lease: Lease) -> tuple[int, ...]:
    """Milliseconds of the first two cards' time."""
    return tuple(ns // MS for ns in account.read(lease.account).charged_ns[:2])


@pytest.mark.parametrize("name", with_role("LAUNCH"))
def test_launch_is_charged_its_duration(limited: Leases, name: str) -> None:
    """The first is paid for once it is measured; on the card that is current, and on no other."""
    lease = limited(50, 50)
    actor = start(lease, 5000, card=1)
    assert actor.ask(f"spend {name}", 4).code == 0
    assert charged(lease) == (0, 20)


@pytest.mark.parametrize("name", with_role("LAUNCH"))
def test_launch_waits_when_the_share_is_used(limited: Leases, name: str) -> None:
    """Fifteen launches of 20 ms at one half take 600 ms, but for what may be saved and the last one."""
    actor = start(limited(50), 20000)
    code, took_ms, _ = actor.ask(f"spend {name}", 15)
    assert code == 0
    assert took_ms > 400


def test_nothing_is_measured_when_there_is_no_limit(limited: Leases) -> None:
    """Nor does anybody wait."""
    lease = limited(100, 100)
    actor = start(lease, 1_000_000)
    assert actor.ask("spend cuLaunchKernel", 1000).code == 0
    assert charged(lease) == (0, 0)


def feedback(lease: Lease, other: Lease | None = None, share: int = 80) -> None:
    """Write feedback once, as a new writer: a lease without compute, and a busy one that has a share."""
    writer = ComputeFeedback(lambda *_: (time.time_ns() // 1000, {1: 100}), {1: "other"}.get)
    writer.add_lease("test", lease.control, requested={CARDS[0]: 0})
    if other:
        writer.add_lease("other", other.control, requested={CARDS[0]: share})
    writer.update()
    writer.close()


def test_launches_are_measured_only_while_others_have_a_share(limited: Leases) -> None:
    """Of a lease without compute: as one without limit before and afterwards, while the program runs."""
    lease, without, service = limited(100), limited(100), limited(80)
    actor = start(lease, 5000)
    for other, share, charged_ms in (
        (None, 0, 0),
        (without, 0, 0),
        (service, 80, 20),
        (None, 0, 20),
    ):
        feedback(lease, other, share)
        assert actor.ask("spend cuLaunchKernel", 4).code == 0
        assert charged(lease) == (charged_ms, 0)


def test_time_used_before_others_had_a_share_is_no_debt(limited: Leases) -> None:
    """What the driver measured while nothing was charged is not compared with the charges."""
    lease, service = limited(100), limited(80)
    began, passed_us = time.monotonic_ns(), 0
    writer = ComputeFeedback(
        lambda *_: (passed_us, {1: 100, 2: 80}),
        {1: "test", 2: "service"}.get,
        lambda: began + passed_us * 1000,
        lambda: passed_us,
    )
    writer.add_lease("test", lease.control, requested={CARDS[0]: 0})
    actor = start(lease, 1000)
    for shared in (True, False, True):
        if shared:
            writer.add_lease("service", service.control)
        else:
            writer.remove_lease("service")
        passed_us += 500_000
        writer.update()
        assert actor.ask("spend cuLaunchKernel", 8).code == 0
    writer.close()
    slots = layout().from_buffer("struct fenka_account *", lease.account.read_bytes())
    assert slots.compute_budgets[0].feedback_at == began + 1_500_000_000
    assert slots.compute_budgets[0].excess == 0
    assert charged(lease)[0] == 16


def test_waiting_launch_goes_on_when_the_writer_was_killed(limited: Leases) -> None:
    """It would wait for twenty minutes at one percent; a second later the feedback is too old."""
    lease, service = limited(100), limited(100)
    actor = start(lease, 12_000_000)
    feedback(lease, service, 100)
    actor.send("spend cuLaunchKernel", 8)
    assert actor.answer().code == 0
    assert charged(lease)[0] == 8 * 12_000


def test_captured_launch_is_not_charged(limited: Leases) -> None:
    """The null driver ends a program that makes, asks or records an event while a stream is captured."""
    lease = limited(50)
    actor = start(lease, 20000)
    graph = actor.ask("graph -").value
    assert actor.ask("capture -", graph).code == 0
    assert actor.ask("spend cuLaunchKernel", 100).code == 0
    assert actor.ask("captured -").code == 0
    assert charged(lease) == (0, 0)


def test_debt_is_bounded_when_a_program_was_killed(limited: Leases) -> None:
    """At most what its last launch cost; then another program of the lease has its turn."""
    lease = limited(50)
    actor = start(lease, 20000)
    actor.send("spend cuLaunchKernel", 1000)
    wait_until(lambda: charged(lease)[0] >= 200)
    os.kill(actor.process.pid, signal.SIGKILL)
    other = start(lease, 20000)
    assert other.ask("spend cuLaunchKernel", 5).code == 0
    assert charged(lease)[0] >= 280


def test_waiting_launch_follows_a_changed_limit(limited: Leases) -> None:
    """A program that would wait for twenty minutes at one percent goes on when the limit is lifted."""
    lease = limited(1)
    actor = start(lease, 12_000_000)
    actor.send("spend cuLaunchKernel", 8)
    wait_until(lambda: charged(lease)[0] >= 100)
    lease_control.update(lease.control, Control("test", (Limit(CARDS[0], GIB),)))
    assert actor.answer().code == 0


def test_processes_of_a_lease_share_one_budget(limited: Leases) -> None:
    """Two together have what one has alone: sixteen launches of 20 ms at one half take 640 ms."""
    lease = limited(50)
    actors = [start(lease, 20000), start(lease, 20000)]
    for actor in actors:
        actor.send("spend cuLaunchKernel", 8)
    assert max(actor.answer().value for actor in actors) > 400
    assert charged(lease)[0] == 320


def test_gpu_is_refused_when_the_compute_mode_is_unknown(limited: Leases) -> None:
    """A program that ignored a limit would take other programs' time."""
    lease = limited(50)
    page = bytearray(lease.control.read_bytes())
    mode = page.index(b"\x32\0\0\0", 64) + 4
    page[mode] = 9
    lease.control.write_bytes(page)
    client = lease.start()
    assert client.ask("init").code != 0
    assert "limits compute in a way that this library does not know" in client.finish()


def test_table_has_every_launch_function() -> None:
    """Also those that are deprecated; what runs on the host is not among them."""
    assert len(with_role("LAUNCH")) == 12
    assert "cuLaunchHostFunc" not in HOOKS
