"""Serves the hook that starts containers: makes a container a job, and sends the mounts of its lease.

The hook gives sealed copies of the OCI state and of config.json, and a descriptor of the container's init. A
process of its own reads them (`hook_reader.py`).
The answer is a sentence, or names and descriptors of mounts. It never waits for a slice: a container whose
slice is not free gets a lease without limits, in which the shim holds its program (native/shim/hold.c).

Root's hook may start any container. Another user's may start one whose user namespace is that user's.
"""

import asyncio
import contextlib
import os
import pwd
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from msgspec.structs import replace as replace_fields

from fenka import procfs
from fenka.core.errors import FenkaError
from fenka.core.request import InvalidRequest
from fenka.formats.quantities import InvalidSize
from fenka.hardware.peer_credentials import PeerProcess, user_name
from fenka.isolation import proxy_install
from fenka.isolation.device_access import DeviceAccessError
from fenka.isolation.lease_files import describe_os_error
from fenka.isolation.mount_handles import copy_mount
from fenka.isolation.sandbox import DRIVER, LEASE_ROOT, NODE, SHIM, LeaseMounts
from fenka.jobs.job_spec import JobSpec
from fenka.workstation import admission, protocol
from fenka.workstation.accepting import Caller, admit, hung_up
from fenka.workstation.admission import Admission, QuotaExceeded
from fenka.workstation.connections import create_jobs, with_time_limit
from fenka.workstation.containers import packet_server
from fenka.workstation.containers.container_request import (
    DeviceRequest,
    InvalidContainer,
    read_request,
)
from fenka.workstation.containers.hook_reader import HookMessage, HookReader
from fenka.workstation.containers.tickets import Tickets
from fenka.workstation.controller import Controller
from fenka.workstation.job import Job, JobContainer
from fenka.workstation.lifetime import describe, log
from fenka.workstation.paths import Runtime

MAX_INIT_AGE_S = 120.0
"""An init is made by the runtime right before its hook. One that is older is somebody's running program."""

PLACING_TIMEOUT_S = 30.0
"""Until the hook has placed the mounts."""

_TICKS = os.sysconf("SC_CLK_TCK")

CHARGES = ("root", "refuse", "annotation")
"""Rules about who pays for root's containers that name nobody, in place of a user."""

Copy = tuple[str, Path, bool]
"""A mount: its place below /run/fenka, what is copied, and whether programs may write there."""


class HookClient:
    """The connection of one hook, as the controller's other parts see it: answered once."""

    def __init__(self) -> None:
        self.job: str | None = None
        self.answer: protocol.Message | None = None

    def send(self, message: protocol.Message) -> None:
        """Keep the first answer. The container learns of a later grant by its lease."""
        if self.answer is None:
            self.answer = message


