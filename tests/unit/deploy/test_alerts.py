"""The alert rules fire when they should, and only then."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from reference_alerts import AlertCase, Rule, read_cases, read_rules

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "prometheus"
RULES = read_rules(FOLDER / "alerts.yml")
CASES = read_cases(FOLDER / "alerts_test.yml")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_alerts_fire_as_the_cases_say(case: AlertCase) -> None:
    for (query, at, expected), found in zip(case.expected, case.found(), strict=True):
        assert found == expected, f"{query} at {at:g} s"


def test_every_alert_fires_in_a_case() -> None:
    fires = {
        dict(labels)["alertname"] for case in CASES for _, _, v in case.expected for labels in v
    }
    assert fires == {rule.alert for rule in RULES}


def test_promtool_agrees_where_it_is_installed() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        return  # the cases above have been judged without it
    for command in (
        ["check", "config", "prometheus.yml"],
        ["check", "rules", "alerts.yml"],
        ["test", "rules", "alerts_test.yml"],
    ):
        judged = subprocess.run([promtool, *command], cwd=FOLDER, capture_output=True, text=True)
        assert judged.returncode == 0, judged.stdout + judged.stderr


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.alert)
def test_an_alert_says_how_bad_it_is_and_what_to_do(rule: Rule) -> None:
    assert rule.labels["severity"] in ("critical", "warning", "info")
    assert rule.seconds > 0
    assert {"summary", "description", "runbook_url"} == set(rule.annotations)
    page, _, anchor = rule.annotations["runbook_url"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.MULTILINE)
    assert rule.alert in headings
    assert anchor == rule.alert.lower()
