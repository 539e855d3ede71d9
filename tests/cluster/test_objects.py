"""Objects as Go writes them: a time that was never set is null."""

import msgspec

from fenka.cluster.objects import Node, Pod


def test_objects_decode_when_go_writes_null_for_unset_times() -> None:
    """One such node would keep the extender from reading any."""
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": None}
    assert msgspec.convert({"status": {"conditions": [ready]}}, Node).ready
    states = (
        {"running": {"startedAt": None}},
        {"terminated": {"finishedAt": None}},
        {"waiting": {"reason": "CrashLoopBackOff"}},
    )
    for state in states:
        status = {"name": "c", "state": state, "lastState": {}}
        told = {"status": {"conditions": [ready], "containerStatuses": [status]}}
        pod = msgspec.json.decode(msgspec.json.encode(told), type=Pod)
        assert pod.ended_at == ""


def test_condition_is_read_when_it_has_no_time() -> None:
    """The API server answers null for a time that the writer of a condition has not set."""
    condition = {"type": "Ready", "status": "False", "lastTransitionTime": None}
    status = {"status": {"conditions": [condition]}}
    assert msgspec.convert(status, Pod).ended_at == ""
    assert not msgspec.convert(status, Node).ready
