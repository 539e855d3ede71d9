"""`fenka nodes` and `fenka admin groups`: all nodes, and what an autoscaler may buy."""

import asyncio
import time
from collections.abc import Callable
from typing import Annotated

import typer

from fenka.cli import cluster, tables
from fenka.cli.common_options import ClusterTarget, OutputOption, Target, short_duration
from fenka.cli.error_report import UserError, print_error
from fenka.cli.world import snapshot_here
from fenka.cluster.autoscaling import AutoscalerStatus, OfferStatus
from fenka.core.units import format_units
from fenka.kubernetes.api_client import Api, ApiError
from fenka.kubernetes.autoscaler_reader import AutoscalerState, read_autoscaler
from fenka.kubernetes.reader import read_cluster, read_screen
from fenka.views.node_rows import NodeRow
from fenka.views.node_summaries import NodeSummary, summarize_nodes, summarize_row

OLD_S = 60
"""A leader renews its lease each second, and another one takes over within seconds."""

GROUPS_LESS_IMPORTANT = ("CAP", "MAX", "STARTING", "CAPACITY", "TYPE")
NODES_LESS_IMPORTANT = ("CAPACITY", "AGE", "CARDS")
"""Columns that narrow terminals do not show."""

NOT_INSTALLED = (
    "no autoscaler is installed: set autoscaler.enabled in the chart, or name its namespace with -n"
)

AutoscalerNamespaceOption = Annotated[
    str, typer.Option("-n", "--namespace", help="the autoscaler's; default: as the chart publishes")
]


def groups(
    cluster_target: ClusterTarget,
    namespace: AutoscalerNamespaceOption = "",
    output: OutputOption = "table",
) -> None:
    """Print the offers of all groups. Raises UserError."""
    state, status = published(
        cluster.ask(
            cluster_target.target,
            lambda api: read_autoscaler(api, namespace),
            cluster.explain_cluster_denial,
        )
    )
    now = time.time()
    if not tables.print_data(status.offers, output):
        rows = groups_table(status.offers, now)
        tables.print_lines(tables.align_to_terminal(rows, GROUPS_LESS_IMPORTANT))
    _report_age(state, now)


def nodes(
    target: Target,
    namespace: AutoscalerNamespaceOption = "",
    output: OutputOption = "table",
) -> None:
    """Print the nodes of this machine or cluster, and those that an autoscaler has ordered."""
    here = None if namespace else snapshot_here(target)
    state, rows = None, list[NodeSummary]()
    if here is not None:
        from fenka.local.views import node_row

        rows = [summarize_row(node_row(here))]
    else:
        state, rows = cluster.ask(
            target, lambda api: _read_nodes(api, namespace), cluster.explain_cluster_denial
        )
    now = time.time()
    if not tables.print_data(rows, output):
        tables.print_lines(
            tables.align_to_terminal(nodes_table(rows, now), NODES_LESS_IMPORTANT)
            if rows
            else ["the cluster has no node"]
        )
    if state is not None and state.status is None:
        print_error(_unpublished(state))
    elif state is not None:
        _report_age(state, now)


async def _read_nodes(api: Api, namespace: str) -> tuple[AutoscalerState | None, list[NodeSummary]]:
    """Return what the autoscaler publishes, None without one, and all nodes.

    Raises ApiError, ApiUnreachable, InvalidRecord.
    """
    try:
        state, snapshot = await asyncio.gather(read_autoscaler(api, namespace), read_cluster(api))
    except ApiError as why:
        served = await read_screen(api, "nodes", NodeRow) if why.status == 403 else None
        if served is None:
            raise
        return None, [*map(summarize_row, served)]
    status, orders = (state.status, state.orders) if state else (None, {})
    return state, summarize_nodes(cluster.keep(snapshot), status or AutoscalerStatus(), orders)


def groups_table(offers: tuple[OfferStatus, ...], now: float) -> list[list[str]]:
    """Return the table with its head line."""
    columns: dict[str, Callable[[OfferStatus], str]] = {
        "NAME": lambda offer: offer.group,
        "TYPE": lambda offer: offer.type,
        "ZONE": lambda offer: offer.zone,
        "CAPACITY": lambda offer: offer.capacity,
        "PRICE": lambda offer: price(offer.price),
        "CAP": lambda offer: "-" if offer.cap is None else price(offer.cap),
        "NODES": lambda offer: str(offer.nodes),
        "STARTING": lambda offer: str(offer.starting),
        "MAX": lambda offer: str(offer.max),
        "STATE": lambda offer: _offer_state(offer, now),
    }
    return tables.tabulate(offers, columns)


def nodes_table(rows: list[NodeSummary], now: float) -> list[list[str]]:
    """Return the table with its head line. Without a node of a group it has no columns of groups."""
    group: dict[str, Callable[[NodeSummary], str]] = {
        "GROUP": lambda row: row.group or "-",
        "CAPACITY": lambda row: row.capacity or "-",
    }
    columns: dict[str, Callable[[NodeSummary], str]] = {
        "NAME": lambda row: row.name or "-",
        **(group if any(row.group for row in rows) else {}),
        "AGE": lambda row: "-" if row.created_at is None else short_duration(now - row.created_at),
        "CARDS": lambda row: "-" if row.cards is None else str(row.cards),
        "FREE": lambda row: "-" if row.free is None else f"{format_units(row.free)}/{row.total}",
        "STATE": lambda row: _node_state(row, now),
    }
    return tables.tabulate(rows, columns)


def price(amount: float) -> str:
    """Return a price with two decimals, or four if it has more."""
    return f"{amount:.2f}" if round(amount, 2) == round(amount, 4) else f"{amount:.4f}"


def _offer_state(offer: OfferStatus, now: float) -> str:
    if offer.again_at is None or offer.again_at <= now:
        return offer.state
    return f"{offer.state}, again in {short_duration(offer.again_at - now)}"


def _node_state(row: NodeSummary, now: float) -> str:
    left = None if row.until is None else short_duration(row.until - now)
    if row.state == "starting":
        return f"starting (order {row.order})"
    if row.state == "idle":
        ends = f", ends in {left}" if left else ""
        return f"idle for {short_duration(now - (row.since or now))}{ends}"
    if row.state == "taken back" and left:
        return f"taken back in {left}"
    if row.protected_until is not None and row.protected_until > now:
        return f"{row.state}; protected for {short_duration(row.protected_until - now)}"
    return row.state


def published(state: AutoscalerState | None) -> tuple[AutoscalerState, AutoscalerStatus]:
    """Return the state with its status. Raises UserError if there is none."""
    if state is None:
        raise UserError(NOT_INSTALLED)
    if state.status is None:
        raise UserError(_unpublished(state))
    return state, state.status


def _unpublished(state: AutoscalerState) -> str:
    return (
        f"the autoscaler in namespace {state.namespace} has not published anything yet: see whether "
        f"its pods run (kubectl get pods -n {state.namespace})"
    )


def _report_age(state: AutoscalerState, now: float) -> None:
    """Say so if nobody has kept the status up to date."""
    if sentence := out_of_date(state, now):
        print_error(sentence)


def out_of_date(state: AutoscalerState, now: float) -> str:
    """Return that nobody has kept the status up to date; empty if that is not so, or not known."""
    if state.renewed_at is None or now - state.renewed_at <= OLD_S:
        return ""
    return (
        f"no autoscaler has run for {short_duration(now - state.renewed_at)}, so this is out of date: "
        f"see its pods (kubectl get pods -n {state.namespace})"
    )
