"""Follows a cluster for all viewers: its pods and nodes by watches, its readings by questions.

An API server that is away, or a right that is missing, costs what it would have told. The rest stays, with a
sentence.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec

from fenka import __version__
from fenka.cluster.autoscaling import AutoscalerStatus, OrderRecord, node_prices
from fenka.cluster.objects import Node, Pod
from fenka.cluster.pod_groups import names_pod_group
from fenka.cluster.state import ClusterSnapshot, ClusterState
from fenka.dashboard.node_questions import LOOKED_AT_S, ask_nodes, is_program, period_s
from fenka.dashboard.stream import Fanout
from fenka.dashboard.usage_meter import UsageMeter
from fenka.dialects.base import InvalidRecord
from fenka.kubernetes.api_client import Api, ApiError, ApiUnreachable
from fenka.kubernetes.autoscaler_reader import AutoscalerState, read_autoscaler
from fenka.kubernetes.informer import Informer, Informers
from fenka.kubernetes.reader import (
    read_namespace,
    read_pod_groups,
    read_scheduler_options,
    read_screen,
    read_services,
    read_training_objects,
)
from fenka.server.program import end_if_cancelled
from fenka.views.board import CardTile, ProgramLine, World
from fenka.views.cluster_board import (
    MAX_CARDS,
    ClusterView,
    NodePart,
    fleet,
    node_part,
    world,
)
from fenka.views.cluster_queue import cluster_queue
from fenka.views.cluster_workloads import service_versions, training_jobs
from fenka.views.node_figures import NodeFigures
from fenka.views.node_summaries import NodeSummary, summarize_nodes
from fenka.views.workloads import QueueRow, Workload

TICK_S = 1.0
"""Between two looks for what has changed."""

QUEUE_S = 2.0
SURROUNDINGS_S = 10.0
"""Between two readings of trainings, services and the autoscaler."""

CURRENT_S = 30.0
"""After the API server's last answer, what is known of the cluster is not current any more."""

BOOKMARK_S = 90.0
"""The API server sends something of each watch within a minute, also where nothing changes."""

IN_CLUSTER = "status.phase!=Succeeded,status.phase!=Failed"

NO_NAMESPACE = "what cards use is not known: fenka's chart of this cluster is older than this page"

Sleep = Callable[[float], Awaitable[None]]

_encode = msgspec.json.Encoder().encode


class _Nodes:
    """Puts nodes into the state. changed: gets the names of nodes that are to be shown anew."""

    def __init__(self, state: ClusterState, changed: set[str]) -> None:
        self._state, self._changed = state, changed

    def on_replace(self, objects: Sequence[Node]) -> None:
        """Replace all nodes."""
        self._state.replace_nodes(objects)
        self._changed.update(node.metadata.name for node in objects)

    def on_upsert(self, obj: Node) -> None:
        """Set a node."""
        self._state.set_node(obj)
        self._changed.add(obj.metadata.name)

    def on_delete(self, obj: Node) -> None:
        """Remove a node, unless another one already has its name."""
        known = self._state.node(obj.metadata.name)
        if known is None or known.metadata.uid == obj.metadata.uid:
            self._state.forget_node(obj.metadata.name)


class _Pods:
    """Puts pods into the state. changed: gets the names of nodes that are to be shown anew."""

    def __init__(self, state: ClusterState, changed: set[str]) -> None:
        self._state, self._changed = state, changed

    def on_replace(self, objects: Sequence[Pod]) -> None:
        """Replace all pods."""
        self._state.replace_pods(objects)
        self._changed.update(node.metadata.name for node in self._state.nodes())

    def on_upsert(self, obj: Pod) -> None:
        """Set a pod."""
        self._state.set_pod(obj)
        self._changed.add(obj.spec.node_name)

    def on_delete(self, obj: Pod) -> None:
        """Remove a pod."""
        self._state.forget_pod(obj.metadata.uid)
        self._changed.add(obj.spec.node_name)


class WatchedCluster(Informers):
    """The nodes and the pods that have not ended."""

    def __init__(self, api: Api, state: ClusterState, changed: set[str], sleep: Sleep) -> None:
        self.nodes = Informer(api, "/api/v1/nodes", Node, _Nodes(state, changed), sleep=sleep)
        self.pods = Informer(
            *(api, "/api/v1/pods", Pod, _Pods(state, changed)),
            query={"fieldSelector": IN_CLUSTER},
            sleep=sleep,
        )
        self.by_collection = {"nodes": self.nodes, "pods": self.pods}


