"""Describes a pod's state in the words of kubectl's column STATUS.

Source: the printer of pods in k8s.io/kubernetes, pkg/printers/internalversion.
"""

from fenka.cluster.training_objects import (
    ContainerTerminated,
    TrainingContainerStatus,
    TrainingPod,
)

EVICTED = "Evicted"


def status_word(pod: TrainingPod) -> str:
    """Return the state, such as `Running`, `Init:0/1`, `ContainerCreating` or `OOMKilled`."""
    if pod.evicted:
        # kubectl has this word only for the kubelet's evictions.
        return EVICTED
    if pod.gone and not pod.finished:
        return "Unknown" if pod.status.reason == "NodeLost" else "Terminating"
    init = _init_word(pod)
    initialized = pod.condition("Initialized")
    if init and not (initialized and initialized.status == "True"):
        return init
    return _containers_word(pod)


def _init_word(pod: TrainingPod) -> str:
    """Return how far the init containers are; empty if they have completed."""
    sidecars = {
        container.name
        for container in pod.spec.init_containers
        if container.restart_policy == "Always"
    }
    for number, container in enumerate(pod.status.init_container_statuses):
        state = container.state
        if container.name in sidecars and container.started:
            continue
        if state.terminated is not None:
            if state.terminated.exit_code == 0:
                continue
            return f"Init:{_end_word(state.terminated)}"
        if state.waiting is not None and state.waiting.reason not in ("", "PodInitializing"):
            return f"Init:{state.waiting.reason}"
        return f"Init:{number}/{len(pod.spec.init_containers)}"
    return ""


def _containers_word(pod: TrainingPod) -> str:
    status = pod.status
    scheduled = pod.condition("PodScheduled")
    gated = scheduled is not None and scheduled.reason == "SchedulingGated"
    word = "SchedulingGated" if gated else status.reason or status.phase or "Unknown"
    words = [each for each in map(_container_word, status.container_statuses) if each]
    word = words[0] if words else word
    if word == "Completed" and any(each.state.running for each in status.container_statuses):
        return "Running" if pod.ready else "NotReady"
    return word


def _container_word(container: TrainingContainerStatus) -> str:
    state = container.state
    if state.waiting is not None:
        return state.waiting.reason
    return "" if state.terminated is None else _end_word(state.terminated)


def _end_word(end: ContainerTerminated) -> str:
    if end.reason:
        return end.reason
    return f"Signal:{end.signal}" if end.signal else f"ExitCode:{end.exit_code}"
