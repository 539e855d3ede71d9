"""Detects jobs that exceed their limits, by the same thresholds as the node program."""

import time
from collections.abc import Callable, Collection, Mapping

from fenka.core.request import Slice
from fenka.isolation import violations
from fenka.isolation.files import MIB
from fenka.workstation.gpu_processes import GpuProcesses
from fenka.workstation.job import Job

_Slices = Mapping[tuple[str, str], tuple[Job, Slice]]
"""Slices by job id and card UUID."""


class ViolationDetector:
    """Compares what the driver reports with the jobs' limits, sample after sample."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._memory, self._compute = violations.MemoryViolations(), violations.ComputeViolations()
        self._clock, self._sampled_at = clock, clock()
        self._busy_ns: dict[tuple[str, str], int] = {}

    def sample(
        self,
        jobs: Collection[Job],
        processes: GpuProcesses,
        contexts_mib: Mapping[str, int],
        busy_ns: Callable[[str, str], int],
    ) -> dict[str, list[str]]:
        """Take one sample, and return sentences about violations by job id.

        Args:
            jobs: The jobs that hold slices.
            processes: The processes on the cards.
            contexts_mib: The size of a process's context, by card UUID.
            busy_ns: Returns how long a job has used a card, by job id and card UUID.
        """
        slices: _Slices = {
            (job.id, piece.uuid): (job, piece) for job in jobs for piece in job.slices
        }
        sentences: dict[str, list[str]] = {}
        for key in sorted(self._memory.observe(_exceeds_memory(slices, processes, contexts_mib))):
            job, piece = slices[key]
            sentences.setdefault(job.id, []).append(
                f"holds {processes.used_mib(*key)} MiB of card {piece.card} by the driver's account, "
                f"more than its {piece.memory_mib} MiB"
            )
        for key in sorted(self._compute.observe(*self._compute_excess(slices, busy_ns))):
            job, piece = slices[key]
            sentences.setdefault(job.id, []).append(
                f"has had more than its {job.spec.gpu.core} % of the time of card {piece.card} by the "
                "driver's account"
            )
        for job in jobs:
            pids = (process.pid for process in processes.by_lease.get(job.id, ()))
            if job.shim_inode and (unmanaged := violations.without_shim(pids, job.shim_inode)):
                sentences.setdefault(job.id, []).append(
                    f"uses a card without fenka's library, so without its limit: process "
                    f"{', '.join(map(str, unmanaged))}"
                )
        return sentences

    def _compute_excess(
        self, slices: _Slices, busy_ns: Callable[[str, str], int]
    ) -> tuple[float, dict[tuple[str, str], float]]:
        """Return the seconds since the last sample, and by how much each slice exceeded its share in them."""
        now, before = self._clock(), self._busy_ns
        elapsed_s, self._sampled_at = now - self._sampled_at, now
        limited = [
            key
            for key, (job, _) in slices.items()
            if job.spec.gpu.core and job.spec.gpu.core_mode == "hard"
        ]
        self._busy_ns = {key: busy_ns(*key) for key in limited}
        shares = violations.time_shares(self._busy_ns, before, elapsed_s)
        return elapsed_s, {
            key: share - slices[key][0].spec.gpu.core / 100 for key, share in shares.items()
        }


def _exceeds_memory(
    slices: _Slices, processes: GpuProcesses, contexts_mib: Mapping[str, int]
) -> dict[tuple[str, str], bool]:
    return {
        key: (processes.used_mib(*key) or 0) * MIB
        > violations.memory_allowance(piece.memory_mib * MIB, contexts_mib.get(piece.uuid, 0) * MIB)
        for key, (_, piece) in slices.items()
    }
