"""The mode of a node by its labels: gpushare's and gpu-manager's say that it shares cards, ACK's say how.

The node program advertises, and the scheduler admits, what this mode allows.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from fenka.dialects.base import InvalidRecord, NodeMode, SliceRequest

PLACEMENT_LABEL = "ack.node.gpu.placement"
"""Node label: binpack or spread, over the cards of that node."""


SHARING_LABELS = {"gpushare": "true", "cgpu": "true", "nvidia-device-enable": "enable"}
"""Node labels, with the value by which each makes a node share its cards."""
MODE_LABEL = "ack.node.gpu.schedule"
"""Node label: ACK's mode of the node."""
WHOLE_LABEL = "fenka.io/whole-cards"
"""Node label: with `true` a node that shares cards also gives whole ones."""
DISABLE_ISOLATION_LABEL = "cgpu.disable.isolation"

MODE_LABELS = (*SHARING_LABELS, MODE_LABEL, WHOLE_LABEL)
"""The labels that decide what a node admits."""


SHARED = NodeMode(memory=True, compute=True)
EXCLUSIVE = NodeMode(whole=True)

MODES = {
    "default": EXCLUSIVE,
    "topology": EXCLUSIVE,
    "cgpu": NodeMode(memory=True),
    "core_mem": SHARED,
    "share": NodeMode(memory=True, isolated=False),
}
"""Modes by the value of ACK's label."""


def has_mode_label(labels: Mapping[str, str]) -> bool:
    """Return whether the node has any of the labels, with any value."""
    return MODE_LABEL in labels or any(label in labels for label in SHARING_LABELS)


def node_mode(labels: Mapping[str, str]) -> NodeMode:
    """Return the mode of a node. Without any of the labels it does not share cards.

    Raises:
        InvalidRecord: for labels that contradict each other, and for a mode that fenka does not serve.
    """
    sharing = {
        label: labels[label] == yes for label, yes in SHARING_LABELS.items() if label in labels
    }
    known = dict(sharing)
    if MODE_LABEL in labels:
        if labels[MODE_LABEL] not in MODES:
            raise InvalidRecord(
                f"its label {MODE_LABEL}={labels[MODE_LABEL]} is none of {', '.join(sorted(MODES))}"
            )
        known[MODE_LABEL] = MODES[labels[MODE_LABEL]].memory
    if len(set(known.values())) > 1:
        written = " and ".join(f"{label}={labels[label]}" for label in known)
        raise InvalidRecord(f"the labels {written} contradict each other: keep one of them")
    mode = (
        MODES[labels[MODE_LABEL]]
        if MODE_LABEL in labels
        else SHARED
        if any(sharing.values())
        else EXCLUSIVE
    )
    if mode.memory and labels.get(WHOLE_LABEL) == "true":
        mode = replace(mode, whole=True)
    if labels.get(DISABLE_ISOLATION_LABEL) == "true":
        mode = replace(mode, isolated=False)
    return mode


def check_shared(labels: Mapping[str, str]) -> None:
    """Raise InvalidRecord with the reason if a node that advertises shared cards takes no new pods.

    A node without any of the labels takes them: gpushare's extender ignores labels.
    """
    if has_mode_label(labels) and not node_mode(labels).memory:
        label = next(label for label in (*SHARING_LABELS, MODE_LABEL) if label in labels)
        raise InvalidRecord(f"its label {label}={labels[label]} takes it out of sharing")


def check_admission(
    labels: Mapping[str, str], parts: Sequence[SliceRequest], neighbours: Collection[bool] = ()
) -> None:
    """Raise InvalidRecord with the reason if the mode of a shared node rejects the pod.

    Args:
        labels: the node's.
        parts: what the pod requests.
        neighbours: for each pod that has memory there now, whether it has compute too. On nodes of `core_mem`
            the two kinds do not mix: pods without a share of compute would take it from those with one.
    """
    allowed = node_mode(labels) if has_mode_label(labels) else SHARED
    subject = (
        f"its label {MODE_LABEL}={labels[MODE_LABEL]}" if MODE_LABEL in labels else "its owner"
    )
    for part in parts:
        request = part.request
        if request.whole:
            if not (allowed.whole if part.requires_opt_in else allowed.compute or allowed.whole):
                raise InvalidRecord(
                    f"{subject} keeps it for slices: {WHOLE_LABEL}=true is for both"
                )
        elif not allowed.memory:
            raise InvalidRecord(f"{subject} keeps it for whole cards")
        elif request.compute and not allowed.compute:
            raise InvalidRecord(f"{subject} shares out memory alone, not compute")
        elif labels.get(MODE_LABEL) == "core_mem" and any(
            has_compute != (request.compute > 0) for has_compute in neighbours
        ):
            other = "without" if request.compute else "with"
            raise InvalidRecord(
                f"{subject} does not mix, and pods {other} a share of compute are there"
            )
