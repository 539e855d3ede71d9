"""The leader's loop: makes one pass after the other, and publishes offers, nodes and unserved pods.

Each pass decides by what cluster and cloud show then, so a pass that failed anywhere is simply repeated.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from fenka.autoscaler.actor_context import Actor, ActorContext
from fenka.autoscaler.buyer import Buyer
from fenka.autoscaler.cloud_cache import CloudCache
from fenka.autoscaler.new_nodes import shape_for
from fenka.autoscaler.orders import REFUSED, listed_missing
from fenka.autoscaler.reclaim import evicted_demand
from fenka.autoscaler.snapshot import COMING, Snapshot, UnknownShape, offer_of, slots
from fenka.autoscaler.stores import OrderStore, ShapeStore, StoredMap, WriteLost
from fenka.autoscaler.supply import is_leaving, pauses
from fenka.autoscaler.watch import ElasticCluster
from fenka.cloud.config import AutoscalerConfig, GroupConfig
from fenka.cloud.port import InstanceState, OfferKey, Provider, ProviderError
from fenka.cluster import autoscaling
from fenka.cluster.pending_queue import is_open
from fenka.dialects.base import InvalidRecord
from fenka.kubernetes.api_client import Api, ApiError, ApiUnreachable
from fenka.kubernetes.election import Term
from fenka.kubernetes.events import EventRecorder
from fenka.kubernetes.leadership import Leadership
from fenka.server.program import end_if_cancelled

log = logging.getLogger(__name__)

BUSY_S, QUIET_S = 2.0, 10.0
"""Between two passes for which nothing has changed: while nodes come or go, and else."""
MIN_INTERVAL_S = 0.1
"""Between two passes, however much changes."""
RETRY_S = 1.0
"""After a pass that failed."""

MAX_UNSERVED = 400_000
"""Characters of names and reasons, which are the tenants': a ConfigMap has 1 MiB. Events have them all."""


def status_of(
    snapshot: Snapshot,
    nodes: Mapping[str, autoscaling.ElasticNodeStatus],
    unserved: Mapping[str, str],
) -> autoscaling.AutoscalerStatus:
    """Return the status.

    Args:
        snapshot: what is there.
        nodes: the states of nodes, by name.
        unserved: why no node is bought for pods, by UID.
    """
    sentences: dict[str, list[str]] = {}
    left = MAX_UNSERVED
    for uid, sentence in unserved.items():
        pod = snapshot.pods.get(uid)
        if pod is None or not (is_open(pod) or uid in snapshot.evicted):
            # It has found a node since, or is gone.
            continue
        name = pod.full_name
        left -= len(name) + (len(sentence) if sentence not in sentences else 0)
        if left >= 0:
            sentences.setdefault(sentence, []).append(name)
    return autoscaling.AutoscalerStatus(
        offers=tuple(_offers(snapshot)),
        nodes=dict(sorted(nodes.items())),
        unserved={sentence: sorted(names) for sentence, names in sorted(sentences.items())},
        schedulers=tuple(sorted(snapshot.schedulers)),
    )


def _offers(snapshot: Snapshot) -> list[autoscaling.OfferStatus]:
    paused = pauses(snapshot)
    on_the_way: dict[OfferKey, int] = {}
    arriving = set[str]()
    for _, _, record, slot in snapshot.coming():
        on_the_way[offer_of(record)] = on_the_way.get(offer_of(record), 0) + 1
        arriving.add(slot.instance)
    statuses = []
    for config in snapshot.config.groups:
        for key in config.offers:
            offer, pause = snapshot.offers.get(key), paused.get(key)
            state: str = pause.failure if pause is not None else "ok"
            price = offer.price if offer is not None else config.price or 0.0
            if offer is None and snapshot.offers:
                state = "unknown to the provider"
            elif pause is None and offer is not None:
                state = _offer_state(offer.stock, price, config.spot.cap)
            statuses.append(
                autoscaling.OfferStatus(
                    group=config.name,
                    type=key.type,
                    zone=key.zone,
                    capacity=key.capacity,
                    price=price,
                    cap=config.spot.cap if key.capacity == "spot" else None,
                    nodes=_there(snapshot, key, arriving),
                    starting=on_the_way.get(key, 0),
                    max=config.max,
                    state=state,
                    again_at=pause.until if pause is not None else None,
                    cards=_cards(snapshot, config, key),
                    machine=offer.machine if offer is not None else None,
                )
            )
    return statuses


