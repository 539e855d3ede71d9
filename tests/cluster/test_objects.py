"""Objects as Go writes them, where a time that was never set is null, and what they mean."""

from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.cluster.objects import Event, Node, Pod, micro_time, seconds
from tests.builders import Json


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


@pytest.mark.parametrize(
    ("moment", "expected"),
    [
        ("1970-01-01T00:01:40Z", 100.0),
        ("1970-01-01T00:01:40.250000Z", 100.25),
        # two hours east of Greenwich it is two hours earlier
        ("1970-01-01T02:01:40+02:00", 100.0),
        ("", None),
        ("yesterday", None),
        ("1970-13-01T00:00:00Z", None),
        ("0000-00-00T00:00:00Z", None),
        ("1970-01-01T00:01:40Z" * 100, None),
    ],
)
def test_time_is_read_only_when_it_is_one(moment: str, expected: float | None) -> None:
    """As Kubernetes writes it, in seconds since 1970."""
    assert seconds(moment) == expected


@given(st.text() | st.datetimes().map(str) | st.from_regex(r"[0-9:TZ.+-]{0,30}", fullmatch=True))
def test_any_text_is_a_time_or_none(moment: str) -> None:
    """Some times are written by others than the API server."""
    assert isinstance(seconds(moment), float | None)


@given(st.datetimes(min_value=datetime(1970, 1, 2), max_value=datetime(9999, 1, 1)))
def test_written_time_is_read_as_the_same(moment: datetime) -> None:
    """To the microsecond, as a MicroTime has it."""
    moment = moment.replace(tzinfo=UTC)
    assert seconds(micro_time(moment)) == moment.timestamp()


@pytest.mark.parametrize(
    ("conditions", "readiness", "ready"),
    [
        ([("Ready", "True")], "True", True),
        ([("Ready", "False")], "False", False),
        ([("Ready", "Unknown")], "Unknown", False),
        # a node that has never reported
        ([], "Unknown", False),
        ([("MemoryPressure", "True")], "Unknown", False),
        ([("MemoryPressure", "True"), ("Ready", "True")], "True", True),
    ],
)
def test_node_is_ready_only_when_its_condition_says_so(
    conditions: list[tuple[str, str]], readiness: str, ready: bool
) -> None:
    """Other conditions do not count."""
    listed = [{"type": kind, "status": status} for kind, status in conditions]
    node = msgspec.convert({"status": {"conditions": listed}}, Node)
    assert (node.readiness, node.ready) == (readiness, ready)


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        ([], "unknown"),
        ([("Hostname", "n1")], "unknown"),
        ([("Hostname", "n1"), ("InternalIP", "10.0.0.1"), ("InternalIP", "fd00::1")], "10.0.0.1"),
    ],
)
def test_address_is_the_first_internal_one(addresses: list[tuple[str, str]], expected: str) -> None:
    """Screens show one address for each node."""
    listed = [{"type": kind, "address": address} for kind, address in addresses]
    node = msgspec.convert({"status": {"addresses": listed}}, Node)
    assert node.address == expected


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ({"status": "False", "reason": "Unschedulable", "message": "0/2 nodes"}, "0/2 nodes"),
        # kube-scheduler tried, and had nothing to say
        ({"status": "False", "reason": "Unschedulable"}, ""),
        ({"status": "False", "reason": "SchedulingGated", "message": "gated"}, None),
        ({"status": "True", "reason": "Unschedulable"}, None),
    ],
)
def test_pod_is_unschedulable_only_when_its_condition_says_so(
    condition: Json, expected: str | None
) -> None:
    """A gated pod has not been tried."""
    conditions = [{"type": "PodScheduled", **condition}]
    pod = msgspec.convert({"status": {"conditions": conditions}}, Pod)
    assert pod.unschedulable == expected


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"series": {"lastObservedTime": "4"}, "lastTimestamp": "3", "eventTime": "2"}, "4"),
        ({"series": {}, "lastTimestamp": "3", "eventTime": "2"}, "3"),
        ({"series": None, "lastTimestamp": None, "eventTime": "2"}, "2"),
        ({"lastTimestamp": None, "eventTime": None}, "1"),
    ],
)
def test_event_happened_when_it_was_last_observed(times: Json, expected: str) -> None:
    """Old and new kinds of events have different fields, the others are null."""
    event = msgspec.convert({"metadata": {"creationTimestamp": "1"}, **times}, Event)
    assert event.at == expected


@pytest.mark.parametrize(
    ("inits", "apps", "expected"),
    [
        ([], ["3", "4"], 7),
        # an init container runs before the others: max(5, 3 + 1)
        ([("5", "")], ["3", "1"], 5),
        # a sidecar runs beside all that come after it: max(2 + 5, 2 + 3)
        ([("2", "Always"), ("5", "")], ["3"], 7),
        # the init container has ended when the sidecar starts: max(5, 2 + 4)
        ([("5", ""), ("2", "Always")], ["4"], 6),
        # whole numbers of other notations: 1k + 24
        ([], ["1k", "24"], 1024),
        # what cannot be read is no amount
        ([], ["3", "many"], 0),
        ([("-1", "")], ["3"], 0),
    ],
)
def test_amount_is_the_peak_of_all_containers(
    inits: list[tuple[str, str]], apps: list[str], expected: int
) -> None:
    """As kube-scheduler adds containers up."""

    def container(amount: str, restart_policy: str = "") -> Json:
        resources = {"limits": {"nvidia.com/gpu": amount}}
        return {"name": "c", "resources": resources, "restartPolicy": restart_policy or None}

    spec = {
        "initContainers": [container(*init) for init in inits],
        "containers": [container(app) for app in apps],
    }
    pod = msgspec.convert({"spec": spec}, Pod)
    assert pod.amount("nvidia.com/gpu") == expected
    assert pod.amount("nvidia.com/other") == 0


@pytest.mark.parametrize(
    ("phase", "finished"),
    [
        ("Succeeded", True),
        ("Failed", True),
        ("Running", False),
        ("Pending", False),
        ("Unknown", False),
        ("", False),
    ],
)
def test_pod_has_finished_when_its_phase_is_final(phase: str, finished: bool) -> None:
    """An unknown phase is that of a node that does not answer: its programs may run."""
    assert msgspec.convert({"status": {"phase": phase}}, Pod).finished is finished
