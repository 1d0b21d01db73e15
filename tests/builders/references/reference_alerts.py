"""Alert rules over the cases of a file that `promtool test rules` reads, evaluated plainly.

Known is what the file uses: series by their notation, and the samples that a query expects.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import promql_parser as promql
import yaml
from reference_promql import Labels, Series, Vector, evaluate

__all__ = ["AlertCase", "Rule", "read_cases", "read_rules"]

_REPEATED = re.compile(r"(?P<start>[^+x]+)(\+(?P<step>[^x]+))?x(?P<times>\d+)")


@dataclass(frozen=True)
class Rule:
    """An alert rule, as Prometheus reads it."""

    alert: str
    expr: str
    seconds: float
    labels: dict[str, str]
    annotations: dict[str, str]


@dataclass
class AlertCase:
    """One test of the file.

    Attributes:
        name: what it is of.
        series: that exist.
        expected: queries, when they are asked, and what they find.
        rules: that are evaluated.
        step: seconds between two evaluations.
    """

    name: str
    series: Series
    expected: list[tuple[str, float, Vector]]
    rules: list[Rule]
    step: float
    _active: dict[tuple[str, Labels], float] = field(default_factory=dict)
    _written: set[Labels] = field(default_factory=set)

    def found(self) -> list[Vector]:
        """What each query finds, after the rules have been evaluated until the last one."""
        last = max(at for _, at, _ in self.expected)
        for number in range(int(last / self.step) + 1):
            self._write_alerts(number * self.step)
        return [
            _as_vector(evaluate(promql.parse(query), self.series, at))
            for query, at, _ in self.expected
        ]

    def _write_alerts(self, now: float) -> None:
        """Evaluate every rule, and write the series `ALERTS` as Prometheus does."""
        active, written = {}, set()
        for rule in self.rules:
            for labels in _as_vector(evaluate(promql.parse(rule.expr), self.series, now)):
                alert = {k: v for k, v in labels if k != "__name__"} | rule.labels
                key = rule.alert, frozenset(alert.items())
                since = active[key] = self._active.get(key, now)
                state = "firing" if now - since >= rule.seconds else "pending"
                names = {"__name__": "ALERTS", "alertname": rule.alert, "alertstate": state}
                written.add(frozenset((alert | names).items()))
        for one in written:
            self.series.setdefault(one, []).append((now, 1.0))
        for one in self._written - written:
            self.series[one].append((now, None))
        self._active, self._written = active, written


def read_rules(path: Path) -> list[Rule]:
    return [
        Rule(
            alert=rule["alert"],
            expr=rule["expr"],
            seconds=_seconds(rule["for"]),
            labels=rule["labels"],
            annotations=rule["annotations"],
        )
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
    ]


def read_cases(path: Path) -> list[AlertCase]:
    content = yaml.load(path.read_text(), yaml.BaseLoader)  # or 0x90 would be a number
    rules = [rule for name in content["rule_files"] for rule in read_rules(path.parent / name)]
    step = _seconds(content["evaluation_interval"])
    return [_case(test, rules, step) for test in content["tests"]]


def _case(test: dict[str, Any], rules: list[Rule], step: float) -> AlertCase:
    interval = _seconds(test["interval"])
    series: Series = {}
    for one in test["input_series"]:
        values = enumerate(_values(one["values"]))
        samples = [(number * interval, value) for number, value in values]
        series[_labels(one["series"])] = samples
    expected = [
        (
            query["expr"],
            _seconds(query["eval_time"]),
            {_labels(one["labels"]): float(one["value"]) for one in query.get("exp_samples", [])},
        )
        for query in test["promql_expr_test"]
    ]
    return AlertCase(test["name"], series, expected, rules, step)


def _values(notation: str) -> list[float | None]:
    """Numbers of `1 2`, of `5x3` (a value and three more) and of `0+2x3`; None where stale."""
    values: list[float | None] = []
    for word in notation.split():
        repeated = _REPEATED.fullmatch(word)
        if repeated is None:
            values.append(None if word == "stale" else float(word))
            continue
        start, step = float(repeated["start"]), float(repeated["step"] or 0)
        values += [start + step * number for number in range(int(repeated["times"]) + 1)]
    return values


def _labels(selector: str) -> Labels:
    parsed = promql.parse(selector)
    assert isinstance(parsed, promql.VectorSelector) and parsed.name is not None
    pairs = {one.name: one.value for one in parsed.matchers.matchers}
    return frozenset((pairs | {"__name__": parsed.name}).items())


def _seconds(duration: str) -> float:
    return promql.parse_duration(duration).total_seconds()


def _as_vector(value: Vector | float) -> Vector:
    assert isinstance(value, dict)
    return value