def _offer_state(stock: int | None, price: float, cap: float | None) -> str:
    if stock == 0:
        return "out of stock"
    return "too dear" if cap is not None and price > cap else "ok"


def _there(snapshot: Snapshot, key: OfferKey, arriving: set[str]) -> int:
    return sum(
        instance.offer == key
        and instance.state is not InstanceState.ENDING
        and instance.id not in arriving
        for instance in snapshot.instances.values()
    )


def _cards(snapshot: Snapshot, config: GroupConfig, key: OfferKey) -> int | None:
    try:
        return len(shape_for(snapshot, config, key.type).cards)
    except UnknownShape:
        return None


@dataclass(frozen=True, slots=True)
class StoredState:
    """The ConfigMaps."""

    orders: OrderStore
    shapes: ShapeStore
    status: StoredMap

    @classmethod
    def of(cls, api: Api, namespace: str, config: AutoscalerConfig) -> "StoredState":
        """Return those of a namespace."""
        return cls(
            OrderStore(api, namespace),
            ShapeStore(api, namespace, config),
            StoredMap(api, namespace, autoscaling.STATUS_MAP),
        )

    async def load(self) -> None:
        """Read all of them. Raises ApiError, ApiUnreachable."""
        await asyncio.gather(self.orders.load(), self.shapes.load(), self.status.load())


