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
from fenka.workstation.ended import EndedJob
from fenka.workstation.history import History
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
    history: History
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

    async def handle(
        self, client: Client, message: protocol.ToDaemon | protocol.StopDaemon
    ) -> None:
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
                client.send(await self._stop(client, message))
            case protocol.GetEnded():
                client.send(self._ended(client, message))
            case protocol.RemoveEnded():
                client.send(protocol.Done(str(self._remove_ended(client, message))))
            case protocol.ResizeJob():
                client.send(protocol.Done(self._resize(client, message)))
            case protocol.StopDaemon():
                self._check_stop(client, message)
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
            jobs = create_jobs(
                request.spec, client.process, unit_mib, known, time.time(), client.account
            )
            self.admission.check_jobs(client.account, len(jobs), known)
            self.admission.check_records(client.account, jobs, known)
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

    async def _stop(self, client: Client, request: protocol.StopJob) -> protocol.JobsStopped:
        """Stop jobs, or all of a gang whichever member is named. Pending ones are removed first, in one step:
        otherwise one could start when another ends."""
        stopped, failures = dict[str, list[Job]](), list[str]()
        for name in dict.fromkeys(request.names):
            try:
                jobs = self._to_stop(client, name)
            except FenkaError as why:
                failures.append(str(why))
            else:
                stopped[jobs[0].queue_id] = jobs
        for job in (job for jobs in stopped.values() for job in jobs):
            job.mark_ending("stopped", user_name(client.uid))
        pending = [queue_id for queue_id, jobs in stopped.items() if jobs[0].state == "waiting"]
        self.controller.cancel_pending(pending)
        ends = (self._end(jobs, request.grace_s) for jobs in stopped.values())
        results = await asyncio.gather(*ends)
        names = [jobs[0].display_name for jobs in stopped.values()]
        return protocol.JobsStopped(
            [name for name, failure in zip(names, results, strict=True) if not failure],
            [*failures, *filter(None, results)],
        )

    def _to_stop(self, client: Client, name: str) -> list[Job]:
        """Return the jobs that are meant, which the client may stop. Raises UnknownJob, RequestFailed."""
        job, *_ = self.broker.find(name, client.uid)
        shown = job.display_name
        _check_owner(client, job, shown, "stop")
        jobs = self.broker.jobs_of(job.queue_id)
        return jobs

    async def _end(self, jobs: list[Job], grace_s: float) -> str:
        """End what runs of a job; return why that failed."""
        jobs = self.broker.present(jobs)
        if not jobs or await self.terminator.terminate(jobs, grace_s):
            return ""
        left = ", ".join(map(str, await self.terminator.pids(jobs)))
        return f"{jobs[0].display_name} does not end: processes {left} ignore SIGKILL"

    def _ended(self, client: Client, request: protocol.GetEnded) -> protocol.EndedJobs:
        """Return all ended jobs, which every user may see like running ones, or the client's of one name."""
        if not request.name:
            return protocol.EndedJobs(self.history.jobs())
        present = self.broker.has(request.name, client.uid)
        jobs = self.history.called(request.name, client.uid, request.run)
        return protocol.EndedJobs(jobs, present)

    def _remove_ended(self, client: Client, request: protocol.RemoveEnded) -> int:
        def unwanted(job: EndedJob) -> bool:
            return (
                request.name in ("", job.name, job.gang)
                and request.run in (0, job.run)
                and (request.before is None or job.ended_at < request.before)
            )

        return self.history.remove(client.uid, unwanted)

    def _resize(self, client: Client, request: protocol.ResizeJob) -> str:
        job, *others = self.broker.find(request.name, client.uid)
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

    def _check_stop(self, client: Client, request: protocol.StopDaemon) -> None:
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
