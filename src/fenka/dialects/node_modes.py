"""What a node's labels say it is for: gpushare's and gpu-manager's say that it shares, ACK's say how.

One place for all of them: the node offers, and the scheduler admits, what is said here.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from fenka.dialects.base import InvalidRecord, NodeMode, SliceRequest

PLACEMENT_LABEL = "ack.node.gpu.placement"
"""Node label: binpack or spread, over the cards of that node."""


SHARING_LABELS = {"gpushare": "true", "cgpu": "true", "nvidia-device-enable": "enable"}
"""Node labels, and the value of each that makes a sharing node."""
MODE_LABEL = "ack.node.gpu.schedule"
"""Node label: ACK's word for whom the node is."""
WHOLE_LABEL = "fenka.io/whole-cards"
"""Node label: `true` on a sharing node gives away whole cards too."""
DISABLE_ISOLATION_LABEL = "cgpu.disable.isolation"


SHARED = NodeMode(memory=True, compute=True)
EXCLUSIVE = NodeMode(whole=True)

MODES = {
    "default": EXCLUSIVE,
    "topology": EXCLUSIVE,
    "cgpu": NodeMode(memory=True),
    "core_mem": SHARED,
    "share": NodeMode(memory=True, isolated=False),
}
"""By the value of ACK's label."""


def has_mode_label(labels: Mapping[str, str]) -> bool:
    """Whether any of the labels is there, whatever it says."""
    return MODE_LABEL in labels or any(label in labels for label in SHARING_LABELS)


def node_mode(labels: Mapping[str, str]) -> NodeMode:
    """Of a node; one without any of the labels does not share.

    Raises InvalidRecord for labels that contradict each other, and for a mode that fenka does not serve.
    """
    said = {label: labels[label] == yes for label, yes in SHARING_LABELS.items() if label in labels}
    known = dict(said)
    if MODE_LABEL in labels:
        if labels[MODE_LABEL] not in MODES:
            raise InvalidRecord(
                f"its label {MODE_LABEL}={labels[MODE_LABEL]} is none of {', '.join(sorted(MODES))}"
            )
        known[MODE_LABEL] = MODES[labels[MODE_LABEL]].memory
    if len(set(known.values())) > 1:
        written = " and ".join(f"{label}={labels[label]}" for label in known)
        raise InvalidRecord(f"the labels {written} contradict each other: keep one of them")
    found = (
        MODES[labels[MODE_LABEL]]
        if MODE_LABEL in labels
        else SHARED
        if any(said.values())
        else EXCLUSIVE
    )
    if found.memory and labels.get(WHOLE_LABEL) == "true":
        found = replace(found, whole=True)
    if labels.get(DISABLE_ISOLATION_LABEL) == "true":
        found = replace(found, isolated=False)
    return found


def check_shared(labels: Mapping[str, str]) -> None:
    """Raises InvalidRecord, with the reason, where a node that seems to share takes no new pods.

    One without any of the labels does: gpushare's extender never looked at them.
    """
    if has_mode_label(labels) and not node_mode(labels).memory:
        label = next(label for label in (*SHARING_LABELS, MODE_LABEL) if label in labels)
        raise InvalidRecord(f"its label {label}={labels[label]} takes it out of sharing")


def check_admission(
    labels: Mapping[str, str], parts: Sequence[SliceRequest], neighbours: Collection[bool] = ()
) -> None:
    """Raises InvalidRecord, with the reason, where a sharing node's mode turns the pod away.

    neighbours: of those that hold memory there now, whether they hold compute too. On nodes of `core_mem`
    the two kinds do not mix: who has no share of compute would take it from those who have.
    """
    allowed = node_mode(labels) if has_mode_label(labels) else SHARED
    said = f"its label {MODE_LABEL}={labels[MODE_LABEL]}" if MODE_LABEL in labels else "its owner"
    for part in parts:
        request = part.request
        if request.whole:
            if not (allowed.whole if part.requires_opt_in else allowed.compute or allowed.whole):
                raise InvalidRecord(f"{said} keeps it for slices: {WHOLE_LABEL}=true is for both")
        elif not allowed.memory:
            raise InvalidRecord(f"{said} keeps it for whole cards")
        elif request.compute and not allowed.compute:
            raise InvalidRecord(f"{said} shares out memory alone, not compute")
        elif labels.get(MODE_LABEL) == "core_mem" and any(
            it != (request.compute > 0) for it in neighbours
        ):
            other = "without" if request.compute else "with"
            raise InvalidRecord(
                f"{said} does not mix, and pods {other} a share of compute are there"
            )
