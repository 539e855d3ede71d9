"""`fenka autoscaler --config FILE`: follows a cluster until the process is told to stop."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from fenka.autoscaler.buyer import Buyer
from fenka.autoscaler.inputs import AutoscalerOptions
from fenka.autoscaler.loop import Loop, StoredState
from fenka.autoscaler.metrics import ActivityCounts, Metrics
from fenka.autoscaler.orders import OrderKeeper
from fenka.autoscaler.planner import Planner, plan_process
from fenka.autoscaler.providers import open_provider
from fenka.autoscaler.reclaim import Reclaimer
from fenka.autoscaler.scale_in import ScaleInActor
from fenka.autoscaler.stores import ShapeStore
from fenka.autoscaler.watch import ElasticCluster
from fenka.cloud.config import AutoscalerConfig
from fenka.cloud.config_file import check_offers, check_shapes, read_config
from fenka.cloud.port import Provider, ProviderError
from fenka.dialects.registry import DIALECTS, WITH_HAMI
from fenka.kubernetes.api_client import Api, ApiError, ApiUnreachable
from fenka.kubernetes.election import Election
from fenka.kubernetes.events import EventRecorder
from fenka.kubernetes.leadership import Leadership
from fenka.server.listener import listening_socket
from fenka.server.probes import serve_probes
from fenka.server.program import identity, stop_requests, working_until

log = logging.getLogger(__name__)


class Autoscaler:
    """One replica: the wiring of its parts."""

    def __init__(  # noqa: PLR0913
        self,
        api: Api,
        provider: Provider,
        planner: Planner,
        config: AutoscalerConfig,
        options: AutoscalerOptions,
        *,
        identity: str,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Args:
        api: the API server.
        provider: the cloud.
        planner: makes plans.
        config: what may be bought.
        options: where its objects are.
        identity: names this process, and no other, in the lease.
        clock: seconds, monotonic.
        now: seconds since 1970.
        sleep: waits for a number of seconds.
        """
        dialects = WITH_HAMI if options.hami_names else DIALECTS
        self.cluster = ElasticCluster(api, dialects, tuple(options.topology_level))
        recorder = EventRecorder(api, "fenka-autoscaler", identity)
        memory = StoredState.of(api, options.namespace, config)
        election = Election(api, options.namespace, options.lease, identity, clock=clock)
        leadership = self.leadership = Leadership(election, self.cluster, sleep)
        counts, reclaimer = ActivityCounts(), Reclaimer()
        buyer = self.buyer = Buyer(config, planner, counts)
        loop = self.loop = Loop(
            api,
            provider,
            config,
            self.cluster,
            memory,
            recorder,
            leadership=leadership,
            # A cloud that does not answer ends a pass, and must not keep pods from their notice.
            before=(reclaimer, OrderKeeper(memory.shapes, counts)),
            buyer=buyer,
            after=(ScaleInActor(),),
            schedulers=frozenset(options.scheduler_name),
            now=now,
            sleep=sleep,
        )
        self.metrics = Metrics(
            counts,
            loop.snapshot,
            leading=lambda: leadership.leading,
            unserved=lambda: len(buyer.unserved),
            reclaims=lambda: reclaimer.counts,
        )
        self._tasks = (self.cluster.run, recorder.run, leadership.run, loop.run)

    async def run(self) -> None:
        """Run until cancelled. An exception is a bug: the process should be restarted."""
        async with asyncio.TaskGroup() as group:
            for task in self._tasks:
                group.create_task(task())

    async def stop(self) -> None:
        """Begin nothing new, and let another replica lead at once."""
        self.leadership.end()
        await self.leadership.election.release()


async def serve(path: Path, options: AutoscalerOptions) -> None:
    """Run until SIGTERM or SIGINT.

    Raises:
        InvalidConfig, ProviderMissing: with one sentence.
        ProviderError, ApiUnreachable: if the provider or the API server cannot be configured.
        OSError: if a file cannot be read, or the port is in use.
    """
    stop = stop_requests()
    config = read_config(path)
    async with contextlib.AsyncExitStack() as stack:
        api = await stack.enter_async_context(await Api.connect(options.kubeconfig))
        provider = await stack.enter_async_context(open_provider(config, api))
        await _check_offers(config, provider, ShapeStore(api, options.namespace, config))
        planner = await stack.enter_async_context(plan_process())
        replica = Autoscaler(
            api, provider, planner, config, options, identity=identity(options.name)
        )
        listening = listening_socket(options.address, options.port)
        await stack.enter_async_context(
            serve_probes(listening, lambda: replica.leadership.problem, replica.metrics.text)
        )
        stack.push_async_callback(replica.stop)
        async with working_until(stop, replica.run()):
            pass


async def _check_offers(config: AutoscalerConfig, provider: Provider, shapes: ShapeStore) -> None:
    """Check the configuration's types and zones, and that types have a shape. Raises InvalidConfig."""
    try:
        offers, _ = await asyncio.gather(provider.offers(), shapes.load())
    except (ProviderError, ApiError, ApiUnreachable) as why:
        log.warning("types and zones are not checked: %s", why)
        return
    check_offers(config, [offer.key for offer in offers])
    described = {offer.key.type for offer in offers if offer.machine is not None}
    check_shapes(config, {*described, *shapes.shapes})
