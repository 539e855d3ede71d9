"""Services in arena's layouts, and as data with arena's keys."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from fenka.cli import tables
from fenka.cli.durations import short_duration
from fenka.cli.training.blocks import UNKNOWN, block, cards
from fenka.cluster.service_objects import TYPES
from fenka.views.services import Replica, ServiceVersion

Columns = Mapping[str, Callable[[ServiceVersion], str]]


def list_screen(versions: Sequence[ServiceVersion], *, all_namespaces: bool) -> list[str]:
    """Return a line for each version."""
    namespace: Columns = {"NAMESPACE": lambda each: each.namespace} if all_namespaces else {}
    columns: Columns = {
        "NAME": lambda each: each.name,
        "TYPE": _kind,
        "VERSION": lambda each: each.version,
        "DESIRED": lambda each: str(each.desired),
        "AVAILABLE": lambda each: str(each.available),
        "ADDRESS": _address,
        "PORTS": _ports,
    }
    gpu: Columns = {"GPU": lambda each: cards(each.requested)} if any(map(_gpu, versions)) else {}
    return tables.align(tables.tabulate(versions, {**namespace, **columns, **gpu}))


def get_screen(version: ServiceVersion, now: float) -> list[str]:
    """Return a version, and a line for each replica."""
    fields = {
        "Name": version.name,
        "Namespace": version.namespace,
        "Type": _kind(version),
        "Version": version.version,
        "Desired": str(version.desired),
        "Available": str(version.available),
        "Age": short_duration(now - version.created),
        "Address": _address(version),
        "Port": _ports(version),
    }
    if _gpu(version):
        fields["GPU"] = cards(version.requested)
    columns: dict[str, Callable[[Replica], str]] = {
        "NAME": lambda each: each.name,
        "STATUS": lambda each: each.status,
        "AGE": lambda each: short_duration(now - each.created),
        "READY": lambda each: f"{each.ready}/{each.containers}",
        "RESTARTS": lambda each: str(each.restarts),
        **({"GPU": lambda each: cards(each.requested)} if _gpu(version) else {}),
        "NODE": lambda each: each.node or UNKNOWN,
        **({"SOCKET": _sockets} if any(each.sockets for each in version.replicas) else {}),
    }
    rows = [[cell(each) for cell in columns.values()] for each in version.replicas]
    notes = [f"Note: {note}" for note in (version.note, version.why) if note]
    return [
        *(f"{label + ':':<12}{value}" for label, value in fields.items()),
        *block("Instances:", [*columns], rows),
        "",
        *notes,
    ]


def document(version: ServiceVersion, now: float) -> dict[str, object]:
    """Return the data of one version: arena's keys, and fenka's own after them."""
    return {
        "uuid": version.uid,
        "name": version.name,
        "namespace": version.namespace,
        "type": _kind(version),
        "version": version.version,
        "age": _seconds(now - version.created),
        "desiredInstances": version.desired,
        "availableInstances": version.available,
        "endpoints": [
            {"name": port.name, "port": port.port, "nodePort": port.node_port}
            for port in version.ports
        ],
        "ip": version.address or UNKNOWN,
        "instances": [_replica(each, now) for each in version.replicas],
        "requestCPUs": _sum(each.cpus for each in version.replicas),
        "requestGPUs": version.requested,
        "requestGPUMemory": _sum(each.memory_units for each in version.replicas),
        "requestGPUCore": _sum(each.compute for each in version.replicas),
        "creationTimestamp": int(version.created),
        "traffic": version.share,
        "note": version.note,
        "why": version.why,
    }


def _replica(replica: Replica, now: float) -> dict[str, object]:
    return {
        "name": replica.name,
        "status": replica.status,
        "age": _seconds(now - replica.created),
        "readyContainers": replica.ready,
        "totalContainers": replica.containers,
        "restartCount": replica.restarts,
        "nodeIP": replica.node_address or UNKNOWN,
        "nodeName": replica.node or UNKNOWN,
        "ip": replica.address,
        "requestCPUs": _sum([replica.cpus]),
        "requestGPUs": replica.requested,
        "requestGPUMemory": _sum([replica.memory_units]),
        "requestGPUCore": replica.compute,
        "creationTimestamp": int(replica.created),
        "why": replica.why,
        "sockets": list(replica.sockets),
    }


def _sum(amounts: Iterable[float]) -> float:
    """Return a sum, a whole number as an integer, as arena's readers expect it."""
    total = round(sum(amounts), 3)
    return int(total) if total == int(total) else total


def _kind(version: ServiceVersion) -> str:
    return TYPES[version.kind][1]


def _address(version: ServiceVersion) -> str:
    share = "" if version.share is None or not version.address else f"({version.share}%)"
    return (version.address or UNKNOWN) + share


def _ports(version: ServiceVersion) -> str:
    return ",".join(map(str, version.ports)) or UNKNOWN


def _sockets(replica: Replica) -> str:
    return ",".join(replica.sockets) or UNKNOWN


def _gpu(version: ServiceVersion) -> bool:
    """Return whether a version requests cards, or may."""
    return version.requested != 0


def _seconds(duration: float) -> str:
    return f"{max(int(duration), 0)}s"
