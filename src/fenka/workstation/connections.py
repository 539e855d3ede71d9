"""Serves client connections: the handshake, quotas and time limits, and one request after another.

Turns submitted jobs into the daemon's jobs. The values are checked here, whoever sent them.

Resizes a running job, in the order that :mod:`fenka.isolation.limit_changes` defines.

The records are the ledger and the state file. If the daemon is killed meanwhile, the same request completes
the resize.

Carries out what clients request of the daemon.
"""

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace

import msgspec

from fenka.build import build_id
from fenka.core.errors import FenkaError
from fenka.core.ledger import Conflict
from fenka.core.request import InvalidRequest, Placement, Request, reserved_percent
from fenka.core.users.caps import applied_limit_s
from fenka.formats.quantities import InvalidSize, parse_memory
from fenka.hardware.card_spec import NodeError
from fenka.hardware.nvml import NoDriver
from fenka.hardware.peer_credentials import PeerProcess, peer, user_name
from fenka.isolation.account import InvalidAccount
from fenka.isolation.lease_control import InvalidControl
from fenka.isolation.lease_files import describe_os_error
from fenka.isolation.limit_changes import InUse, ResizePlan, resized
from fenka.jobs.job_spec import GpuResources, JobSpec, check_priority, generate_name
from fenka.procfs import lives, parent_pid
from fenka.workstation import admission, protocol
from fenka.workstation.accepting import Caller, admit, hung_up, refuse
from fenka.workstation.admission import Admission, QuotaExceeded
from fenka.workstation.broker import Broker, UnknownJob
from fenka.workstation.controller import Client, ConnectedClients, Controller
from fenka.workstation.files import History
from fenka.workstation.job import Job, JobGang
from fenka.workstation.layouts import Layouts
from fenka.workstation.lease_processes import Terminator
from fenka.workstation.leases import Leases
from fenka.workstation.lifetime import describe, log
from fenka.workstation.paths import Runtime
from fenka.workstation.protocol import EndedJob
from fenka.workstation.recording.machine_recorder import MachineRecorder
from fenka.workstation.screens.snapshot_feed import SnapshotFeed
from fenka.workstation.screens.what_if import Rehearsals
from fenka.workstation.users.user_requests import UserRequests


def with_time_limit(spec: JobSpec, broker: Broker, account: int) -> JobSpec:
    """Return a job with the time limit that the caps of its user give it."""
    caps = broker.policies.caps(str(account))
    return msgspec.structs.replace(spec, time_limit_s=applied_limit_s(caps, spec.time_limit_s))


def create_jobs(
    spec: JobSpec,
    process: PeerProcess,
    unit_mib: int,
    existing: Collection[Job],
    now: float,
    account: int | None = None,
) -> list[Job]:
    """Return the job, or the members of the gang, that a specification describes.

    Args:
        spec: The job as submitted.
        process: The client's.
        unit_mib: The unit of sizes that name none.
        existing: All current jobs.
        now: Unix seconds.
        account: The user that the jobs count for; None for the client's.

    Raises:
        InvalidSize, InvalidRequest: The request is rejected.
    """
    spec.validate()
    spec = spec.truncate()
    _check_may_prioritize(process.uid, spec.priority)
    first = Job(
        id=secrets.token_hex(4),
        name=spec.name or generate_name(spec.command or [spec.kind]),
        uid=process.uid,
        account_uid=account,
        pid=process.pid,
        start_ticks=process.start_ticks,
        spec=spec,
        request=_request(spec.requests[0], unit_mib),
        # Later than all other requests, also if the clock was set back.
        requested_at=max([now, *(job.requested_at + 1e-3 for job in existing)]),
    )
    if any(first.name in job.names for job in existing if job.uid == process.uid):
        raise InvalidRequest(f"a job called {first.name} already exists: choose another --name")
    if spec.gang is None:
        return [first]
    gang = JobGang(first.id, first.name, spec.gang, first.pid, first.start_ticks)
    return [
        msgspec.structs.replace(
            first,
            id=secrets.token_hex(4),
            name=f"{first.name}/{rank}",
            spec=msgspec.structs.replace(spec, gpu=gpu, members=[]),
            request=_request(gpu, unit_mib),
            gang=gang,
            rank=rank,
        )
        for rank, gpu in enumerate(spec.requests)
    ]


