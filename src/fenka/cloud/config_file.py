"""Reads the autoscaler's configuration (docs/do/autoscale-configuration.md).

An error names the field of its mistake.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from fenka.cloud.alibaba.settings import EssConfig
from fenka.cloud.aws.group_settings import AwsConfig
from fenka.cloud.config import (
    NOT_COUNTED,
    AutoscalerConfig,
    GroupConfig,
    InvalidConfig,
    ScaleOut,
    ShapeConfig,
    StartTimes,
)
from fenka.cloud.karpenter import KarpenterConfig
from fenka.cloud.port import OfferKey
from fenka.cloud.simulated_cloud import SimulatedConfig
from fenka.cluster.autoscaling import CAPACITY, GROUP, ORDER
from fenka.core.errors import InvalidCase
from fenka.core.nodes.case import check_limits, check_price
from fenka.core.request import MAX_CARDS
from fenka.formats import documents
from fenka.formats.documents import MAX_BYTES, InvalidYaml, parse_yaml, similar

CONFIGS: Mapping[str, type[AutoscalerConfig]] = {
    "ess": EssConfig,
    "aws": AwsConfig,
    "karpenter": KarpenterConfig,
    "simulated": SimulatedConfig,
}
"""By `provider.kind`."""

MAX_NAMES = 48
"""Characters of the cluster's and a group's name together: an order's token has both, and 64 at most."""

EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?")
_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_KEY = re.compile(rf"(?:[a-z0-9](?:[a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_WORD}")
_VALUE = re.compile(rf"(?:{_WORD})?")


def read_config(path: Path) -> AutoscalerConfig:
    """Return the configuration in a file. Raises InvalidConfig, OSError."""
    with path.open("rb") as file:
        return decode_config(file.read(MAX_BYTES + 1))


def decode_config(data: bytes) -> AutoscalerConfig:
    """Return the configuration of this YAML. Raises InvalidConfig for anything that is not understood."""
    try:
        document = parse_yaml(data)
        provider = document.get("provider") if isinstance(document, dict) else None
        kind = provider.get("kind") if isinstance(provider, dict) else None
        known = CONFIGS.get(str(kind), AutoscalerConfig)
        config = documents.convert(document, known, "the configuration")
        groups = (
            _with_protection(group, f"groups[{number}]", document["groups"][number], known)
            for number, group in enumerate(config.groups)
        )
        config = replace(config, groups=tuple(groups))
        _check(config)
    except InvalidYaml as why:
        raise InvalidConfig(f"the configuration {why}") from None
    except (documents.InvalidDocument, InvalidCase) as why:
        raise InvalidConfig(str(why)) from None
    return config


def _with_protection(
    group: GroupConfig, path: str, given: Mapping[str, Any], kind: type[AutoscalerConfig]
) -> GroupConfig:
    """Return the group with the cloud's protection of spot nodes, where the file does not say another."""
    if group.capacity != "spot":
        if "spot" in given:
            raise InvalidConfig(f"{path}.spot needs capacity: spot: add it, or remove spot")
        return group
    if "protection" in given.get("spot", {}):
        return group
    return replace(group, spot=replace(group.spot, protection=kind.protection_s))


def check_offers(config: AutoscalerConfig, offers: Iterable[OfferKey]) -> None:
    """Raise InvalidConfig for the first type or zone that the provider does not have.

    offers: all that it has.
    """
    known = list(offers)
    for number, group in enumerate(config.groups):
        keys = [key for key in known if key.group == group.name]
        if not keys:
            raise InvalidConfig(
                f"groups[{number}]: the provider has no {' or '.join(group.types)} in "
                f"{' or '.join(group.zones)}: correct types or zones of {group.name}"
            )
        for title, wanted, offered in (
            ("types", group.types, {key.type for key in keys}),
            ("zones", group.zones, {key.zone for key in keys}),
        ):
            for index, name in enumerate(wanted):
                if name not in offered:
                    raise InvalidConfig(
                        f"groups[{number}].{title}[{index}]: the provider has no {name} for "
                        f"{group.name}{similar(name, offered - {*wanted}) or ': remove it'}"
                    )


def check_shapes(config: AutoscalerConfig, known: Collection[str]) -> None:
    """Raise InvalidConfig for the first type of which nobody says what its nodes will be.

    known: types that have been seen, or that the provider describes.
    """
    for number, group in enumerate(config.groups):
        for index, kind in enumerate(group.types if group.shape is None else ()):
            if kind not in known:
                raise InvalidConfig(
                    f"groups[{number}].types[{index}]: the shape of {kind} is not known: say shape: for it"
                )


