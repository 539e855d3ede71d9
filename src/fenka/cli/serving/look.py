"""`fenka serve list`, `get` and `logs`: services, their versions and replicas."""

import sys
import time
from typing import Annotated, Literal

import typer

from fenka.cli import tables
from fenka.cli.durations import parse_duration
from fenka.cli.options import WideOutputOption
from fenka.cli.serving import screens
from fenka.cli.serving.backend import VersionOption
from fenka.cli.serving.selection import find_version, open_services
from fenka.cli.training.backend import (
    AllNamespacesOption,
    CommandArgument,
    ContainerOption,
    InstanceOption,
    JobTarget,
    LogRequest,
    SinceOption,
    TailOption,
    TimestampsOption,
)
from fenka.cli.training.document import print_document

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
    backend = open_services(target, all_namespaces=all_namespaces)
    kind = "tensorflow" if type_ == "tf" else type_
    versions = [each for each in backend.versions() if kind in (None, each.kind)]
    now = time.time()
    if not print_document([screens.document(each, now) for each in versions], output):
        tables.print_lines(screens.list_screen(versions, all_namespaces=all_namespaces))


def get(
    target: JobTarget,
    name: NameArgument,
    version: VersionOption = "",
    output: WideOutputOption = "table",
) -> None:
    """Print one version and its replicas."""
    chosen, now = find_version(open_services(target), name, version), time.time()
    if not print_document(screens.document(chosen, now), output):
        tables.print_lines(screens.get_screen(chosen, now))


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
    backend = open_services(target)
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
    backend = open_services(target)
    chosen = find_version(backend, name, version)
    request = LogRequest(instance=instance, container=container)
    code = backend.attach(chosen, request, command or ["sh"])
    if code:
        sys.exit(code)
