"""Parses pods for dialects: valid requests, and how a pod's containers share them."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from fenka.core.inventory import WHOLE_COMPUTE
from fenka.core.request import (
    COMPUTE_MODES,
    ComputeMode,
    InvalidRequest,
    Memory,
    Request,
    reserved_percent,
)
from fenka.dialects import base
from fenka.dialects.mig_records import INSIDE
from fenka.formats.mig_profiles import parse_inside

COMMON_OPTIONS = (base.CORE_MODE, INSIDE, base.TOPOLOGY)
"""The annotations that pods of every dialect may have."""


def valid_request(make: Callable[[], Request]) -> Request:
    """Return the request. Raises InvalidRecord with the core's sentence if it is impossible."""
    try:
        return make()
    except InvalidRequest as why:
        raise base.InvalidRecord(str(why)) from None


def memory_request(amount: int, unit_mib: int | None, compute: int, cards: int = 1) -> Request:
    """Return a request for units and percent on each of the cards. Raises InvalidRecord."""
    try:
        return Request(Memory(amount, unit_mib), compute, cards)
    except InvalidRequest as why:
        raise base.InvalidRecord(str(why)) from None


def whole_card_request(cards: int) -> Request:
    """Return a request for whole cards. Raises InvalidRecord."""
    return valid_request(lambda: Request(whole=True, cards=cards))


def per_container(
    pod: base.PodRequest,
    parse_container: Callable[[base.ContainerRequest], Request | None],
    burst_percent: int | None = None,
) -> tuple[base.SliceRequest, ...]:
    """Return a slice request for each container that requests something.

    An init container has ended when the others start, so it uses the cards of one of them.

    Raises:
        InvalidRecord: if no other container's cards are enough for an init container.
    """
    slices: dict[str, tuple[list[str], Request]] = {}
    for container in pod.containers:
        request = (
            parse_container(container) if container.kind is not base.ContainerKind.INIT else None
        )
        if request is not None:
            slices[container.name] = [container.name], request
    for container in pod.containers:
        request = parse_container(container) if container.kind is base.ContainerKind.INIT else None
        if request is None:
            continue
        hosts = (names for names, larger in slices.values() if _covers(larger, request))
        names = next(hosts, None)
        if names is None:
            raise base.InvalidRecord(
                f"its init container {container.name} asks for more than any container beside it: "
                "let it ask for no more than one of those"
            )
        names.append(container.name)
    return tuple(
        base.SliceRequest(tuple(names), request, None if request.whole else burst_percent)
        for names, request in slices.values()
    )


def with_core_mode(
    pod: base.PodRequest, parts: tuple[base.SliceRequest, ...]
) -> tuple[base.SliceRequest, ...]:
    """Return the slice requests with their compute in the mode that the pod's annotation says.

    Raises:
        InvalidRecord: if it is no mode, or the pod requests no share of compute.
    """
    text = pod.annotations.get(base.CORE_MODE)
    if text is None:
        return parts
    if text not in COMPUTE_MODES:
        raise base.InvalidRecord(
            f"annotation {base.CORE_MODE} is {text[:40]!r}: write one of {', '.join(COMPUTE_MODES)}"
        )
    if not any(part.request.compute for part in parts):
        raise base.InvalidRecord(
            f"annotation {base.CORE_MODE} is {text}, and no container requests a share of compute: "
            "request one beside the memory, or leave the annotation out"
        )
    return tuple(_in_mode(part, text) for part in parts)


def _in_mode(part: base.SliceRequest, mode: ComputeMode) -> base.SliceRequest:
    percent = part.request.compute
    if not percent or mode == "hard":
        return part
    if mode == "soft":
        return msgspec.structs.replace(part, burst_percent=WHOLE_COMPUTE)
    request = replace(part.request, compute=reserved_percent(percent, mode))
    return msgspec.structs.replace(part, request=request, weight=percent)


def with_inside(
    pod: base.PodRequest, parts: tuple[base.SliceRequest, ...]
) -> tuple[base.SliceRequest, ...]:
    """Return the slice requests as slices in MIG instances, if the pod's annotation says so.

    Raises:
        InvalidRecord: if it names no profile, or the pod requests anything but slices of one card each.
    """
    text = pod.annotations.get(INSIDE)
    if text is None:
        return parts
    try:
        profile = parse_inside(text)
    except InvalidRequest as why:
        raise base.InvalidRecord(f"annotation {INSIDE}: {why}") from None
    for part in parts:
        if part.request.whole:
            what = "instances" if part.request.instance else "cards"
            raise base.InvalidRecord(
                f"annotation {INSIDE} is {text}, and container {part.containers[0]} requests whole {what}: "
                "request a slice, or leave the annotation out"
            )
        if part.request.cards > 1:
            raise base.InvalidRecord(
                f"annotation {INSIDE} is {text}, and container {part.containers[0]} requests slices of "
                f"{part.request.cards} cards: request one, since CUDA connects no two instances"
            )
    return tuple(
        msgspec.structs.replace(part, request=replace(part.request, instance=profile))
        for part in parts
    )


def with_topology(
    pod: base.PodRequest, parts: tuple[base.SliceRequest, ...]
) -> tuple[base.SliceRequest, ...]:
    """Return the slice requests with the connections between their cards that the pod's annotation says.

    Raises:
        InvalidRecord: if it is no such word, or no container requests several cards.
    """
    text = pod.annotations.get(base.TOPOLOGY)
    if text is None:
        return parts
    if text not in base.TOPOLOGIES:
        raise base.InvalidRecord(
            f"annotation {base.TOPOLOGY} is {text[:40]!r}: write one of {', '.join(base.TOPOLOGIES)}"
        )
    if not any(part.request.by_links for part in parts):
        raise base.InvalidRecord(
            f"annotation {base.TOPOLOGY} is {text}, and no container requests several cards: request more "
            "than one, or leave the annotation out"
        )
    return tuple(
        msgspec.structs.replace(
            part, request=replace(part.request, linked=text == "required", near=True)
        )
        if part.request.by_links
        else part
        for part in parts
    )


def with_options(
    pod: base.PodRequest, parts: tuple[base.SliceRequest, ...]
) -> tuple[base.SliceRequest, ...]:
    """Return the slice requests as all annotations in `COMMON_OPTIONS` say. Raises InvalidRecord."""
    return with_placement_options(pod, with_core_mode(pod, parts))


def with_placement_options(
    pod: base.PodRequest, parts: tuple[base.SliceRequest, ...]
) -> tuple[base.SliceRequest, ...]:
    """Return the slice requests as the annotations say which cards they may have. Raises InvalidRecord."""
    return with_topology(pod, with_inside(pod, parts))


def require_plain_containers(pod: base.PodRequest, resources: Sequence[str]) -> None:
    """Raise InvalidRecord if an init container requests anything: some records cannot express that."""
    for container in pod.containers:
        if container.kind is not base.ContainerKind.APP and (
            names := [name for name in resources if container.amount(name)]
        ):
            raise base.InvalidRecord(
                f"its init container {container.name} asks for {names[0]}: only its containers can"
            )


def _covers(larger: Request, request: Request) -> bool:
    if larger.whole:
        return larger.instance == request.instance and larger.cards >= request.cards
    return larger == request
