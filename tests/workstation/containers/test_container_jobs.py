"""Containers as jobs: their lifecycle in the broker, and how their processes are recognised."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fenka import procfs
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.request import Memory, Request
from fenka.workstation.broker import Broker, GrantLease, RecordEnd, RemoveLease, Terminate
from fenka.workstation.job import Job, JobContainer
from fenka.workstation.lease_processes import Scanner
from tests.builders import job

T4 = Card(0, DeviceId("GPU-0"), "Tesla T4", 15079)


@pytest.fixture
def broker() -> Broker:
    """One T4 with 14 units."""
    return Broker(Node("here", (T4,)), "binpack")


def container(name: str, units: int = 14, **fields: Any) -> Job:
    """A container that requests this number of units of 1 GiB; its lease is in place."""
    request = Request(memory=Memory(units, 1024))
    record = JobContainer(f"id-{name}", started=True, **fields)
    return job(name, request=request, requested_at=0.0, container=record)


def kinds(effects: object) -> list[str]:
    """Return the effects' names, but for reports of the queue."""
    assert isinstance(effects, list)
    names = [type(effect).__name__ for effect in effects]
    return [name for name in names if name != "JobQueued"]


def test_held_container_is_ended_when_it_is_cancelled(broker: Broker) -> None:
    """It has a program, which is waiting inside; its place is given up when that has ended."""
    broker.submit([container("first")], 0)
    broker.submit([container("held")], 0)
    assert kinds(broker.cancel("held", 1)) == [Terminate.__name__]
    assert broker.jobs["held"].state == "waiting"
    assert kinds(broker.on_exit("held", 2)) == [RecordEnd.__name__, RemoveLease.__name__]


def test_container_that_has_not_started_is_removed_when_it_is_cancelled(broker: Broker) -> None:
    """Its hook fails, and the runtime ends it."""
    new = container("new")
    assert new.container
    new.container.started = False
    broker.submit([new], 0)
    assert kinds(broker.cancel("new", 1)) == [RecordEnd.__name__, RemoveLease.__name__]


def test_container_has_a_lease_before_it_has_a_slice(broker: Broker) -> None:
    """So its processes are known while it waits, and its end is seen."""
    broker.submit([container("first")], 0)
    broker.submit(
        [
            container("held"),
        ],
        0,
    )
    broker.submit([job("program", request=container("x").request, requested_at=0.0)], 0)
    assert [job.name for job in broker.leased()] == ["first", "held"]
    assert [job.name for job in broker.placed()] == ["first"]


def test_kept_slice_passes_to_the_next_start_before_all_others(broker: Broker) -> None:
    """14 of 14 units are held all the time, and the waiting container stays first in the queue."""
    former = container("former", keep_s=30.0)
    broker.submit([former], 0)
    broker.confirm("former", 0)
    broker.submit([container("waiting", 1)], 1)
    assert former.is_to_be_kept
    assert former.container
    former.container.kept_until = 40
    assert (former.kept, former.is_to_be_kept, former.started) == (True, False, False)
    effects = broker.succeed(former, container("again"), 10)
    assert kinds(effects) == [RecordEnd.__name__, RemoveLease.__name__, GrantLease.__name__]
    assert broker.leased_mib("GPU-0") == 15079
    assert [broker.jobs[name].state for name in ("again", "waiting")] == ["starting", "waiting"]


def test_slice_that_somebody_has_ended_is_not_kept(broker: Broker) -> None:
    """`fenka stop` and a time limit release it."""
    stopped = container("stopped", keep_s=30.0)
    broker.submit([stopped], 0)
    broker.confirm("stopped", 0)
    stopped.mark_ending("stopped", "root")
    assert not stopped.is_to_be_kept


PIDS, OTHER_PIDS = 7001, 7002


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Mapping[int, tuple[str, int]]:
    """Processes with their control group and PID namespace. The groups' inodes are their lengths."""
    processes = {
        10: ("/a", PIDS),
        11: ("/a/nested", PIDS),
        12: ("/b", PIDS),
        13: ("/session", PIDS),
        14: ("/session", 1),
        15: ("/ab", 1),
    }
    monkeypatch.setattr(procfs, "cgroup", lambda pid: processes[pid][0])
    monkeypatch.setattr(procfs, "cgroup_inode", len)
    monkeypatch.setattr(procfs, "lives", lambda pid, _: pid in processes)

    class Namespaces:
        """In place of procfs.NamespaceAncestry."""

        def __init__(self, kind: str, known: Mapping[int, str]) -> None:
            self.known = known if kind == "pid" else {}

        def name(self, pid: int) -> str | None:
            """Return the name of a process's namespace."""
            return self.known.get(processes[pid][1])

    monkeypatch.setattr(procfs, "NamespaceAncestry", Namespaces)
    return processes


def owners(machine: Mapping[int, object], *jobs: Job) -> dict[int, str]:
    """Return the job of each process that is in one."""
    scanner = Scanner(jobs, Path("/nowhere"))
    found = {pid: scanner.lease(pid) for pid in machine}
    return {pid: name for pid, name in found.items() if name}


def placed(name: str, pid: int, **fields: Any) -> Job:
    """A container whose init is this process."""
    made = container(name, 14, **fields)
    made.pid = pid
    return made


def test_control_group_decides_before_the_pid_namespace(
    machine: Mapping[int, tuple[str, int]],
) -> None:
    """`--pid=container:a`: b shares the namespace of a, and is told apart by its group."""
    first = placed("a", 10, cgroup="/a", cgroup_inode=2, pid_namespace=PIDS)
    second = placed("b", 12, cgroup="/b", cgroup_inode=2)
    assert owners(machine, first, second) == {10: "a", 11: "a", 12: "b", 13: "a"}


def test_group_of_a_restarted_container_is_another_one(
    machine: Mapping[int, tuple[str, int]],
) -> None:
    """It has the same path, and another inode: the former start does not hold the new one's processes."""
    former = placed("a", 99, cgroup="/a", cgroup_inode=77, pid_namespace=PIDS)
    assert owners(machine, former) == {}


def test_group_of_everybody_is_nobodys(machine: Mapping[int, tuple[str, int]]) -> None:
    """A container without an own group and namespace could not be recorded (record_container)."""
    assert owners(machine, placed("a", 10)) == {}


@pytest.mark.parametrize(
    ("group", "found"),
    [("/a", "a"), ("/a/b/c", "a"), ("/ab", None), ("/", None), ("", None), ("/x/a", None)],
)
def test_nearest_group_is_the_group_or_one_around_it(group: str, found: str | None) -> None:
    """Whole names of directories count."""
    assert procfs.nearest_cgroup(group, {"/a": "a"}) == found
