"""What the leader publishes: offers, nodes, and pods that no node is bought for. Pure."""

from collections.abc import Mapping

from fenka.autoscaler.backoff import pauses
from fenka.autoscaler.machines import shape_for
from fenka.autoscaler.shapes import UnknownShape
from fenka.autoscaler.view import View, coming, offer_of
from fenka.cloud.config import GroupConfig
from fenka.cloud.port import InstanceState, OfferKey
from fenka.cluster.autoscaling import NodeStatus, OfferStatus, Status
from fenka.cluster.pending_queue import is_open

MAX_UNSERVED = 400_000
"""Characters of names and reasons, which are the tenants': a ConfigMap has 1 MiB. Events have them all."""


def status_of(view: View, nodes: Mapping[str, NodeStatus], unserved: Mapping[str, str]) -> Status:
    """Return the status.

    Args:
        view: what is there.
        nodes: the states of nodes, by name.
        unserved: why no node is bought for pods, by UID.
    """
    sentences: dict[str, list[str]] = {}
    left = MAX_UNSERVED
    for uid, sentence in unserved.items():
        pod = view.pods.get(uid)
        if pod is None or not (is_open(pod) or uid in view.displaced):
            # It has found a node since, or is gone.
            continue
        name = pod.full_name
        left -= len(name) + (len(sentence) if sentence not in sentences else 0)
        if left >= 0:
            sentences.setdefault(sentence, []).append(name)
    return Status(
        offers=tuple(_offers(view)),
        nodes=dict(sorted(nodes.items())),
        unserved={sentence: sorted(names) for sentence, names in sorted(sentences.items())},
        schedulers=tuple(sorted(view.schedulers)),
    )


def _offers(view: View) -> list[OfferStatus]:
    paused = pauses(view)
    on_the_way: dict[OfferKey, int] = {}
    arriving = set[str]()
    for _, _, record, slot in coming(view.orders):
        on_the_way[offer_of(record)] = on_the_way.get(offer_of(record), 0) + 1
        arriving.add(slot.instance)
    statuses = []
    for config in view.config.groups:
        for key in config.offers:
            offer, pause = view.offers.get(key), paused.get(key)
            state: str = pause.failure if pause is not None else "ok"
            price = offer.price if offer is not None else config.price or 0.0
            if offer is None and view.offers:
                state = "unknown to the provider"
            elif pause is None and offer is not None:
                state = _offer_state(offer.stock, price, config.spot.cap)
            statuses.append(
                OfferStatus(
                    group=config.name,
                    type=key.type,
                    zone=key.zone,
                    capacity=key.capacity,
                    price=price,
                    cap=config.spot.cap if key.capacity == "spot" else None,
                    nodes=_there(view, key, arriving),
                    starting=on_the_way.get(key, 0),
                    max=config.max,
                    state=state,
                    again_at=pause.until if pause is not None else None,
                    cards=_cards(view, config, key),
                    machine=offer.machine if offer is not None else None,
                )
            )
    return statuses


def _offer_state(stock: int | None, price: float, cap: float | None) -> str:
    if stock == 0:
        return "out of stock"
    return "too dear" if cap is not None and price > cap else "ok"


def _there(view: View, key: OfferKey, arriving: set[str]) -> int:
    return sum(
        each.offer == key and each.state is not InstanceState.ENDING and each.id not in arriving
        for each in view.instances.values()
    )


def _cards(view: View, config: GroupConfig, key: OfferKey) -> int | None:
    try:
        return len(shape_for(view, config, key.type).cards)
    except UnknownShape:
        return None