def _check(config: AutoscalerConfig) -> None:
    """Raise InvalidConfig for the first contradiction."""
    _check_name("cluster", config.cluster)
    if not config.groups:
        raise InvalidConfig("groups is empty: add the first group")
    _check_distinct("groups", "name", [group.name for group in config.groups])
    _check_distinct("groups", "id", [group.id for group in config.groups if group.id])
    for number, group in enumerate(config.groups):
        _check_group(f"groups[{number}]", group, config.cluster)
    _check_times(config.scale_out, config.start)
    check_price("scaleIn.repackSaves", config.scale_in.repack_saves)
    check_limits(config.limits, ())
    least = sum(group.min for group in config.groups)
    if config.limits.nodes is not None and config.limits.nodes < least:
        raise InvalidConfig(
            f"limits.nodes is {config.limits.nodes}, less than the {least} that the groups' min requires: "
            "raise it, or lower a min"
        )


def _check_times(out: ScaleOut, start: StartTimes) -> None:
    for name, value in (
        ("scaleOut.timeLimit", out.time_limit),
        ("start.timeout", start.timeout),
        ("start.backoff", start.backoff),
    ):
        if value <= 0:
            raise InvalidConfig(f"{name} is 0: write more")
    for name, most, value in (
        ("scaleOut.window", out.window_most, out.window),
        ("start.backoff", start.backoff_most, start.backoff),
    ):
        if most < value:
            raise InvalidConfig(
                f"{name}Most is {most:g}s, less than {name}, which is {value:g}s: raise it"
            )


def _check_group(path: str, group: GroupConfig, cluster: str) -> None:
    _check_name(f"{path}.name", group.name)
    if len(cluster) + len(group.name) > MAX_NAMES:
        raise InvalidConfig(
            f"{path}.name and cluster have more than {MAX_NAMES} characters together: shorten one"
        )
    for name, values in (("types", group.types), ("zones", group.zones)):
        if not all(values) or not values:
            raise InvalidConfig(f"{path}.{name} is empty: name one at least")
        _check_distinct(f"{path}.{name}", "", values)
    if group.max < group.min:
        raise InvalidConfig(
            f"{path}.max is {group.max}, less than its min of {group.min}: raise max or lower min"
        )
    for name, price in (("price", group.price), ("spot.cap", group.spot.cap)):
        if price is not None:
            check_price(f"{path}.{name}", price)
    if group.shape is not None:
        _check_shape(f"{path}.shape", group.shape)
    _check_labels(path, group)


def _check_shape(path: str, shape: ShapeConfig) -> None:
    if sum(cards.count for cards in shape.cards) > MAX_CARDS:
        raise InvalidConfig(f"{path}.cards are more than {MAX_CARDS}: count them again")
    for name in shape.resources:
        if name in NOT_COUNTED:
            raise InvalidConfig(f"{path}.resources.{name} is no counted resource: remove it")


def _check_labels(path: str, group: GroupConfig) -> None:
    pairs = chain(
        ((f"{path}.labels", key, value) for key, value in group.labels.items()),
        ((f"{path}.taints[{n}]", taint.key, taint.value) for n, taint in enumerate(group.taints)),
    )
    for title, key, value in pairs:
        if not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
            raise InvalidConfig(
                f"{title} has {key!r} with {value!r}, which Kubernetes does not allow: "
                "use letters, digits, '.', '_' and '-'"
            )
    for name in (GROUP, CAPACITY, ORDER):
        if name in group.labels:
            raise InvalidConfig(f"{path}.labels has {name}, which the autoscaler sets: remove it")
    for number, taint in enumerate(group.taints):
        if taint.effect not in EFFECTS:
            raise InvalidConfig(
                f"{path}.taints[{number}].effect must be {', '.join(EFFECTS[:2])} or {EFFECTS[2]}"
            )


def _check_name(path: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidConfig(
            f"{path} is {name!r}: write lower-case letters, digits and '-', as in t4-spot"
        )


def _check_distinct(path: str, key: str, values: Sequence[str]) -> None:
    seen: dict[str, int] = {}
    for number, value in enumerate(values):
        first = seen.setdefault(value, number)
        if first != number:
            suffix = f".{key}" if key else ""
            raise InvalidConfig(
                f"{path}[{number}]{suffix} is {value!r}, as {path}[{first}]{suffix} is: "
                + ("write another" if key else "remove it")
            )
