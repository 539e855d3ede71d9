"""`fenka serve list`, `get` and `logs`: services, their versions and replicas.

Services in arena's layouts, and as data with arena's keys.

`fenka serve delete` and `fenka traffic-split`: withdraw versions and divide requests among them.
"""

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Literal

import typer

from fenka.cli import tables
from fenka.cli.errors import UserError
from fenka.cli.options import WideOutputOption, parse_duration, short_duration
from fenka.cli.tables import escape
from fenka.cli.workloads.backend import (
    AllNamespacesOption,
    CommandArgument,
    ContainerOption,
    InstanceOption,
    JobTarget,
    LogRequest,
    SinceOption,
    TailOption,
    TimestampsOption,
    VersionOption,
)
from fenka.cli.workloads.screens import UNKNOWN, block, cards, print_document
from fenka.cli.workloads.selection import find_version, open_backend
from fenka.cluster.service_objects import TYPES
from fenka.core.errors import FenkaError
from fenka.jobs.service import parse_weights
from fenka.views.workloads import ReplicaView, ServiceVersion

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
    columns: dict[str, Callable[[ReplicaView], str]] = {
        "NAME": lambda each: each.name,
        "STATUS": lambda each: each.status,
        "AGE": lambda each: short_duration(now - each.created),
        "READY": lambda each: f"{each.ready}/{each.containers}",
        "RESTARTS": lambda each: str(each.restarts),
        **({"GPU": lambda each: cards(each.requested)} if _gpu(version) else {}),
        "NODE": lambda each: each.node or UNKNOWN,
        **({"SOCKET": _sockets} if any(replica.sockets for replica in version.replicas) else {}),
    }
    rows = [[cell(replica) for cell in columns.values()] for replica in version.replicas]
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
        "instances": [_replica(replica, now) for replica in version.replicas],
        "requestCPUs": _sum(replica.cpus for replica in version.replicas),
        "requestGPUs": version.requested,
        "requestGPUMemory": _sum(replica.memory_units for replica in version.replicas),
        "requestGPUCore": _sum(replica.compute for replica in version.replicas),
        "creationTimestamp": int(version.created),
        "traffic": version.share,
        "note": version.note,
        "why": version.why,
    }


def _replica(replica: ReplicaView, now: float) -> dict[str, object]:
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


def _sockets(replica: ReplicaView) -> str:
    return ",".join(replica.sockets) or UNKNOWN


def _gpu(version: ServiceVersion) -> bool:
    """Return whether a version requests cards, or may."""
    return version.requested != 0


def _seconds(duration: float) -> str:
    return f"{max(int(duration), 0)}s"


NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="the service")]
_Kind = Literal["custom", "tensorflow", "tf", "triton"]


def list_services(
    target: JobTarget,
    all_namespaces: AllNamespacesOption = False,
    type_: Annotated[
        _Kind | None, typer.Option("-T", "--type", help="only services of this kind")
    ] = None,
    output: WideOutputOption = "table",
) -> None:
    """Print all versions of services."""
    backend = open_backend(target, all_namespaces=all_namespaces)
    kind = "tensorflow" if type_ == "tf" else type_
    versions = [version for version in backend.versions() if kind in (None, version.kind)]
    now = time.time()
    if not print_document([document(version, now) for version in versions], output):
        tables.print_lines(list_screen(versions, all_namespaces=all_namespaces))


def get(
    target: JobTarget,
    name: NameArgument,
    version: VersionOption = "",
    output: WideOutputOption = "table",
) -> None:
    """Print one version and its replicas."""
    chosen, now = find_version(open_backend(target), name, version), time.time()
    if not print_document(document(chosen, now), output):
        tables.print_lines(get_screen(chosen, now))


def logs(
    target: JobTarget,
    name: NameArgument,
    version: VersionOption = "",
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="print until the replica ends")
    ] = False,
    instance: InstanceOption = "",
    container: ContainerOption = "",
    tail: TailOption = None,
    since: SinceOption = "",
    timestamps: TimestampsOption = False,
) -> None:
    """Print the log of a version's oldest replica, or of the one that is named."""
    since_s = parse_duration("--since", since) if since else None
    backend = open_backend(target)
    chosen = find_version(backend, name, version)
    backend.logs(chosen, LogRequest(follow, instance, container, tail, since_s, timestamps))


def attach(
    target: JobTarget,
    name: NameArgument,
    command: CommandArgument = None,
    version: VersionOption = "",
    instance: InstanceOption = "",
    container: ContainerOption = "",
) -> None:
    """Run a command in a replica, connected to this terminal."""
    backend = open_backend(target)
    chosen = find_version(backend, name, version)
    request = LogRequest(instance=instance, container=container)
    code = backend.attach(chosen, request, command or ["sh"])
    if code:
        sys.exit(code)


def delete(
    target: JobTarget,
    names: Annotated[list[str], typer.Argument(metavar="NAME...")],
    version: VersionOption = "",
) -> None:
    """Delete services with all their versions, or one version."""
    backend, failures = open_backend(target), []
    for name in dict.fromkeys(names):
        try:
            backend.delete_service(name, version)
        except FenkaError as why:
            failures.append(str(why))
        else:
            which = f"version {version} of service {name}" if version else f"service {name}"
            print(f"{escape(which)}: deleted")
    if failures:
        raise UserError("; ".join(failures))


def traffic_split(
    target: JobTarget,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="the service")],
    weights: Annotated[
        list[str] | None,
        typer.Option(
            "-v",
            "--version-weight",
            metavar="VERSION:WEIGHT",
            help="percent of the requests; may be repeated",
        ),
    ] = None,
    http_route: Annotated[
        str,
        typer.Option(
            "--http-route", metavar="NAME", help="by this HTTPRoute of the Gateway API instead"
        ),
    ] = "",
) -> None:
    """Divide a service's requests among its versions."""
    shares = parse_weights(weights or [])
    open_backend(target).split(name, shares, http_route)
    text = ", ".join(f"{version} {weight}%" for version, weight in shares.items())
    print(f"{escape(name)}: {text}")