class Loop:
    """Everything that the leader does.

    Attributes:
        problem: why the last pass failed, empty if it did not.
    """

    def __init__(  # noqa: PLR0913
        self,
        api: Api,
        provider: Provider,
        config: AutoscalerConfig,
        cluster: ElasticCluster,
        memory: StoredState,
        recorder: EventRecorder,
        *,
        leadership: Leadership,
        before: Sequence[Actor],
        buyer: Buyer,
        after: Sequence[Actor],
        schedulers: frozenset[str] = frozenset(),
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """before, buyer, after: the parts of a pass, in their order."""
        self._config, self._cluster, self._memory = config, cluster, memory
        self._leadership, self._schedulers = leadership, schedulers
        self._before, self._buyer, self._after = before, buyer, after
        self._now, self._sleep = now, sleep
        self._cloud = CloudCache(provider, now)
        self._missing: Mapping[str, float] = {}
        self._status = autoscaling.AutoscalerStatus()
        self._loaded_term: Term | None = None
        self._seen_at = float("-inf")
        self._provider_problem = ""
        self._was_busy = False
        self._context = ActorContext(
            api, provider, recorder, memory.orders, self.leading, self.snapshot
        )
        self.problem = ""

    def leading(self) -> bool:
        """Return whether a write may begin now."""
        return self._leadership.leading

    def snapshot(self) -> Snapshot:
        """Return what is known now."""
        memory, cloud, cluster = self._memory, self._cloud, self._cluster
        shown = Snapshot.of_cluster(cluster, self._now(), self._config)
        return replace(
            shown,
            orders=memory.orders.records,
            instances=cloud.instances,
            instances_at=cloud.instances_at,
            missing=self._missing,
            offers=cloud.offers,
            notices=cloud.notices,
            shapes=memory.shapes.shapes,
            unhelpful=memory.shapes.unhelpful,
            status=self._status,
            evicted=evicted_demand(shown),
            schedulers=self._schedulers,
            cloud_problem=cloud.problem,
        )

    async def run(self) -> None:
        """Make passes while this replica leads, until cancelled."""
        try:
            await self._pass_by_pass(self._cluster.changed)
        finally:
            self._buyer.stop()

    async def _pass_by_pass(self, changed: asyncio.Event) -> None:
        while True:
            changed.clear()
            if self.leading():
                await self._guarded()
            end_if_cancelled()
            await self._sleep(MIN_INTERVAL_S)
            await self._wait(changed)

    async def _wait(self, changed: asyncio.Event) -> None:
        """Wait until something has changed, or the next pass is due."""
        if not self.leading():
            limit = RETRY_S / 4
        elif self.problem:
            limit = RETRY_S
        else:
            limit = BUSY_S if self._is_busy() else QUIET_S
            due_at = self._buyer.due_at(self._now())
            if due_at is not None:
                limit = min(limit, max(due_at - self._now(), 0.0))
        waiting = asyncio.create_task(changed.wait())
        sleeping = asyncio.ensure_future(self._sleep(limit))
        try:
            await asyncio.wait((waiting, sleeping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (waiting, sleeping):
                task.cancel()
            await asyncio.gather(waiting, sleeping, return_exceptions=True)

    async def _guarded(self) -> None:
        try:
            await self.act()
            problem = self._cloud.problem or self._provider_problem or self._buyer.problem
        except WriteLost:
            # Another replica has written: whatever was decided here counts for nothing.
            self._loaded_term = None
            return
        except (ApiError, ApiUnreachable) as why:
            problem = str(why)
            if isinstance(why, ApiError) and why.status in REFUSED:
                await self._publish_problem(problem)
        if problem and problem != self.problem:
            log.warning("%s", problem)
        self.problem = problem

    async def act(self) -> None:
        """Make one pass. Raises WriteLost, ApiError, ApiUnreachable."""
        term, now = self._leadership.election.term, self._now()
        log.debug("a pass, %s", "busy" if self._was_busy else "quiet")
        # By a clock that was set back, what is due would be due much later.
        was_set_back, self._seen_at = now < self._seen_at, now
        if term != self._loaded_term or was_set_back:
            await self._memory.load()
            self._status = self._published()
            self._cloud.forget()
            self._missing = {}
            self._buyer.forget()
            self._loaded_term = term
        elif self._memory.orders.unreadable:
            # Until somebody has mended it.
            await self._memory.orders.load()
        busy = self._is_busy()
        if self._was_busy and not busy:
            # The last node has come or gone since the cloud was asked.
            self._cloud.expect_change()
        self._was_busy = busy
        await self._cloud.refresh(busy=busy, spot=self._has_spot())
        self._missing = listed_missing(self.snapshot())
        states, orders = dict[str, autoscaling.ElasticNodeStatus](), self._memory.orders.records
        problem = ""
        for actor in (*self._before, self._buyer, *self._after):
            if not self.leading():
                return
            try:
                states |= await actor.act(self._context)
            except ProviderError as why:
                # A node that cannot be ended must not keep others from being bought, and the reverse.
                problem = problem or str(why)
        if self._memory.orders.records is not orders:
            self._cloud.expect_change()
        await self._publish(states)
        self._provider_problem = problem

    async def _publish(self, states: Mapping[str, autoscaling.ElasticNodeStatus]) -> None:
        status = status_of(self.snapshot(), states, self._buyer.unserved)
        self._status = status
        text = msgspec.json.encode(status, order="deterministic").decode()
        if self.leading() and self._memory.status.data.get(autoscaling.STATUS_KEY) != text:
            await self._memory.status.write({autoscaling.STATUS_KEY: text})

    async def _publish_problem(self, problem: str) -> None:
        """Tell people why passes fail, until an operator has changed what the API server refuses."""
        if self._loaded_term != self._leadership.election.term:
            return
        self._buyer.hinder(self._context, problem)
        try:
            await self._publish(self._status.nodes)
        except WriteLost:
            self._loaded_term = None
        except (ApiError, ApiUnreachable):
            log.info("the status cannot be written either")

    def _published(self) -> autoscaling.AutoscalerStatus:
        text = self._memory.status.data.get(autoscaling.STATUS_KEY)
        try:
            return autoscaling.decode_status(text) if text else autoscaling.AutoscalerStatus()
        except InvalidRecord:
            return autoscaling.AutoscalerStatus()

    def _is_busy(self) -> bool:
        """Return whether nodes are coming or going."""
        return (
            any(slots(self._memory.orders.records, COMING | {"ending"}))
            or bool(self._missing)
            or any(
                instance.state is not InstanceState.RUNNING
                for instance in self._cloud.instances.values()
            )
            or any(map(is_leaving, self._cluster.nodes.by_name.values()))
        )

    def _has_spot(self) -> bool:
        return any(instance.offer.capacity == "spot" for instance in self._cloud.instances.values())
