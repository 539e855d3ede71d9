"""A job: what was requested, by which process, and what it holds."""

import msgspec

from fenka.core.request import Placement, Request, Slice
from fenka.isolation.control import ComputeMode
from fenka.isolation.files import ComputeShare
from fenka.jobs.spec import Isolation
from fenka.workstation.protocol import JobState

__all__ = ["Gang", "Job"]


class Gang(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the members of a gang share. pid, start_ticks: the process that starts them."""

    id: str
    name: str
    size: int
    pid: int
    start_ticks: int


class Job(msgspec.Struct, forbid_unknown_fields=True):
    """One request of one process, as recorded on disk. Times are Unix seconds."""

    id: str
    name: str
    uid: int
    pid: int
    start_ticks: int
    request: Request
    summary: str
    command: list[str]
    directory: str
    kind: str
    isolation: Isolation
    requested_at: float
    state: JobState = "waiting"
    started_at: float | None = None
    grant_expires_at: float | None = None
    placement: Placement | None = None
    compute_percent: int = 0
    """Percent of each card's time; 0 for no limit."""
    compute_mode: ComputeMode = "hard"
    priority: int = 0
    """Larger priorities are served first."""
    time_limit_s: float | None = None
    """Seconds from the grant until the job is terminated; None for no limit."""
    deadline: float | None = None
    """When it is terminated; None before its grant and without a limit."""
    gang: Gang | None = None
    rank: int = 0
    """Its number among its gang's members, from 0."""
    retained: str = ""
    """Why its slice is kept after its last process has ended."""
    shim_inode: int = 0
    """Inode of the shim that its processes map; 0 if unknown."""
    unattributed_mib: dict[str, int] = {}
    """Memory by card UUID that belonged to no process when the slice was granted."""
    allow_user_namespaces: bool = False
    """Whether its programs may create user namespaces."""
    user_namespace: int = 0
    """Inode of its lease's user namespace; 0 before it runs (see lease_processes.py)."""

    @property
    def slices(self) -> tuple[Slice, ...]:
        """The slices that it holds; none while it is pending."""
        return self.placement.slices if self.placement else ()

    @property
    def compute_share(self) -> ComputeShare:
        """Its share of each card's time, as its control page has it."""
        return ComputeShare(self.compute_percent or 100, self.compute_mode)

    @property
    def queue_id(self) -> str:
        """Its id in the queue, in which a gang is one entry."""
        return self.gang.id if self.gang else self.id

    @property
    def display_name(self) -> str:
        """The name that its user gave: the gang's for each of its members."""
        return self.gang.name if self.gang else self.name
