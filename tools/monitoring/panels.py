"""What the panels of all boards have in common, around their queries."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    prometheus,
    stat,
    table,
    timeseries,
)
from grafana_foundation_sdk.models.common import (
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DynamicConfigValue,
    VariableOption,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH, HEIGHT = 12, 8
"""A row of a board is 24 wide."""
DASHED = {"fill": "dash", "dash": [10, 10]}
_Panel = TypeVar("_Panel", bargauge.Panel, stat.Panel, table.Panel, timeseries.Panel)


@dataclass(frozen=True, slots=True)
class Query:
    """A query, and what its series are called.

    Attributes:
        expr: PromQL.
        legend: the template of a series' name.
        dashed: it is a limit, and drawn dashed.
        unit: one of its own, on the right axis.
    """

    expr: str
    legend: str = ""
    dashed: bool = False
    unit: str = ""


def lines(
    title: str,
    unit: str,
    *queries: Query,
    decimals: int | None = None,
    most: float | None = None,
    stacked: bool = False,
    text: str = "",
) -> timeseries.Panel:
    """Return a panel of lines over time. Every axis begins at 0. most: the end of the axis."""
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.TABLE)
    legend = legend.placement(LegendPlacement.BOTTOM).calcs(["lastNotNull", "max"])
    legend = legend.show_legend(True)
    panel = _common(timeseries.Panel(), title, unit, queries, text)
    panel.min(0).fill_opacity(20 if stacked else 5).legend(legend)
    panel.tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    if decimals is not None:
        panel.decimals(decimals)
    if most is not None:
        panel.max(most)
    if stacked:
        panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    for name, query in _named(queries):
        properties = []
        if query.dashed:
            properties = [
                DynamicConfigValue("custom.lineStyle", DASHED),
                DynamicConfigValue("custom.fillOpacity", 0),
            ]
        if query.unit:
            properties += [
                DynamicConfigValue("unit", query.unit),
                DynamicConfigValue("custom.axisPlacement", "right"),
            ]
        if properties:
            panel.override_by_query(name, properties)
    return panel


def bars(title: str, unit: str, *queries: Query, text: str = "") -> bargauge.Panel:
    """Return a panel with a bar from 0 to 1 for each series as it is now."""
    panel = _common(bargauge.Panel(), title, unit, queries, text)
    return panel.min(0).max(1).orientation(VizOrientation.HORIZONTAL)


def number(title: str, unit: str, *queries: Query, text: str = "") -> stat.Panel:
    """Return a panel with a number for each series as it is now."""
    return _common(stat.Panel(), title, unit, queries, text).height(4).span(4)


def rows(title: str, unit: str, *queries: Query, text: str = "") -> table.Panel:
    """Return a table with a row for each series as it is now."""
    return _common(table.Panel(), title, unit, queries, text)


def board(
    title: str, uid: str, text: str, variables: Sequence[tuple[str, str]]
) -> dashboard.Dashboard:
    """Return a board without panels, with the cards' XIDs as annotations.

    variables: the names, after that of the data source, and the metrics that have them as labels.
    """
    xids = dashboard.AnnotationQuery().name("XIDs").datasource(SOURCE).enable(True)
    made = dashboard.Dashboard(title).uid(uid).description(text).tags(["fenka", "gpu"])
    made.refresh("30s").time("now-1h", "now").tooltip(DashboardCursorSync.CROSSHAIR).editable()
    made.annotation(
        xids.icon_color("red").expr(
            "sum by (node, index, model, kind) (increase(fenka_card_xid_errors_total[1m])) > 0"
        )
    )
    link = dashboard.DashboardLink("fenka").type(DashboardLinkType.DASHBOARDS).tags(["fenka"])
    made.link(link.as_dropdown(True).keep_time(True).include_vars(True))
    made.with_variable(dashboard.DatasourceVariable("datasource").type("prometheus"))
    for name, metric in variables:
        variable = dashboard.QueryVariable(name).datasource(SOURCE)
        variable.query(f"label_values({metric}, {name})").refresh(
            VariableRefresh.ON_TIME_RANGE_CHANGED
        )
        variable.include_all(True).multi(True).sort(VariableSort.ALPHABETICAL_ASC)
        made.with_variable(variable.current(VariableOption(text="All", value="$__all")))
    return made


def _common(panel: _Panel, title: str, unit: str, queries: Sequence[Query], text: str) -> _Panel:
    panel.title(title).description(text).unit(unit).datasource(SOURCE).span(WIDTH).height(HEIGHT)
    over_time = isinstance(panel, timeseries.Panel)
    kind = PromQueryFormat.TABLE if isinstance(panel, table.Panel) else PromQueryFormat.TIME_SERIES
    for name, query in _named(queries):
        target = prometheus.Dataquery().ref_id(name).datasource(SOURCE).expr(query.expr)
        target.legend_format(query.legend).format(kind)
        panel.with_target(target.range() if over_time else target.instant())
    return panel


def _named(queries: Sequence[Query]) -> list[tuple[str, Query]]:
    return list(zip("ABCDEF", queries, strict=False))
