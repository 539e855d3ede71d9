"""Test what gateways' figures mean for one version."""

from dataclasses import replace

import pytest

from fenka.metrics_adapter.exposition import NoValue, SumReader
from fenka.metrics_adapter.values import GATEWAY_LABELS, GatewayFigures, requests_of


def gateway(waiting: float = 0, **versions: tuple[float, float, float]) -> GatewayFigures:
    """Return a gateway's figures. versions: weight, ready replicas and requests in flight of each."""
    return GatewayFigures(
        {name: in_flight for name, (_, _, in_flight) in versions.items()},
        {name: weight for name, (weight, _, _) in versions.items()},
        {name: ready for name, (_, ready, _) in versions.items() if ready},
        {},
        waiting,
    )


@pytest.mark.parametrize(
    ("gateways", "expected"),
    [
        # Requests in flight of all gateways.
        ([gateway(v1=(1, 2, 3)), gateway(v1=(1, 2, 4))], 7),
        # Two thirds of 6 waiting requests.
        ([gateway(6, v1=(2, 0, 1), v2=(1, 0, 0))], 1 + 4),
        # A tenth of 2 is less than 1, but nobody else serves.
        ([gateway(2, v1=(10, 0, 0), v2=(90, 0, 0))], 1),
        # Others serve, so the share of 0.2 is what it is.
        ([gateway(2, v1=(10, 0, 0), v2=(90, 1, 0))], 0.2),
        # The other version has replicas, but its weight is 0.
        ([gateway(2, v1=(10, 0, 0), v2=(0, 1, 0))], 2),
        # Weight 0: its requests finish, and none of those that wait is for it.
        ([gateway(5, v1=(0, 1, 2), v2=(1, 0, 0))], 2),
        ([gateway(5, v1=(0, 0, 0))], 0),
        # One request at each of two gateways is 2, not 1 each.
        ([gateway(1, v1=(1, 0, 0), v2=(1, 0, 0))] * 2, 1),
        ([gateway(v1=(1, 0, 0))], 0),
    ],
)
def test_requests_are_those_in_flight_and_a_share_of_the_waiting(
    gateways: list[GatewayFigures], expected: float
) -> None:
    """The share is by weight, and at least 1 where nobody else serves."""
    assert requests_of("v1", gateways) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ready", "idle_s", "expected"),
    [(1, 16, 0.001), (1, 20, 0), (1, None, 0), (0, 1, 0)],
)
def test_version_in_use_is_not_idle_when_no_request_was_seen_in_flight(
    ready: float, idle_s: float | None, expected: float
) -> None:
    """Its short requests are between an autoscaler's looks, 15 s. They start no version without replicas."""
    figures = gateway(v1=(1, ready, 0))
    idle = {} if idle_s is None else {"v1": idle_s}
    assert requests_of("v1", [figures, replace(figures, idle_s=idle)]) == expected
    busy = replace(figures, idle_s=idle, in_flight={"v1": 3})
    assert requests_of("v1", [busy]) == 3


def test_value_is_an_error_when_a_gateway_does_not_know_the_version() -> None:
    """One that has just started knows none."""
    with pytest.raises(NoValue, match="does not know version v1"):
        requests_of("v1", [gateway(v1=(1, 1, 3)), gateway()])


def test_pod_is_no_gateway_when_it_lacks_the_metric() -> None:
    """Its labels are a tenant's choice."""
    with pytest.raises(NoValue, match="pod p is no gateway"):
        GatewayFigures.of("p", SumReader(GATEWAY_LABELS).sums)
