"""The daemon that leases this machine's cards.

It may be killed at any moment: what it decided is on disk before anybody acts on it, programs go on in
their leases without it, and the next one finds them again (lease_processes.py).
"""

import asyncio
import contextlib
import fcntl
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from fenka.core.errors import FenkaError
from fenka.core.inventory import Card
from fenka.core.ledger import Conflict
from fenka.core.request import InvalidRequest, Placement
from fenka.dialects.sizes import InvalidSize
from fenka.hardware import card_lock
from fenka.hardware.machine import Hardware
from fenka.hardware.nvml import NoDriver, Reading
from fenka.hardware.peer_credentials import process, user_name
from fenka.hardware.simulated import NodeError
from fenka.isolation import compute_feedback, pid_namespaces
from fenka.isolation.files import describe_os_error, with_file_name
from fenka.isolation.processes import parent_pid, start_ticks
from fenka.workstation import (
    admission,
    files,
    lease_processes,
    protocol,
    resizing,
    signals,
    submission,
    usage,
)
from fenka.workstation.admission import Admission, QuotaExceeded
from fenka.workstation.broker import (
    GRACE_S,
    GRANT_TTL_S,
    Broker,
    Effect,
    Gang,
    GrantLease,
    Job,
    RejectJob,
    RemoveLease,
    ReportQueued,
    Terminate,
    UnknownJob,
)
from fenka.workstation.paths import Runtime
from fenka.workstation.shutdown import ShutdownSignals
from fenka.workstation.snapshot import snapshot

HEALTH_PERIOD_S = 5.0
"""A card that fell off the bus is noticed within that."""

RECHECK_DELAY_S = 0.3
"""After a slice was held for the first time."""

ABANDONED_GRACE_S = 3.0
"""Between SIGTERM and SIGKILL for jobs of a daemon that was started for a program that has ended."""

WRITE_RETRY_S = 1.0
"""Until it is tried again to write what could not be written."""

ABANDON_ROUNDS = 3
"""Of ending them: one may have been granted meanwhile."""

KILL_TIMEOUT_S = 5.0
"""SIGKILL ends a process at once, unless it waits for a device."""


class AlreadyRunning(FenkaError):
    """Another daemon serves this runtime directory."""


