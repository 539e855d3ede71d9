"""A job: what was requested, by which process, and what it holds."""

import msgspec

from fenka.core.request import Placement, Request, Slice
from fenka.isolation.lease_files import ComputeShare
from fenka.jobs.job_spec import JobSpec
from fenka.workstation.protocol import EndCause, JobState


class JobGang(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The properties that a gang's members share. pid, start_ticks: the process that starts them."""

    id: str
    name: str
    size: int
    pid: int
    start_ticks: int


class JobContainer(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The container that a job is. The job's process is its init.

    Attributes:
        id: The engine's id of the container.
        engine: The command that manages it; empty if that is not known.
        pid_namespace: Inode of its own PID namespace; 0 if it has none, or its init has ended.
        cgroup: Its own control group below procfs.cgroup_directory; empty if it has none.
        cgroup_inode: The group's. A restarted container has another group with the same path.
        keep_s: Seconds for which its slice is kept for its next start.
        kept_until: Until when that is, in Unix seconds; 0 before its end.
        started: Whether its lease has been placed in it. Then it runs, or is held until its slice is granted.
    """

    id: str
    engine: str = ""
    pid_namespace: int = 0
    cgroup: str = ""
    cgroup_inode: int = 0
    keep_s: float = 0.0
    kept_until: float = 0.0
    started: bool = False


class Job(msgspec.Struct, forbid_unknown_fields=True):
    """One request of one process, as recorded on disk. Times are Unix seconds."""

    id: str
    name: str
    uid: int
    pid: int
    start_ticks: int
    spec: JobSpec
    """As submitted, or as resized since."""
    request: Request
    requested_at: float
    state: JobState = "waiting"
    started_at: float | None = None
    grant_expires_at: float | None = None
    placement: Placement | None = None
    deadline: float | None = None
    """When it is terminated; None before its grant and without a limit."""
    gang: JobGang | None = None
    rank: int = 0
    """Its number among its gang's members, from 0."""
    shim_inode: int = 0
    """Inode of the shim that its processes map; 0 if unknown."""
    waits: bool = True
    """Whether it waits for what cannot be granted now."""
    exit_status: int | None = None
    """The wait status of the process that requested it; None before its end, and if it is not known."""
    end_cause: EndCause = "exit"
    """Why its processes are being ended, or were."""
    stopped_by: str = ""
    """The user who has stopped it."""
    user_namespace: int = 0
    """Inode of its lease's user namespace; 0 before it runs (see lease_processes.py)."""
    account_uid: int | None = None
    """The user that it counts for in quotas and fair shares; None for `uid`."""
    container: JobContainer | msgspec.UnsetType = msgspec.UNSET
    """The container that it is; unset for a program of this machine."""

    @property
    def slices(self) -> tuple[Slice, ...]:
        """The slices that it holds; none while it is pending."""
        return self.placement.slices if self.placement else ()

    @property
    def compute_share(self) -> ComputeShare:
        """Its share of each card's time, as its control page has it."""
        return ComputeShare(self.spec.gpu.core or 100, self.spec.gpu.core_mode)

    @property
    def started(self) -> bool:
        """Whether it has processes in its lease; those of a container may be held until its grant."""
        container = self.in_container
        if container is None:
            return self.state == "running"
        return container.started and not container.kept_until

    @property
    def kept(self) -> bool:
        """Whether it is a container that has ended, whose slice is kept for its next start."""
        return self.in_container is not None and self.in_container.kept_until > 0

    @property
    def is_to_be_kept(self) -> bool:
        """Whether its slice is kept when it ends: nobody else has ended it."""
        container = self.in_container
        ends_itself = self.state == "running" and self.end_cause == "exit" and not self.kept
        return container is not None and container.keep_s > 0 and ends_itself

    @property
    def in_container(self) -> JobContainer | None:
        """The container that it is; None for a program of this machine."""
        return self.container or None

    @property
    def cooperative(self) -> bool:
        """Whether its processes are recognised by their environment instead of by namespaces."""
        return self.spec.isolation == "cooperative"

    @property
    def names(self) -> tuple[str, ...]:
        """The names and ids by which commands know it or its gang."""
        return self.display_name, self.name, self.queue_id, self.id

    def mark_ending(self, cause: EndCause, user: str = "") -> None:
        """Record why it is being ended: the first cause counts. user: who stops it."""
        if self.end_cause == "exit":
            self.end_cause, self.stopped_by = cause, user

    @property
    def account(self) -> int:
        """The user that it counts for in quotas and fair shares."""
        return self.uid if self.account_uid is None else self.account_uid

    @property
    def queue_id(self) -> str:
        """Its id in the queue, in which a gang is one entry."""
        return self.gang.id if self.gang else self.id

    @property
    def display_name(self) -> str:
        """The name that its user gave: the gang's for each of its members."""
        return self.gang.name if self.gang else self.name
