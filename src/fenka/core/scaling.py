"""How many replicas a service gets for its load, by the rule of Kubernetes' HorizontalPodAutoscaler.

With a target T per replica and a load L in total, N replicas have the ratio L / (N * T). Within the tolerance
nothing changes; otherwise ceil(L / T) replicas are desired. The number grows to the smallest that was desired
during `up_after_s`, and shrinks to the largest that was desired during `down_after_s`.

How the weights of a service's versions divide its requests.
"""

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

TOLERANCE = 0.1
"""As in the HorizontalPodAutoscaler."""


@dataclass(frozen=True, slots=True)
class ScalingPolicy:
    """How a version scales.

    Attributes:
        least: The smallest number of replicas; 0 if an idle version needs none.
        most: The largest number of replicas.
        target: Load of one replica.
        up_after_s: Seconds of more load before a replica is added.
        down_after_s: Seconds of less load before a replica is removed.
    """

    least: int
    most: int
    target: float
    up_after_s: float = 0.0
    down_after_s: float = 300.0


def desired_replicas(policy: ScalingPolicy, current: int, load: float) -> int:
    """Return the number of replicas for a load, within the policy's limits, without its pauses."""
    capacity = current * policy.target
    if current and abs(load - capacity) <= TOLERANCE * capacity:
        wanted = current
    else:
        # Load is a number of requests: the smallest amount needs a replica.
        wanted = math.ceil(load / policy.target)
    return min(max(wanted, policy.least), policy.most)


class ReplicaScaler:
    """Decides about one version, with what was desired before."""

    def __init__(self, policy: ScalingPolicy) -> None:
        self._policy = policy
        self._desired: deque[tuple[float, int]] = deque()

    def step(self, now: float, current: int, load: float) -> int:
        """Return the number of replicas to have from now on.

        Args:
            now: The current time in seconds.
            current: The number of replicas that there are or are being started.
            load: The load of all of them.
        """
        policy = self._policy
        desired = desired_replicas(policy, current, load)
        if not self._desired:
            # Earlier desired numbers are not known, so the pauses begin now.
            self._desired.append((now, current))
        self._desired.append((now, desired))
        longest = max(policy.up_after_s, policy.down_after_s)
        while now - self._desired[0][0] > longest:
            self._desired.popleft()
        up = min(self._since(now - policy.up_after_s), default=desired)
        down = max(self._since(now - policy.down_after_s), default=desired)
        # A version without replicas has requests that wait: they cannot wait for the pause, too.
        if current == 0:
            return desired
        number = max(current, up) if up > current else min(current, down)
        return min(max(number, policy.least), policy.most)

    def _since(self, moment: float) -> Iterator[int]:
        return (desired for at, desired in self._desired if at > moment)


@dataclass(frozen=True, slots=True)
class VersionUse:
    """The gateways' figures of one version.

    Attributes:
        weight: Its share of the requests, relative to the other versions' weights.
        in_flight: Requests at its replicas.
        serves: Whether it has a replica that accepts requests.
    """

    weight: float
    in_flight: float
    serves: bool


def version_loads(versions: Mapping[str, VersionUse], waiting: float) -> dict[str, float]:
    """Return the load of each version: its requests in flight, and its share of those that wait.

    If requests wait and no version serves, each version with a weight has a load of at least 1. So the share
    of a small weight starts a replica, too.

    Args:
        versions: The versions by name.
        waiting: Requests that wait for a replica of any version.
    """
    total = sum(use.weight for use in versions.values())
    none_serves = not any(use.serves and use.weight for use in versions.values())
    loads = {}
    for name, use in versions.items():
        share = waiting * use.weight / total if total else 0.0
        if waiting and none_serves and use.weight:
            share = max(share, 1.0)
        loads[name] = use.in_flight + share
    return loads


def shares(weights: Mapping[str, int] | None, versions: Collection[str]) -> dict[str, int]:
    """Return the shares of versions, which add up to 100; nothing if none of them has a weight.

    Args:
        weights: The weights by version; None if all are equal.
        versions: The versions that there are.
    """
    known = {name: 1 if weights is None else weights.get(name, 0) for name in versions}
    total = sum(known.values())
    if not total:
        return {}
    parts = {name: 100 * weight // total for name, weight in known.items()}
    # The largest remainders get what is left of the sum.
    order = sorted(known, key=lambda name: (-(100 * known[name] % total), name))
    for name in order[: 100 - sum(parts.values())]:
        parts[name] += 1
    return parts
