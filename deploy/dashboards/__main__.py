"""Write every dashboard as the JSON that Grafana imports."""

from pathlib import Path

from deploy.dashboards import DASHBOARDS
from deploy.dashboards.dashboard_json import dashboard_json

_FOLDER = Path(__file__).parents[1] / "grafana"

if __name__ == "__main__":
    for name, build in DASHBOARDS.items():
        path = _FOLDER / f"{name}.json"
        path.write_text(dashboard_json(build()))
        print(path)
