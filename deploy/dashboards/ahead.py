"""Headway: ahead: when requests finish, what was promised, and the load that is coming."""

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from deploy.dashboards.panels import OURS, figure, graph, new_dashboard

_FORECASTS = "headway_proxy_finish_forecasts_total"
_PROMISES = "headway_proxy_promises_total"
_EXPECTED = "headway_proxy_expected_context_tokens"
_UP = (
    f'(headway_proxy_instance_up{{{OURS}, role="decode"}}'
    f' * (1 - headway_proxy_instance_draining{{{OURS}, role="decode"}}))'
)


def ahead() -> Dashboard:
    """Return the dashboard of finish times, promises, and the load ahead."""
    dashboard = new_dashboard(
        "Headway: ahead",
        "headway-ahead",
        "When requests finish, what was promised of it, and the load that is coming.",
    )
    _now(dashboard)
    _finish_times(dashboard)
    _load(dashboard)
    _instances(dashboard)
    return dashboard


def _now(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("Last hour"))
    dashboard.with_panel(
        figure(
            "Finish times",
            "Share of the 80% intervals that held. Below 65% they are miscalibrated.",
            "percentunit",
            f'sum(increase({_FORECASTS}{{{OURS}, of="finish", outcome="within"}}[1h]))'
            f' / sum(increase({_FORECASTS}{{{OURS}, of="finish"}}[1h]))',
        )
    )
    dashboard.with_panel(
        figure(
            "Promises kept",
            "Share of the promises that were kept, of those that were kept or broken.",
            "percentunit",
            f'sum(increase({_PROMISES}{{{OURS}, outcome="kept"}}[1h]))'
            f' / sum(increase({_PROMISES}{{{OURS}, outcome=~"kept|broken"}}[1h]))',
        )
    )
    dashboard.with_panel(
        figure(
            "Promises refused",
            "Share of the requests that asked for a promise and got 429.",
            "percentunit",
            f'sum(increase({_PROMISES}{{{OURS}, outcome="refused"}}[1h]))'
            f' / sum(increase({_PROMISES}{{{OURS}, outcome=~"given|refused"}}[1h]))',
        )
    )
    dashboard.with_panel(
        figure(
            "Unplaceable",
            "Waiting requests that no decode instance is expected to have room for, now.",
            "short",
            f"sum(headway_proxy_unplaceable_requests{{{OURS}}})",
        )
    )


def _finish_times(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("Finish times and promises"))
    dashboard.with_panel(
        graph(
            "80% intervals that held",
            "By what was forecast, a start or a finish, and what the request was then: `arriving`, "
            "`queued`, at its `first_token`, or `running`. Over a quarter of an hour; calibrated "
            "ones are at 80%.",
            "percentunit",
            {
                "{{of}} of {{request}}": "sum by (of, request) "
                f'(increase({_FORECASTS}{{{OURS}, outcome="within"}}[15m]))'
                f" / sum by (of, request) (increase({_FORECASTS}{{{OURS}}}[15m]))"
            },
            most=1,
        )
    )
    dashboard.with_panel(
        graph(
            "Promises",
            "On arrival: `given`, `refused`, or `none`, taken without one, while too little was "
            "known. At the end: `kept` or `broken`, or `left` where the client or an error ended "
            "the request in time.",
            "reqps",
            {"{{outcome}}": f"sum by (outcome) (rate({_PROMISES}{{{OURS}}}[$__rate_interval]))"},
        )
    )


def _load(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("The load ahead, and what came"))
    for seconds in (60, 300):
        expected = f'{_EXPECTED}{{{OURS}, seconds="{seconds}", arrivals="as_lately", quantile='
        dashboard.with_panel(
            graph(
                f"Expected {seconds} s before",
                "Context tokens on all decode instances, and what had been expected of them "
                f"{seconds} s before if requests went on coming as in the minute until then. The "
                "load should be above the p90 one time in ten.",
                "short",
                {
                    "now": f'sum(headway_proxy_context_tokens{{{OURS}, role="decode"}})',
                    "expected": f'sum({expected}"0.5"}} offset {seconds}s)',
                    "p90": f'sum({expected}"0.9"}} offset {seconds}s)',
                    "capacity": f"sum(headway_proxy_kv_capacity_tokens{{{OURS}}})",
                },
            )
        )


def _instances(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("Instances"))
    dashboard.with_panel(
        graph(
            "Wanted, and in service",
            "Decode instances that nine times in ten hold the load of so many seconds ahead, and "
            "those that get requests.",
            "short",
            {
                "wanted in {{seconds}} s": "sum by (seconds) "
                f"(headway_proxy_wanted_instances{{{OURS}}})",
                "in service": f"sum{_UP}",
            },
        )
    )
    dashboard.with_panel(
        graph(
            "Time to drain",
            "Until all that runs on an instance now has ended, nine times in ten, if nothing moves "
            "away.",
            "s",
            {
                "{{instance_name}}": "max by (instance_name) "
                f"(headway_proxy_expected_drain_seconds{{{OURS}}})"
            },
        )
    )
