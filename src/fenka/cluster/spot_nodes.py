"""Spot nodes: which pods they admit, because the cloud takes them back. Pure: time comes in by `set_time`.

The autoscaler buys them only for pods that may run there. Without this rule any other pod could be placed on
one that is there, and would be lost with it.
"""

from dataclasses import dataclass
from math import inf

from fenka.cluster.autoscaling import (
    CAPACITY,
    GROUP,
    INTERRUPTIBLE,
    PROTECTED_UNTIL,
    SPOT_ADMIT,
    decode_time,
)
from fenka.cluster.objects import Node, Pod
from fenka.cluster.queue_snapshot import time_limit_s
from fenka.core.inventory import needed_protection_s
from fenka.dialects.base import InvalidRecord

RECHECK_S = 30.0
"""While nodes are protected, the queue is scheduled again so often: pods outlast what is left."""


def is_interruptible(pod: Pod) -> bool:
    """Return whether its user says that it may be ended at any time."""
    return pod.metadata.annotations.get(INTERRUPTIBLE) == "true"


def protection_needed_s(pod: Pod) -> float:
    """Return for how long a spot node must be protected to run the pod, its termination grace included."""
    return needed_protection_s(time_limit_s(pod), interruptible=is_interruptible(pod))


@dataclass(frozen=True, slots=True)
class SpotRule:
    """Which pods a spot node admits.

    Attributes:
        protected_until: when it may be taken back, in seconds since 1970; 0 for at any time.
    """

    protected_until: float = 0.0

    def admits(self, pod: Pod, now: float) -> bool:
        """Return whether the pod may run there from now on."""
        return protection_needed_s(pod) <= self.left_s(now)

    def left_s(self, now: float) -> float:
        """Return for how long the node is still protected."""
        return max(self.protected_until - now, 0.0)

    @property
    def sentence(self) -> str:
        """Return why the node does not admit other pods."""
        return (
            f'spot node, taken back at any time: annotate the pod {INTERRUPTIBLE}: "true" '
            "if it may restart"
        )


UNPROTECTED = SpotRule()


def read_spot_rule(node: Node) -> SpotRule | None:
    """Return a node's rule; None if it is no spot node that was bought, or admits every pod.

    An annotation that is missing or cannot be read protects nothing.
    """
    labels, annotations = node.metadata.labels, node.metadata.annotations
    if labels.get(CAPACITY) != "spot" or not labels.get(GROUP):
        return None
    if annotations.get(SPOT_ADMIT) == "all":
        return None
    try:
        return SpotRule(decode_time(annotations.get(PROTECTED_UNTIL, "")))
    except InvalidRecord:
        return UNPROTECTED


class SpotNodes:
    """The rules of all spot nodes.

    Attributes:
        now: seconds since 1970. Until a time is set, no protection counts.
    """

    def __init__(self) -> None:
        self.now = inf
        self._rules: dict[str, SpotRule] = {}
        self._checked_at = -inf

    def get(self, node: str) -> SpotRule | None:
        """Return the node's rule, None if it admits any pod. All that are not protected have the same."""
        rule = self._rules.get(node)
        return rule if rule is None or rule.left_s(self.now) else UNPROTECTED

    def excluded(self, pod: Pod) -> frozenset[str]:
        """Return the nodes that do not admit the pod."""
        needed = protection_needed_s(pod)
        return frozenset(
            name for name, rule in self._rules.items() if needed > rule.left_s(self.now)
        )

    def set(self, name: str, rule: SpotRule | None) -> bool:
        """Take a node's rule, None for none. Return whether that changes anything."""
        before = self.get(name)
        self._rules.pop(name, None)
        if rule is not None:
            self._rules[name] = rule
        return self.get(name) != before

    def set_time(self, now: float) -> frozenset[str]:
        """Take the time. Return the nodes whose protection has ended by it."""
        before = self._protected()
        self.now = now
        # A clock that was set back protects nodes again.
        return before ^ self._protected()

    def is_recheck_due(self) -> bool:
        """Return, every RECHECK_S, whether nodes are protected, for less time than at the last check."""
        if 0 <= self.now - self._checked_at < RECHECK_S or not self._protected():
            return False
        self._checked_at = self.now
        return True

    def _protected(self) -> frozenset[str]:
        return frozenset(name for name, rule in self._rules.items() if rule.left_s(self.now))
