"""Headway: forecasts: how good they are, and whether they arrive."""

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from deploy.dashboards.panels import OURS, figure, graph, new_dashboard

_LEVELS = (50, 80, 90)


def forecasts() -> Dashboard:
    """Return the dashboard of what the proxy tells of forecasts and telemetry."""
    dashboard = new_dashboard(
        "Headway: forecasts",
        "headway-forecasts",
        "Forecasts of remaining tokens: error, calibration, drift, and the engines' telemetry.",
    )
    _quality(dashboard)
    _drift(dashboard)
    _telemetry(dashboard)
    return dashboard


def _quality(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("Of the last 500 requests"))
    dashboard.with_panel(
        figure(
            "Error",
            "Mean absolute error of the median, tokens.",
            "short",
            f"max(headway_forecast_mae_tokens{{{OURS}}})",
        )
    )
    dashboard.with_panel(
        figure(
            "80% interval",
            "Share of the ends that it held. Beyond 70 to 90% it counts as miscalibrated.",
            "percentunit",
            f'avg(headway_forecast_coverage_ratio{{{OURS}, interval="0.8"}})',
        )
    )
    dashboard.with_panel(
        figure(
            "Miscalibrated",
            "1 while the coverage of the 80% interval is too far off.",
            "short",
            f"max(headway_forecast_miscalibrated{{{OURS}}})",
        )
    )
    dashboard.with_panel(
        figure(
            "Scored",
            "Finished requests whose forecasts were scored, per second.",
            "reqps",
            f"sum(rate(headway_forecast_scored_requests_total{{{OURS}}}[$__rate_interval]))",
        )
    )
    dashboard.with_row(Row("Quality"))
    dashboard.with_panel(
        graph(
            "Calibration",
            "Share of the ends inside each central interval, less its probability. At 0 the "
            "forecast is calibrated, below its intervals are too narrow, above too wide.",
            "percentunit",
            {
                f"{level}% interval": "avg(headway_forecast_coverage_ratio"
                f'{{{OURS}, interval="{level / 100}"}}) - {level / 100}'
                for level in _LEVELS
            },
            least=-0.5,
            most=0.5,
        )
    )
    dashboard.with_panel(
        graph(
            "Bias",
            "Mean of the median less what came, by tokens generated when the forecast was made: "
            "above 0 forecasts are too long.",
            "short",
            {"at {{age}} tokens": f"avg by (age) (headway_forecast_bias_tokens{{{OURS}}})"},
            least=None,
        ).axis_centered_zero(True)
    )


def _drift(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("Drift"))
    error = f"headway_forecast_mae_tokens{{{OURS}}}"
    dashboard.with_panel(
        graph(
            "Error, and that of the day before",
            "Mean absolute error of the median now, and its mean over the 24 hours that ended an "
            "hour ago.",
            "short",
            {
                "now": f"max({error})",
                "the day before": f"max(avg_over_time({error}[1d] offset 1h))",
            },
        )
    )


def _telemetry(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("Telemetry of the engines"))
    dashboard.with_panel(
        graph(
            "Stale",
            "1 while an engine has not reported for three seconds.",
            "short",
            {"{{instance_name}}": f"max by (instance_name) (headway_instance_stale{{{OURS}}})"},
            most=1,
        )
    )
    dashboard.with_panel(
        graph(
            "Messages that went wrong",
            "`lost` between engine and proxy, `malformed`, `duplicated`, `outdated`, or "
            "`foreign`: two engines of one name.",
            "ops",
            {
                "{{kind}}": "sum by (kind) "
                f"(rate(headway_telemetry_message_errors_total{{{OURS}}}[$__rate_interval]))"
            },
        )
    )
    dashboard.with_panel(
        graph(
            "Requests",
            "In the running batch, and waiting to be scheduled, as the engines report them.",
            "short",
            {
                "{{instance_name}}: running": "sum by (instance_name) "
                f"(headway_instance_num_requests_running{{{OURS}}})",
                "{{instance_name}}: waiting": "sum by (instance_name) "
                f"(headway_instance_num_requests_waiting{{{OURS}}})",
            },
        )
    )
    dashboard.with_panel(
        graph(
            "KV cache in use",
            "Share of each engine's blocks, as it reports it.",
            "percentunit",
            {
                "{{instance_name}}": "max by (instance_name) "
                f"(headway_instance_kv_cache_usage_ratio{{{OURS}}})"
            },
            most=1,
        )
    )
    dashboard.with_panel(
        graph(
            "Prefill budget",
            "Tokens of new prompts that an engine can compute in time, if deadline-aware batching "
            "is on.",
            "short",
            {
                "{{instance_name}}": "sum by (instance_name) "
                f"(headway_instance_prefill_budget_tokens{{{OURS}}})"
            },
        )
    )
