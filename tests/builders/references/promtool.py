"""Prometheus' own checker of rules and queries, where this machine has it."""

import shutil
from pathlib import Path

_FETCHED = Path(__file__).parents[3] / "build/promtool/usr/bin/promtool"
PROMTOOL = shutil.which("promtool") or shutil.which(_FETCHED)
"""None: it is missing; `.ci/run` fetches it."""
