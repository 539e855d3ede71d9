"""`fenka snapshot`, and what-ifs of `fenka simulate`: what starts on other nodes or by other policies."""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from fenka.autoscaler.inputs import read_case
from fenka.autoscaler.solver import available_solver
from fenka.cli import cluster, tables
from fenka.cli.admin.autoscaler import (
    PLANNING,
    TimeLimitOption,
    document,
    from_file,
    left_out_lines,
    nodes_lines,
    read_once,
    remaining_of,
    seconds_of,
)
from fenka.cli.common_options import ClusterTarget, OutputOption
from fenka.cli.error_report import UserError, print_error
from fenka.cloud.config import AutoscalerConfig, ProviderConfig
from fenka.core.errors import INVALID_INPUT
from fenka.core.nodes.case import PlanningCase, with_nodes
from fenka.core.nodes.plan import NodePlan, make_plan

NO_AUTOSCALER = AutoscalerConfig(cluster="", provider=ProviderConfig(kind="simulated"), groups=())

MAX_NODES = 1000
"""Of one kind. Nobody asks for more, and a plan of more takes minutes."""


def snapshot(
    cluster_target: ClusterTarget,
    keep_names: Annotated[
        bool, typer.Option("--keep-names", help="keep names and labels; default: pseudonyms")
    ] = False,
) -> None:
    """Print the cluster as one document. Raises UserError, InvalidRecord."""
    from fenka.autoscaler.recorded.cluster_file import encode, record_cluster

    file = cluster.ask(
        cluster_target.target,
        lambda api: record_cluster(api, time.time(), keep_names=keep_names),
        cluster.explain_cluster_denial,
    )
    sys.stdout.write(encode(file).decode())


@dataclass(frozen=True, slots=True)
class WhatIfOptions:
    """A cluster, or a file of one, and what is changed of it."""

    snapshot: Annotated[
        Path | None,
        typer.Option("--snapshot", metavar="FILE", help="the cluster that `fenka snapshot` wrote"),
    ] = None
    case: Annotated[
        Path | None,
        typer.Option(
            "--case", metavar="FILE", help="a case (groups, nodes, pending requests), not a cluster"
        ),
    ] = None
    add_nodes: Annotated[
        list[str],
        typer.Option(
            "--add-nodes",
            metavar="NAME=N",
            help="N nodes of this group, or like this node; repeatable",
        ),
    ] = ()  # type: ignore[assignment]
    time_limit: TimeLimitOption = "2s"


def simulate(
    target: ClusterTarget, options: WhatIfOptions, policy: str | None, output: OutputOption
) -> None:
    """Print which pods would start where.

    policy: places them in the order of the queue; without one the planner finds the best plan.

    Raises InvalidCase, InvalidClusterFile, InvalidConfig, UserError.
    """
    added = _added(options.add_nodes)
    with tables.spinner(PLANNING):
        case, result, seconds = _answer(target, options, added, policy)
    if not tables.print_data(document(result, seconds), output):
        tables.print_lines(_screen(case, result))


def _answer(
    target: ClusterTarget, options: WhatIfOptions, added: Mapping[str, int], policy: str | None
) -> tuple[PlanningCase, NodePlan, float]:
    limit = seconds_of("--time-limit", options.time_limit)
    # A policy needs none, and its library takes long to import.
    solver = available_solver(print_error) if policy is None else None
    if options.case is not None:
        from fenka.core.nodes.by_policy import PolicyQueue, place_by_policy

        case, begin = with_nodes(from_file(read_case, options.case), added), time.monotonic()
        plan = (
            place_by_policy(case, PolicyQueue(policy, {}))
            if policy is not None
            else make_plan(case, remaining_of(limit), solver)
        )
        return case, plan, _since(begin)
    from fenka.autoscaler.plan_case import dry_run, plan_case, what_if
    from fenka.autoscaler.recorded.cluster_file import read_cluster_file, snapshot_of
    from fenka.autoscaler.recorded.policy_trial import try_policy

    if options.snapshot is not None:
        file = from_file(read_cluster_file, options.snapshot)
        state, scheduler = snapshot_of(file, NO_AUTOSCALER), file.scheduler
    else:
        state, scheduler = read_once(target, without=NO_AUTOSCALER), None
    begin = time.monotonic()
    made = what_if(state, plan_case(state), added)
    if policy is None:
        plan = dry_run(state, made, remaining_of(limit), solver)
    else:
        assert scheduler is not None
        plan = try_policy(state, made, replace(scheduler, policy=policy))
    return made.case, plan, _since(begin)


def _since(begin: float) -> float:
    return round(time.monotonic() - begin, 3)


def _screen(case: PlanningCase, result: NodePlan) -> list[str]:
    started = len(result.placements)
    total = started + sum(request.count for request in result.unserved)
    if not total:
        return ["no pod is pending"]
    cost = f", for {result.cost:g} more an hour" if result.cost else ""
    return [
        *nodes_lines(case, result),
        f"{started} of {total} pending pods would start{cost}",
        *left_out_lines(result),
    ]


def _added(options: list[str]) -> dict[str, int]:
    """Return the numbers of nodes by name. Raises UserError."""
    added: dict[str, int] = {}
    for text in options:
        name, equals, number = text.rpartition("=")
        if not (equals and name and number.isascii() and number.isdecimal()):
            raise UserError(
                f"invalid --add-nodes {text!r}: write a group or node and a number, such as t4=2",
                INVALID_INPUT,
            )
        # Python reads no number of thousands of digits.
        count = int(number) if len(number) < len(str(MAX_NODES)) + 1 else MAX_NODES + 1
        if not 1 <= count <= MAX_NODES:
            raise UserError(
                f"invalid --add-nodes {text!r}: ask for 1 to {MAX_NODES} nodes", INVALID_INPUT
            )
        if name in added:
            raise UserError(f"--add-nodes names {name} twice: name it once", INVALID_INPUT)
        added[name] = count
    return added