class HookServer:
    """Serves the hooks of one daemon of root's."""

    def __init__(
        self,
        runtime: Runtime,
        controller: Controller,
        quotas: Admission,
        payer: Callable[[Caller, DeviceRequest], tuple[int, JobSpec]],
        nodes: Callable[[Job], Iterator[tuple[Path, int]]] | None = None,
    ) -> None:
        """Args:
        runtime: The daemon's.
        controller: Its jobs.
        quotas: The users' limits.
        payer: Returns the user that a container counts for, and its job. Raises InvalidContainer.
        nodes: Yields a job's device nodes with descriptors of mounts; None where the machine's serve.
        """
        self._runtime, self._controller = runtime, controller
        self._quotas, self._payer, self._nodes = quotas, payer, nodes
        self._tasks: set[asyncio.Task[None]] = set()
        self._reader = HookReader()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Serve while in the context. Raises OSError."""
        mode = 0o666 if self._runtime.system else 0o600
        path = self._runtime.containers
        with packet_server.listening(path, self._accept, mode, descriptors=True):
            try:
                yield
            finally:
                for task in self._tasks:
                    task.cancel()

    def _accept(self, connection: socket.socket) -> None:
        try:
            caller = admit(connection, self._quotas)
        except OSError:
            connection.close()
        except QuotaExceeded as why:
            with connection:
                _send(connection, str(why))
        else:
            task = asyncio.get_running_loop().create_task(self._serve(connection, caller))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket, caller: Caller) -> None:
        with (
            connection,
            contextlib.suppress(OSError, TimeoutError),
            contextlib.ExitStack() as opened,
        ):
            opened.callback(caller.process.close)
            opened.callback(self._quotas.remove_connection, caller.account)
            try:
                await self._start(connection, caller, opened)
            except FenkaError as why:
                _refuse(connection, caller, str(why))
            except OSError as why:
                _refuse(connection, caller, describe_os_error(why))
            except Exception as why:  # One container must not affect others.
                log(f"a container's hook failed: {describe(why)}")
                _refuse(connection, caller, "the fenka daemon failed to do it; its log says why")

    async def _start(
        self, connection: socket.socket, caller: Caller, opened: contextlib.ExitStack
    ) -> None:
        async with asyncio.timeout(admission.HELLO_TIMEOUT_S):
            await _readable(connection)
        async with self._quotas.time_share(caller.account):
            if hung_up(connection):
                return
            message = await self._reader.read(connection.fileno(), caller.account)
            opened.callback(os.close, message.descriptor)
            device = message.device.decode(errors="replace")
            request = read_request(device, message.state, message.config)
            client = HookClient()
            opened.callback(self._controller.clients.remove, client)
            job, mounts = await self._submit(client, caller, request, message)
        await self._place(connection, job, mounts)

    # --- a container becomes a job ------------------------------------------------------------------

    async def _submit(
        self, client: HookClient, caller: Caller, request: DeviceRequest, message: HookMessage
    ) -> tuple[Job, LeaseMounts]:
        """Return the job and the mounts of its lease. Raises FenkaError, OSError."""
        controller, pid = self._controller, message.pid
        init = PeerProcess(pid, caller.account, message.descriptor, message.start_ticks)
        _check_init(caller, init)
        job = self._known(init)
        if job is not None:
            controller.clients.add(job.queue_id, client)
            controller.replay(job.queue_id)
        else:
            self._check_free(pid)
            uid, spec = self._payer(caller, request)
            account = caller.account if caller.process.uid else uid
            await self._settle(request.id, account)
            job = self._new_job(account, request, spec, replace(init, uid=uid))
            controller.clients.add(job.queue_id, client)
        try:
            former = self._kept(request.id, job.account)
            if former and (former.request, former.uid) == (job.request, job.uid):
                controller.succeed(former, job)
            elif client.answer is None:
                if former:
                    controller.on_exit(former.id)
                controller.submit([job], wait=request.waits)
            return job, self._mounts(job, client.answer)
        except (OSError, InvalidContainer, DeviceAccessError):
            if job.id in controller.broker.jobs:
                controller.cancel(job.queue_id)
            controller.processes.forget(job.id)
            raise

    def _mounts(self, job: Job, answer: protocol.Message | None) -> LeaseMounts:
        """Return the mounts of a lease, granted or pending.

        Raises InvalidContainer, DeviceAccessError, OSError.
        """
        leases = self._controller.leases
        match answer:
            case protocol.LeaseGranted(mounts=mounts):
                return mounts
            case protocol.JobQueued(reason=reason, position=position, length=length):
                self._controller.restrict_cards(job)
                leases.create_pending(job, f"place {position} of {length} in the queue: {reason}")
                return leases.grant(job).mounts
        raise InvalidContainer(getattr(answer, "reason", "its slice could not be made"))

    def _known(self, init: PeerProcess) -> Job | None:
        """Return the job of a hook that asks again, since an earlier daemon did not answer it."""
        for job in self._controller.broker.jobs.values():
            same = (job.pid, job.start_ticks) == (init.pid, init.start_ticks)
            if same and job.in_container and not job.started:
                return job
        return None

    def _starts(self, container: str, account: int) -> list[Job]:
        """Return the jobs of an account that are starts of a container.

        The id is what the caller says, so others' containers of this id are other containers.
        """
        return [
            job
            for job in self._controller.broker.jobs.values()
            if job.in_container and job.in_container.id == container and job.account == account
        ]

    def _kept(self, container: str, account: int) -> Job | None:
        """Return the former start of a container, if its slice is kept."""
        return next((job for job in self._starts(container, account) if job.kept), None)

    def _check_free(self, pid: int) -> None:
        lease = self._controller.processes.lease_of(pid)
        job = self._controller.broker.jobs.get(lease or "")
        if job is None:
            return
        if job.in_container and job.pid == pid:
            raise InvalidContainer(
                "this container has several devices of fenka: name one, and say how many cards with "
                "FENKA_CARDS"
            )
        raise InvalidContainer(
            f"this container is in the slice of {job.name} already: leave out its device of fenka"
        )

    async def _settle(self, container: str, account: int) -> None:
        """Release the slice of the container's former start, whose end may not have been noticed yet."""
        former = [job for job in self._starts(container, account) if not job.kept]
        if not former:
            return
        scan = await self._controller.processes.scan()
        for job in former:
            ended = not procfs.lives(job.pid, job.start_ticks)
            if ended and scan.complete and not scan.pids(job.id):
                self._controller.on_exit(job.id)

    def _new_job(
        self, account: int, request: DeviceRequest, spec: JobSpec, init: PeerProcess
    ) -> Job:
        """Return a new job of an account. Raises InvalidContainer, QuotaExceeded, NotInLease, OSError."""
        broker, kept = self._controller.broker, self._kept(request.id, account)
        known = [job for job in broker.jobs.values() if job is not kept]
        try:
            spec = with_time_limit(spec, broker, account)
            (job,) = create_jobs(spec, init, broker.node.unit_mib, known, time.time(), account)
            self._quotas.check_jobs(account, 1, known)
            job.container = JobContainer(request.id, request.engine, keep_s=request.keep_s)
            self._quotas.check_records(account, [job], known)
        except (InvalidSize, InvalidRequest, QuotaExceeded) as why:
            raise InvalidContainer(str(why)) from None
        self._controller.processes.record_container(job)
        if not init.lives():
            self._controller.processes.forget(job.id)
            raise InvalidContainer("the container has ended")
        return job

    # --- its lease ----------------------------------------------------------------------------------

    async def _place(self, connection: socket.socket, job: Job, mounts: LeaseMounts) -> None:
        """Send the mounts, and record that they are in place; remove the job if they are not.

        If the daemon ends meanwhile, the job stays: the hook asks the next one.
        """
        ending = False
        try:
            with contextlib.ExitStack() as opened:
                copies, descriptors = lease_copies(mounts), list[int]()
                for _, source, writable in copies:
                    descriptors.append(copy_mount(source, writable=writable))
                    opened.callback(os.close, descriptors[-1])
                places = [place for place, _, _ in copies]
                for path, descriptor in self._nodes(job) if self._nodes else ():
                    opened.callback(os.close, descriptor)
                    places.append(f"/dev/{path.name}")
                    descriptors.append(descriptor)
                names = b"".join(place.encode() + b"\0" for place in places)
                socket.send_fds(connection, [b"+" + names], descriptors)
            await _placed(connection)
            self._controller.place_container(job)
            connection.send(b".")
        except asyncio.CancelledError:
            ending = True
            raise
        finally:
            if not ending and not job.started and job.id in self._controller.broker.jobs:
                self._controller.cancel(job.queue_id)


