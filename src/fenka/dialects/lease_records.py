"""Leases as a node program reports them on its Node: pods and their slices.

    fenka.io/leases   JSON, written by the node program alone

A pod's owner can change the record on the pod, but not the Node. So the scheduler counts a pod that is
reported here by this report, whatever the pod's own record says. `refused` lists pods that the node has
refused to start for a minute: the scheduler moves them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from sys import intern
from typing import Literal

import msgspec

from fenka.core.inventory import DeviceId
from fenka.core.request import Slice
from fenka.dialects import card_records
from fenka.dialects.base import InvalidRecord
from fenka.dialects.card_records import CardIndex, Count

REPORT = "fenka.io/leases"
"""Node annotation."""

VERSION: Literal[1] = 1

MAX_CHARACTERS = 200_000
"""All annotations of an object together may have 256 KiB."""

MAX_SENTENCE = 300


@dataclass(frozen=True, slots=True)
class Lingering:
    """Slices of a pod that the API server no longer shows, or shows as finished. name: namespace/name."""

    name: str
    slices: tuple[Slice, ...]


class Refusal(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Why a pod does not start. movable: whether it may start on another node."""

    sentence: str
    movable: bool = False


@dataclass(frozen=True, slots=True)
class LeaseReport:
    """The slices of pods, by UID.

    Attributes:
        pods: slices of pods at their peak, whose processes are alive or may start at any moment.
        lingering: slices of pods that the API server no longer shows.
        refused: pods that the node does not start.
    """

    pods: Mapping[str, tuple[Slice, ...]] = field(default_factory=dict)
    lingering: Mapping[str, Lingering] = field(default_factory=dict)
    refused: Mapping[str, Refusal] = field(default_factory=dict)


EMPTY_REPORT = LeaseReport()


class _LeaseSlice(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    uuid: Count
    """A position in the report's list of cards."""
    card: CardIndex
    memory_mib: Count
    compute: Count


class _Report(msgspec.Struct, forbid_unknown_fields=True):
    version: Literal[1]
    cards: list[str]
    pods: dict[str, list[_LeaseSlice]]
    lingering: dict[str, tuple[str, list[_LeaseSlice]]]
    refused: dict[str, Refusal]


_REPORT = msgspec.json.Decoder(_Report)


def encode_report(report: LeaseReport) -> str:
    """Return the annotation REPORT, without `refused` if it would be too long.

    Raises:
        InvalidRecord: if it is too long even so.
    """
    uuids: dict[DeviceId, int] = {}

    def encoded(slices: Iterable[Slice]) -> list[_LeaseSlice]:
        return [
            _LeaseSlice(
                uuids.setdefault(part.uuid, len(uuids)), part.card, part.memory_mib, part.compute
            )
            for part in slices
        ]

    pods = {uid: encoded(slices) for uid, slices in sorted(report.pods.items())}
    lingering = {
        uid: (pod.name, encoded(pod.slices)) for uid, pod in sorted(report.lingering.items())
    }
    refused = {
        uid: Refusal(refusal.sentence[:MAX_SENTENCE], refusal.movable)
        for uid, refusal in sorted(report.refused.items())
    }
    for shown in (refused, {}):
        text = card_records.encode(_Report(VERSION, list(uuids), pods, lingering, shown))
        if len(text) <= MAX_CHARACTERS:
            return text
    raise InvalidRecord(f"annotation {REPORT} would have {len(text)} characters")


def decode_report(annotations: Mapping[str, str]) -> LeaseReport | None:
    """Return None if the node program has reported nothing. Raises InvalidRecord."""
    if REPORT not in annotations:
        return None
    record = card_records.decode(annotations[REPORT], _REPORT, f"annotation {REPORT}")
    # The node's inventory has the same ids: they are kept once. Pods' are not: Python 3.12.0 to 3.12.6 never
    # frees a string that was interned, and a cluster has new pods all the time.
    devices = [DeviceId(intern(text)) for text in record.cards]

    def decoded(slices: Iterable[_LeaseSlice]) -> tuple[Slice, ...]:
        return tuple(
            Slice(part.card, devices[part.uuid], part.memory_mib, part.compute) for part in slices
        )

    try:
        return LeaseReport(
            {uid: decoded(slices) for uid, slices in record.pods.items()},
            {
                uid: Lingering(name, decoded(slices))
                for uid, (name, slices) in record.lingering.items()
            },
            record.refused,
        )
    except IndexError:
        raise InvalidRecord(
            f"annotation {REPORT} is not understood: a slice is on a card that it does not list"
        ) from None


# ---- the request ----


# ---- the status ----