class ClusterLive:
    """The present state of a cluster, and the viewers that are told of it.

    Attributes:
        api: the cluster.
        clock: Unix seconds.
        fanout: the viewers.
        encoded: the last World as JSON; None before the cluster was read once.
        autoscaler: what it publishes; None without one.
        meter: records usage; None if nothing does.
    """

    def __init__(
        self,
        api: Api,
        name: str,
        clock: Callable[[], float] = time.time,
        sleep: Sleep = asyncio.sleep,
        meter: UsageMeter | None = None,
    ) -> None:
        """Args:
        api: of the viewer, or of the dashboard's own account.
        name: of the cluster.
        clock: Unix seconds.
        sleep: waits for a number of seconds.
        meter: records usage; None if nothing does.
        """
        self.api, self._name, self.clock, self._sleep = api, name, clock, sleep
        self.meter = meter
        self._answered_at = 0.0
        """When the API server last answered, in Unix seconds."""
        self.state = ClusterState()
        self._changed: set[str] = set()
        self.informers = WatchedCluster(api, self.state, self._changed, sleep)
        self.fanout = Fanout()
        self._looked_at: Counter[str] = Counter()
        self.encoded: bytes | None = None
        self._world: World | None = None
        self._parts: dict[str, NodePart] = {}
        self._readings: dict[str, NodeFigures] = {}
        self._queue: list[QueueRow] = []
        self._summaries: list[NodeSummary] = []
        self._workloads: list[Workload] = []
        self.autoscaler: AutoscalerState | None = None
        self._namespaces, self._namespaces_of_pods = frozenset[str](), frozenset[str]()
        self._namespace = ""
        """Of the nodes' programs."""
        self._prices_known = False
        self._problems: dict[str, str] = {}
        """Sentences by what is not known."""

    async def run(self) -> None:
        """Follow the cluster until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.informers.run())
            if self.meter is not None:
                group.create_task(self.meter.run(self._sleep))
            for work, period in (
                (self._publish, lambda: TICK_S),
                (self._read_queue, lambda: QUEUE_S),
                (self._read_surroundings, lambda: SURROUNDINGS_S),
                (self._ask_all, lambda: period_s(len(self._parts))),
                (self._ask_looked_at, lambda: LOOKED_AT_S),
            ):
                group.create_task(self._repeat(work, period))

    async def _repeat(
        self, work: Callable[[], Awaitable[None]], period_s: Callable[[], float]
    ) -> None:
        await asyncio.gather(
            *(informer.synced.wait() for informer in self.informers.by_collection.values())
        )
        while True:
            await work()
            end_if_cancelled()
            await self._sleep(period_s())

    # ---- reading ----

    async def _read_queue(self) -> None:
        """Take the queue from the scheduler, which knows expired reservations; without it compute it."""
        try:
            rows = await read_screen(self.api, "queue", QueueRow)
            if rows is None:
                options = await read_scheduler_options(self.api)
                snapshot = self.snapshot()
                if any(names_pod_group(pod) for pod in snapshot.pods):
                    snapshot = replace(snapshot, groups=await read_pod_groups(self.api))
                rows = cluster_queue(snapshot, options, self.clock())
            self._queue = rows
            self._problems.pop("queue", None)
        except (ApiError, ApiUnreachable) as why:
            self._problems["queue"] = f"the queue is old: {why}"
            if isinstance(why, ApiUnreachable):
                return
        self._answered_at = self.clock()

    async def _read_surroundings(self) -> None:
        """Read what changes seldom."""
        now = self.clock()
        try:
            trainings, services = await asyncio.gather(
                read_training_objects(self.api, None), read_services(self.api, None)
            )
            jobs = training_jobs(trainings, now)
            workloads: list[Workload] = [*jobs, *service_versions(services, now)]
            if workloads != self._workloads:
                self._workloads = workloads
                self._changed.update(self._parts)
            self._problems.pop("workloads", None)
        except (ApiError, ApiUnreachable) as why:
            self._problems["workloads"] = f"trainings and services are not known: {why}"
        try:
            self.autoscaler = await read_autoscaler(self.api)
            self._problems.pop("autoscaler", None)
            self._prices_known = True
        except (ApiError, ApiUnreachable, InvalidRecord) as why:
            self._problems["autoscaler"] = f"what the autoscaler does is not known: {why}"
            # Without the right to read them, elastic nodes have the prices of the list.
            self._prices_known |= not isinstance(why, ApiUnreachable)
        self._summaries = summarize_nodes(self.snapshot(), *_published(self.autoscaler))

    async def _ask_all(self) -> None:
        try:
            self._namespace = await read_namespace(self.api)
            problem = "" if self._namespace else NO_NAMESPACE
        except (ApiError, ApiUnreachable) as why:
            problem = f"what cards use is not known: {why}"
        await self._ask(self._programs(), "readings")
        self._problems["readings"] = problem or self._problems["readings"]

    async def _ask_looked_at(self) -> None:
        programs = [pod for pod in self._programs() if pod.spec.node_name in self._looked_at]
        if programs:
            await self._ask(programs, "")

    def _programs(self) -> list[Pod]:
        """Return the pods of the nodes' programs."""
        pods = self.informers.pods.objects.values()
        return [pod for pod in pods if is_program(pod, self._namespace)]

    async def _ask(self, programs: Sequence[Pod], subject: str) -> None:
        answers = await ask_nodes(self.api, programs)
        self._readings |= answers.readings
        self._changed.update(answers.readings)
        if subject:
            self._problems[subject] = answers.problem

    # ---- showing ----

    def snapshot(self) -> ClusterSnapshot:
        """Return the cluster as the command line reads it."""
        nodes, pods = self.informers.nodes.objects, self.informers.pods.objects
        return ClusterSnapshot.of(nodes.values(), pods.values(), state=self.state)

    async def _publish(self) -> None:
        if self.meter is not None:
            self._observe(self.meter)
        self._refresh_parts()
        now = self.clock()
        self._world = world(self._view(), now)
        self._namespaces = frozenset(
            [
                *(line.user for line in self.programs()),
                *(row.namespace for row in self._queue),
                *(workload.namespace for workload in self._workloads),
            ]
        )
        self._namespaces_of_pods = frozenset(
            pod.metadata.namespace for pod in self.informers.pods.objects.values()
        )
        self.encoded = _encode(self._world)
        self.fanout.publish("world", self.encoded)
        if sum(len(part.tiles) for part in self._parts.values()) > MAX_CARDS:
            self.fanout.publish("fleet", _encode(fleet(self._parts, now)))

    def _observe(self, meter: UsageMeter) -> None:
        """Have the usage charged, unless what is known of the cluster or of its prices is not current."""
        broken = any(
            informer.last_error and informer.age_s > BOOKMARK_S
            for informer in self.informers.by_collection.values()
        )
        current = self.clock() - self._answered_at <= CURRENT_S and not broken
        if current and self._prices_known:
            changed = bool(self._changed)
            meter.observe(self.state, self._readings, self._node_prices(), changed=changed)

    def _node_prices(self) -> dict[str, float]:
        """Return what an hour of each node costs that was bought, by its name."""
        return node_prices(self.state.nodes(), *_published(self.autoscaler))

    def _refresh_parts(self) -> None:
        """Make anew what nodes show that have changed."""
        changed = {*self._changed}
        self._changed.clear()
        now, workloads = self.clock(), self._by_pod()
        sharing = [shared.node.name for shared in self.state.shared_nodes()]
        self._parts = {
            name: self._parts[name]
            if name in self._parts and name not in changed
            else node_part(self.state, name, self._readings.get(name), workloads, now)
            for name in sharing
        }
        for name in self._readings.keys() - self._parts.keys():
            del self._readings[name]

    def _by_pod(self) -> Mapping[tuple[str, str], Workload]:
        return {
            (workload.namespace, instance.pod): workload
            for workload in self._workloads
            for instance in workload.instances
        }

    def _view(self) -> ClusterView:
        return ClusterView(
            name=self._name,
            version=__version__,
            parts=self._parts,
            queue=self._queue,
            summaries=self._summaries,
            seen_at={name: reading.at for name, reading in self._readings.items()},
            notes={name: error for name in self._parts if (error := self.state.node_error(name))},
            workloads=self._workloads,
            prices=self._node_prices(),
            currency=self.meter.currency if self.meter else "",
            problems=[*self._sentences()],
        )

    def _sentences(self) -> Iterator[str]:
        yield from (f"the cluster is not up to date: {error}" for error in self.informers.errors)
        yield from filter(None, self._problems.values())
        if self.meter is not None and self.meter.problem:
            yield self.meter.problem

    @property
    def namespaces(self) -> frozenset[str]:
        """Return the namespaces of all that is shown."""
        return self._namespaces

    @property
    def namespaces_of_pods(self) -> frozenset[str]:
        """Return the namespaces of all pods."""
        return self._namespaces_of_pods

    def world(self) -> World | None:
        """Return what viewers were told last; None before the cluster was read once."""
        return self._world

    def programs(self) -> Iterator[ProgramLine]:
        """Yield all programs."""
        for part in self._parts.values():
            yield from part.programs

    @contextlib.contextmanager
    def looking_at(self, name: str) -> Iterator[None]:
        """Ask a node more often while the block runs."""
        self._looked_at[name] += 1
        try:
            yield
        finally:
            self._looked_at[name] -= 1
            self._looked_at += Counter()  # Removes names that nobody looks at.

    def node(self, name: str) -> Sequence[CardTile]:
        """Return the cards of a node: the message `node`."""
        return self._parts.get(name, NodePart()).tiles


def _published(
    known: AutoscalerState | None,
) -> tuple[AutoscalerStatus, Mapping[str, OrderRecord]]:
    """Return what an autoscaler has published: its status and its orders."""
    status = known.status if known is not None else None
    return status or AutoscalerStatus(), known.orders if known is not None else {}