def _check_may_prioritize(uid: int, priority: int) -> None:
    """Raise InvalidRequest unless this user may give a job this priority."""
    if priority > 0 and uid not in (0, os.geteuid()):
        raise InvalidRequest(
            f"only {user_name(os.geteuid())}, who runs this daemon, may give a priority above 0: use 0 "
            f"or less, not {priority}"
        )


def _request(gpu: GpuResources, unit_mib: int) -> Request:
    return Request(
        memory=parse_memory(gpu.memory, unit_mib) if gpu.memory else None,
        compute=reserved_percent(gpu.core, gpu.core_mode),
        cards=gpu.cards,
        whole=gpu.whole or bool(gpu.mig),
        models=frozenset(gpu.models),
        instance=gpu.mig or gpu.inside,
        linked=gpu.topology == "required",
        near=gpu.topology != "any",
    )


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


class RequestRefused(FenkaError):
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
    clients: ConnectedClients
    terminator: Terminator
    resizer: JobResizer
    layouts: Layouts
    history: History
    snapshot: Callable[[], Awaitable[protocol.MachineSnapshot]]
    feed: SnapshotFeed
    rehearsals: Rehearsals
    stopped: asyncio.Event
    recorder: MachineRecorder
    make_ticket: Callable[[int, protocol.CreateTicket], str]
    users: UserRequests
    device_access: Callable[[], protocol.DeviceAccessRead]

    def has_pending_request(self, client: Client) -> bool:
        """Return whether the client waits for a lease, and may be silent."""
        return any(job.state != "running" for job in self.broker.jobs_of(client.job or ""))

    def on_disconnect(self, client: Client) -> None:
        """Cancel a job whose client disconnects before it has confirmed its lease."""
        if self.clients.remove(client) and not self.stopped.is_set():
            assert client.job is not None
            jobs = self.broker.jobs_of(client.job)
            if any(job.state in ("waiting", "starting") for job in jobs):
                self.controller.leave(client.job)

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
            case protocol.ApplyLayout():
                _check_may_divide(client)
                client.send(await self.layouts.apply(message))
            case protocol.CancelLayout():
                _check_may_divide(client)
                client.send(self.layouts.cancel())
            case protocol.StopJob() | protocol.Watch():
                await self._answer_later(client, message)
            case protocol.RemoveEnded():
                client.send(protocol.Done(str(self._remove_ended(client, message))))
            case protocol.ResizeJob() | protocol.PrioritizeJob() | protocol.ReportReset():
                client.send(protocol.Done(self._change(client, message)))
            case protocol.StopDaemon():
                self._check_stop(client, message)
                client.send(protocol.Done())
                self.stopped.set()
            case protocol.CreateTicket() | protocol.GetDeviceAccess():
                client.send(self._serve_containers(client, message))
            case protocol.GetHistory() | protocol.GetUsage():
                reader = None if _owns_daemon(client) else client.uid
                client.send(await self.recorder.answer(message, reader))
            case (
                protocol.GetQuotas()
                | protocol.BookCards()
                | protocol.GetBookings()
                | protocol.CancelBooking()
            ):
                owner = _owns_daemon(client)
                answer = self.users.answer(
                    client.uid, client.account, message, time.time(), owner=owner
                )
                client.send(answer)
            case _:
                client.send(await self._look(client, message))

    async def _answer_later(
        self, client: Client, message: protocol.StopJob | protocol.Watch
    ) -> None:
        """Answer a request that waits. Only work of the daemon's own is done in the user's share of time."""
        if isinstance(message, protocol.StopJob):
            client.send(await self._stop(client, message))
            return
        snapshot = await self.feed.after(message.after)
        async with self.admission.time_share(client.account):
            client.send(snapshot)

    async def _look(
        self,
        client: Client,
        message: protocol.GetSnapshot
        | protocol.AskWhatIf
        | protocol.GetHelps
        | protocol.GetInstances
        | protocol.GetEnded,
    ) -> protocol.Message:
        """Return the answer to a request that changes nothing. Raises FenkaError."""
        match message:
            case protocol.GetSnapshot():
                return await self.snapshot()
            case protocol.AskWhatIf():
                answer = self.rehearsals.answer(message.question, time.time())
                return protocol.WhatIfAnswered(answer)
            case protocol.GetHelps():
                return protocol.HelpsListed(await self.rehearsals.helps(message.id))
            case protocol.GetInstances():
                return self.layouts.describe()
            case protocol.GetEnded():
                return self._ended(client, message)

    # --- submission ---------------------------------------------------------------------------------

    async def _submit(self, client: Client, request: protocol.SubmitJob) -> None:
        self.controller.finish_ends()  # may make room, and ends what this process had requested before
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
            await self.controller.changes.driver.finish()  # may make room
        known = self.broker.jobs.values()
        try:
            unit_mib = self.broker.node.unit_mib
            spec = with_time_limit(request.spec, self.broker, client.account)
            jobs = create_jobs(spec, client.process, unit_mib, known, time.time(), client.account)
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
            raise RequestRefused("the grant expired before the program started: try again")
        self.controller.confirm(job)

    # --- changes ------------------------------------------------------------------------------------

    async def _stop(self, client: Client, request: protocol.StopJob) -> protocol.JobsStopped:
        """Stop jobs, or all of a gang whichever member is named. Raises RequestRefused."""
        async with self.admission.time_share(client.account):
            stopped, failures = self._begin_stop(client, request)
        results = await asyncio.gather(*(self._end(jobs, request.grace_s) for jobs in stopped))
        names = [jobs[0].display_name for jobs in stopped]
        return protocol.JobsStopped(
            [name for name, failure in zip(names, results, strict=True) if not failure],
            [*failures, *filter(None, results)],
        )

    def _begin_stop(
        self, client: Client, request: protocol.StopJob
    ) -> tuple[list[list[Job]], list[str]]:
        """Return what is stopped, and why others are not. Raises RequestRefused.

        Pending jobs are removed first, in one step: otherwise one could start when another ends.
        """
        if len(request.names) > protocol.MAX_STOPPED:
            raise RequestRefused(
                f"one request stops at most {protocol.MAX_STOPPED} jobs, not {len(request.names)}"
            )
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
        pending = [
            queue_id
            for queue_id, jobs in stopped.items()
            if jobs[0].state == "waiting" or jobs[0].kept
        ]
        self.controller.cancel_pending(pending)
        return list(stopped.values()), failures

    def _to_stop(self, client: Client, name: str) -> list[Job]:
        """Return the jobs that are meant, which the client may stop. Raises UnknownJob, RequestRefused."""
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

    def _change(
        self,
        client: Client,
        request: protocol.ResizeJob | protocol.PrioritizeJob | protocol.ReportReset,
    ) -> str:
        """Change a job, a gang or cards. Return the name, or what is left. Raises FenkaError, OSError."""
        if isinstance(request, protocol.ReportReset):
            return self._use_again(client, request)
        try:
            jobs = self.broker.find(request.name, client.uid)
        except UnknownJob:
            ended = self.history.called(request.name, client.uid)
            if not ended or any(request.name in job.names for job in self.broker.jobs.values()):
                raise
            raise RequestRefused(f"{request.name} has ended: {ended[-1].sentence}") from None
        if isinstance(request, protocol.ResizeJob):
            return self._resize(client, jobs, request)
        return self._prioritize(client, jobs[0], request.priority)

    def _resize(self, client: Client, jobs: Sequence[Job], request: protocol.ResizeJob) -> str:
        job, *others = jobs
        if others:
            raise RequestRefused(
                f"{request.name} is a gang: resize its members one by one, beginning with {job.name}"
            )
        _check_owner(client, job, job.name, "resize")
        with contextlib.suppress(NoDriver, NodeError):  # without a driver what was seen last counts
            self.controller.observe_cards()
        # Only who may give others' places away may take them.
        self.resizer.resize(job, request, reserved=_owns_daemon(client))
        return job.name

    def _prioritize(self, client: Client, job: Job, priority: int) -> str:
        """Change the priority of all of its gang."""
        name = job.display_name
        _check_owner(client, job, name, "prioritize")
        check_priority(priority)
        _check_may_prioritize(client.uid, priority)
        if job.end_cause != "exit":
            raise RequestRefused(f"{name} is being ended: its priority stays as it is")
        self.controller.prioritize(job.queue_id, priority)
        return name

    def _serve_containers(
        self, client: Client, request: protocol.CreateTicket | protocol.GetDeviceAccess
    ) -> protocol.Done | protocol.DeviceAccessRead:
        if isinstance(request, protocol.GetDeviceAccess):
            return self.device_access()
        if os.geteuid() != 0:
            raise RequestRefused(
                "containers get slices from root's daemon only, and this one is "
                f"{user_name(os.geteuid())}'s: `sudo fenka daemon --background` starts root's"
            )
        return protocol.Done(self.make_ticket(client.account, request))

    def _use_again(self, client: Client, request: protocol.ReportReset) -> str:
        """Clear the errors of cards, and return what was done. Raises RequestRefused."""
        if not _owns_daemon(client):
            raise RequestRefused(
                f"only {user_name(os.geteuid())}, who runs this daemon, may have its cards used again"
            )
        cards = [card for card in self.broker.node.cards if card.parent is None]
        by_name = {name: card for card in cards for name in (str(card.index), str(card.uuid))}
        if unknown := [name for name in request.cards if name not in by_name]:
            raise RequestRefused(
                f"no card is called {unknown[0][:64]!r}: there are {', '.join(sorted(by_name))}"
            )
        self.controller.cards.errors.clear_reset({by_name[name].uuid for name in request.cards})
        self.controller.observe_cards()
        left = [
            f"card {card.index} is still not used: {problem}"
            for card in cards
            if {str(card.index), card.uuid} & {*request.cards}
            and (problem := self.controller.cards.problems.get(card.uuid))
        ]
        return "; ".join(left)

    def _check_stop(self, client: Client, request: protocol.StopDaemon) -> None:
        if not _owns_daemon(client):
            raise RequestRefused(f"the daemon belongs to {user_name(os.geteuid())}")
        names = list(dict.fromkeys(job.display_name for job in self.broker.jobs.values()))
        if names and not request.force:
            raise RequestRefused(
                f"{len(names)} jobs are still here ({', '.join(names[:5])}): stop them first, or add "
                "--force to leave them running without a daemon"
            )


