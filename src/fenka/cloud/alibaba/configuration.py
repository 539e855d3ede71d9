"""Whether a scaling group is set up for what is ordered. Pure: it judges what the cloud has answered."""

from typing import Any

from fenka.cloud.alibaba.instances import CLUSTER
from fenka.cloud.port import Denied, Order
from fenka.cluster.autoscaling import GROUP

_ACTS_BY_ITSELF = {
    "auto_rebalance": "rebalancing of zones",
    "enable_desired_capacity": "expected number of instances",
    "spot_instance_remedy": "supplement of spot instances",
}
"""Fields of a group that lets it launch instances without an order."""

_SPOT_POLICIES = frozenset({"BALANCE", "PRIORITY"})
"""The others mix spot and on-demand instances."""


def check_group(order: Order, cluster: str, group: Any, configuration: Any) -> bool:
    """Return whether the group can launch nothing else than the order's type, in one zone.

    Args:
        order: for one of the group's offers.
        cluster: its tag.
        group: as ESS lists it.
        configuration: the group's active one, as ESS lists it.

    Raises:
        Denied: the group would launch something else, or instances that are not recognised later.
    """
    name, offer = group.scaling_group_id, order.offer
    if order.whole:
        raise Denied(
            f"scaling group {name} launches what it can get, not {order.count} nodes or none: set "
            f"launchTemplate and vSwitches of group {offer.group}"
        )
    for field, title in _ACTS_BY_ITSELF.items():
        if getattr(group, field):
            raise Denied(
                f"scaling group {name} would replace nodes that are replaced already: switch its {title} off"
            )
    _check_tags(name, {CLUSTER: cluster, GROUP: offer.group}, group, configuration)
    types = list(configuration.instance_types or ()) or [configuration.instance_type]
    if offer.type not in types:
        raise Denied(
            f"scaling group {name} does not launch {offer.type}: correct types of group {offer.group}"
        )
    _check_capacity(name, order, group, configuration)
    candidates = configuration.instance_type_candidate_options
    return (
        len(types) == 1
        and len(group.v_switch_ids or ()) == 1
        and not configuration.instance_pattern_infos
        and not (candidates is not None and candidates.enabled)
    )


def _check_tags(name: str, wanted: dict[str, str], group: Any, configuration: Any) -> None:
    tags = {tag.tag_key: tag.tag_value for tag in group.tags or () if tag.propagate}
    tags |= {tag.key: tag.value for tag in configuration.tags or ()}
    for key, value in wanted.items():
        if tags.get(key) != value:
            raise Denied(
                f"instances of scaling group {name} would not be recognised: add the tag {key}={value} to "
                "its scaling configuration"
            )


def _check_capacity(name: str, order: Order, group: Any, configuration: Any) -> None:
    strategy, offer = configuration.spot_strategy or "NoSpot", order.offer
    if (strategy == "NoSpot") != (offer.capacity == "on-demand"):
        raise Denied(
            f"scaling group {name} has the spot strategy {strategy}: correct capacity of group {offer.group}"
        )
    if offer.capacity == "on-demand":
        return
    if (group.multi_azpolicy or "PRIORITY") not in _SPOT_POLICIES:
        raise Denied(
            f"scaling group {name} may launch on-demand nodes in place of spot: set its MultiAZPolicy to "
            "PRIORITY"
        )
    if order.cap is None:
        return
    limits = {it.instance_type: it.price_limit for it in configuration.spot_price_limits or ()}
    limit = limits.get(offer.type) if strategy == "SpotWithPriceLimit" else None
    if limit is None or limit > order.cap:
        has = "no price limit" if limit is None else f"the price limit {limit:g}"
        raise Denied(
            f"scaling group {name} has {has} for {offer.type}, and the cap of group {offer.group} is "
            f"{order.cap:g}: lower the limit or raise the cap"
        )
