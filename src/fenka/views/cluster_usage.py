"""A cluster's cards and allocations at a moment, for the ledger of usage."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from fenka.cluster.state import ClusterState, PodAllocation
from fenka.core.metering import PRICE_SCALE, Holding, MeteredCard, Moment, Observation
from fenka.dialects.base import SharedNode
from fenka.history.series import Holder
from fenka.views.node_figures import NodeFigures, SliceFigures

TEAM_LABEL = "fenka.io/team"
"""Label of pods by default: the team that usage counts for."""


@dataclass(slots=True)
class BusyTime:
    """Adds up the cards' time that slices had, from readings of shares. It is lost with its program."""

    _had: dict[tuple[str, str], int] = field(default_factory=dict)
    _read_at: dict[str, float] = field(default_factory=dict)

    def add(self, node: str, reading: NodeFigures) -> None:
        """Count a node's reading once. Its shares are taken for the time since the one before."""
        before = self._read_at.get(node, reading.at)
        self._read_at[node] = max(before, reading.at)
        elapsed_us = max(reading.at - before, 0) * 1e6
        for piece in reading.slices:
            if piece.busy is not None:
                key = piece.pod, piece.device
                share = min(max(piece.busy, 0.0), 1.0)
                self._had[key] = self._had.get(key, 0) + round(share * elapsed_us)

    def had_us(self, pod: str, device: str) -> int | None:
        """Return the time that was counted; None if it was never read."""
        return self._had.get((pod, device))

    def keep(self, pods: frozenset[str]) -> None:
        """Forget all pods but these."""
        self._had = {key: had for key, had in self._had.items() if key[0] in pods}


def observe_cluster(
    state: ClusterState,
    readings: Mapping[str, NodeFigures],
    busy: BusyTime,
    prices: Mapping[str, float],
    moment: Moment,
    team_label: str = TEAM_LABEL,
) -> tuple[Observation, dict[str, Holder]]:
    """Return all cards and holdings of a cluster, and who the holders are, by UID.

    Args:
        state: The cluster.
        readings: The nodes' last ones, by name.
        busy: The time that slices had; it counts the readings.
        prices: What an hour of an elastic node costs, as it was paid, by name. Its cards share it equally.
        moment: The time.
        team_label: The key of the label that names a pod's team.
    """
    cards: list[MeteredCard] = []
    holdings: list[Holding] = []
    holders: dict[str, Holder] = {}
    for shared in state.shared_nodes():
        name = shared.node.name
        reading = readings.get(name)
        if reading is not None:
            busy.add(name, reading)
        cards += _cards(shared, prices.get(name))
        used = {(piece.pod, piece.device): piece for piece in reading.slices} if reading else {}
        for held in state.allocations(name):
            holders[held.pod.metadata.uid] = _holder(held, team_label)
            holdings += _holdings(held, used, busy)
    busy.keep(frozenset(holders))
    return Observation(*moment, tuple(cards), tuple(holdings)), holders


def _cards(shared: SharedNode, node_price: float | None) -> Iterator[MeteredCard]:
    cards = [*shared.physical_cards]
    paid = None
    if node_price is not None and cards:
        paid = round(Fraction(node_price) * PRICE_SCALE / len(cards))
    for card in cards:
        yield MeteredCard(card.uuid, card.model, card.memory_mib, shared.node.name, paid)


def _holdings(
    held: PodAllocation, used: Mapping[tuple[str, str], SliceFigures], busy: BusyTime
) -> Iterator[Holding]:
    uid = held.pod.metadata.uid
    for piece in held.slices:
        read = used.get((uid, piece.uuid))
        yield Holding(
            *(uid, piece.card_uuid, piece.memory_mib, piece.compute),
            read.used_mib if read else None,
            busy.had_us(uid, piece.uuid),
        )


def _holder(held: PodAllocation, team_label: str) -> Holder:
    meta = held.pod.metadata
    asks = " + ".join(f"{piece.memory_mib} MiB" for piece in held.slices)
    team = meta.labels.get(team_label, "")
    return Holder(
        meta.uid, meta.name, team=team, namespace=meta.namespace, kind="pod", asks=asks[:128]
    )