def lease_copies(mounts: LeaseMounts) -> list[Copy]:
    """Return the mounts of a container's lease, the first with the mount points of the others."""

    def place(path: Path) -> str:
        return str(path.relative_to(LEASE_ROOT))

    assert mounts.proxies
    shim = place(SHIM.parent)
    return [
        ("", mounts.directory / "run", False),
        (shim, mounts.directory / "lease", False),
        (place(SHIM), mounts.shim, False),
        *(
            (f"{shim}/{name}", mounts.proxies / name, False)
            for name in proxy_install.NEXT_LIBRARIES
        ),
        ("account", mounts.directory / "account", True),
        (place(DRIVER), mounts.directory / "driver", False),
        *([(place(DRIVER / NODE), mounts.node, True)] if mounts.node else []),
        *((place(DRIVER / name), first, False) for name, (first, *_) in mounts.driver.items()),
    ]


def _check_init(caller: Caller, init: PeerProcess) -> None:
    """Check that a process is a new container's, and that the caller may name it. Raises InvalidContainer."""
    try:
        owner = procfs.user_namespace_owner(init.pid)
        outside = procfs.namespace_inode(init.pid, "mnt") == procfs.namespace_inode("self", "mnt")
    except OSError:
        raise InvalidContainer("the container's process is gone") from None
    if caller.process.uid and owner != caller.account:
        raise InvalidContainer(
            f"process {init.pid} is no container of {user_name(caller.account)}, who names it"
        )
    if outside:
        raise InvalidContainer("the process has no mounts of its own: it is no container")
    if caller.process.start_ticks - init.start_ticks > MAX_INIT_AGE_S * _TICKS:
        raise InvalidContainer("the process is no new container: it was started long before")


