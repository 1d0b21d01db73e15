"""Headway's Grafana dashboards: `python -m deploy.dashboards` writes them to `deploy/grafana`."""

import json
import re
from pathlib import Path
from typing import Any

import yaml
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

_FOLDER = Path(__file__).parent / "grafana"
_METRIC = re.compile(r"\b(headway_\w+|vllm:\w+)(?:\{(.*?)\})?")
_RATE = re.compile(r"\brate\((.*?\})\)")

DASHBOARDS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text()
)
"""What `dashboards.yaml` says of each, by the names of their files."""


def dashboard_json(name: str) -> str:
    """Return a dashboard's JSON, the same for the same dashboard; panels are numbered from 1."""
    built = _dashboard(name, DASHBOARDS[name]).build()
    for number, panel in enumerate(built.panels or [], 1):
        panel.id_val = number
    return json_text(json.loads(JSONEncoder(sort_keys=True).encode(built)))


def _dashboard(name: str, table: dict[str, Any]) -> dashboards.Dashboard:
    """Return a dashboard of the last hour, with its choice of source and deployment."""
    everything = VariableOption(text="All", value="$__all", selected=True)
    made = (
        dashboards.Dashboard(table["title"])
        .uid(name)
        .description(table["text"])
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
    for row, panels in table["rows"].items():
        made.with_row(dashboards.Row(row))
        for panel in panels:
            made.with_panel(_figure(panel) if "figure" in panel else _graph(panel))
    return made


def _graph(table: dict[str, Any]) -> timeseries.Panel:
    """Return lines over time; the axis begins at 0, and where ``least`` is null has it centred."""
    stacked, least, most = table.get("stacked", False), table.get("least", 0), table.get("most")
    panel = (
        timeseries.Panel()
        .title(table["graph"])
        .description(table["text"])
        .datasource(_SOURCE)
        .unit(table["unit"])
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
    if least is None:
        panel.axis_centered_zero(True)
    else:
        panel.min(least)
    if most is not None:
        panel.max(most)
    if stacked:
        panel.stacking(StackingConfig().mode(StackingMode.NORMAL))
    for number, (legend, expression) in enumerate(_queries(table).items()):
        query = prometheus.Dataquery().expr(expression).legend_format(legend).range()
        panel.with_target(query.ref_id(chr(ord("A") + number)))
    return panel


def _figure(table: dict[str, Any]) -> stat.Panel:
    """Return the latest value of a query with one result, in large figures."""
    return (
        stat.Panel()
        .title(table["figure"])
        .description(table["text"])
        .datasource(_SOURCE)
        .unit(table["unit"])
        .span(_FIGURE_WIDTH)
        .height(_FIGURE_HEIGHT)
        .color_mode(BigValueColorMode.NONE)
        .reduce_options(ReduceDataOptions().calcs(["lastNotNull"]))
        .with_target(
            prometheus.Dataquery().expr(_of_the_chosen(table["query"])).range().ref_id("A")
        )
    )


def _queries(table: dict[str, Any]) -> dict[str, str]:
    """Return a graph's PromQL by legend, in which `{{label}}` stands for a label's value."""
    queries: dict[str, str] = {}
    if "percentiles" in table:
        buckets = _METRIC.sub(
            lambda metric: f"{metric[1]}_bucket{{{metric[2] or ''}}}", table["percentiles"]
        )
        for percent in (50, 90, 99):
            quantile = f"histogram_quantile({percent / 100}, sum by (le) (rate({buckets})))"
            queries[f"p{percent}"] = quantile
    if "by" in table:
        label, function = table["by"], table.get("of", "sum")
        queries[f"{{{{{label}}}}}"] = f"{function} by ({label}) ({table['query']})"
    queries |= table.get("queries", {})
    return {legend: _of_the_chosen(query) for legend, query in queries.items()}


def _of_the_chosen(query: str) -> str:
    """Return a query of the chosen deployments, a label that `prometheus.yml` sets."""
    chosen = _METRIC.sub(
        lambda metric: f"{metric[1]}{{{', '.join(filter(None, (_CHOICE, metric[2])))}}}", query
    )
    return _RATE.sub(r"rate(\1[$__rate_interval])", chosen)


if __name__ == "__main__":
    for name in DASHBOARDS:
        path = _FOLDER / f"{name}.json"
        path.write_text(dashboard_json(name))
        print(path)
