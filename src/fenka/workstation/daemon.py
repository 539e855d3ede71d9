"""The daemon that leases this machine's cards.

It may be killed at any moment. Its decisions are on disk before anyone acts on them. Programs go on in their
leases without it, and the next daemon finds them again (Controller.recover).
"""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fenka.core.errors import FenkaError
from fenka.hardware.card_errors import CardErrors
from fenka.hardware.card_spec import NodeError
from fenka.hardware.nvml import Hardware, NoDriver, Reading, Xid, XidListener
from fenka.isolation import compute_feedback, pid_namespaces
from fenka.isolation.lease_files import account_file
from fenka.mig.manager import InstanceManager
from fenka.workstation import admission, files, foreign_descriptors, paths, presence, protocol
from fenka.workstation.accepting import accepting
from fenka.workstation.admission import Admission
from fenka.workstation.broker import Broker
from fenka.workstation.cards import CardObserver, SliceActivity
from fenka.workstation.connections import Connections, JobResizer, RequestHandler
from fenka.workstation.containers import cdi_devices, hook_server
from fenka.workstation.containers.card_nodes import CardNodes
from fenka.workstation.containers.hook_server import HookServer
from fenka.workstation.containers.tickets import Tickets
from fenka.workstation.controller import ConnectedClients, Controller
from fenka.workstation.files import DaemonConfig, History, RunningJobs
from fenka.workstation.layouts import Layouts
from fenka.workstation.lease_processes import LeaseProcesses, Terminator
from fenka.workstation.leases import Leases
from fenka.workstation.lifetime import ShutdownSignals, describe, log, log_unhandled
from fenka.workstation.node_server import NodeServer
from fenka.workstation.paths import Runtime
from fenka.workstation.presence import Presence
from fenka.workstation.recording.machine_recorder import MachineRecorder
from fenka.workstation.screens.snapshot import snapshot
from fenka.workstation.screens.snapshot_feed import SnapshotFeed
from fenka.workstation.screens.what_if import Rehearsals
from fenka.workstation.users.user_policies import UserPolicies
from fenka.workstation.users.user_requests import UserRequests

if TYPE_CHECKING:
    from fenka.workstation.monitor.metrics import WorkstationMetrics

HEALTH_PERIOD_S = 5.0
"""Between two checks of the cards."""

BOOKING_PERIOD_S = 5.0
"""Between two looks at the clock, which may be set."""

ABANDONED_GRACE_S = 3.0
"""Between SIGTERM and SIGKILL for jobs of a daemon that was started for a program that has ended."""

ABANDON_ROUNDS = 3
"""Attempts to end all jobs: further ones may be granted meanwhile."""


