"""Who a client counts for: subordinate user IDs are no further users."""

import os
import subprocess
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from fenka import procfs
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.request import Memory, Request
from fenka.hardware.peer_credentials import PeerProcess
from fenka.workstation.accepting import account_of
from fenka.workstation.admission import MAX_JOBS_PER_USER, Admission, QuotaExceeded
from fenka.workstation.broker import Broker
from tests.builders import job

NOBODY, SUBORDINATE = 65533, 231077

Start = Callable[..., int]

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become other users")


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process in new user namespaces, each inside the last. Return its PID once it is there."""
    running: list[subprocess.Popen[str]] = []

    def run(*, depth: int = 1, user: int | None = None) -> int:
        words = [*["unshare", "--user", "--map-root-user"] * depth, "sh", "-c", "echo; exec cat"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        program = subprocess.Popen(words, user=user, text=True, **pipes)  # type: ignore[call-overload]
        running.append(program)
        assert program.stdout.readline() == "\n"
        return int(program.pid)

    yield run
    for program in running:
        program.communicate()


def client(pid: int, uid: int, *, lives: bool = True) -> PeerProcess:
    """A process that has connected."""
    return cast("PeerProcess", SimpleNamespace(pid=pid, uid=uid, lives=lambda: lives))


@as_root
@pytest.mark.parametrize("depth", [1, 2])
def test_client_counts_for_the_maker_of_its_outermost_namespace(start: Start, depth: int) -> None:
    """It may have any ID there. The rights stay those of the ID."""
    pid = start(depth=depth, user=NOBODY)
    assert procfs.user_namespace_owner(pid) == NOBODY
    assert account_of(client(pid, SUBORDINATE)) == NOBODY


def test_client_has_no_account_when_it_has_ended() -> None:
    """Nobody can tell any more whose namespace it was in: its ID may be one of thousands of its maker's."""
    with pytest.raises(ProcessLookupError):
        account_of(client(os.getpid(), SUBORDINATE, lives=False))
    with pytest.raises(ProcessLookupError):
        account_of(client(2**22 + 1, 7, lives=False))


@as_root
def test_client_counts_for_itself_when_root_made_its_namespace(start: Start) -> None:
    """A container of root's must not have root's freedom from quotas."""
    pid = start()
    assert procfs.user_namespace_owner(pid) == 0
    assert account_of(client(pid, SUBORDINATE)) == SUBORDINATE


def test_client_counts_for_itself_when_it_is_in_our_namespace() -> None:
    """So it is on machines without containers."""
    assert procfs.user_namespace_owner(os.getpid()) is None
    assert account_of(client(os.getpid(), 7)) == 7


def test_ids_of_one_account_are_one_user_in_the_queue() -> None:
    """Twenty requests of twenty IDs take turns with one earlier of another user's as those of one user do."""
    broker = Broker(Node("here", (Card(0, DeviceId("GPU-0"), "T4", 15079),)), "binpack")
    whole = Request(Memory(14, 1024))
    broker.submit([job("running", request=whole)], 0)
    for number in range(20):
        ids = {"uid": SUBORDINATE + number, "account_uid": NOBODY}
        broker.submit([job(f"sub{number:02}", request=whole, requested_at=1 + number, **ids)], 1)
    broker.submit([job("other", request=whole, requested_at=30, uid=7)], 30)
    positions = {
        each.name: status.position
        for each in broker.jobs.values()
        if (status := broker.queue_status(each))
    }
    assert positions["other"] == 2


def test_ids_of_one_account_have_one_quota() -> None:
    """The number of jobs is counted by account."""
    jobs = [
        job(str(number), uid=SUBORDINATE + number, account_uid=NOBODY)
        for number in range(MAX_JOBS_PER_USER)
    ]
    admission = Admission(10_000, frozenset({0}))
    admission.check_jobs(SUBORDINATE, 1, jobs)
    with pytest.raises(QuotaExceeded):
        admission.check_jobs(NOBODY, 1, jobs)
