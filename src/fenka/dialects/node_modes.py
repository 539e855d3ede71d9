"""The mode of a node by its labels: gpushare's and gpu-manager's say that it shares cards, ACK's say how.

The node program advertises, and the scheduler admits, what this mode allows.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fenka.core.request import InvalidRequest, Request
from fenka.dialects.base import InvalidRecord, NodeMode, SliceRequest
from fenka.dialects.mig_names import parse_inside
from fenka.dialects.mig_records import INSIDE

PLACEMENT_LABEL = "ack.node.gpu.placement"
"""Node label: binpack or spread, over the cards of that node."""


SHARING_LABELS = {"gpushare": "true", "cgpu": "true", "nvidia-device-enable": "enable"}
"""Node labels, with the value by which each makes a node share its cards."""
MODE_LABEL = "ack.node.gpu.schedule"
"""Node label: ACK's mode of the node."""
WHOLE_LABEL = "fenka.io/whole-cards"
"""Node label: with `true` a node that shares cards also gives whole ones."""
DISABLE_ISOLATION_LABEL = "cgpu.disable.isolation"
MIG_LABEL = "fenka.io/mig"
"""Node label: which cards are divided into MIG instances, see `mig_mode`."""
MIG_TENANCY = "fenka.io/mig-tenancy"
"""Node label: with `shared` pods of two namespaces may share a MIG instance; `namespace` is the default."""
TENANCIES = ("namespace", "shared")

MODE_LABELS = (*SHARING_LABELS, MODE_LABEL, WHOLE_LABEL, MIG_LABEL, MIG_TENANCY, INSIDE)
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


@dataclass(frozen=True, slots=True)
class MigMode:
    """Which cards of a node are divided, and by what.

    Attributes:
        kind: off: by fenka none. on-demand: for pods. static: by layouts.
        indexes: the cards that are divided on demand; None for all that can be.
        labelled: whether the node has the label.
    """

    kind: Literal["off", "on-demand", "static"] = "off"
    indexes: frozenset[int] | None = None
    labelled: bool = False

    @property
    def on(self) -> bool:
        """Whether the node gives instances."""
        return self.kind != "off"


_ON_DEMAND = re.compile(r"on-demand((?:[.:,_-][0-9]{1,4})*)")


def mig_mode(labels: Mapping[str, str]) -> MigMode:
    """Return how a node is divided: `off`, `static`, `on-demand`, or `on-demand.0.1` for these cards.

    Kubernetes allows no colon or comma in the value of a label, so that dots separate the indexes.

    Raises:
        InvalidRecord: for another value.
    """
    if MIG_LABEL not in labels:
        return MigMode()
    value = labels[MIG_LABEL]
    if value in ("off", "static"):
        return MigMode("static" if value == "static" else "off", labelled=True)
    match = _ON_DEMAND.fullmatch(value)
    if match is None:
        raise InvalidRecord(
            f"its label {MIG_LABEL}={value[:63]} is none of off, static, on-demand, and on-demand.0.1 for "
            "the cards 0 and 1"
        )
    indexes = frozenset(map(int, re.findall("[0-9]+", match[1])))
    return MigMode("on-demand", indexes or None, labelled=True)


def mig_shared(labels: Mapping[str, str]) -> bool:
    """Return whether two namespaces may share an instance of a node; `check_admission` rejects bad values."""
    return labels.get(MIG_TENANCY) == TENANCIES[1]


def slices_inside(labels: Mapping[str, str]) -> str:
    """Return the profile of the instances that slices of a node are in, or ANY_INSTANCE; empty for cards.

    Raises:
        InvalidRecord: if the label is no profile.
    """
    try:
        return parse_inside(labels[INSIDE]) if INSIDE in labels else ""
    except InvalidRequest as why:
        raise InvalidRecord(f"its label {INSIDE}: {why}") from None


def check_shared(labels: Mapping[str, str]) -> None:
    """Raise InvalidRecord with the reason if a node that advertises shared cards takes no new pods.

    A node without any of the labels takes them: gpushare's extender ignores labels. So does one that gives
    instances; `check_admission` says what else it takes.
    """
    if has_mode_label(labels) and not node_mode(labels).memory and not mig_mode(labels).on:
        label = next(label for label in (*SHARING_LABELS, MODE_LABEL) if label in labels)
        raise InvalidRecord(f"its label {label}={labels[label]} takes it out of sharing")


def check_admission(
    labels: Mapping[str, str], parts: Sequence[SliceRequest], neighbours: Collection[bool] = ()
) -> None:
    """Raise InvalidRecord with the reason if the mode of a shared node rejects the pod.

    Instances are admitted if the node divides cards, whether it shares the others or not. Slices inside them
    need both.

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
        if request.instance:
            _check_instances(labels, request)
            if request.whole:
                continue
        if request.whole:
            if not (allowed.whole if part.requires_opt_in else allowed.compute or allowed.whole):
                raise InvalidRecord(
                    f"{subject} keeps it for slices: {WHOLE_LABEL}=true is for both"
                )
        elif not allowed.memory:
            raise InvalidRecord(f"{subject} keeps it for whole cards")
        elif not request.instance and slices_inside(labels):
            raise InvalidRecord(
                f"its label {INSIDE}={labels[INSIDE]} keeps it for slices of one card, inside MIG instances, "
                "of pods outside of gangs"
            )
        elif part.has_compute and not allowed.compute:
            raise InvalidRecord(f"{subject} shares out memory alone, not compute")
        elif labels.get(MODE_LABEL) == "core_mem" and any(
            has_compute != part.has_compute for has_compute in neighbours
        ):
            other = "without" if part.has_compute else "with"
            raise InvalidRecord(
                f"{subject} does not mix, and pods {other} a share of compute are there"
            )


def _check_instances(labels: Mapping[str, str], request: Request) -> None:
    """Check that a node has instances for a request, and shares them if it is for a slice."""
    if not mig_mode(labels).on:
        raise InvalidRecord(
            f"its owner has no card divided into MIG instances: label {MIG_LABEL}=on-demand does that"
        )
    if request.whole:
        return
    if not node_mode(labels).memory:
        raise InvalidRecord("its owner keeps it for whole cards and whole MIG instances")
    tenancy = labels.get(MIG_TENANCY, TENANCIES[0])
    if tenancy not in TENANCIES:
        raise InvalidRecord(
            f"its label {MIG_TENANCY}={tenancy[:63]} is none of {' and '.join(TENANCIES)}"
        )