class Daemon:
    """Serves one node's cards on one socket."""

    def __init__(
        self,
        runtime: Runtime,
        hardware: Hardware,
        broker: Broker,
        instances: InstanceManager,
        native: Path,
        config: DaemonConfig,
    ) -> None:
        self.config = config
        self.runtime, self.hardware, self.broker = runtime, hardware, broker
        self._stopped = asyncio.Event()
        self._processes = LeaseProcesses(broker.leased, runtime.leases)
        self._feedback = compute_feedback.ComputeFeedback(
            hardware.busy_samples, self._processes.lease_of
        )
        self._reaper = pid_namespaces.NamespaceReaper()
        self._leases = Leases(
            *(runtime, hardware, native, self._feedback),
            *(broker.compute_of, instances.capabilities),
        )
        self._cards = CardObserver(
            hardware, self._processes.lease_of, self._feedback.busy_ns, broker.leased_mib
        )
        self._terminator = Terminator(broker, self._processes)
        history_file = paths.history_file(runtime)
        self._history, self._running = History(history_file), RunningJobs(history_file.parent)
        self._recorder = MachineRecorder(
            runtime, broker, self._cards, self._feedback, self._history, config
        )
        self._cards.xids.on_xid = self._recorder.on_xid
        clients = ConnectedClients()
        self._controller = Controller(
            *(runtime, broker, clients, self._leases, self._cards),
            *(self._processes, self._terminator, instances, self._history),
        )
        self._card_nodes = CardNodes(runtime, hardware, config)
        self._controller.restrict_cards = self._card_nodes.restrict
        self.nodes = NodeServer(runtime, hardware, broker)
        self._policies = UserPolicies(runtime.users, history_file.parent, runtime.owners)
        broker.policies = self._policies
        self._layouts = Layouts(self._controller, broker, instances)
        self._rehearsals = Rehearsals(broker)
        self._activity = SliceActivity(self._feedback.busy_s, broker.placed)
        self._feed = SnapshotFeed(self._watched_snapshot)
        self._controller.on_change = self._on_change
        quotas = Admission(admission.raise_descriptor_limit(), frozenset({0, os.geteuid()}))
        tickets = Tickets(history_file.with_name("tickets.json"))
        self.handler = RequestHandler(
            *(self._controller, broker, quotas, clients, self._terminator),
            JobResizer(self._controller, broker, self._leases),
            *(self._layouts, self._history, self._snapshot, self._feed),
            *(self._rehearsals, self._stopped, self._recorder, tickets.answer),
            UserRequests(self._policies, broker, self._controller.reschedule),
            self._card_nodes.describe,
        )
        self._metrics = self._open_metrics()
        self._connections = Connections(runtime, quotas, self.handler)
        self._hooks = HookServer(
            *(runtime, self._controller, quotas, hook_server.payer(config.charge, tickets)),
            self.nodes.copies if config.closed else None,
        )
        self._presence = Presence(runtime, self.record)
        self.name: socket.socket | None = None
        """Listens at the directory's name."""
        self.moved = False
        """Whether it has ended to start again in a directory that was made again."""

    async def serve(self, ready: Callable[[], None], signals: ShutdownSignals) -> None:
        """Serve until a signal or a StopDaemon request ends it, or its directory was made again.

        Args:
            ready: Called once clients can connect. If it raises BrokenPipeError, the program that started the
                daemon has gone, and the daemon ends at once.
            signals: The signals and the lifeline that end the daemon.
        """
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(log_unhandled)
        with foreign_descriptors.interrupted(loop):
            await self._serve(loop, ready, signals)
            # Their connections are closed while that can be interrupted.
            clients = asyncio.all_tasks() - {asyncio.current_task()}
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)

    async def _serve(
        self,
        loop: asyncio.AbstractEventLoop,
        ready: Callable[[], None],
        signals: ShutdownSignals,
    ) -> None:
        self._policies.load()
        self._leases.prepare()
        self._write_devices()
        self._layouts.load()
        self._history.load()
        self._load_card_errors()
        for job in self._running.lost():
            self._history.add(job)
        self._recorder.on_change()
        self._controller.recover()
        self._card_nodes.renew(self.broker.jobs.values())
        if self.config.closed:
            self._leases.node_server = self.runtime.nodes
            self.nodes.close()
        else:
            self.nodes.reopen()
        server, self.name = self._listen(), presence.listen(self.runtime)
        self._presence.begin()
        signals.attach(loop, self._stopped.set, self._on_abandoned)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup, os.isatty(0))
        if not self._stopped.is_set():
            try:
                ready()
            except BrokenPipeError:
                self._stopped.set()
        loops = (
            *(self._health_loop(), self._feedback_loop(), self._namespace_loop()),
            *(self._presence_loop(), self._booking_loop()),
            self._cards.xids.listen(lambda: XidListener(self.hardware)),
        )
        tasks = [asyncio.create_task(loop) for loop in loops]
        serving = self._metrics.serving() if self._metrics else contextlib.nullcontext()
        async with serving:
            with self._accepting(server):
                await self._stopped.wait()
        signals.detach()
        await self._controller.changes.driver.finish()
        for task in tasks:
            task.cancel()
        self._feedback.close()
        self.runtime.socket.unlink(missing_ok=True)
        self._running.record(self._controller.ended_by_restart())
        self._policies.on_saved()
        self._controller.close()
        self._processes.close()
        await self._recorder.close()

    def _load_card_errors(self) -> None:
        """Take over the errors that an earlier daemon recorded, and record those that come."""
        known = files.load_card_errors(self.runtime)
        self._cards.errors = CardErrors(known, self._save_card_errors)
        self._cards.xids.on_event = self._on_xid

    def _on_xid(self, event: Xid) -> None:
        """Take a card, or the instance that the XID names, out of use if it needs a reset."""
        keys: list[str] = [event.uuid]
        if event.gpu_instance is not None:
            # Of an administrator's instance there is no record, and nothing is leased.
            keys = [
                record.instance.device
                for record in self._controller.instances.keeper.records
                if (record.card, record.gpu_instance) == (event.uuid, event.gpu_instance)
            ]
        if self._cards.errors.report_xid(keys, event.number):
            with contextlib.suppress(FenkaError, OSError):
                self._controller.observe_cards()

    def _save_card_errors(self, errors: Mapping[str, str]) -> None:
        try:
            files.save_card_errors(self.runtime, errors)
        except OSError as why:
            log(f"a card's error will be forgotten at the daemon's next start: {describe(why)}")

    def _write_devices(self) -> None:
        """Write containers' devices again if cards, unit or libraries have changed."""
        if not self.runtime.system or not cdi_devices.exist():
            return
        driver, node = self.hardware.driver, self.broker.node
        try:
            machine = cdi_devices.describe(
                [card.memory_mib for card in node.cards if card.parent is None],
                node.unit_mib,
                "" if driver.simulated else driver.version,
                self.config.driver,
            )
            cdi_devices.write(machine, self.runtime)
        except (FenkaError, OSError) as why:
            log(f"containers' devices are not written again: {describe(why)}")

    def _open_metrics(self) -> "WorkstationMetrics | None":
        if self.config.metrics_port is None:
            return None
        # An HTTP server would cost each daemon 20 MB.
        from fenka.workstation.monitor.metrics import WorkstationMetrics

        return WorkstationMetrics(
            *(self.config.metrics_port, self.runtime, self.hardware, self.broker),
            self._cards.xids.counts,
        )

    def _listen(self) -> socket.socket:
        """Listen at the directory's socket. Raises OSError."""
        # The runtime directory is locked, so a socket in it belonged to a daemon that was killed.
        self.runtime.socket.unlink(missing_ok=True)
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        former = os.umask(0o111 if self.runtime.system else 0o177)
        try:
            server.bind(os.fspath(self.runtime.socket))
        finally:
            os.umask(former)
        server.listen(admission.BACKLOG)
        return server

    @contextlib.contextmanager
    def _accepting(self, server: socket.socket) -> Iterator[None]:
        """Serve clients while in the context."""
        with contextlib.ExitStack() as opened:
            opened.enter_context(server)
            opened.enter_context(accepting(server, self._connections.accept))
            if self.name is not None:
                opened.enter_context(accepting(self.name, self._connections.accept_by_name))
            # Only root can give mounts to containers.
            if os.geteuid() == 0:
                opened.enter_context(self._hooks.listening())
            if self.config.closed:
                opened.enter_context(self.nodes.listening())
            yield

    # --- loops --------------------------------------------------------------------------------------

    async def _health_loop(self) -> None:
        """Check cards and jobs, so that a card that comes back is leased without a request."""
        if self._metrics is not None:
            with contextlib.suppress(NoDriver, NodeError, OSError):
                self._update_metrics(self._controller.observe_cards())
        while True:
            await asyncio.sleep(HEALTH_PERIOD_S)
            with contextlib.suppress(OSError):
                files.trim_log(self.runtime.log)
            self._card_nodes.renew(self.broker.jobs.values())
            if self.config.closed:
                self.nodes.check()
            await self._record_running()
            self._activity.observe()
            readings: Mapping[str, Reading] = {}
            with contextlib.suppress(NoDriver, NodeError, OSError):
                readings = self._controller.observe_cards()
                await self._cards.check_violations(self.broker.placed())
            await self._recorder.sample(readings)
            self._update_metrics(readings)

    def _on_change(self) -> None:
        self._feed.on_change()
        self._recorder.on_change()

    def _update_metrics(self, readings: Mapping[str, Reading]) -> None:
        """readings: empty if the driver did not answer; then the last figures stay."""
        if self._metrics is None or not readings:
            return
        with contextlib.suppress(NoDriver):
            sample = replace(self._cards.sample(readings), activity=self._activity.observe())
            self._metrics.update(sample, self._cards.violations)

    async def _record_running(self) -> None:
        jobs = self._controller.jobs_of_this_boot()
        if self._running.outdated(frozenset(job.id for job in jobs)):
            # A disk may take long.
            await asyncio.to_thread(self._running.record, self._controller.ended_by_restart())

    async def _feedback_loop(self) -> None:
        """Send programs with a limited share of compute what they cannot measure themselves."""
        while True:
            await asyncio.sleep(compute_feedback.PERIOD_S)
            with contextlib.suppress(NoDriver, NodeError):  # the health loop opens the driver again
                self._feedback.update()
            if self._processes.needs_scan:
                await self._processes.scan()

    async def _namespace_loop(self) -> None:
        """Free the memory of processes that ended together with their PID namespace."""
        while True:
            await asyncio.sleep(pid_namespaces.PERIOD_S)
            accounts = [account_file(self.runtime.lease(job.id)) for job in self.broker.placed()]
            await asyncio.to_thread(self._reaper.run_once, accounts)

    async def _presence_loop(self) -> None:
        """Start again in the runtime directory if it was removed, as soon as it can be made."""
        while not self._presence.restored():
            await asyncio.sleep(presence.PERIOD_S)
        self.moved = True
        self._stopped.set()

    async def _booking_loop(self) -> None:
        """Serve the queue when a booking begins or ends and at midnight; end jobs in a booking's way."""
        while True:
            now = time.time()
            try:
                if self._policies.tick(now):
                    self._controller.reschedule()
                for job, booker, at in self.handler.users.jobs_to_end(now):
                    self._controller.end_for_booking(job, booker, at)
            except Exception as why:  # It must not keep later bookings from beginning.
                log(f"a booking has not begun or ended as it should: {describe(why)}")
            next_s = self._policies.next_boundary(now) - now
            await asyncio.sleep(min(max(next_s, 0.01), BOOKING_PERIOD_S))

    # --- the rest -----------------------------------------------------------------------------------

    def record(self) -> None:
        """Write all that the next daemon needs. Raises OSError."""
        files.save_config(self.runtime, self.config)
        for job in self.broker.placed():  # A lease without files is still one that is held.
            self.runtime.lease(job.id).mkdir(mode=0o700, exist_ok=True)
        self._controller.save()
        self.nodes.record()
        self._layouts.record()
        if self._controller.instances.keeper.records:
            self._controller.instances.keeper.record()

    async def _snapshot(self) -> protocol.MachineSnapshot:
        scan = await self._processes.scan()
        readings = self._controller.observe_cards()
        sample = replace(self._cards.sample(readings), activity=self._activity.observe())
        divided = [card for card in self._layouts.cards() if card.enabled]
        return snapshot(self.hardware, sample, self._rehearsals, scan, self.runtime, divided)

    async def _watched_snapshot(self) -> protocol.MachineSnapshot:
        """Return a snapshot for those who watch, who are told what would help as soon as it is found."""
        self._controller.spawn(self._look_ahead())
        return await self._snapshot()

    async def _look_ahead(self) -> None:
        if await self._rehearsals.look():
            self._feed.on_change()

    def _on_hangup(self, on_terminal: bool) -> None:
        """Read users.toml again; end if the terminal that this daemon was started on is gone."""
        if on_terminal and not os.isatty(0):
            self._stopped.set()
            return
        self._policies.reload()
        self._controller.reschedule()

    def _on_abandoned(self) -> None:
        """The program that this daemon was started for has ended: end all jobs, then the daemon."""
        self._controller.spawn(self._end_all())

    async def _end_all(self) -> None:
        for _ in range(ABANDON_ROUNDS):
            jobs = list(self.broker.jobs.values())
            for job in jobs:
                job.mark_ending("shutdown")
            pending = dict.fromkeys(job.queue_id for job in jobs if job.state == "waiting")
            self._controller.cancel_pending(list(pending))
            remaining = self.broker.present(jobs)
            if not jobs or not await self._terminator.terminate(remaining, ABANDONED_GRACE_S):
                break
        self._stopped.set()
