"""Headway's Grafana dashboards: `python -m deploy.dashboards` writes them to `deploy/grafana`."""

from collections.abc import Callable

from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.dashboards.ahead import ahead
from deploy.dashboards.forecasts import forecasts
from deploy.dashboards.moves import moves
from deploy.dashboards.serving import serving

__all__ = ["DASHBOARDS"]

DASHBOARDS: dict[str, Callable[[], Dashboard]] = {
    "headway-serving": serving,
    "headway-moves": moves,
    "headway-ahead": ahead,
    "headway-forecasts": forecasts,
}
"""By the names of their files."""
