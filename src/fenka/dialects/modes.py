"""What a node's labels say it is for: gpushare's and gpu-manager's say that it shares, ACK's say how.

One place for all of them: the node offers, and the scheduler admits, what is said here.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from fenka.dialects.gpushare import Unreadable
from fenka.dialects.requests import Part

SHARING_LABELS = {"gpushare": "true", "cgpu": "true", "nvidia-device-enable": "enable"}
"""Node labels, and the value of each that makes a sharing node."""
MODE = "ack.node.gpu.schedule"
"""Node label: ACK's word for whom the node is."""
WHOLE_LABEL = "fenka.io/whole-cards"
"""Node label: `true` on a sharing node gives away whole cards too."""
DISABLE_ISOLATION_LABEL = "cgpu.disable.isolation"


@dataclass(frozen=True, slots=True)
class Mode:
    """What may be asked for on a node: whole cards, memory, memory with compute.

    isolated: False where programs see the whole card and limit themselves.
    """

    whole: bool = False
    memory: bool = False
    compute: bool = False
    isolated: bool = True


SHARED = Mode(memory=True, compute=True)
EXCLUSIVE = Mode(whole=True)

MODES = {
    "default": EXCLUSIVE,
    "topology": EXCLUSIVE,
    "cgpu": Mode(memory=True),
    "core_mem": SHARED,
    "share": Mode(memory=True, isolated=False),
}
"""By the value of ACK's label."""


def labelled(labels: Mapping[str, str]) -> bool:
    """Whether any of the labels is there, whatever it says."""
    return MODE in labels or any(label in labels for label in SHARING_LABELS)


def mode(labels: Mapping[str, str]) -> Mode:
    """Of a node; one without any of the labels does not share.

    Raises Unreadable for labels that contradict each other, and for a mode that fenka does not serve.
    """
    said = {label: labels[label] == yes for label, yes in SHARING_LABELS.items() if label in labels}
    known = dict(said)
    if MODE in labels:
        if labels[MODE] not in MODES:
            raise Unreadable(
                f"its label {MODE}={labels[MODE]} is none of {', '.join(sorted(MODES))}"
            )
        known[MODE] = MODES[labels[MODE]].memory
    if len(set(known.values())) > 1:
        written = " and ".join(f"{label}={labels[label]}" for label in known)
        raise Unreadable(f"the labels {written} contradict each other: keep one of them")
    found = MODES[labels[MODE]] if MODE in labels else SHARED if any(said.values()) else EXCLUSIVE
    if found.memory and labels.get(WHOLE_LABEL) == "true":
        found = replace(found, whole=True)
    if labels.get(DISABLE_ISOLATION_LABEL) == "true":
        found = replace(found, isolated=False)
    return found


def open_to_slices(labels: Mapping[str, str]) -> None:
    """Raises Unreadable, with the reason, where a node that seems to share takes no new pods.

    One without any of the labels does: gpushare's extender never looked at them.
    """
    if labelled(labels) and not mode(labels).memory:
        label = next(label for label in (*SHARING_LABELS, MODE) if label in labels)
        raise Unreadable(f"its label {label}={labels[label]} takes it out of sharing")


def admits(
    labels: Mapping[str, str], parts: Sequence[Part], neighbours: Collection[bool] = ()
) -> None:
    """Raises Unreadable, with the reason, where a sharing node's mode turns the pod away.

    neighbours: of those that hold memory there now, whether they hold compute too. On nodes of `core_mem`
    the two kinds do not mix: who has no share of compute would take it from those who have.
    """
    allowed = mode(labels) if labelled(labels) else SHARED
    said = f"its label {MODE}={labels[MODE]}" if MODE in labels else "its owner"
    for part in parts:
        request = part.request
        if request.whole:
            if not (allowed.whole if part.by_label else allowed.compute or allowed.whole):
                raise Unreadable(f"{said} keeps it for slices: {WHOLE_LABEL}=true is for both")
        elif not allowed.memory:
            raise Unreadable(f"{said} keeps it for whole cards")
        elif request.compute and not allowed.compute:
            raise Unreadable(f"{said} shares out memory alone, not compute")
        elif labels.get(MODE) == "core_mem" and any(
            it != (request.compute > 0) for it in neighbours
        ):
            other = "without" if request.compute else "with"
            raise Unreadable(f"{said} does not mix, and pods {other} a share of compute are there")