def _refuse(connection: socket.socket, caller: Caller, reason: str) -> None:
    # Not all runtimes show what a hook says.
    log(f"a container of {user_name(caller.account)} gets no slice: {reason}")
    _send(connection, reason)


def _send(connection: socket.socket, reason: str) -> None:
    """Send the hook the sentence with which its container does not start."""
    with contextlib.suppress(OSError):
        connection.send(b"-" + reason.encode(errors="replace")[:4000])


async def _placed(connection: socket.socket) -> None:
    """Wait until the hook has placed the mounts. Raises ConnectionError, TimeoutError."""
    async with asyncio.timeout(PLACING_TIMEOUT_S):
        await _readable(connection)
    if connection.recv(2) != b"ok":
        raise ConnectionError("the hook has ended")


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(connection, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection)


def payer(charge: str, tickets: Tickets) -> Callable[[Caller, DeviceRequest], tuple[int, JobSpec]]:
    """Return how the user is found that a container counts for, with its job at an allowed priority.

    Args:
        charge: Who pays for root's containers without a ticket or annotation: root, another user, or
            `refuse`. With `annotation` the user and a priority above 0 of Podman's annotations count, too,
            which may be the image's.
        tickets: Those of this daemon.
    """

    def pays(caller: Caller, request: DeviceRequest) -> tuple[int, JobSpec]:
        if caller.process.uid:
            if request.user and request.user != user_name(caller.account):
                raise InvalidContainer(
                    f"only root's containers count for others: leave out fenka.io/user={request.user[:80]}"
                )
            return caller.account, request.spec
        if request.engine != "podman" or charge == "annotation":
            user, spec = request.user, request.spec
        else:
            user, spec = "", replace_fields(request.spec, priority=min(request.spec.priority, 0))
        if request.ticket:
            return tickets.use(request.ticket, request.id), spec
        if user:
            return user_id(user), spec
        if charge == "refuse":
            raise InvalidContainer(
                "nobody pays for this container: start it with `fenka docker run`, or name a user in its "
                "annotation fenka.io/user"
            )
        return 0 if charge in ("root", "annotation") else user_id(charge), spec

    return pays


def user_id(name: str) -> int:
    """Return a user's number by name. Raises InvalidContainer."""
    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):
        raise InvalidContainer(f"there is no user {name[:80]!r} on this machine") from None
