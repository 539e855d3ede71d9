"""Follows a service on Kubernetes: two watches, and a new routing table after each change."""

import asyncio
import logging
from collections.abc import Callable

from fenka.cluster.service_objects import SERVICE, SERVICES_API
from fenka.gateway.endpoints import (
    ENDPOINT_SLICES,
    EndpointSlice,
    ServiceObject,
    read_weights,
    routing_table,
)
from fenka.jobs.routing_table import InvalidTable, RoutingTable
from fenka.kubernetes.client import Api
from fenka.kubernetes.informer import Informer

log = logging.getLogger(__name__)


class _ChangeListener:
    """Applies the table after each change: it is made from both collections."""

    def __init__(self, source: "EndpointSource") -> None:
        self._source = source

    def on_replace(self, _: object) -> None:
        self._source.schedule()

    def on_upsert(self, _: object) -> None:
        self._source.schedule()

    def on_delete(self, _: object) -> None:
        self._source.schedule()


class EndpointSource:
    """The replicas of a service.

    Attributes:
        error: Why the newest table is not used; None if it is.
    """

    def __init__(
        self, api: Api, namespace: str, service: str, apply: Callable[[RoutingTable], None]
    ) -> None:
        """apply: gets each table. While the API server does not answer, the last one stays."""
        self._service, self._apply = service, apply
        self._scheduled = False
        self.error: str | None = None
        listener = _ChangeListener(self)
        self._slices = Informer(
            api,
            ENDPOINT_SLICES.format(namespace=namespace),
            EndpointSlice,
            listener,
            query={"labelSelector": f"{SERVICE}={service}"},
        )
        self._services = Informer(
            api,
            SERVICES_API.format(namespace=namespace),
            ServiceObject,
            listener,
            query={"fieldSelector": f"metadata.name={service}"},
        )

    async def follow(self) -> None:
        """Apply each new table until cancelled."""
        await asyncio.gather(self._slices.run(), self._services.run())

    def schedule(self) -> None:
        """Apply the table once after all changes of this turn of the event loop."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._update)

    def _update(self) -> None:
        self._scheduled = False
        if not (self._slices.synced.is_set() and self._services.synced.is_set()):
            return
        service = next(iter(self._services.objects.values()), None)
        try:
            table = routing_table(
                self._service, self._slices.objects.values(), read_weights(service)
            )
            table.validate()
        except InvalidTable as error:
            if str(error) != self.error:
                log.warning("the last routing table stays in use: %s", error)
            self.error = str(error)
            return
        self.error = None
        self._apply(table)
