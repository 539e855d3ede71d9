"""`fenka autoscaler`: buys and ends nodes, and plans them."""

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from fenka.autoscaler.inputs import AutoscalerOptions, read_case
from fenka.autoscaler.solver import available_solver
from fenka.cli import cluster, tables
from fenka.cli.admin.elastic import AutoscalerNamespaceOption, published
from fenka.cli.common_options import ClusterTarget, OutputOption, group, register, register_bare
from fenka.cli.error_report import UserError, print_error
from fenka.cloud.config import AutoscalerConfig
from fenka.cloud.config_file import decode_config, read_config
from fenka.cluster.autoscaling import AutoscalerStatus, encode_time
from fenka.core.errors import INVALID_INPUT, listed
from fenka.core.nodes.case import PlanningCase
from fenka.core.nodes.plan import NodePlan, Unserved, make_plan
from fenka.formats.durations import parse_duration
from fenka.isolation.lease_files import describe_os_error
from fenka.kubernetes.api_client import Api
from fenka.kubernetes.autoscaler_reader import AutoscalerState, read_autoscaler, read_config_text
from fenka.server.program import start_log

if TYPE_CHECKING:
    from fenka.autoscaler.snapshot import Snapshot

T = TypeVar("T")

_SECONDS = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,6})?")

PLANNING = "planning …"
"""Shown on a terminal meanwhile."""

MAX_NAMES = 3
"""Requests to name of those that are left out for one reason."""

CaseOption = Annotated[
    Path | None,
    typer.Option(
        "--case",
        metavar="FILE",
        help="plan for a case (groups, nodes, pending requests) instead of the cluster",
    ),
]
TimeLimitOption = Annotated[
    str, typer.Option("--time-limit", metavar="TIME", help="after this the best plan so far stands")
]
PlanConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="default: the configuration that the chart installed"
    ),
]


def plan(
    cluster_target: ClusterTarget,
    case: CaseOption = None,
    config: PlanConfigOption = None,
    namespace: AutoscalerNamespaceOption = "",
    time_limit: TimeLimitOption = "2s",
    output: OutputOption = "table",
) -> None:
    """Print a plan; nothing is bought. Raises InvalidCase, InvalidConfig, UserError."""
    if case is not None and config is not None:
        raise UserError(
            "--config is for a plan on the cluster: leave it out, or leave out --case",
            INVALID_INPUT,
        )
    limit, solver = seconds_of("--time-limit", time_limit), available_solver(print_error)
    if case is not None:
        planned, begin = from_file(read_case, case), time.monotonic()
        with tables.spinner(PLANNING):
            result = make_plan(planned, remaining_of(limit), solver)
    else:
        from fenka.autoscaler.plan_case import dry_run, plan_case

        snapshot, begin = read_once(cluster_target, namespace, config), time.monotonic()
        with tables.spinner(PLANNING):
            made = plan_case(snapshot)
            planned, result = made.case, dry_run(snapshot, made, remaining_of(limit), solver)
    seconds = round(time.monotonic() - begin, 3)
    if not tables.print_data(document(result, seconds), output):
        tables.print_lines(screen(planned, result, seconds))


def snapshot(
    cluster_target: ClusterTarget,
    config: PlanConfigOption = None,
    namespace: AutoscalerNamespaceOption = "",
) -> None:
    """Print the case of a cluster. Raises InvalidConfig, UserError."""
    from fenka.autoscaler.plan_case import plan_case

    snapshot = read_once(cluster_target, namespace, config)
    at = encode_time(snapshot.now)
    case = replace(plan_case(snapshot).case, why=f"cluster {snapshot.config.cluster} at {at}")
    tables.print_data(case, "json")


def read_once(
    target: ClusterTarget,
    namespace: str = "",
    config: Path | None = None,
    *,
    without: AutoscalerConfig | None = None,
) -> "Snapshot":
    """Read the cluster once, as the loop sees it.

    Args:
        target: the cluster.
        namespace: the autoscaler's, if the chart does not publish it.
        config: instead of the configuration that is installed.
        without: the configuration where no autoscaler is installed, None if that is an error.

    Raises:
        UserError: if the cluster, the autoscaler or the file cannot be read.
        InvalidConfig: if the configuration cannot be understood.
    """
    from fenka.autoscaler.plan_case import read_snapshot

    given = None if config is None else from_file(read_config, config)

    async def read(api: Api) -> "Snapshot":
        found = await read_autoscaler(api, namespace)
        if found is None and without is not None:
            return await read_snapshot(
                api, AutoscalerState(""), AutoscalerStatus(), without, time.time()
            )
        state, status = published(found)
        installed = given or await _installed_config(api, state)
        return await read_snapshot(api, state, status, installed, time.time())

    return cluster.ask(target.target, read, cluster.explain_cluster_denial)


async def _installed_config(api: Api, state: AutoscalerState) -> AutoscalerConfig:
    text = await read_config_text(api, state)
    if text is None:
        raise UserError(
            f"namespace {state.namespace} has no configuration of an autoscaler: give --config FILE",
            INVALID_INPUT,
        )
    return decode_config(text.encode())


