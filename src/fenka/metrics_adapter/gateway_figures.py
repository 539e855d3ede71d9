"""What the figures of a service's gateways say about one version. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from fenka.core.scaling import VersionUse, version_loads
from fenka.metrics_adapter.exposition import LabelValues, Sums
from fenka.metrics_adapter.wire import NoValue

IN_FLIGHT = "fenka_gateway_requests_in_flight"
WAITING = "fenka_gateway_requests_waiting"
WEIGHT = "fenka_gateway_version_weight"
REPLICAS = "fenka_gateway_replicas"
IDLE = "fenka_gateway_version_idle_seconds"
READY = "ready"

RECENT_S = 20.0
"""A version that got a request within this time is in use.

Autoscalers look every 15 s by default, so one of their looks is within it. More would only make
`--down-after` longer, which begins at the last look that saw a version in use.
"""
SOME_REQUESTS = 0.001
"""The smallest value that can be served."""

GATEWAY_LABELS: dict[str, LabelValues] = {
    IN_FLIGHT: ("version",),
    WAITING: (),
    WEIGHT: ("version",),
    REPLICAS: ("version", "state"),
    IDLE: ("version",),
}
"""The gateway's metrics that are read, with their labels."""


@dataclass(frozen=True, slots=True)
class GatewayFigures:
    """What one gateway has, by version.

    Attributes:
        idle_s: Seconds since the last request.
        waiting: Requests without a replica, of all versions.
    """

    in_flight: dict[str, float]
    weights: dict[str, float]
    ready: dict[str, float]
    idle_s: dict[str, float]
    waiting: float

    @classmethod
    def of(cls, pod: str, sums: Sums) -> Self:
        """Return the figures that a pod answered. Raises NoValue."""
        if () not in sums[WAITING]:
            raise NoValue(f"pod {pod} is no gateway: it does not have {WAITING}")
        return cls(
            {version: value for (version,), value in sums[IN_FLIGHT].items()},
            {version: value for (version,), value in sums[WEIGHT].items()},
            {
                version: value
                for (version, state), value in sums[REPLICAS].items()
                if state == READY
            },
            {version: value for (version,), value in sums[IDLE].items()},
            sums[WAITING][()],
        )


def requests_of(version: str, gateways: Sequence[GatewayFigures]) -> float:
    """Return a version's load by the figures of all gateways of its service; see `version_loads`.

    An autoscaler looks now and then, and would miss all short requests of a version in use: it is never 0.
    Raises NoValue for a version that a gateway does not know.
    """
    for gateway in gateways:
        if version not in gateway.weights or version not in gateway.in_flight:
            raise NoValue(f"a gateway does not know version {version}: it has no Service yet")
    names = {name for gateway in gateways for name in gateway.weights}
    uses = {
        name: VersionUse(
            max(gateway.weights.get(name, 0) for gateway in gateways),
            sum(gateway.in_flight.get(name, 0) for gateway in gateways),
            any(gateway.ready.get(name) for gateway in gateways),
        )
        for name in names
    }
    load = version_loads(uses, sum(gateway.waiting for gateway in gateways))[version]
    in_use = uses[version].serves and any(
        gateway.idle_s.get(version, RECENT_S) < RECENT_S for gateway in gateways
    )
    return max(load, SOME_REQUESTS) if in_use else load
