"""Services of a cluster: values of the screens from one reading of its objects."""

from collections.abc import Iterable, Mapping

from fenka.cluster.objects import seconds
from fenka.cluster.pod_status import status_word
from fenka.cluster.service_objects import (
    SERVICE,
    TYPE,
    TYPES,
    VERSION,
    AddressService,
    ServiceObjects,
    ServingDeployment,
    read_weights,
)
from fenka.cluster.training_objects import TrainingPod
from fenka.core.weights import shares
from fenka.dialects import ack, gpushare
from fenka.dialects.base import parse_milli
from fenka.views.cluster_jobs import SUBMISSION_S
from fenka.views.pod_cards import PodCards
from fenka.views.services import Replica, ServiceVersion, ServingPort

_KINDS = {label: kind for kind, (label, _) in TYPES.items()}
_PORTS = {"grpc-serving": "GRPC", "http-serving": "RESTFUL"}
"""arena's names of ports, in the order in which it prints them."""

Name = tuple[str, str]
"""Namespace and name of a service."""


def service_versions(objects: ServiceObjects, now: float) -> list[ServiceVersion]:
    """Return all versions, by namespace, name and version."""
    cards = PodCards(objects.nodes, objects.pods)
    addresses = {_name(each): each for each in objects.addresses}
    pods: dict[tuple[Name, str], list[TrainingPod]] = {}
    for pod in objects.pods:
        key = _name(pod), pod.metadata.labels.get(VERSION, "")
        pods.setdefault(key, []).append(pod)
    names: dict[Name, list[str]] = {}
    for each in objects.versions:
        names.setdefault(_name(each), []).append(each.version)
    divided = {name: _shares(addresses.get(name), versions) for name, versions in names.items()}
    versions = [
        _version(
            each,
            addresses.get(_name(each)),
            [_replica(pod, cards) for pod in pods.get((_name(each), each.version), ())],
            divided[_name(each)].get(each.version),
            now,
        )
        for each in objects.versions
    ]
    return sorted(versions, key=lambda each: (each.namespace, each.name, each.version))


def _name(item: ServingDeployment | AddressService | TrainingPod) -> Name:
    return item.metadata.namespace, item.metadata.labels.get(SERVICE, "")


def _version(
    deployment: ServingDeployment,
    address: AddressService | None,
    replicas: Iterable[Replica],
    share: int | None,
    now: float,
) -> ServiceVersion:
    meta = deployment.metadata
    created = seconds(meta.creation_timestamp) or 0
    return ServiceVersion(
        meta.labels[SERVICE],
        meta.namespace,
        meta.uid,
        _KINDS.get(meta.labels.get(TYPE, ""), "custom"),
        deployment.version,
        deployment.spec.replicas,
        deployment.status.available_replicas,
        created,
        address=address.address if address else "",
        ports=_ports(address),
        share=share,
        replicas=tuple(sorted(replicas, key=lambda each: (each.created, each.name))),
        note=_note(deployment, now - created),
        rolled_out=deployment.rolled_out and not deployment.interrupted,
    )


def _ports(address: AddressService | None) -> tuple[ServingPort, ...]:
    known = {port.name: port for port in address.spec.ports} if address else {}
    return tuple(
        ServingPort(word, known[name].port, known[name].node_port)
        for name, word in _PORTS.items()
        if name in known
    )


def _shares(address: AddressService | None, versions: Iterable[str]) -> Mapping[str, int]:
    """Return the percent of the requests that each version gets; nothing if they are not divided."""
    weights = read_weights(address.metadata.annotations) if address else None
    return {} if weights is None else shares(weights, [*versions])


def _note(deployment: ServingDeployment, age_s: float) -> str:
    if not deployment.interrupted:
        return deployment.problem
    if age_s < SUBMISSION_S:
        return "it is being deployed"
    service, version = deployment.metadata.labels[SERVICE], deployment.version
    return (
        "its deployment was interrupted, and it will not start: delete it (fenka serve delete "
        f"{service} -v {version}) and deploy it again"
    )


def _replica(pod: TrainingPod, cards: PodCards) -> Replica:
    statuses = pod.status.container_statuses
    return Replica(
        pod.metadata.name,
        status_word(pod),
        seconds(pod.metadata.creation_timestamp) or 0,
        sum(each.ready for each in statuses),
        len(pod.spec.containers),
        sum(each.restart_count for each in statuses),
        node=pod.spec.node_name,
        node_address=cards.node_address(pod),
        address=pod.status.pod_ip,
        requested=cards.requested(pod),
        why=pod.unschedulable or "",
        memory_units=pod.amount(gpushare.MEMORY),
        compute=pod.amount(ack.CORE),
        cpus=_cpus(pod),
    )


def _cpus(pod: TrainingPod) -> float:
    """Return the processors that a pod's containers request together."""
    amounts = (each.resources.requests.get("cpu", "0") for each in pod.spec.containers)
    return sum(map(parse_milli, amounts)) / 1000
