"""Which pods are asked for their metrics, and at which address. Pure.

Wire facts: only nodes write a pod's status, so its addresses are its own, except in the host's network,
where they are the node's. `started` is false until a container runs and its startup probe has succeeded.
deletionTimestamp is when a terminating pod's grace period ends; the kubelet has killed it by then.
"""

import ipaddress
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

import msgspec

from fenka.cluster.objects import Object, ObjectMeta
from fenka.metrics_adapter.wire import NoValue

CLOCKS = timedelta(seconds=30)
"""The clocks of two machines may differ by this."""


class ContainerPort(Object):
    """A port of a container."""

    name: str = ""
    container_port: int = 0


class Container(Object):
    """A container. Ports may be null."""

    name: str = ""
    ports: tuple[ContainerPort, ...] | None = None


class PodSpec(Object):
    """The spec of a pod."""

    node_name: str = ""
    host_network: bool = False
    containers: tuple[Container, ...] = ()


class ContainerStatus(Object):
    """A container as the kubelet reports it. started: null if it is unknown."""

    name: str = ""
    started: bool | None = None


class PodStatus(Object):
    """The status of a pod."""

    phase: str = ""
    pod_ip: str = msgspec.field(default="", name="podIP")
    host_ip: str = msgspec.field(default="", name="hostIP")
    container_statuses: tuple[ContainerStatus, ...] | None = None


class Pod(Object):
    """A pod, with the fields that say whether and where it is asked."""

    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    spec: PodSpec = msgspec.field(default_factory=PodSpec)
    status: PodStatus = msgspec.field(default_factory=PodStatus)

    @property
    def ending(self) -> bool:
        """Return whether the pod is terminating."""
        return self.metadata.deletion_timestamp is not None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a pod is asked. ending: it is terminating, so it may refuse connections because it has ended."""

    namespace: str
    pod: str
    uid: str
    host: str
    port: int
    port_name: str
    ending: bool


def running(pods: Iterable[Pod], now: datetime) -> Iterator[Pod]:
    """Yield the pods that have begun and not ended. now: with its time zone."""
    for pod in pods:
        end = pod.metadata.deletion_timestamp
        over = end is not None and datetime.fromisoformat(end) + CLOCKS <= now
        if pod.status.phase not in {"Pending", "Succeeded", "Failed"} and not over:
            yield pod


def endpoints(pods: Iterable[Pod], port_name: str, now: datetime) -> Iterator[Endpoint]:
    """Yield where pods are asked: those whose container with this port has started and may not have ended.

    A container that has not started has no requests. Raises NoValue if a pod cannot be asked.
    """
    for pod in running(pods, now):
        name, (container, port) = pod.metadata.name, _port(pod, port_name)
        states = {state.name: state.started for state in pod.status.container_statuses or ()}
        if states.get(container) is False:
            continue
        if pod.spec.host_network or pod.status.pod_ip == pod.status.host_ip:
            raise NoValue(
                f"pod {name} uses its node's network, so it has no address of its own: run it without "
                "hostNetwork"
            )
        try:
            host = str(ipaddress.ip_address(pod.status.pod_ip))
        except ValueError:
            raise NoValue(f"pod {name} has no address yet") from None
        meta = pod.metadata
        yield Endpoint(meta.namespace, name, meta.uid, host, port, port_name, pod.ending)


def _port(pod: Pod, port_name: str) -> tuple[str, int]:
    """Return the container with the port, and the port's number. Raises NoValue."""
    for container in pod.spec.containers:
        for port in container.ports or ():
            if port.name == port_name:
                return container.name, port.container_port
    raise NoValue(
        f"pod {pod.metadata.name} has no port named {port_name}: name the port of its metrics so"
    )