def _owns_daemon(client: Client) -> bool:
    return client.uid in (0, os.geteuid())


def _check_may_divide(client: Client) -> None:
    if not _owns_daemon(client):
        raise RequestRefused(
            f"only {user_name(os.geteuid())}, who runs this daemon, may divide its cards"
        )


def _check_owner(client: Client, job: Job, name: str, action: str) -> None:
    if client.uid not in (0, job.uid):
        raise RequestRefused(f"{name} belongs to {user_name(job.uid)}: only they may {action} it")


class Connections:
    """Serves the connections of one daemon."""

    def __init__(self, runtime: Runtime, admission: Admission, handler: RequestHandler) -> None:
        self._runtime, self._admission, self._handler = runtime, admission, handler
        self._tasks: set[asyncio.Task[None]] = set()

    def accept_by_name(self, connection: socket.socket) -> None:
        """Serve a connection to the daemon's abstract name, which any user can connect to."""
        if peer(connection).uid in (0, os.geteuid()):
            self.accept(connection)
        else:
            connection.close()

    def accept(self, connection: socket.socket) -> None:
        """Serve a connection in a task, or refuse it; for :func:`accepting`."""
        try:
            caller = admit(connection, self._admission)
        except OSError:
            connection.close()
        except QuotaExceeded as why:
            refuse(connection, str(why))
        else:
            task = asyncio.get_running_loop().create_task(self._serve(connection, caller))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket, caller: Caller) -> None:
        """Serve one connection until it ends."""
        client = None
        try:
            async with self._admission.time_share(caller.account):
                if hung_up(connection):
                    return
                # Messages of clients are bounded while they are read.
                reader, writer = await asyncio.open_unix_connection(
                    sock=connection, limit=admission.MAX_LINE_BYTES
                )
                client = Client(writer, caller, self._admission)
                client.send(protocol.Hello(build=build_id()))
            await self._serve_admitted(client, reader)
        except asyncio.CancelledError:
            pass  # The daemon ends; asyncio would print a traceback.
        finally:
            self._admission.remove_connection(caller.account)
            if client is None:
                caller.process.close()
                connection.close()
            else:
                self._close(client)

    def _close(self, client: Client) -> None:
        self._handler.on_disconnect(client)
        transport = client.writer.transport
        if transport.get_write_buffer_size() > 0:
            asyncio.get_running_loop().call_later(admission.WRITE_TIMEOUT_S, transport.abort)
        client.close()

    async def _serve_admitted(self, client: Client, reader: asyncio.StreamReader) -> None:
        try:
            await self._serve_requests(client, reader)
        except protocol.ProtocolMismatch:
            pass  # It is no client of fenka.
        except msgspec.MsgspecError as why:
            client.send(protocol.Failure(f"invalid message: {why}"))
        except (ConnectionError, TimeoutError):
            pass  # The client closed the connection, or exceeded a time limit.
        except asyncio.CancelledError:
            pass  # The daemon ends; asyncio would print a traceback.
        except Exception as why:  # One client's failing request must not affect other clients.
            log(f"a request of {user_name(client.uid)} failed: {describe(why)}")
            client.send(protocol.Failure("the fenka daemon failed to do it; its log says why"))

    async def _serve_requests(self, client: Client, reader: asyncio.StreamReader) -> None:
        """Serve requests until the client closes the connection."""
        async with asyncio.timeout(admission.HELLO_TIMEOUT_S):
            first = protocol.decode_first_line(await _read_line(reader), self._runtime.socket)
        if isinstance(first, protocol.StopDaemon):
            await self._answer(client, first)
            return
        if first.protocol != protocol.PROTOCOL:
            return  # Our Hello lets the client report the mismatch.
        while line := await self._next_line(client, reader):
            async with self._admission.time_share(client.account):
                message = protocol.decode_request(line)
                waits = isinstance(message, protocol.StopJob | protocol.Watch)
                if not waits:
                    await self._answer(client, message)
            # It takes as long as programs take to end, or until something changes. The handler does what
            # takes the daemon's own time in the user's share.
            if waits:
                await self._answer(client, message)

    async def _next_line(self, client: Client, reader: asyncio.StreamReader) -> bytes:
        pending = self._handler.has_pending_request(client)
        async with asyncio.timeout(None if pending else admission.IDLE_TIMEOUT_S):
            return await _read_line(reader)

    async def _answer(
        self, client: Client, message: protocol.ToDaemon | protocol.StopDaemon
    ) -> None:
        try:
            await self._handler.handle(client, message)
        except FenkaError as why:
            # The client gives up its place in the queue by disconnecting.
            client.send(protocol.Failure(str(why)))
        except OSError as why:
            client.send(protocol.Failure(describe_os_error(why)))
        try:
            async with asyncio.timeout(admission.WRITE_TIMEOUT_S):
                await client.writer.drain()
        except TimeoutError:
            client.writer.transport.abort()
            raise


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    """Read one line. Raises MsgspecError if it is too long."""
    try:
        return await reader.readline()
    except ValueError:
        raise msgspec.DecodeError(
            f"a message has at most {admission.MAX_LINE_BYTES} bytes"
        ) from None
