"""Pods of a queue on a virtual clock."""

from datetime import UTC, datetime
from typing import Any

import msgspec

from fenka.cluster.objects import Pod
from tests.builders import Json, gang_labels, pod_json

START = datetime(2026, 1, 1, tzinfo=UTC).timestamp()


UNSCHEDULABLE: Json = {
    "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]
}


def stamp(at: float) -> str:
    """So many seconds after the start."""
    return datetime.fromtimestamp(START + at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def make(
    name: str,
    units: int,
    at: float = 0,
    *,
    runs: int | None = None,
    started: float | None = None,
    spec: Json | None = None,
    namespace: str = "default",
    said: Json | None = None,
    **rest: Any,
) -> Pod:
    """A pod asked for at that time. runs: its deadline, with no grace."""
    made = pod_json(name, units, uid=name, **rest)
    made["metadata"] |= {"creationTimestamp": stamp(at), "namespace": namespace}
    made["spec"] |= {"terminationGracePeriodSeconds": 0, **(spec or {})}
    if runs is not None:
        made["spec"]["activeDeadlineSeconds"] = runs
    if started is not None:
        made["status"]["startTime"] = stamp(started)
    made["status"] |= said or {}
    return msgspec.convert(made, Pod)


def gang(name: str, units: int, at: float) -> Pod:
    """Return a pod of the gang g, which has two."""
    return make(name, units, at, labels=gang_labels("g", 2))
