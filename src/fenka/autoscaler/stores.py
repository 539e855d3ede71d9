"""ConfigMaps in which the leader remembers: orders, shapes of nodes, and offers that did not help.

Orders are written before the cloud is called. Nothing is written over what another replica has written.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from fenka.autoscaler.snapshot import Shape
from fenka.cloud.config import AutoscalerConfig
from fenka.cloud.port import OfferKey
from fenka.cluster.autoscaling import ORDERS_MAP, SHAPES_MAP, Failure, OrderRecord, decode_order
from fenka.cluster.objects import ConfigMap
from fenka.dialects.base import InvalidRecord
from fenka.kubernetes.api_client import Api, ApiError, if_accepted


class WriteLost(Exception):
    """Another replica has changed the ConfigMap since it was read: read it again, and decide again."""


class StoredMap:
    """One ConfigMap. Attributes: data: as it was read or written last."""

    def __init__(self, api: Api, namespace: str, name: str) -> None:
        self._api, self._namespace, self._name = api, namespace, name
        self._collection = f"/api/v1/namespaces/{namespace}/configmaps"
        self._version: str | None = None
        self.data: dict[str, str] = {}

    async def load(self) -> None:
        """Read it. Raises ApiError, ApiUnreachable."""
        found = await if_accepted(self._api.get(f"{self._collection}/{self._name}", ConfigMap))
        self._version = found.metadata.resource_version if found is not None else None
        self.data = found.data if found is not None else {}

    async def write(self, changes: Mapping[str, str | None]) -> None:
        """Set these keys, remove those that are None. One that was deleted is made again, with all its keys.

        Raises:
            WriteLost: if another replica wrote it.
            ApiError, ApiUnreachable: if it may not have been written.
        """
        data = {key: text for key, text in {**self.data, **changes}.items() if text is not None}
        try:
            written = await self._send(changes, data)
        except ApiError as why:
            if why.status == 409:
                raise WriteLost(str(why)) from None
            raise
        self._version, self.data = written.metadata.resource_version, data

    async def _send(self, changes: Mapping[str, str | None], data: dict[str, str]) -> ConfigMap:
        if self._version is not None:
            body: dict[str, Any] = {
                "metadata": {"resourceVersion": self._version},
                "data": changes,
            }
            path = f"{self._collection}/{self._name}"
            written = await if_accepted(self._api.patch(path, ConfigMap, body))
            if written is not None:
                return written
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": self._name, "namespace": self._namespace},
            "data": data,
        }
        return await self._api.create(self._collection, ConfigMap, body)


class OrderStore:
    """The orders, as the leader last read or wrote them.

    Attributes:
        records: by name.
        unreadable: a sentence for each entry that is not understood, by its name. It is left as it is, and
            nothing is bought meanwhile: what cannot be read is never none.
    """

    def __init__(self, api: Api, namespace: str) -> None:
        self._map = StoredMap(api, namespace, ORDERS_MAP)
        self.records: Mapping[str, OrderRecord] = {}
        self.unreadable: Mapping[str, str] = {}

    async def load(self) -> None:
        """Read all orders. Raises ApiError, ApiUnreachable."""
        await self._map.load()
        records, unreadable = dict[str, OrderRecord](), dict[str, str]()
        for name, text in self._map.data.items():
            try:
                records[name] = decode_order(name, text)
            except InvalidRecord as why:
                unreadable[name] = str(why)
        self.records, self.unreadable = records, unreadable

    async def save(self, changes: Mapping[str, OrderRecord | None]) -> None:
        """Write these orders, None to remove one. Raises WriteLost, ApiError, ApiUnreachable."""
        changed = {
            name: record for name, record in changes.items() if record != self.records.get(name)
        }
        if not changed:
            return
        await self._map.write(
            {
                name: None if record is None else msgspec.json.encode(record).decode()
                for name, record in changed.items()
            }
        )
        self.unreadable = {
            name: why for name, why in self.unreadable.items() if name not in changed
        }
        merged = {**self.records, **changed}
        self.records = {name: record for name, record in merged.items() if record is not None}

    async def fail_offer(self, offer: OfferKey, failure: Failure, why: str, now: float) -> None:
        """Remember a failure of an offer without an order, such as a take-back, so that it is backed off."""
        name = new_name(offer.group, now, self.records)
        await self.save({name: failed_order(offer, failure, why, now)})


def order_for(offer: OfferKey, **fields: Any) -> OrderRecord:
    """Return an order for an offer. fields: all others that an order requires."""
    return OrderRecord(
        group=offer.group, type=offer.type, zone=offer.zone, capacity=offer.capacity, **fields
    )


def failed_order(offer: OfferKey, failure: Failure, why: str, now: float) -> OrderRecord:
    """Return the record of a failure for which there is no order."""
    failed = {"slots": (), "state": "failed", "failure": failure, "why": why, "changed_at": now}
    return order_for(offer, price=0, written_at=now, **failed)


def new_name(group: str, now: float, taken: Iterable[str]) -> str:
    """Return a name that no order ever had, also if the ConfigMap was deleted: it has the time in it.

    A cloud answers a token that it knows with the nodes of the earlier order, so names are used once.
    """
    names, number = frozenset(taken), int(now)
    while f"{group}-{_base36(number)}" in names:
        number += 1
    return f"{group}-{_base36(number)}"


def _base36(number: int) -> str:
    digits = ""
    while number:
        number, rest = divmod(number, 36)
        digits = "0123456789abcdefghijklmnopqrstuvwxyz"[rest] + digits
    return digits or "0"


UNHELPFUL_KEY = "misfits"


class _UnhelpfulOffer(msgspec.Struct, frozen=True):
    offer: OfferKey
    classes: tuple[str, ...]


class _UnhelpfulOffers(msgspec.Struct, frozen=True):
    """Unhelpful offers under a configuration. They are forgotten when it changes."""

    configuration: str
    offers: tuple[_UnhelpfulOffer, ...] = msgspec.field(name="misfits")


class ShapeStore:
    """ConfigMap fenka-shapes.

    Attributes:
        shapes: by instance type.
        unhelpful: classes of pods, by the offer that does not help them.
    """

    def __init__(self, api: Api, namespace: str, config: AutoscalerConfig) -> None:
        self._map = StoredMap(api, namespace, SHAPES_MAP)
        self._configuration = hashlib.sha256(repr(config).encode()).hexdigest()[:16]
        self.shapes: Mapping[str, Shape] = {}
        self.unhelpful: Mapping[OfferKey, frozenset[str]] = {}

    async def load(self) -> None:
        """Read both. Entries that are not understood are learnt again. Raises ApiError, ApiUnreachable."""
        await self._map.load()
        shapes = dict[str, Shape]()
        self.unhelpful = {}
        for key, text in self._map.data.items():
            try:
                if key != UNHELPFUL_KEY:
                    shapes[key] = msgspec.json.decode(text, type=Shape)
                    continue
                known = msgspec.json.decode(text, type=_UnhelpfulOffers)
            except msgspec.MsgspecError:
                continue
            if known.configuration == self._configuration:
                self.unhelpful = {entry.offer: frozenset(entry.classes) for entry in known.offers}
        self.shapes = shapes

    async def save(
        self, shapes: Mapping[str, Shape], unhelpful: Mapping[OfferKey, frozenset[str]]
    ) -> None:
        """Add what was learnt. Raises WriteLost, ApiError, ApiUnreachable."""
        if not shapes and not unhelpful:
            return
        merged = dict(self.unhelpful)
        for offer, classes in unhelpful.items():
            merged[offer] = merged.get(offer, frozenset()) | classes
        changes: dict[str, str | None] = {
            kind: msgspec.json.encode(shape).decode() for kind, shape in shapes.items()
        }
        if unhelpful:
            entries = tuple(
                _UnhelpfulOffer(offer, tuple(sorted(classes))) for offer, classes in merged.items()
            )
            encoded = msgspec.json.encode(_UnhelpfulOffers(self._configuration, entries))
            changes[UNHELPFUL_KEY] = encoded.decode()
        await self._map.write(changes)
        self.shapes = {**self.shapes, **shapes}
        self.unhelpful = merged
