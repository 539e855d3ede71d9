"""gpushare's names, and what Alibaba Cloud's ACK adds to them: a share of compute, and modes of nodes.

How gpushare's part is written and read is `dialects.gpushare`'s.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from fenka.core.requests import Placement
from fenka.dialects import gpushare
from fenka.dialects.gpushare import COUNT, MEMORY, Share, Unreadable
from fenka.dialects.requests import Manifest, Part, counted

NAME = "gpushare"

CORE = "aliyun.com/gpu-core.percentage"
"""Extended resource: percent of one card's compute, in steps of 5, together with memory."""
RESOURCES: tuple[str, ...] = (MEMORY, CORE)
STEP, MOST = 5, 100

CORES = "gpushare.alibabacloud.com/core-percentage"
"""Annotation: {"<container>": {"<card>": <percent>}}."""

MODE = "ack.node.gpu.schedule"
"""Node label: for whom the node is."""


@dataclass(frozen=True, slots=True)
class Mode:
    """What may be asked for on a node: whole cards, memory, memory with compute.

    isolated: False where programs see the whole card and limit themselves.
    """

    whole: bool = False
    memory: bool = False
    compute: bool = False
    isolated: bool = True


MODES = {
    "default": Mode(whole=True),
    "topology": Mode(whole=True),
    "cgpu": Mode(memory=True),
    "core_mem": Mode(memory=True, compute=True),
    "share": Mode(memory=True, isolated=False),
}
"""By the value of the label. A node without it takes everything, isolated."""
UNLABELLED = Mode(whole=True, memory=True, compute=True)


def mode(labels: Mapping[str, str]) -> Mode:
    """Of a node. Raises Unreadable for a mode that fenka does not serve."""
    if MODE not in labels:
        return UNLABELLED
    found = MODES.get(labels[MODE])
    if found is None:
        raise Unreadable(f"its label {MODE}={labels[MODE]} is none of {', '.join(sorted(MODES))}")
    return found


def admits(
    labels: Mapping[str, str], parts: Sequence[Part], neighbours: Collection[bool] = ()
) -> None:
    """Raises Unreadable, with the reason, where the node's mode turns the pod away.

    neighbours: of those that hold memory there now, whether they hold compute too. On nodes of `core_mem`
    the two kinds do not mix: who has no share of compute would take it from those who have.
    """
    allowed = mode(labels)
    said = f"its label {MODE}={labels.get(MODE)}"
    for part in parts:
        request = part.request
        if request.whole:
            if not allowed.whole:
                raise Unreadable(f"{said} keeps it for slices")
        elif not allowed.memory:
            raise Unreadable(f"{said} keeps it for whole cards")
        elif request.compute and not allowed.compute:
            raise Unreadable(f"{said} shares out memory alone, not compute")
        elif labels.get(MODE) == "core_mem" and any(
            it != (request.compute > 0) for it in neighbours
        ):
            other = "without" if request.compute else "with"
            raise Unreadable(f"{said} does not mix, and pods {other} a share of compute are there")


def isolated(labels: Mapping[str, str]) -> bool:
    """Whether containers on the node are held to their slices. Raises Unreadable."""
    return mode(labels).isolated and labels.get(gpushare.DISABLE_ISOLATION_LABEL) != "true"


def speaks(pod: Manifest) -> bool:
    """Raises Unreadable."""
    return bool(pod.names(RESOURCES))


def demand(pod: Manifest, unit_mib: int) -> tuple[Part, ...]:
    """One part: what the whole pod needs at its peak, on each of as many cards as its label says.

    Raises Unreadable.
    """
    asks = pod.asks(MEMORY)
    compute = _compute(pod)
    request = gpushare.read_request(asks, pod.labels, unit_mib)
    if request is None:
        return ()
    if compute and request.cards > 1:
        raise Unreadable(
            f"it asks for {CORE} and, by its label {COUNT}, for {request.cards} cards: "
            "a share of compute is of one card, leave out one of the two"
        )
    containers = tuple(ask.name for ask in asks if ask.units)
    return (Part(containers, replace(request, compute=compute)),)


def _compute(pod: Manifest) -> int:
    """Percent at the pod's peak, 0 if it asks for none."""
    cores = pod.asks(CORE)
    if not any(ask.units for ask in cores):
        return 0
    for core, memory in zip(cores, pod.asks(MEMORY), strict=True):
        if bool(core.units) != bool(memory.units):
            have, lack = (CORE, MEMORY) if core.units else (MEMORY, CORE)
            raise Unreadable(
                f"container {core.name} asks for {have} without {lack}: ask for both in each container"
            )
        if core.units % STEP or core.units > MOST:
            raise Unreadable(
                f"container {core.name} asks for {core.units} of {CORE}: "
                f"ask for {STEP} to {MOST}, in steps of {STEP}"
            )
    peak = gpushare.demand(cores)
    if peak > MOST:
        raise Unreadable(f"its containers ask for {peak} of {CORE} together: one card has {MOST}")
    return peak


def write(
    pod: Manifest, share: Share, placements: Sequence[Placement], now_ns: int
) -> dict[str, str]:
    """gpushare's annotations, and ACK's where there is compute."""
    (placement,) = placements
    written = gpushare.write_placement(share, placement, pod.asks(MEMORY), now_ns)
    if any(piece.compute for piece in placement.slices):
        cores = {
            str(number): {str(piece.card): it.of(CORE) for piece in placement.slices}
            for number, it in enumerate(pod.apps)
            if it.of(CORE)
        }
        written[CORES] = json.dumps(cores, separators=(",", ":"))
    return written


def read(pod: Manifest, share: Share) -> tuple[Placement, ...] | None:
    """By gpushare's annotations; the compute is what the pod asks for, or more where ACK's say so.

    Raises Unreadable.
    """
    placement = gpushare.read_placement(share, pod.annotations, pod.asks(MEMORY))
    if placement is None:
        return None
    asked, recorded = _compute(pod), _recorded(pod.annotations)
    return (
        replace(
            placement,
            slices=tuple(
                replace(piece, compute=max(asked, recorded.get(piece.card, 0)))
                for piece in placement.slices
            ),
        ),
    )


def _recorded(annotations: Mapping[str, str]) -> dict[int, int]:
    total: dict[int, int] = {}
    try:
        for cards in json.loads(annotations.get(CORES, "{}")).values():
            for card, percent in cards.items():
                total[int(card)] = total.get(int(card), 0) + counted(percent)
    except (ValueError, TypeError, AttributeError, RecursionError) as why:
        raise Unreadable(f"annotation {CORES} is not understood: {why}") from None
    return total


def environment(
    pod: Manifest, share: Share, placements: Sequence[Placement], container: str
) -> dict[str, str]:
    """gpushare's; nothing for a container that asks for nothing."""
    (placement,) = placements
    own = next((it.of(MEMORY) for it in pod.containers if it.name == container), 0)
    total = sum(it.of(MEMORY) for it in pod.apps)
    return gpushare.environment(share, placement, total, own) if own else {}


def advertised(share: Share) -> dict[str, int]:
    """Units, cards, and 100 percent of each."""
    cards = len(share.node.cards)
    return {MEMORY: share.total, COUNT: cards, CORE: MOST * cards}
