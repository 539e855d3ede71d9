"""Resizes a running job, in the order that :mod:`fenka.isolation.resize_plan` defines.

The records are the ledger and the state file. If the daemon is killed meanwhile, the same request completes
the resize.
"""

from dataclasses import dataclass, replace

import msgspec

from fenka.core.errors import FenkaError
from fenka.core.ledger import Conflict
from fenka.core.request import InvalidRequest, Placement, Request, reserved_percent
from fenka.dialects.sizes import InvalidSize, parse_memory
from fenka.isolation.account import InvalidAccount
from fenka.isolation.control import InvalidControl
from fenka.isolation.resize import InUse
from fenka.isolation.resize_plan import ResizePlan, resized
from fenka.workstation import protocol
from fenka.workstation.broker import Broker
from fenka.workstation.controller import Controller
from fenka.workstation.job import Job
from fenka.workstation.leases import Leases


class CannotResize(FenkaError):
    """The job keeps its size. The message says why."""


@dataclass(frozen=True, slots=True)
class JobResizer:
    """Resizes the jobs of one daemon."""

    controller: Controller
    broker: Broker
    leases: Leases

    def resize(self, job: Job, wanted: protocol.ResizeJob, *, reserved: bool) -> None:
        """Resize a running job. Its programs have the new size within a second.

        reserved: whether it may have what is reserved for pending requests. Raises CannotResize, OSError.
        """
        before, former = job.placement, job.spec
        if job.state != "running" or before is None:
            raise CannotResize(f"{job.name} is {job.state}: only a running job can be resized")
        if before.whole:
            raise CannotResize(f"{job.name} holds whole cards: there is nothing to resize")
        percent = former.gpu.core if wanted.gpu_core is None else wanted.gpu_core
        mode = wanted.gpu_core_mode or (former.gpu.core_mode if percent else "hard")
        if mode != "hard" and not percent:
            raise CannotResize(f"{job.name} has no share of compute: say how much with --gpu-core")
        try:
            after = self._placement(job, before, wanted, reserved_percent(percent, mode))
            plan = ResizePlan({job.id: before.slices}, {job.id: after.slices})
            larger = replace(before, slices=tuple(plan.reserved[job.id]))
            rejection = self.broker.growth_rejection(job, larger.slices, reserved=reserved)
            if rejection:
                raise CannotResize(f"{job.name} cannot grow: {rejection}")
            self.controller.record_placement(job, larger)
        except (InvalidSize, InvalidRequest) as error:
            raise CannotResize(str(error)) from None
        except Conflict:
            raise CannotResize(
                f"{job.name} cannot grow: its cards have no room for that now"
            ) from None
        gpu = msgspec.structs.replace(former.gpu, core=percent, core_mode=mode)
        job.spec = msgspec.structs.replace(former, gpu=gpu)
        try:
            # Slices do not show weights and modes, so the limits may differ where the slices do not.
            self.leases.set_limits(job, after.slices)
        except (InUse, InvalidControl, InvalidAccount) as error:
            job.spec = former
            self.controller.record_placement(job, before)
            raise CannotResize(str(error)) from None
        self.controller.record_placement(job, after)

    def _placement(
        self, job: Job, before: Placement, wanted: protocol.ResizeJob, compute: int
    ) -> Placement:
        node = self.broker.node
        memory = parse_memory(wanted.gpu_mem, node.unit_mib) if wanted.gpu_mem else None
        Request(memory=job.request.memory, compute=compute)  # Raises InvalidRequest.
        slices = resized(before.slices, memory, compute, node)
        return replace(before, slices=tuple(slices))