def lock_runtime(runtime: Runtime) -> BinaryIO:
    """Lock the runtime directory for this process. Raises AlreadyRunning, UnsafeDirectory, OSError."""
    runtime.create()
    # Who may read a file may lock it, and would keep the next daemon out.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.ExitStack() as opened:
        lock = opened.enter_context(open(os.open(runtime.lock, flags, 0o600), "r+b", buffering=0))
        with with_file_name(runtime.lock):
            os.fchmod(lock.fileno(), 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = lock.read(20).decode(errors="replace").strip() or "unknown"
                raise AlreadyRunning(
                    f"a fenka daemon is already running here (process {holder})"
                ) from None
            lock.truncate(0)
            lock.write(str(os.getpid()).encode())
        opened.pop_all()
        return lock


async def _read(reader: asyncio.StreamReader) -> bytes:
    """One line. Raises MsgspecError where it is too long."""
    try:
        return await reader.readline()
    except ValueError:
        raise msgspec.DecodeError(
            f"a message has at most {admission.MAX_LINE_BYTES} bytes"
        ) from None


def _log(message: str) -> None:
    """One line in the daemon's log."""
    print(f"fenka daemon: {message!s:.2000}".replace("\n", " "), file=sys.stderr, flush=True)


def _log_failure(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What asyncio would print as a traceback: no descriptor left for a connection, for instance."""
    why = context.get("exception")
    _log(f"{context['message']}: {_describe(why)}" if why else context["message"])


def _describe(why: BaseException) -> str:
    frames = traceback.extract_tb(why.__traceback__)
    at = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(why).__name__}: {why}{at}"


class Client:
    """One connection: who is there, and the job it asks for. Raises OSError where that process is gone."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._process = process(writer.get_extra_info("socket"))
        self.pid, self.uid = self._process.pid, self._process.uid
        self.start_ticks = start_ticks(self.pid) or 0
        """Of the process that connected, as long as :attr:`lives`."""
        self.writer = writer
        self.job: str | None = None

    @property
    def lives(self) -> bool:
        """Whether the process that connected is still there; others may have the connection from it."""
        return self._process.lives() and self.start_ticks != 0

    def is_process(self, pid: int, start_ticks: int) -> bool:
        """Whether it is the process that is recorded so."""
        return (self.pid, self.start_ticks) == (pid, start_ticks)

    def close(self) -> None:
        """Hang up."""
        self._process.close()
        self.writer.close()

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message; a client that went away is noticed when its connection is read.

        To one that does not read, its place in the queue is not told.
        """
        stuck = self.writer.transport.get_write_buffer_size() > 0
        if not (stuck and isinstance(message, protocol.JobQueued)):
            self.writer.write(protocol.encode(message) + b"\n")


class Daemon:
    """Serves one node's cards on one socket."""

    def __init__(
        self, runtime: Runtime, hardware: Hardware, broker: Broker, unit_mib: int, native: Path
    ) -> None:
        self.runtime, self.hardware, self.broker = runtime, hardware, broker
        self.unit_mib, self.native = unit_mib, native
        simulated = hardware.driver.simulated
        self.library_dir = runtime.simulated / "lib" if simulated else None
        self.cache: Path | None = None
        self._driver: dict[str, tuple[Path, ...]] = {}
        """The driver's files, which the proxies stand in for inside leases."""
        self._clients: dict[str, Client] = {}
        """By the entry that they ask for; a gang's members, each by its own job."""
        self._watches: dict[str, lease_processes.ProcessWatch] = {}
        """By job; for a gang, who started it, by entry."""
        self._admission = Admission(
            admission.raise_descriptor_limit(), frozenset({0, os.geteuid()})
        )
        self._cards_lost: set[str] = set()
        """Cards of ours that root's daemon owns now, by UUID."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = asyncio.Event()
        self._pending: list[Effect] = []
        """Decided, but not yet recorded, or not yet acted on."""
        self._retry: asyncio.TimerHandle | None = None
        self._lease_processes = lease_processes.LeaseProcesses(broker.jobs.values, runtime.leases)
        self._feedback = compute_feedback.ComputeFeedback(
            self._samples, self._lease_processes.lease_of
        )
        self._reaper = pid_namespaces.NamespaceReaper()
        self._violations = usage.ViolationDetector()
        self._reported_violations: dict[str, list[str]] = {}
        """What jobs do beyond their limits, by the last look."""

    async def serve(self, ready: Callable[[], None], ending: ShutdownSignals) -> None:
        """Until `ending` says so, or a Shutdown. `ready` is called once clients can connect.

        If it raises BrokenPipeError, who started this has gone: it ends at once.
        """
        asyncio.get_running_loop().set_exception_handler(_log_failure)
        if self.library_dir is not None:
            self.cache = files.build_linker_cache(self.runtime, self.library_dir)
        self._driver = files.driver_files(self.library_dir)
        self._recover()
        # We hold the lock, so a socket that is there is a dead daemon's.
        self.runtime.socket.unlink(missing_ok=True)
        former = os.umask(0o111 if self.runtime.system else 0o177)
        server = await asyncio.start_unix_server(
            self._on_connect,
            self.runtime.socket,
            limit=admission.MAX_LINE_BYTES,
            backlog=admission.BACKLOG,
        )
        os.umask(former)
        ending.attach(asyncio.get_running_loop(), self._stopped.set, self._abandoned)
        if not self._stopped.is_set():
            try:
                ready()
            except BrokenPipeError:
                self._stopped.set()
        work = (self._health_loop(), self._feedback_loop(), self._namespace_loop())
        tasks = [asyncio.create_task(it) for it in work]
        async with server:
            await self._stopped.wait()
        ending.detach()
        for task in tasks:
            task.cancel()
        self._feedback.close()
        self.runtime.socket.unlink(missing_ok=True)
        for watch in self._watches.values():
            watch.close()
        self._lease_processes.close()

    # --- events -----------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Take over from the daemon before, which may have been killed at any moment.

        Raises Unreadable if programs hold slices that cannot be accounted for on these cards.
        """
        known = files.load_jobs(self.runtime)
        look = self._lease_processes.recover(known)
        kept = [
            job
            for job in known
            if start_ticks(job.pid) == job.start_ticks
            or look.pids(job.id)
            or not look.complete
            or job.retained
        ]
        for directory in self.runtime.leases.iterdir():
            if directory.name in (job.id for job in kept):
                continue
            recorded = directory.name in (job.id for job in known)
            if not recorded and (there := self._lease_processes.unrecorded_holders(directory.name)):
                raise files.InvalidState(
                    f"processes {there} hold a slice that {self.runtime.state} does not know: end them "
                    "first"
                )
            files.remove_lease(directory)
        granted = [job for job in kept if job.placement]
        try:
            effects = self.broker.restore(kept, time.time())
        except Conflict as why:
            names = ", ".join(job.name for job in granted)
            raise files.InvalidState(
                f"programs still hold slices of other cards than these ({names}; {why}): start the "
                "daemon as it was started for them, or end them first"
            ) from None
        self._apply(effects)
        for entry in dict.fromkeys(job.queue_id for job in kept):
            # A waiting client comes back by itself; until then its place is kept while it lives.
            self._watch(self.broker.jobs_of(entry))
        for job in granted:
            self._add_feedback(job)
            self._schedule_deadline(job)
            if job.state == "starting":
                self._schedule_grant_expiry()

    async def _on_connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            client = Client(writer)
        except OSError:
            writer.close()
            return
        client.send(protocol.Hello())
        try:
            self._admission.add_connection(client.uid)
        except QuotaExceeded as why:
            client.send(protocol.Failure(str(why)))
            client.close()
            return
        try:
            await self._serve_client(client, reader)
        except protocol.ProtocolMismatch:
            pass  # Our Hello lets the other end say so.
        except msgspec.MsgspecError as why:
            client.send(protocol.Failure(f"not understood: {why}"))
        except (ConnectionError, TimeoutError):
            pass  # It went away, or keeps others waiting.
        except asyncio.CancelledError:
            pass  # We are going away; asyncio would print a traceback for it.
        except Exception as why:  # What one client says must not reach another's, whatever it is.
            _log(f"a request of {user_name(client.uid)} failed: {_describe(why)}")
            client.send(protocol.Failure("the fenka daemon failed to do it; its log says why"))
        finally:
            self._admission.remove_connection(client.uid)
            self._on_disconnect(client)
            if writer.transport.get_write_buffer_size() > 0:
                loop = asyncio.get_running_loop()
                loop.call_later(admission.WRITE_TIMEOUT_S, writer.transport.abort)
            client.close()

    async def _serve_client(self, client: Client, reader: asyncio.StreamReader) -> None:
        """Until the client hangs up. Raises what ends the conversation otherwise."""
        async with asyncio.timeout(admission.HELLO_TIMEOUT_S):
            protocol.check_hello(await _read(reader), self.runtime.socket)
        while line := await self._line(client, reader):
            message = protocol.decode_request(line)
            if isinstance(
                message, protocol.StopJob
            ):  # It takes as long as the programs take to end.
                await self._answer(client, message)
                await self._drain(client)
                continue
            async with self._admission.time_share(client.uid):
                await self._answer(client, message)
                await self._drain(client)

    async def _line(self, client: Client, reader: asyncio.StreamReader) -> bytes:
        jobs = self.broker.jobs_of(client.job or "")
        waits = any(job.state != "running" for job in jobs)
        async with asyncio.timeout(None if waits else admission.IDLE_TIMEOUT_S):
            return await _read(reader)

    async def _drain(self, client: Client) -> None:
        try:
            async with asyncio.timeout(admission.WRITE_TIMEOUT_S):
                await client.writer.drain()
        except TimeoutError:
            client.writer.transport.abort()
            raise

    async def _answer(self, client: Client, message: protocol.ToDaemon) -> None:
        try:
            await self._handle(client, message)
        except (NoDriver, NodeError) as why:
            # The client gives up its place by leaving.
            client.send(protocol.Failure(str(why)))
        except OSError as why:
            client.send(protocol.Failure(describe_os_error(why)))

    async def _handle(self, client: Client, message: protocol.ToDaemon) -> None:
        match message:
            case protocol.SubmitJob():
                self._submit(client, message)
            case protocol.ConfirmLease():
                self._confirm(client)
            case protocol.GetSnapshot():
                client.send(await self._snapshot())
            case protocol.StopJob():
                await self._stop(client, message)
            case protocol.ResizeJob():
                client.send(self._resize(client, message))
            case protocol.Shutdown():
                self._shutdown(client, message)

    def _check_cards(self) -> dict[str, Reading]:
        """See which cards are there: no slice of one that is not. Raises NoDriver, NodeError."""
        here = self.hardware.readings()
        node = self.broker.node
        taken: set[str] = {card.uuid for card in node.cards if card_lock.locked_by_root(card)}
        if taken > self._cards_lost:
            _log(
                f"root's daemon has taken {len(taken)} of our cards: nothing more is given of them"
            )
        self._cards_lost = taken
        cards = tuple(
            replace(card, healthy=card.uuid in here.keys() - taken) for card in node.cards
        )
        self._apply(self.broker.update_node(replace(node, cards=cards), time.time()), save=False)
        return here

    async def _health_loop(self) -> None:
        """So that those who wait for a card get it when it comes back, and not when somebody asks."""
        while True:
            await asyncio.sleep(HEALTH_PERIOD_S)
            with contextlib.suppress(OSError):
                files.trim_log(self.runtime)
            with contextlib.suppress(NoDriver, NodeError, OSError):
                self._check_cards()
                for job in [it for it in self.broker.jobs.values() if it.retained]:
                    self._on_exit(job.id)
                jobs, seen = self._with_slices(), self._gpu_processes()
                contexts = self.hardware.context_mib
                self._reported_violations = await asyncio.to_thread(
                    self._violations.sample, jobs, seen, contexts, self._feedback.busy_ns
                )

    async def _feedback_loop(self) -> None:
        """What programs with a limited share of compute need; cheap where there are none."""
        while True:
            await asyncio.sleep(compute_feedback.PERIOD_S)
            with contextlib.suppress(NoDriver, NodeError):  # _look opens the driver again
                self._feedback.update()
            if self._lease_processes.needs_scan:
                await self._lease_processes.scan()

    async def _namespace_loop(self) -> None:
        """Memory of processes that ended with their PID namespace is free for others of their lease."""
        while True:
            await asyncio.sleep(pid_namespaces.PERIOD_S)
            accounts = [files.account_path(self.lease_dir(job.id)) for job in self._with_slices()]
            await asyncio.to_thread(self._reaper.run_once, accounts)

    def _with_slices(self) -> list[Job]:
        return [job for job in self.broker.jobs.values() if job.placement]

    def _gpu_processes(self) -> usage.GpuProcesses:
        """Raises NoDriver."""
        processes = self.hardware.driver.processes()
        return usage.group_by_lease(processes, self._lease_processes.lease_of, start_ticks)

    def _retention_reason(self, job: Job) -> str:
        """Why the slice of a job without processes cannot be given away. A lost driver cannot be asked."""
        cards: dict[str, Card] = {card.uuid: card for card in self.broker.node.cards}
        try:
            readings, seen = self._check_cards(), self._gpu_processes()
        except (NoDriver, NodeError):
            return ""
        return usage.retention_reason(job, self._with_slices(), cards, readings, seen)

    def _samples(self, uuid: str, since_us: int) -> tuple[int, dict[int, int]] | None:
        return self.hardware.driver.busy_samples(uuid, since_us)  # of the driver that is open now

    def _add_feedback(self, job: Job) -> None:
        with contextlib.suppress(FileNotFoundError):  # made when its client comes back
            self._feedback.add_lease(job.id, self.lease_dir(job.id) / "lease" / "control")

    async def _snapshot(self) -> protocol.Snapshot:
        look = await self._lease_processes.scan()
        readings = self._check_cards()
        return snapshot(
            self.hardware,
            usage.UsageSample(readings, self._gpu_processes(), self._reported_violations),
            self.broker,
            look,
            self.runtime,
            self.unit_mib,
        )

    def _submit(self, client: Client, ask: protocol.SubmitJob) -> None:
        if not client.lives:
            client.send(protocol.JobRejected("the process that connected is gone", final=True))
            return
        known = self._resubmitted(client, ask.job_id)
        if known:
            client.job = known.queue_id
            self._clients[known.queue_id] = client
            self._apply(self.broker.replay(known.queue_id), save=False)
            return
        member = self._gang_member(client, ask.job_id)
        if member:
            self._claim(client, member)
            return
        self._check_cards()
        try:
            who = submission.Peer(client.pid, client.uid, client.start_ticks)
            jobs = submission.create_jobs(
                ask, who, self.unit_mib, self.broker.jobs.values(), time.time()
            )
            self._admission.check_jobs(client.uid, len(jobs), self.broker.jobs.values())
        except (InvalidSize, InvalidRequest, QuotaExceeded) as why:
            client.send(protocol.JobRejected(str(why), final=not isinstance(why, QuotaExceeded)))
            return
        entry = client.job = jobs[0].queue_id
        self._clients[entry] = client
        effects = self.broker.submit(jobs, time.time(), wait=ask.wait)
        self._watch(self.broker.jobs_of(entry))
        self._apply(effects)

    def _resubmitted(self, client: Client, job_id: str) -> Job | None:
        """The job of a process that asked a former daemon, and may not have heard its id."""
        for job in self.broker.jobs.values():
            same = job.uid == client.uid and client.is_process(job.pid, job.start_ticks)
            if same and job_id in ("", job.queue_id) and job.state in ("waiting", "starting"):
                return job
        return None

    def _gang_member(self, client: Client, job_id: str) -> Job | None:
        """The member of a gang that this process is to be: its gang's own process has started it."""
        job = self.broker.jobs.get(job_id)
        if job is None or job.gang is None or job.placement is None or job.uid != client.uid:
            return None
        gang = job.gang
        entitled = client.is_process(job.pid, job.start_ticks) or (
            job.pid == gang.pid == parent_pid(client.pid)
            and start_ticks(gang.pid) == gang.start_ticks
            and job.state == "starting"
        )
        return job if entitled else None

    def _claim(self, client: Client, job: Job) -> None:
        job.pid, job.start_ticks = client.pid, client.start_ticks
        client.job = job.id
        self._clients[job.id] = client
        self._follow(job.id, job, lambda: self._on_exit(job.id))
        self._save()
        client.send(self._granted(job))

    def _confirm(self, client: Client) -> None:
        job = self.broker.jobs.get(client.job or "")
        # Again, if the daemon before us recorded it and could not say so.
        ours = job is not None and client.lives and client.is_process(job.pid, job.start_ticks)
        if job is None or not ours or job.state not in ("starting", "running"):
            client.send(protocol.Failure("the grant expired before the program started: try again"))
            return
        if job.isolation == "namespace":
            try:
                self._lease_processes.record_entry(job)
            except lease_processes.NotInLease as why:
                client.send(protocol.Failure(str(why)))
                return
        self.broker.confirm(job.id, time.time())
        self._save()
        client.send(protocol.Done())

    def _on_disconnect(self, client: Client) -> None:
        """A client that went away while it waited, or before it confirmed, gives up its place."""
        if client.job is None or self._clients.get(client.job) is not client:
            return
        del self._clients[client.job]
        if self._stopped.is_set():
            return
        if any(job.state in ("waiting", "starting") for job in self.broker.jobs_of(client.job)):
            self._cancel(client.job)

    def _on_exit(self, job_id: str) -> None:
        job = self.broker.jobs.get(job_id)
        first = job is not None and job.state == "running"
        held = self._retention_reason(job) if job and (first or job.retained) else ""
        self._apply_pending(self.broker.on_exit(job_id, time.time(), held))
        if held and first:
            # A driver may take a moment to give back what a killed process had.
            asyncio.get_running_loop().call_later(RECHECK_DELAY_S, lambda: self._on_exit(job_id))

    def _cancel(self, name: str) -> None:
        self._apply_pending(self.broker.cancel(name, time.time()))

    async def _stop(self, client: Client, stop: protocol.StopJob) -> None:
        try:
            job, *_ = self.broker.find(stop.name)
        except UnknownJob as why:
            client.send(protocol.Failure(str(why)))
            return
        if client.uid not in (0, job.uid):
            client.send(
                protocol.Failure(
                    f"{job.display_name} belongs to {user_name(job.uid)}: only they may stop it"
                )
            )
            return
        # A gang goes as a whole, whichever member is named.
        jobs = self.broker.jobs_of(job.queue_id)
        kept = [it.retained for it in jobs if it.retained]
        if kept and client.uid not in (0, os.geteuid()):
            client.send(
                protocol.Failure(f"{job.display_name} has ended, but {kept[0]}: end that first")
            )
            return
        for it in [it for it in jobs if it.retained]:
            # Who owns the daemon decides: the next program may find less memory than its slice has.
            self._apply(self.broker.on_exit(it.id, time.time()))
        jobs = self._present(jobs)
        if not jobs:
            client.send(protocol.Done(job.display_name))
            return
        if job.state == "waiting":
            if waiter := self._clients.get(job.queue_id):
                waiter.send(protocol.JobRejected("stopped while it waited", final=True))
            self._cancel(job.queue_id)
        elif not await self._terminate(jobs, stop.grace_s):
            left = ", ".join(str(pid) for pid, _ in await self._pids_of(jobs))
            client.send(
                protocol.Failure(
                    f"{job.display_name} does not end: processes {left} ignore SIGKILL"
                )
            )
            return
        client.send(protocol.Done(job.display_name))

    async def _terminate(self, jobs: Sequence[Job], grace_s: float) -> bool:
        """SIGTERM to all, SIGKILL to those that are left after the grace; whether that ended them."""
        for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_TIMEOUT_S)):
            deadline = time.monotonic() + patience_s
            for pid, job in await self._pids_of(jobs):
                signals.send_signal(pid, number, job.uid, partial(self._belongs, job))
            while self._present(jobs) and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
        return not self._present(jobs)

    def _present(self, jobs: Sequence[Job]) -> list[Job]:
        return [job for job in jobs if job.id in self.broker.jobs]

    async def _pids_of(self, jobs: Sequence[Job]) -> list[tuple[int, Job]]:
        look = await self._lease_processes.scan()
        return [
            (pid, job)
            for job in self._present(jobs)
            for pid in sorted({job.pid, *look.holders.get(job.id, [])})
            if self._belongs(job, pid)
        ]

    def _belongs(self, job: Job, pid: int) -> bool:
        """Whether the process that has this PID now is the one that asked, or in the lease."""
        asked = pid == job.pid and start_ticks(pid) == job.start_ticks
        return asked or self._lease_processes.lease_of(pid) == job.id

    def _resize(
        self, client: Client, wanted: protocol.ResizeJob
    ) -> protocol.Done | protocol.Failure:
        try:
            job, *others = self.broker.find(wanted.name)
            if others:
                return protocol.Failure(
                    f"{wanted.name} is a gang: resize its members one by one, beginning with {job.name}"
                )
            if client.uid not in (0, job.uid):
                owner = user_name(job.uid)
                return protocol.Failure(f"{job.name} belongs to {owner}: only they may resize it")
            resizing.resize(self, job, wanted)
        except resizing.CannotResize as why:
            return protocol.Failure(str(why))
        except UnknownJob as why:
            return protocol.Failure(str(why))
        return protocol.Done(job.name)

    def _shutdown(self, client: Client, message: protocol.Shutdown) -> None:
        if client.uid not in (0, os.geteuid()):
            client.send(protocol.Failure(f"the daemon belongs to {user_name(os.geteuid())}"))
            return
        held = list(dict.fromkeys(job.display_name for job in self.broker.jobs.values()))
        if held and not message.force:
            names = ", ".join(held[:5])
            client.send(
                protocol.Failure(
                    f"{len(held)} jobs are still here ({names}): stop them first, or add --force to "
                    "leave them running without a daemon"
                )
            )
            return
        client.send(protocol.Done())
        self._stopped.set()

    def _abandoned(self) -> None:
        """Who this daemon was started for has ended: so do all jobs, and the daemon."""

        async def end() -> None:
            for _ in range(ABANDON_ROUNDS):
                jobs = list(self.broker.jobs.values())
                for entry in {job.queue_id for job in jobs if job.state == "waiting"}:
                    if waiter := self._clients.get(entry):
                        waiter.send(protocol.JobRejected("stopped while it waited", final=True))
                    self._cancel(entry)
                if not jobs or not await self._terminate(self._present(jobs), ABANDONED_GRACE_S):
                    break
            self._stopped.set()

        self._spawn(end())

    # --- effects ----------------------------------------------------------------------------------

    def _apply(self, effects: list[Effect], *, save: bool = True) -> None:
        """Record what was decided, then act on it, in order.

        Raises OSError, for whoever asked; the rest is done as soon as the disk lets it be recorded.
        """
        self._pending += effects
        try:
            if save or self._pending:
                self._save()
            while self._pending:
                self._apply_one(self._pending.pop(0))
        except OSError:
            if self._retry is None:
                loop = asyncio.get_running_loop()
                self._retry = loop.call_later(WRITE_RETRY_S, self._apply_pending)
            raise
        finally:
            self._forget_watches()

    def _apply_pending(self, effects: Sequence[Effect] = ()) -> None:
        """Where nobody has asked who could be told of an error."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        with contextlib.suppress(OSError):
            self._apply(list(effects))

    def _apply_one(self, effect: Effect) -> None:
        match effect:
            case GrantLease(jobs):
                # One that could not be recorded at once may have been given up since.
                if len(self._present(jobs)) == len(jobs):
                    self._start(jobs)
            case RemoveLease(job):
                self._feedback.remove_lease(job.id)
                self._lease_processes.forget(job.id)
                files.remove_lease(self.lease_dir(job.id))
            case Terminate(job):
                self._spawn(self._terminate([job], GRACE_S))
            case ReportQueued(job, position, length, reason):
                said = protocol.JobQueued(job.queue_id, job.display_name, position, length, reason)
                self._notify_client(job, said)
            case RejectJob(job, reason, final):
                self._notify_client(job, protocol.JobRejected(reason, final))

    def _forget_watches(self) -> None:
        here = {name for job in self.broker.jobs.values() for name in (job.id, job.queue_id)}
        for name in self._watches.keys() - here:
            self._watches.pop(name).close()

    def _notify_client(self, job: Job, message: protocol.Message) -> None:
        """Who asked, if they are there."""
        client = self._clients.get(job.queue_id)
        if client:
            client.send(message)

    def _start(self, jobs: Sequence[Job]) -> None:
        # First: if the leases cannot be written, it is this that gives back what they were to hold.
        self._schedule_grant_expiry()
        for job in jobs:
            if not (self.lease_dir(job.id) / "lease" / "control").exists():
                files.create_lease(
                    self.runtime,
                    job,
                    self.hardware.context_mib,
                    resizing.compute_of(job),
                    self.cache,
                )
            self._add_feedback(job)
            self._schedule_deadline(job)
            self._record_baseline(job)
        first = jobs[0]
        if first.gang:
            ids = [job.id for job in jobs]
            self._notify_client(first, protocol.GangGranted(first.gang.name, ids))
        else:
            self._notify_client(first, self._granted(first))

    def _record_baseline(self, job: Job) -> None:
        """What is compared later: which shim its programs have, and what nobody accounts for on its cards."""
        job.shim_inode = (self.native / "libfenka.so").stat().st_ino
        if not pid_namespaces.in_initial_namespace():
            return  # The driver names only processes that we could see.
        with contextlib.suppress(NoDriver, NodeError):
            readings, seen = self.hardware.readings(), self._gpu_processes()
            for piece in job.placement.slices if job.placement else ():
                unnamed = usage.unattributed_mib(piece.uuid, readings, seen)
                if unnamed is not None:
                    job.unattributed_mib.setdefault(piece.uuid, unnamed)

    def _granted(self, job: Job) -> protocol.LeaseGranted:
        assert job.placement is not None
        return protocol.LeaseGranted(
            job_id=job.id,
            name=job.name,
            directory=str(self.lease_dir(job.id)),
            shim=str(self.native / "libfenka.so"),
            linker_cache=str(self.cache or ""),
            library_dir=str(self.library_dir or ""),
            hidden=[str(self.runtime.leases)],
            uuids=[piece.uuid for piece in job.placement.slices],
            proxies=str(self.native / "proxy"),
            driver={name: [*map(str, files)] for name, files in self._driver.items()},
            simulated=str(self.runtime.simulated if self.library_dir else ""),
        )

    def _watch(self, jobs: Sequence[Job]) -> None:
        """Those of one entry, and who is to end with them."""
        for job in jobs:
            if not job.gang or job.pid != job.gang.pid:
                self._follow(job.id, job, lambda job=job: self._on_exit(job.id))  # type: ignore[misc]
        gang, entry = (jobs[0].gang, jobs[0].queue_id) if jobs else (None, "")
        if gang and start_ticks(gang.pid) == gang.start_ticks:
            self._follow(entry, gang, lambda: self._cancel(entry))
        elif gang:
            self._cancel(entry)

    def _follow(self, name: str, who: Job | Gang, on_end: Callable[[], None]) -> None:
        if name in self._watches:
            self._watches.pop(name).close()
        self._watches[name] = lease_processes.ProcessWatch(
            name, who.pid, who.start_ticks, on_end, self._lease_processes.scan
        )

    def _schedule_deadline(self, job: Job) -> None:
        """When its time is over, whatever it does."""
        if job.deadline is None:
            return
        asyncio.get_running_loop().call_later(
            max(job.deadline - time.time(), 0), lambda: self._spawn(self._terminate([job], GRACE_S))
        )

    def _spawn(self, work: Coroutine[None, None, object]) -> None:
        async def run() -> None:
            await work

        # The loop itself keeps no hold of it.
        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _schedule_grant_expiry(self) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(
            GRANT_TTL_S + 1, lambda: self._apply_pending(self.broker.expire(time.time()))
        )

    def record_placement(self, job: Job, placement: Placement) -> None:
        """For resizing.py."""
        self._apply(self.broker.resize(job.id, placement, time.time()))

    def _save(self) -> None:
        files.save_jobs(self.runtime, list(self.broker.jobs.values()))

    def lease_dir(self, job_id: str) -> Path:
        """Where a job's lease is."""
        return self.runtime.lease(job_id)
