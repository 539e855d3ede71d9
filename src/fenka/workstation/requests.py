"""Carries out what clients request of the daemon."""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fenka.core.errors import FenkaError
from fenka.core.request import InvalidRequest
from fenka.dialects.sizes import InvalidSize
from fenka.hardware.nvml import NoDriver
from fenka.hardware.peer_credentials import user_name
from fenka.hardware.spec import NodeError
from fenka.procfs import lives, parent_pid
from fenka.workstation import protocol
from fenka.workstation.admission import Admission, QuotaExceeded
from fenka.workstation.broker import Broker
from fenka.workstation.clients import Client, ClientRegistry
from fenka.workstation.controller import Controller
from fenka.workstation.job import Job
from fenka.workstation.layouts import Layouts
from fenka.workstation.resize import JobResizer
from fenka.workstation.submission import create_jobs
from fenka.workstation.termination import Terminator


class RequestFailed(FenkaError):
    """The request was refused, and nothing was changed."""


@dataclass(frozen=True, slots=True)
class RequestHandler:
    """Checks that the client may do what it requests, and does it.

    Attributes:
        broker: The jobs; only read here.
        stopped: Set to end the daemon. Clients that disconnect afterwards keep their jobs.
    """

    controller: Controller
    broker: Broker
    admission: Admission
    clients: ClientRegistry
    terminator: Terminator
    resizer: JobResizer
    layouts: Layouts
    snapshot: Callable[[], Awaitable[protocol.Snapshot]]
    stopped: asyncio.Event

    def has_pending_request(self, client: Client) -> bool:
        """Return whether the client waits for a lease, and may be silent."""
        return any(job.state != "running" for job in self.broker.jobs_of(client.job or ""))

    def on_disconnect(self, client: Client) -> None:
        """Cancel a job whose client disconnects before it has confirmed its lease."""
        if self.clients.remove(client) and not self.stopped.is_set():
            assert client.job is not None
            jobs = self.broker.jobs_of(client.job)
            if any(job.state in ("waiting", "starting") for job in jobs):
                self.controller.cancel(client.job)

    async def handle(self, client: Client, message: protocol.ToDaemon) -> None:
        """Carry out one request and send the answer. Raises FenkaError, OSError."""
        match message:
            case protocol.SubmitJob():
                await self._submit(client, message)
            case protocol.ConfirmLease():
                self._confirm(client)
                client.send(protocol.Done())
            case protocol.GetSnapshot():
                client.send(await self.snapshot())
            case protocol.GetInstances():
                client.send(self.layouts.describe())
            case protocol.ApplyLayout():
                _check_may_divide(client)
                client.send(await self.layouts.apply(message))
            case protocol.CancelLayout():
                _check_may_divide(client)
                client.send(self.layouts.cancel())
            case protocol.StopJob():
                client.send(protocol.Done(await self._stop(client, message)))
            case protocol.ResizeJob():
                client.send(protocol.Done(self._resize(client, message)))
            case protocol.Shutdown():
                self._check_shutdown(client, message)
                client.send(protocol.Done())
                self.stopped.set()

    # --- submission ---------------------------------------------------------------------------------

    async def _submit(self, client: Client, request: protocol.SubmitJob) -> None:
        if not client.process.lives():
            client.send(protocol.JobRejected("the process that connected is gone", final=True))
        elif known := self._resubmitted(client, request.job_id):
            self.clients.add(known.queue_id, client)
            self.controller.replay(known.queue_id)
        elif member := self._gang_member(client, request.job_id):
            self.clients.add(member.id, client)
            self.controller.assign(member, client.process)
        else:
            await self._submit_new(client, request)

    async def _submit_new(self, client: Client, request: protocol.SubmitJob) -> None:
        self.controller.observe_cards()
        if not request.wait:
            await self.controller.changes.finish()  # may make room
        known = self.broker.jobs.values()
        try:
            unit_mib = self.broker.node.unit_mib
            jobs = create_jobs(request.spec, client.process, unit_mib, known, time.time())
            self.admission.check_jobs(client.uid, len(jobs), known)
        except (InvalidSize, InvalidRequest, QuotaExceeded) as why:
            final = not isinstance(why, QuotaExceeded)
            client.send(protocol.JobRejected(str(why), final))
            return
        self.clients.add(jobs[0].queue_id, client)
        self.controller.submit(jobs, wait=request.wait)

    def _resubmitted(self, client: Client, job_id: str) -> Job | None:
        """Return the job that this process submitted to an earlier daemon, if any.

        The process may not know the job's id.
        """
        for job in self.broker.jobs.values():
            same = job.uid == client.uid and client.made(job)
            if same and job_id in ("", job.queue_id) and job.state in ("waiting", "starting"):
                return job
        return None

    def _gang_member(self, client: Client, job_id: str) -> Job | None:
        """Return the member of a gang that this process, started by the gang's own process, is to run."""
        job = self.broker.jobs.get(job_id)
        if job is None or job.gang is None or job.placement is None or job.uid != client.uid:
            return None
        gang = job.gang
        entitled = client.made(job) or (
            job.pid == gang.pid == parent_pid(client.process.pid)
            and lives(gang.pid, gang.start_ticks)
            and job.state == "starting"
        )
        return job if entitled else None

    def _confirm(self, client: Client) -> None:
        job = self.broker.jobs.get(client.job or "")
        own = job is not None and client.process.lives() and client.made(job)
        # "running" if an earlier daemon recorded the confirmation and could not answer it.
        if job is None or not own or job.state not in ("starting", "running"):
            raise RequestFailed("the grant expired before the program started: try again")
        self.controller.confirm(job)

    # --- changes ------------------------------------------------------------------------------------

    async def _stop(self, client: Client, request: protocol.StopJob) -> str:
        """Stop a job, or all of a gang whichever member is named. Return its name."""
        job, *_ = self.broker.find(request.name)
        name = job.display_name
        _check_owner(client, job, name, "stop")
        jobs = self.broker.jobs_of(job.queue_id)
        if job.state == "waiting":
            self.controller.cancel_pending(job.queue_id)
        elif not await self.terminator.terminate(jobs, request.grace_s):
            left = ", ".join(map(str, await self.terminator.pids(jobs)))
            raise RequestFailed(f"{name} does not end: processes {left} ignore SIGKILL")
        return name

    def _resize(self, client: Client, request: protocol.ResizeJob) -> str:
        job, *others = self.broker.find(request.name)
        if others:
            raise RequestFailed(
                f"{request.name} is a gang: resize its members one by one, beginning with {job.name}"
            )
        _check_owner(client, job, job.name, "resize")
        with contextlib.suppress(NoDriver, NodeError):  # without a driver what was seen last counts
            self.controller.observe_cards()
        # Only who may give others' places away may take them.
        self.resizer.resize(job, request, reserved=_owns_daemon(client))
        return job.name

    def _check_shutdown(self, client: Client, request: protocol.Shutdown) -> None:
        if not _owns_daemon(client):
            raise RequestFailed(f"the daemon belongs to {user_name(os.geteuid())}")
        names = list(dict.fromkeys(job.display_name for job in self.broker.jobs.values()))
        if names and not request.force:
            raise RequestFailed(
                f"{len(names)} jobs are still here ({', '.join(names[:5])}): stop them first, or add "
                "--force to leave them running without a daemon"
            )


def _owns_daemon(client: Client) -> bool:
    return client.uid in (0, os.geteuid())


def _check_may_divide(client: Client) -> None:
    if not _owns_daemon(client):
        raise RequestFailed(
            f"only {user_name(os.geteuid())}, who runs this daemon, may divide its cards"
        )


def _check_owner(client: Client, job: Job, name: str, action: str) -> None:
    if client.uid not in (0, job.uid):
        raise RequestFailed(f"{name} belongs to {user_name(job.uid)}: only they may {action} it")
