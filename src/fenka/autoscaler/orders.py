"""The orders in ConfigMap fenka-orders: written before anything is asked for."""

from collections.abc import Iterable, Mapping

import msgspec

from fenka.autoscaler.config_maps import StoredMap
from fenka.cloud.port import OfferKey
from fenka.cluster.autoscaling import ORDERS_MAP, Failure, OrderRecord, decode_order
from fenka.dialects.base import InvalidRecord
from fenka.kubernetes.client import Api


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
        self.records = {name: each for name, each in merged.items() if each is not None}

    async def fail_offer(self, offer: OfferKey, failure: Failure, why: str, now: float) -> None:
        """Remember a failure of an offer without an order, such as a take-back, so that it is backed off."""
        name = new_name(offer.group, now, self.records)
        await self.save({name: failed_order(offer, failure, why, now)})


def failed_order(offer: OfferKey, failure: Failure, why: str, now: float) -> OrderRecord:
    """Return the record of a failure for which there is no order."""
    return OrderRecord(
        group=offer.group,
        type=offer.type,
        zone=offer.zone,
        capacity=offer.capacity,
        slots=(),
        state="failed",
        price=0,
        written_at=now,
        changed_at=now,
        failure=failure,
        why=why,
    )


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
