"""Test which pods are asked, and where."""

from collections.abc import Callable

import msgspec
import pytest

from fenka.metrics_adapter.exposition import NoValue
from fenka.metrics_adapter.scraper import ScrapedEndpoint, ScrapedPod, endpoints
from tests.metrics_adapter.harness import NOW, Json, pod_json

Change = Callable[[Json], object]


def asked(change: Change = lambda _: None) -> list[ScrapedEndpoint]:
    """Return where a pod is asked after a change of it."""
    pod = pod_json("p", 8002, "http-metrics")
    pod["status"]["podIP"] = "10.0.0.7"
    change(pod)
    decoded = msgspec.json.decode(msgspec.json.encode(pod), type=ScrapedPod)
    return list(endpoints([decoded], "http-metrics", NOW))


def status(**fields: object) -> Change:
    """Return a change of the pod's status."""
    return lambda pod: pod["status"].update(fields)


def deleted(time: str) -> Change:
    """Return a change: the pod's grace period ends at this time."""
    return lambda pod: pod["metadata"].update(deletionTimestamp=time)


def test_pod_is_asked_at_its_own_address_and_the_named_port() -> None:
    """IPv6 addresses as well."""
    (place,) = asked()
    assert (place.host, place.port, place.ending) == ("10.0.0.7", 8002, False)
    assert asked(status(podIP="fd00::7"))[0].host == "fd00::7"
    assert asked(status(containerStatuses=None))[0].port == 8002


@pytest.mark.parametrize(
    "change",
    [
        status(phase="Pending"),
        status(phase="Succeeded"),
        status(phase="Failed"),
        status(containerStatuses=[{"name": "main", "started": False}]),
        deleted("2025-12-31T23:59:00Z"),
    ],
)
def test_pod_is_not_asked_when_it_has_not_begun_or_has_ended(change: Change) -> None:
    """It has no requests. A terminating pod has ended once its grace period is over."""
    assert asked(change) == []


def test_terminating_pod_is_asked_while_its_grace_period_lasts() -> None:
    """It still has requests. Clocks may differ by some seconds."""
    (place,) = asked(deleted("2026-01-01T00:01:00Z"))
    assert place.ending
    assert asked(deleted("2025-12-31T23:59:50Z"))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda pod: pod["spec"].update(hostNetwork=True), "uses its node's network"),
        (status(podIP="192.0.2.1"), "uses its node's network"),
        (status(podIP=""), "no address"),
        (status(podIP="metadata.internal"), "no address"),
        (lambda pod: pod["spec"]["containers"][0].update(ports=None), "no port named http-metrics"),
        (lambda pod: pod["spec"].update(containers=[]), "no port named http-metrics"),
    ],
)
def test_pod_is_refused_when_its_address_is_not_its_own(change: Change, sentence: str) -> None:
    """A node's ports must not be readable by way of a pod in its network."""
    with pytest.raises(NoValue, match=sentence):
        asked(change)
