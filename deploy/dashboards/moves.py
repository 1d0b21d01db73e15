"""Headway: moves: what migration does, and what it costs."""

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from deploy.dashboards.panels import OURS, figure, graph, new_dashboard, percentiles

_MOVES = f"headway_proxy_migrations_total{{{OURS}}}[$__rate_interval]"
_MOVED = f'headway_proxy_migrations_total{{{OURS}, outcome="moved"}}[$__rate_interval]'


def moves() -> Dashboard:
    """Return the dashboard of requests that move between decode instances."""
    dashboard = new_dashboard(
        "Headway: moves",
        "headway-moves",
        "Running requests that move between instances: how many, how well, and what for.",
    )
    _moves(dashboard)
    _costs(dashboard)
    _balance(dashboard)
    return dashboard


def _moves(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("Now"))
    dashboard.with_panel(
        figure("Moves", "Requests moved, per second.", "ops", f"sum(rate({_MOVED}))")
    )
    dashboard.with_panel(
        figure(
            "Succeeded",
            "Share of the attempts that moved their request.",
            "percentunit",
            f"sum(rate({_MOVED})) / sum(rate({_MOVES}))",
        )
    )
    dashboard.with_row(Row("Moves"))
    dashboard.with_panel(
        graph(
            "Attempts by outcome",
            "`moved`; `ended`, `gone` and `not_frozen`: the request ended or left first; "
            "`no_room`: the target is full; `not_copied`, `no_answer` and `rolled_back`: "
            "the transfer or an engine failed. A request that stays is not disturbed.",
            "ops",
            {"{{outcome}}": f"sum by (outcome) (rate({_MOVES}))"},
            stacked=True,
        )
    )
    dashboard.with_panel(
        graph(
            "From where to where",
            "Requests moved. Steady traffic both ways between two instances helps nobody.",
            "ops",
            {"{{source}} to {{target}}": f"sum by (source, target) (rate({_MOVED}))"},
        )
    )


def _costs(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("What they cost"))
    dashboard.with_panel(
        graph(
            "Gap in the stream",
            "From the last token at the source to the first at the target: what a client notices.",
            "s",
            percentiles("headway_proxy_migration_gap_seconds"),
        )
    )
    dashboard.with_panel(
        graph(
            "Copying",
            "Copying the KV cache to the target, while the request goes on at its source.",
            "s",
            percentiles("headway_proxy_migration_copy_seconds"),
        )
    )
    dashboard.with_panel(
        graph(
            "Planning",
            "Decisions of the planner.",
            "s",
            percentiles("headway_proxy_migration_planning_seconds"),
        )
    )


def _balance(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("What they are for"))
    tokens = f'headway_proxy_context_tokens{{{OURS}, role="decode"}}'
    dashboard.with_panel(
        graph(
            "Imbalance",
            "Context tokens of the fullest decode instance above their mean, relative to it.",
            "percentunit",
            {
                "{{deployment}}": f"max by (deployment) ({tokens}) / avg by (deployment) ({tokens})"
                " - 1"
            },
        )
    )
    dashboard.with_panel(
        graph(
            "KV cache in use",
            "Share of each decode engine's blocks.",
            "percentunit",
            {
                "{{instance_name}}": "max by (instance_name) "
                f'(vllm:kv_cache_usage_perc{{{OURS}, role="decode"}})'
            },
            most=1,
        )
    )
    dashboard.with_panel(
        graph(
            "Preemptions",
            "Requests evicted from a full KV cache: what moves are to prevent.",
            "ops",
            {
                "{{instance_name}}": "sum by (instance_name) "
                f'(rate(vllm:num_preemptions_total{{{OURS}, role="decode"}}[$__rate_interval]))'
            },
        )
    )
