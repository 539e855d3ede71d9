"""Pods that have a node, and whose containers have not started: since when, and what they wait for.

A missing image, Secret or volume keeps a pod so for good. It holds its card meanwhile.
"""

from fenka.cluster.objects import Pod

MAX_REASON, MAX_REASONS = 40, 3
"""Characters of a reason, and reasons to name. The kubelet writes them, each one word."""

NO_SANDBOX = "PodReadyToStartContainers"
"""Condition of a pod: whether its volumes and its network are there."""


def runs_nothing(pod: Pod) -> bool:
    """Return whether the pod has a node and no container of it has ever been made there."""
    if not pod.spec.node_name or pod.status.phase != "Pending":
        return False
    containers = (*pod.status.init_container_statuses, *pod.status.container_statuses)
    return not any(container.container_id for container in containers)


def waiting_reasons(pod: Pod) -> list[str]:
    """Return why its containers wait, in the kubelet's words, each once."""
    status = pod.status
    containers = (*status.init_container_statuses, *status.container_statuses)
    reasons = [
        container.state.waiting.reason for container in containers if container.state.waiting
    ]
    # PodInitializing only says that another container is the one that waits.
    named = dict.fromkeys(reason[:MAX_REASON] for reason in reasons if reason != "PodInitializing")
    return list(named)[:MAX_REASONS]


def unstarted(pod: Pod) -> str:
    """Return since when a pod that holds a card has not started, and why; empty if it has.

    It is the end of a sentence, and repeats the pod's name.
    """
    if not pod.spec.node_name or pod.status.phase != "Pending":
        return ""
    at = pod.status.start_time or pod.metadata.creation_timestamp
    since = f" since {at}" if at else ""
    if not runs_nothing(pod):
        return f"; {pod.full_name} has run only its init containers{since}"
    return (
        f"; {pod.full_name} has not started{since}{_why(pod)}: fenka why {pod.full_name} says more"
    )


def _why(pod: Pod) -> str:
    reasons = waiting_reasons(pod)
    sandbox = pod.condition(NO_SANDBOX)
    if sandbox is not None and sandbox.status == "False":
        # The kubelet says which only in events.
        reasons = [
            *(reasons or ["ContainerCreating"]),
            "its volumes, Secrets or network are missing",
        ]
    return f" ({', '.join(reasons)})" if reasons else ""
