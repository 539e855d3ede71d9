"""`fenka serve`: models that answer requests, on a cluster or on this machine."""

from datetime import datetime
from typing import Annotated, Any

import msgspec
import typer

from fenka.cli import workload_options
from fenka.cli.common_options import group, register, seconds
from fenka.cli.control import attach, delete, logs, traffic_split
from fenka.cli.error_report import UserError
from fenka.cli.tables import escape
from fenka.cli.workloads.arguments import (
    GatewayChoice,
    JobTarget,
    SurgeOption,
    VersionOption,
    report_submission,
)
from fenka.cli.workloads.selection import open_backend
from fenka.cli.workloads.show import get, list_services
from fenka.cli.workloads.waiting import wait_until_available
from fenka.core.errors import INVALID_INPUT
from fenka.jobs.service import ServiceKind, ServiceSpec
from fenka.jobs.text_fields import merge, parse_fields

_KINDS: dict[ServiceKind, tuple[str, tuple[str, ...]]] = {
    "custom": ("a program of one's own", ()),
    "tensorflow": ("TensorFlow Serving", ("tf",)),
    "triton": ("NVIDIA Triton", ()),
}
"""The server of the models, and other names of the command."""

_REFUSED = {
    ("kserve", "kf", "kfserving"): "use fenka serve custom",
    ("seldon", "seldon-core"): "use fenka serve custom",
    ("tensorrt", "trt"): "use fenka serve triton",
    ("distributed",): "use fenka serve custom, with --gpus for the cards of one node",
}

_ALIASES = {
    **{alias: kind for kind, (_, aliases) in _KINDS.items() for alias in aliases},
    **{alias: names[0] for names in _REFUSED for alias in names[1:]},
    "ls": "list",
    "del": "delete",
    "log": "logs",
}

_VERSION_FORMAT = "%Y%m%d%H%M%S"


app = group("Serve models.", _ALIASES)
_updates = group("Change a version of a service; its replicas are replaced one by one.", _ALIASES)

WaitOption = Annotated[bool, typer.Option("--wait", help="until all replicas accept requests")]
TimeoutOption = Annotated[
    float | None,
    typer.Option(
        "--timeout", parser=seconds, metavar="TIME", help="of --wait: 60, 1m; default: no limit"
    ),
]


def _add_serve(kind: ServiceKind, summary: str) -> None:
    """Add the command that deploys one kind of service."""

    def serve(
        *,
        command: workload_options.ProgramArgument = None,
        file: workload_options.FileOption = None,
        wait: WaitOption = False,
        timeout: TimeoutOption = None,
        dry_run: workload_options.DryRunOption = False,
        output: workload_options.DryRunOutputOption = "yaml",
        gateway: GatewayChoice,
        where: JobTarget,
        **values: Any,
    ) -> None:
        fields = workload_options.merged_fields(ServiceSpec, kind, file, values, command)
        version = {"version": datetime.now().strftime(_VERSION_FORMAT)}
        spec = parse_fields({**version, **fields, "kind": kind}, ServiceSpec)
        spec.validate()
        if dry_run:
            _print_objects(spec, where, gateway, output)
            return
        backend = open_backend(where)
        before = backend.deploy(spec, gateway)
        _report(spec, before)
        if wait:
            wait_until_available(backend, spec.name, spec.version, timeout, spec.range.least)

    workload_options.add_options(serve, workload_options.SERVICE, kind)
    register(app, serve, summary, name=kind, cls=workload_options.ServeCommand)


