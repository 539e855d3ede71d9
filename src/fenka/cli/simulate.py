"""`fenka simulate`: which pending pods would start if there were more nodes."""

import time
from typing import Annotated

import typer

from fenka.autoscaler.case_file import read_case
from fenka.autoscaler.solver.available import available_solver
from fenka.cli import tables
from fenka.cli.autoscaler_plan import (
    CaseOption,
    TimeLimitOption,
    document,
    from_file,
    left_out_lines,
    nodes_lines,
    read_once,
    remaining_of,
    seconds_of,
)
from fenka.cli.errors import UserError, print_error
from fenka.cli.options import ClusterTarget, OutputOption
from fenka.cloud.config import Config, ProviderConfig
from fenka.core.errors import INVALID_INPUT
from fenka.core.planning.case import Case
from fenka.core.planning.plan import Plan, make_plan
from fenka.core.planning.what_if import with_nodes

NO_AUTOSCALER = Config(cluster="", provider=ProviderConfig(kind="simulated"), groups=())

MAX_NODES = 1000
"""Of one kind. Nobody asks for more, and a plan of more takes minutes."""

AddNodesOption = Annotated[
    list[str],
    typer.Option(
        "--add-nodes",
        metavar="NAME=N",
        help="N nodes of this group, or like this node; repeatable",
    ),
]


def simulate(
    cluster_target: ClusterTarget,
    add_nodes: AddNodesOption,
    case: CaseOption = None,
    time_limit: TimeLimitOption = "2s",
    output: OutputOption = "table",
) -> None:
    """Print which pods would start where. Raises InvalidCase, InvalidConfig, UserError."""
    added = _added(add_nodes)
    limit = seconds_of("--time-limit", time_limit)
    if case is not None:
        read = with_nodes(from_file(read_case, case), added)
        begin = time.monotonic()
        result = make_plan(read, remaining_of(limit), available_solver(print_error))
    else:
        from fenka.autoscaler.dry_run import dry_run, what_if
        from fenka.autoscaler.plan_case import plan_case

        view = read_once(cluster_target, without=NO_AUTOSCALER)
        made = what_if(view, plan_case(view), added)
        read = made.case
        begin = time.monotonic()
        result = dry_run(view, made, remaining_of(limit), available_solver(print_error))
    if not tables.print_data(document(result, round(time.monotonic() - begin, 3)), output):
        tables.print_lines(_screen(read, result))


def _screen(case: Case, result: Plan) -> list[str]:
    started = len(result.placements)
    total = started + sum(each.count for each in result.unserved)
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
