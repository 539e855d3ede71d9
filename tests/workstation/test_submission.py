"""What a client asks for, as jobs."""

import os

import msgspec
import pytest

from fenka.core.request import InvalidRequest, Memory, Request
from fenka.hardware.peer_credentials import PeerProcess
from fenka.jobs.job_spec import NAME, GpuResources, JobSpec
from fenka.workstation.connections import create_jobs

OTHER = os.geteuid() + 4321
SPEC = JobSpec(["/usr/bin/python3", "x.py"], GpuResources("4"))


def client(uid: int) -> PeerProcess:
    """Return a process of this user that connected."""
    return PeerProcess(os.getpid(), uid, descriptor=-1, start_ticks=1)


def submitted(uid: int = OTHER, **fields: object) -> list[str]:
    """Return the names of the jobs."""
    spec = msgspec.structs.replace(SPEC, **fields)
    return [job.name for job in create_jobs(spec, client(uid), 1024, [], 0)]


@pytest.mark.parametrize(
    ("uid", "priority", "refused"),
    [
        (OTHER, 0, False),
        (OTHER, -5, False),
        (OTHER, 1, True),
        (os.geteuid(), 1, False),  # their own daemon
        (0, 1, False),
    ],
)
def test_priority_is_limited_when_the_user_does_not_own_the_daemon(
    uid: int, priority: int, refused: bool
) -> None:
    """Only the daemon's owner and root may use priorities above 0."""
    if not refused:
        assert submitted(uid, name="x", priority=priority) == ["x"]
        return
    with pytest.raises(
        InvalidRequest,
        match=r"only \S+, who runs this daemon, may give a priority above 0: .* not 1",
    ):
        submitted(uid, priority=priority)


def test_gang_has_one_job_for_each_member() -> None:
    """Each member is a job, named by its rank, in one queue entry."""
    jobs = create_jobs(
        msgspec.structs.replace(SPEC, name="g", gang=2), client(7), 1024, [], now=5.0
    )
    assert [(job.name, job.rank, job.display_name) for job in jobs] == [
        ("g/0", 0, "g"),
        ("g/1", 1, "g"),
    ]
    assert len({job.id for job in jobs}) == 2
    assert len({job.queue_id for job in jobs}) == 1
    for name in ("g", "g/1", jobs[0].id):
        with pytest.raises(
            InvalidRequest, match=f"a job called {name} already exists|invalid job name 'g/1'"
        ):
            create_jobs(msgspec.structs.replace(SPEC, name=name), client(7), 1024, jobs, 6.0)
    (later,) = create_jobs(SPEC, client(7), 1024, jobs, now=1.0)
    assert later.requested_at > 5.0, "although the clock was set back"


def test_members_have_their_own_requests_when_they_differ() -> None:
    """A record has only the member's own amount, or records would grow with the square of the gang."""
    spec = msgspec.structs.replace(
        SPEC, gang=2, members=[GpuResources("4"), GpuResources(whole=True, cards=2)]
    )
    jobs = create_jobs(spec, client(7), 1024, [], now=5.0)
    assert [job.request for job in jobs] == [
        Request(Memory(4, 1024)),
        Request(cards=2, whole=True),
    ]
    assert [job.spec.gpu for job in jobs] == spec.members
    assert [job.spec.members for job in jobs] == [[], []]


def test_submission_is_rejected_when_it_is_invalid() -> None:
    """The daemon checks the values again."""
    with pytest.raises(InvalidRequest, match="1 members are described, but the gang has 2"):
        submitted(gang=2, members=[GpuResources("4")])
    with pytest.raises(InvalidRequest, match="a gang has 1 to 256 members, not 0"):
        submitted(gang=0)


def test_job_is_named_after_its_program_when_it_has_no_name() -> None:
    """This holds even without a command."""
    (name,) = submitted(command=[])
    assert NAME.fullmatch(name)


def test_name_of_another_user_s_job_is_free() -> None:
    """Each user has names of their own."""
    spec = msgspec.structs.replace(SPEC, name="night")
    theirs = create_jobs(spec, client(OTHER + 1), 1024, [], 0)
    assert [job.name for job in create_jobs(spec, client(OTHER), 1024, theirs, 0)] == ["night"]
    with pytest.raises(InvalidRequest, match="a job called night already exists"):
        create_jobs(spec, client(OTHER + 1), 1024, theirs, 0)
