"""Dashboards and panels of Grafana, and their queries, as all of Headway's dashboards have them."""

import json
from collections.abc import Mapping, Sequence

from grafana_foundation_sdk.builders import dashboard as dashboards
from grafana_foundation_sdk.builders import prometheus, stat, timeseries
from grafana_foundation_sdk.builders.common import (
    ReduceDataOptions,
    StackingConfig,
    VizLegendOptions,
    VizTooltipOptions,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from deploy.json_text import json_text

_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_GRAPH_WIDTH, _GRAPH_HEIGHT = 12, 8  # of 24 columns
_FIGURE_WIDTH, _FIGURE_HEIGHT = 4, 4
_REDRAWN = "30s"
_CHOICE = 'deployment=~"$deployment"'

Panel = stat.Panel | timeseries.Panel


def dashboard_json(dashboard: dashboards.Dashboard) -> str:
    """Return a dashboard's JSON, the same for the same dashboard; panels are numbered from 1."""
    built = dashboard.build()
    for number, panel in enumerate(built.panels or [], 1):
        panel.id_val = number
    return json_text(json.loads(JSONEncoder(sort_keys=True).encode(built)))


def dashboard(
    title: str, uid: str, description: str, rows: Mapping[str, Sequence[Panel]]
) -> dashboards.Dashboard:
    """Return a dashboard of the last hour, with its choice of source and deployment."""
    everything = VariableOption(text="All", value="$__all", selected=True)
    made = (
        dashboards.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["headway"])
        .time("now-1h", "now")
        .refresh(_REDRAWN)
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(
            dashboards.DashboardLink("Headway")
            .type(DashboardLinkType.DASHBOARDS)
            .tags(["headway"])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(
            dashboards.DatasourceVariable("datasource").label("Source").type("prometheus")
        )
        .with_variable(
            dashboards.QueryVariable("deployment")
            .label("Deployment")
            .datasource(_SOURCE)
            .query("label_values(up, deployment)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(VariableSort.ALPHABETICAL_ASC)
            .include_all(True)
            .all_value(".*")
            .multi(True)
            .current(everything)
        )
    )
    for row, panels in rows.items():
        made.with_row(dashboards.Row(row))
        for panel in panels:
            made.with_panel(panel)
    return made


def graph(
    title: str,
    description: str,
    unit: str,
    queries: dict[str, str],
    stacked: bool = False,
    least: float | None = 0,
    most: float | None = None,
) -> timeseries.Panel:
    """Return lines over time.

    Args:
        title: of the panel.
        description: what it shows, and what is good or bad.
        unit: Grafana's name of it.
        queries: PromQL by legend, in which `{{label}}` stands for a label's value.
        stacked: areas on each other.
        least: where the axis begins; None: below the smallest value.
        most: where the axis ends; None: above the largest value.
    """
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(_SOURCE)
        .unit(unit)
        .span(_GRAPH_WIDTH)
        .height(_GRAPH_HEIGHT)
        .fill_opacity(30 if stacked else 0)
        .legend(
            VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    )
    if least is not None:
        panel.min(least)
    if most is not None:
        panel.max(most)
    if stacked:
        panel.stacking(StackingConfig().mode(StackingMode.NORMAL))
    for number, (legend, expression) in enumerate(queries.items()):
        query = prometheus.Dataquery().expr(expression).legend_format(legend).range()
        panel.with_target(query.ref_id(chr(ord("A") + number)))
    return panel


def figure(title: str, description: str, unit: str, expression: str) -> stat.Panel:
    """Return the latest value of a query with one result, in large figures."""
    return (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(_SOURCE)
        .unit(unit)
        .span(_FIGURE_WIDTH)
        .height(_FIGURE_HEIGHT)
        .color_mode(BigValueColorMode.NONE)
        .reduce_options(ReduceDataOptions().calcs(["lastNotNull"]))
        .with_target(prometheus.Dataquery().expr(expression).range().ref_id("A"))
    )


def chosen(metric: str, *matchers: str, **labels: str) -> str:
    """Return a metric of the chosen deployment, a label that `prometheus.yml` sets."""
    exactly = [f'{label}="{value}"' for label, value in labels.items()]
    return f"{metric}{{{', '.join([_CHOICE, *matchers, *exactly])}}}"


def rate(metric: str, *matchers: str, **labels: str) -> str:
    """Return how fast a counter of the chosen deployment grows."""
    return f"rate({chosen(metric, *matchers, **labels)}[$__rate_interval])"


def by(label: str, expression: str, function: str = "sum") -> dict[str, str]:
    """Return the query of an expression by a label, whose values are its legend."""
    return {f"{{{{{label}}}}}": f"{function} by ({label}) ({expression})"}


def percentiles(histogram: str, **labels: str) -> dict[str, str]:
    """Return the queries of a histogram's median, 90th and 99th percentile."""
    rates = f"sum by (le) ({rate(f'{histogram}_bucket', **labels)})"
    return {
        f"p{percent}": f"histogram_quantile({percent / 100}, {rates})" for percent in (50, 90, 99)
    }
