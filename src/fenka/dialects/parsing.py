"""What dialects share to parse pods: valid requests, and how a pod's containers share them."""

from collections.abc import Callable, Sequence

from fenka.core.request import InvalidRequest, Memory, Request
from fenka.dialects.base import (
    ContainerKind,
    ContainerRequest,
    InvalidRecord,
    PodRequest,
    SliceRequest,
)


def valid_request(make: Callable[[], Request]) -> Request:
    """Return the request. Raises InvalidRecord with the core's sentence if it is impossible."""
    try:
        return make()
    except InvalidRequest as why:
        raise InvalidRecord(str(why)) from None


def memory_request(amount: int, unit_mib: int | None, compute: int, cards: int = 1) -> Request:
    """Return a request for units and percent on each of the cards. Raises InvalidRecord."""
    try:
        return Request(Memory(amount, unit_mib), compute, cards)
    except InvalidRequest as why:
        raise InvalidRecord(str(why)) from None


def whole_card_request(cards: int) -> Request:
    """Return a request for whole cards. Raises InvalidRecord."""
    return valid_request(lambda: Request(whole=True, cards=cards))


def per_container(
    pod: PodRequest,
    parse_container: Callable[[ContainerRequest], Request | None],
    burst_percent: int | None = None,
) -> tuple[SliceRequest, ...]:
    """Return a slice request for each container that requests something.

    An init container has ended when the others start, so it uses the cards of one of them.

    Raises:
        InvalidRecord: if no other container's cards are enough for an init container.
    """
    slices: dict[str, tuple[list[str], Request]] = {}
    for container in pod.containers:
        request = parse_container(container) if container.kind is not ContainerKind.INIT else None
        if request is not None:
            slices[container.name] = [container.name], request
    for container in pod.containers:
        request = parse_container(container) if container.kind is ContainerKind.INIT else None
        if request is None:
            continue
        hosts = (names for names, larger in slices.values() if _covers(larger, request))
        names = next(hosts, None)
        if names is None:
            raise InvalidRecord(
                f"its init container {container.name} asks for more than any container beside it: "
                "let it ask for no more than one of those"
            )
        names.append(container.name)
    return tuple(
        SliceRequest(tuple(names), request, None if request.whole else burst_percent)
        for names, request in slices.values()
    )


def require_plain_containers(pod: PodRequest, resources: Sequence[str]) -> None:
    """Raise InvalidRecord if an init container requests anything: some records cannot express that."""
    for container in pod.containers:
        if container.kind is not ContainerKind.APP and (
            names := [name for name in resources if container.amount(name)]
        ):
            raise InvalidRecord(
                f"its init container {container.name} asks for {names[0]}: only its containers can"
            )


def _covers(larger: Request, request: Request) -> bool:
    if larger.whole:
        return larger.cards >= request.cards
    return larger == request