def from_file(read: Callable[[Path], T], path: Path) -> T:
    """Return what is read from a file. Raises UserError if the file cannot be read."""
    try:
        return read(path)
    except OSError as why:
        raise UserError(describe_os_error(why), INVALID_INPUT) from None


def remaining_of(limit_s: float) -> Callable[[], float]:
    """Return a function that returns the seconds that are left from now on."""
    end = time.monotonic() + limit_s
    return lambda: end - time.monotonic()


def document(result: NodePlan, seconds: float) -> dict[str, object]:
    """Return the plan with the fields of `fenka.plan/1`, in its order."""
    return {
        "format": result.format,
        "nodes": result.nodes,
        "cost": result.cost,
        "bound": result.bound,
        "optimal": result.optimal,
        "seconds": seconds,
        "placements": result.placements,
        "unserved": result.unserved,
    }


def screen(case: PlanningCase, result: NodePlan, seconds: float) -> list[str]:
    """Return the new nodes with their pods, what they cost, and who is left out."""
    count = sum(nodes.count for nodes in result.nodes)
    known = "the best" if result.optimal else f"no plan costs less than {result.bound:g}"
    return [
        *nodes_lines(case, result),
        f"{count} new nodes, {result.cost:g} an hour ({known}), planned in {seconds:.1f} s",
        *left_out_lines(result),
    ]


def nodes_lines(case: PlanningCase, result: NodePlan) -> list[str]:
    """Return new nodes with their prices and pods, and pods of nodes there; nothing if there are none."""
    new: dict[str, list[str]] = {}
    for pod in result.placements:
        new.setdefault(pod.node, []).append(pod.request)
    prices = {group.name: group.price for group in case.groups}
    rows = [("NODE", "PRICE", "PODS")]
    for nodes in result.nodes:
        price = f"{prices[nodes.group]:g}"
        slots = [f"new:{nodes.group}:{slot}" for slot in range(nodes.count)]
        used = [name for name in slots if name in new]
        rows += [(name, price, _names(new.pop(name))) for name in used]
        if len(used) < len(slots):
            rows.append((f"{len(slots) - len(used)} x new:{nodes.group}", price, "-"))
    rows += [(name, "-", _names(pods)) for name, pods in new.items()]
    return tables.align(rows) if len(rows) > 1 else []


def left_out_lines(result: NodePlan) -> list[str]:
    """Return who is left out, by reason."""
    by_reason: dict[str, list[Unserved]] = {}
    for request in result.unserved:
        by_reason.setdefault(request.why, []).append(request)
    return [f"{_left_out(requests)} left out: {why}" for why, requests in by_reason.items()]


def _left_out(requests: list[Unserved]) -> str:
    """Return how many pods of which requests are left out."""
    names = listed([request.request for request in requests], MAX_NAMES)
    return f"{sum(request.count for request in requests)} of {names}"


def _names(requests: list[str]) -> str:
    counts = {name: requests.count(name) for name in dict.fromkeys(requests)}
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())


def seconds_of(option: str, text: str) -> float:
    """Return the seconds of `2`, `0.5s` or `1m30s`. Raises UserError."""
    seconds = float(text) if _SECONDS.fullmatch(text) else parse_duration(text)
    if seconds is None:
        raise UserError(f"invalid {option} {text!r}: write a duration such as 10s", INVALID_INPUT)
    return seconds


SUMMARY = "Plan and operate elastic GPU nodes."

app = group(SUMMARY)

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="follow the cluster, with this configuration"),
]


def autoscaler(options: AutoscalerOptions, config: ConfigOption = None) -> None:
    """Follow the cluster until SIGTERM or SIGINT. Raises UserError, InvalidConfig, InvalidLevels."""
    from fenka.autoscaler.main import serve
    from fenka.cluster.queue_snapshot import check_levels

    if config is None:
        raise UserError("give --config FILE, or a command such as plan", INVALID_INPUT)
    check_levels(options.topology_level)
    start_log(options.log_level)
    try:
        asyncio.run(serve(config, options))
    except OSError as why:
        raise UserError(describe_os_error(why), INVALID_INPUT) from None


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="the configuration, in YAML")],
) -> None:
    """Print what a configuration allows. Raises InvalidConfig, UserError."""
    config = from_file(read_config, file)
    config.check_settings()
    offers = sum(len(group.types) * len(group.zones) for group in config.groups)
    most = sum(group.max for group in config.groups)
    nodes = most if config.limits.nodes is None else min(most, config.limits.nodes)
    tables.print_lines(
        [f"{file} is valid: {len(config.groups)} groups, {offers} offers, at most {nodes} nodes"]
    )


register_bare(app, autoscaler, SUMMARY)
register(app, plan, "Plan which new nodes pending requests need: of the cluster, or of a case.")
register(app, snapshot, "Print the case of the cluster, for `plan --case`.")
register(app, check, "Check a configuration, without a cluster.")
