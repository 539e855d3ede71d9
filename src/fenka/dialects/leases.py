"""What a node's program reports on its Node: which pods hold what of which card.

    fenka.io/leases   JSON, written by the node's program alone

The record on a pod can be changed by the pod's owner, the Node cannot. So the scheduler counts a pod that is
reported here by this, whatever its record says. `refused` are pods that the node has refused to start for a
minute: the scheduler moves them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fenka.core.inventory import DeviceId
from fenka.core.request import Slice
from fenka.dialects.base import InvalidRecord, counted

REPORT = "fenka.io/leases"
"""Node annotation."""

VERSION = 1

LONGEST = 200_000
"""Characters. All annotations of an object together may have 256 KiB."""

LONGEST_SENTENCE = 300


@dataclass(frozen=True, slots=True)
class Lingering:
    """Allocation of a pod that the API server no longer shows, or shows as finished. name: namespace/name."""

    name: str
    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a pod does not start. movable: whether it may start in another place."""

    sentence: str
    movable: bool = False


@dataclass(frozen=True, slots=True)
class LeaseReport:
    """By UID. pods: what pods hold at their peak. Their processes are alive or may start at any moment."""

    pods: Mapping[str, tuple[Slice, ...]] = field(default_factory=dict)
    lingering: Mapping[str, Lingering] = field(default_factory=dict)
    refused: Mapping[str, Refusal] = field(default_factory=dict)


EMPTY_REPORT = LeaseReport()


def encode_report(report: LeaseReport) -> str:
    """Return the annotation REPORT, without `refused` if too long. Raises InvalidRecord if it still is."""
    uuids: dict[str, int] = {}

    def written(slices: Sequence[Slice]) -> list[list[int]]:
        return [
            [uuids.setdefault(it.uuid, len(uuids)), it.card, it.memory_mib, it.compute]
            for it in slices
        ]

    pods = {uid: written(slices) for uid, slices in sorted(report.pods.items())}
    lingering = {uid: [it.name, written(it.slices)] for uid, it in sorted(report.lingering.items())}
    refused = {
        uid: [it.sentence[:LONGEST_SENTENCE], it.movable]
        for uid, it in sorted(report.refused.items())
    }
    for shown in (refused, {}):
        text = json.dumps(
            {
                "version": VERSION,
                "cards": list(uuids),
                "pods": pods,
                "lingering": lingering,
                "refused": shown,
            },
            separators=(",", ":"),
        )
        if len(text) <= LONGEST:
            return text
    raise InvalidRecord(f"annotation {REPORT} would have {len(text)} characters")


def decode_report(annotations: Mapping[str, str]) -> LeaseReport | None:
    """Return None if the node's program has reported nothing. Raises InvalidRecord."""
    if REPORT not in annotations:
        return None
    try:
        said = json.loads(annotations[REPORT])
        _check_version(said["version"])
        uuids = [DeviceId(str(it)) for it in said["cards"]]
        return LeaseReport(
            {str(uid): _slices(it, uuids) for uid, it in said["pods"].items()},
            {
                str(uid): Lingering(str(name), _slices(it, uuids))
                for uid, (name, it) in said["lingering"].items()
            },
            {
                str(uid): Refusal(str(sentence), bool(movable))
                for uid, (sentence, movable) in said["refused"].items()
            },
        )
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        RecursionError,
    ) as why:
        raise InvalidRecord(f"annotation {REPORT} is not understood: {why!r}") from None


def _check_version(value: Any) -> None:
    if value != VERSION:
        raise ValueError(f"version {value!r} is not {VERSION}")


def _slices(items: Any, uuids: Sequence[DeviceId]) -> tuple[Slice, ...]:
    return tuple(
        Slice(counted(card), uuids[counted(uuid)], counted(mib), counted(percent))
        for uuid, card, mib, percent in items
    )
