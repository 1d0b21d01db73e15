"""The alert rules fire when they should, and only then: promtool judges the cases of a file."""

import re
import subprocess
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from promtool import PROMTOOL

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "prometheus"
RULES = [
    rule
    for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is missing: .ci/run fetches it")
@pytest.mark.parametrize(
    "command",
    ["check config prometheus.yml", "check rules alerts.yml", "test rules alerts_test.yml"],
)
def test_promtool_finds_nothing_wrong(command: str) -> None:
    words = [str(PROMTOOL), *command.split()]
    judged = subprocess.run(words, cwd=FOLDER, capture_output=True, text=True)
    assert judged.returncode == 0, judged.stdout + judged.stderr


def test_every_alert_fires_in_a_case() -> None:
    cases = (FOLDER / "alerts_test.yml").read_text()
    fires = re.findall(r'labels: \'ALERTS\{alertname="(\w+)", alertstate="firing"', cases)
    assert set(fires) == {rule["alert"] for rule in RULES}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_says_how_bad_it_is_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert promql.parse_duration(rule["for"]).total_seconds() > 0
    assert {"summary", "description", "runbook_url"} == set(rule["annotations"])
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.MULTILINE)
    assert rule["alert"] in headings
    assert anchor == rule["alert"].lower()
