"""A dashboard as Grafana imports it."""

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder


def dashboard_json(dashboard: Dashboard) -> str:
    """Return a dashboard's JSON, the same for the same dashboard; panels are numbered from 1."""
    built = dashboard.build()
    for number, panel in enumerate(built.panels or [], 1):
        panel.id_val = number
    return JSONEncoder(sort_keys=True, indent=2).encode(built) + "\n"