def _add_update(kind: ServiceKind, summary: str) -> None:
    """Add the command that changes one kind of service."""

    def update(
        *,
        command: workload_options.ProgramArgument = None,
        file: workload_options.FileOption = None,
        wait: WaitOption = False,
        timeout: TimeoutOption = None,
        surge: SurgeOption = None,
        gateway: GatewayChoice,
        where: JobTarget,
        **values: Any,
    ) -> None:
        given = workload_options.merged_fields(ServiceSpec, kind, file, values, command)
        name, version = given.get("name", ""), given.get("version", "")
        if not name:
            raise UserError("--name is required: the service to change", INVALID_INPUT)
        backend = open_backend(where)

        def changed(old: ServiceSpec) -> ServiceSpec:
            if old.kind != kind:
                raise UserError(
                    f"version {old.version} of service {name} is of kind {old.kind}: use fenka serve update "
                    f"{old.kind}",
                    INVALID_INPUT,
                )
            known = {"kind": kind, **msgspec.to_builtins(old)}
            return parse_fields(merge(known, given), ServiceSpec)

        spec = backend.update(name, version, changed, gateway, surge)
        print(f"version {spec.version} of service {escape(name)}: updated", flush=True)
        if wait:
            wait_until_available(backend, spec.name, spec.version, timeout, spec.range.least)

    workload_options.add_options(update, workload_options.SERVICE, kind)
    register(_updates, update, summary, name=kind, cls=workload_options.ServeCommand)


def undo(
    target: JobTarget,
    name: Annotated[str, typer.Argument(metavar="NAME", help="the service")],
    version: VersionOption = "",
    surge: SurgeOption = None,
    wait: WaitOption = False,
    timeout: TimeoutOption = None,
) -> None:
    """Make a version what it was before its last update; a second time, what it is now."""
    backend = open_backend(target)
    spec = backend.undo(name, version, surge)
    print(
        f"version {spec.version} of service {escape(name)}: as before its last update", flush=True
    )
    if wait:
        wait_until_available(backend, spec.name, spec.version, timeout, spec.range.least)


for _kind, (_server, _) in _KINDS.items():
    _add_serve(_kind, f"Serve a model by {_server}.")
    _add_update(_kind, f"Change a version that is served by {_server}.")
for _names, _instead in _REFUSED.items():
    workload_options.register_refused(app, "serve", _names[0], _instead)
_OF_SERVICES = {"type_": "service"}
register(app, list_services, "List the versions of services.", name="list")
for _function, _summary in (
    (get, "Show a version of a service and its replicas."),
    (logs, "Show the output of a replica."),
    (attach, "Run a command in a replica."),
    (delete, "Delete services, or one version."),
):
    register(app, _function, _summary, given=_OF_SERVICES)
app.add_typer(_updates, name="update")
register(app, undo, "Make a version what it was before its last update.")
register(app, traffic_split, "Divide a service's requests among versions.", name="traffic-split")


def _print_objects(
    spec: ServiceSpec,
    where: JobTarget,
    gateway: GatewayChoice,
    output: workload_options.DryRunOutput,
) -> None:
    from fenka.cli import cluster
    from fenka.jobs.collection import Contents, read_config_files
    from fenka.jobs.manifests.gateway_manifest import GatewaySettings, render_gateway
    from fenka.jobs.manifests.scaling_manifest import render_scaled_object, scaling_policy
    from fenka.jobs.manifests.service_manifest import render_address, render_version

    workload_options.refuse_local(where)
    namespace = where.namespace or cluster.namespace(where)
    objects = render_version(spec, Contents(config_files=read_config_files(spec)))
    # Without a cluster nobody knows whether it has KEDA.
    scaled = spec.range.scales and spec.scaler != "keda"
    scaling = {spec.version: scaling_policy(spec)} if scaled else {}
    objects.append(render_address(spec, gateway=spec.range.scales, scaling=scaling))
    if spec.range.scales and not scaled:
        objects.append(render_scaled_object(spec, namespace))
    if spec.range.scales:
        settings = GatewaySettings(
            gateway.gateway_image or "fenka", replicas=gateway.gateway_replicas
        )
        objects += render_gateway(spec, namespace, settings, scaling)
    workload_options.print_manifests(objects, namespace, output)


def _report(spec: ServiceSpec, before: list[str]) -> None:
    report_submission(spec.name, f"fenka serve get {spec.name} -v {spec.version}", "service")
    if before:
        others = " ".join(f"-v {version}:WEIGHT" for version in (*before, spec.version))
        print(
            f"version {spec.version} gets no requests yet: fenka traffic-split --name {spec.name} {others}",
            flush=True,
        )
