"""What the broker decides, to be applied in order once it is recorded."""

from dataclasses import dataclass

from fenka.workstation.job import Job

__all__ = ["Effect", "GrantLease", "RejectJob", "RemoveLease", "ReportQueued", "Terminate"]


@dataclass(frozen=True, slots=True)
class GrantLease:
    """Make the leases of a job, or of all members of a gang, and send the grant to the client."""

    jobs: tuple[Job, ...]


@dataclass(frozen=True, slots=True)
class ReportQueued:
    """Send the client its position in the queue (1 is served next) and the reason."""

    job: Job
    position: int
    length: int
    reason: str


@dataclass(frozen=True, slots=True)
class RejectJob:
    """Reject a job or its gang. final: it could never be granted."""

    job: Job
    reason: str
    final: bool


@dataclass(frozen=True, slots=True)
class RemoveLease:
    """Remove the files of a job's lease."""

    job: Job


@dataclass(frozen=True, slots=True)
class Terminate:
    """End the job's processes. It holds its slice until they have ended."""

    job: Job


Effect = GrantLease | ReportQueued | RejectJob | RemoveLease | Terminate
