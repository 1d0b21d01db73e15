"""What Prometheus, Grafana and Kubernetes' autoscalers are given asks for what exists."""

import asyncio
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import promql_parser as promql
import pytest
import yaml
from exported_metrics import labels_by_name, scraped_proxy
from rendered_chart import rendered
from tokenizers import Tokenizer
from vllm_source import metric_labels

from deploy.dashboards import DASHBOARDS, dashboard_json
from rescheduler.engines.deployment import read_deployment
from rescheduler.finish_times.fleet_load import HORIZONS

ROOT = Path(__file__).parents[3]
PROMETHEUS = ROOT / "deploy" / "prometheus"
GRAFANA = ROOT / "deploy" / "grafana"
RULES = [
    rule
    for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
SCRAPES = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
TARGETS: dict[str, list[dict[str, Any]]] = {
    job["job_name"]: job["static_configs"] for job in SCRAPES["scrape_configs"]
}
CHOSEN = {"$__rate_interval": "1m", "$deployment": "a"}
PANELS = [
    pytest.param(panel, id=f"{path.stem}: {panel['title']}")
    for path in sorted(GRAFANA.glob("*.json"))
    for panel in json.loads(path.read_text())["panels"]
    if panel["type"] != "row"
]


def result_labels(expression: promql.Expr, known: dict[str, set[str]]) -> set[str]:
    """The labels of the results of a PromQL expression.

    Args:
        expression: without subqueries, `without`, `ignoring`, and `group_left` or `group_right`.
        known: the labels of each metric.

    Raises:
        AssertionError: it uses a metric, or a label of one, that does not exist.
    """
    match expression:
        case promql.NumberLiteral():
            return set()
        case promql.ParenExpr():
            return result_labels(expression.expr, known)
        case promql.MatrixSelector():
            return result_labels(expression.vector_selector, known)
        case promql.VectorSelector():
            assert expression.name in known, f"no metric {expression.name}"
            labels = known[expression.name]
            _have(labels, [one.name for one in expression.matchers.matchers], expression)
            return labels
        case promql.AggregateExpr():
            inner, modifier = result_labels(expression.expr, known), expression.modifier
            assert modifier is None or modifier.type == promql.AggModifierType.By
            by = modifier.labels if modifier else []
            _have(inner, by, expression)
            return set(by)
        case promql.Call():
            labels = set().union(*(result_labels(one, known) for one in expression.args))
            if expression.func.name == "histogram_quantile":
                _have(labels, ["le"], expression)
                return labels - {"le"}
            return labels
        case promql.BinaryExpr():
            return _of_both(expression, known)
    raise AssertionError(f"not expected in a query: {expression.prettify()}")


def _of_both(binary: promql.BinaryExpr, known: dict[str, set[str]]) -> set[str]:
    left, right = result_labels(binary.lhs, known), result_labels(binary.rhs, known)
    matching = binary.modifier.matching if binary.modifier else None
    if matching is not None:
        assert matching.type == promql.LabelModifierType.Include
        _have(left & right, matching.labels, binary)
    elif not (_is_number(binary.lhs) or _is_number(binary.rhs)):
        assert left == right, f"never match: {binary.prettify()}"
    return left or right


def _is_number(expression: promql.Expr) -> bool:
    return isinstance(expression, promql.NumberLiteral)


def _have(labels: set[str], asked: list[str], of: promql.Expr) -> None:
    assert labels >= set(asked), f"no label {set(asked) - labels} in {of.prettify()}"


def target_labels(job: str) -> set[str]:
    """Labels that Prometheus adds to everything it reads from a job."""
    return {"job", "instance"}.union(*(target["labels"] for target in TARGETS[job]))


@pytest.fixture(scope="module")
def exported(tokenizer: Tokenizer) -> dict[str, dict[str, set[str]]]:
    """Labels by metric by job."""
    return {
        "headway": labels_by_name(asyncio.run(scraped_proxy(tokenizer))),
        "vllm": metric_labels(),
    }


@pytest.fixture(scope="module")
def known(exported: dict[str, dict[str, set[str]]]) -> dict[str, set[str]]:
    """Labels by metric, with those that Prometheus adds."""
    found = {
        name: labels | target_labels(job)
        for job, metrics in exported.items()
        for name, labels in metrics.items()
    }
    return found | {"up": set.intersection(*map(target_labels, TARGETS))}


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_asks_for_what_exists(panel: dict[str, Any], known: dict[str, set[str]]) -> None:
    assert panel["description"] and panel["targets"]
    for target in panel["targets"]:
        query = target["expr"]
        for variable, value in CHOSEN.items():
            query = query.replace(variable, value)
        labels = result_labels(promql.parse(query), known)
        legend = set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")))
        assert legend == labels, "each line has a name of its own"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_what_exists(rule: dict[str, Any], known: dict[str, set[str]]) -> None:
    labels = result_labels(promql.parse(rule["expr"]), known)
    for annotation in rule["annotations"].values():
        assert set(re.findall(r"\$labels\.(\w+)", annotation)) <= labels, annotation


def test_what_does_not_exist_is_noticed(known: dict[str, set[str]]) -> None:
    for query in (
        "headway_proxy_nothing",
        'headway_proxy_instance_up{engine="a"}',
        "sum by (outcome) (rate(headway_proxy_generation_tokens_total[1m]))",
        "histogram_quantile(0.5, sum by (role) (rate(headway_proxy_requests_total[1m])))",
        "headway_proxy_instance_up / vllm:kv_cache_usage_perc",
        "headway_proxy_instance_up unless on (rank) headway_instance_stale",
    ):
        with pytest.raises(AssertionError):
            result_labels(promql.parse(query), known)


def test_metrics_are_named_as_prometheus_asks(exported: dict[str, dict[str, set[str]]]) -> None:
    for name, labels in exported["headway"].items():
        assert name.startswith("headway_")
        assert not re.search(r"_(ms|milliseconds|minutes|percent|perc|kb|mb)(_|$)", name)
        assert not labels & target_labels("headway"), "Prometheus would rename it"


def test_the_example_scrapes_the_deployment_it_names() -> None:
    deployment = read_deployment(ROOT / "configs" / "serve" / "local-pd.yaml")
    (proxy,) = TARGETS["headway"]
    assert proxy["targets"] == [deployment.proxy_url.removeprefix("http://")]
    assert [
        (target["targets"], target["labels"]["instance_name"], target["labels"]["role"])
        for target in TARGETS["vllm"]
    ] == [([one.url.removeprefix("http://")], one.name, one.role) for one in deployment.instances]


_FETCHED = ROOT / "build/promtool/usr/bin/promtool"
PROMTOOL = shutil.which("promtool") or shutil.which(_FETCHED)
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is missing: .ci/run fetches it"
)


def promtool(command: str, folder: Path) -> None:
    """Have Prometheus' own checker of rules and queries find nothing wrong."""
    words = [str(PROMTOOL), *command.split()]
    judged = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert judged.returncode == 0, judged.stdout + judged.stderr


@needs_promtool
@pytest.mark.parametrize(
    "command",
    ["check config prometheus.yml", "check rules alerts.yml", "test rules alerts_test.yml"],
)
def test_promtool_finds_nothing_wrong(command: str) -> None:
    promtool(command, PROMETHEUS)


def test_every_alert_fires_in_a_case() -> None:
    cases = (PROMETHEUS / "alerts_test.yml").read_text()
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


@pytest.mark.parametrize("name", DASHBOARDS)
def test_the_file_is_what_the_code_describes(name: str) -> None:
    described = dashboard_json(name)
    assert (GRAFANA / f"{name}.json").read_text() == described, "run python -m deploy.dashboards"


def test_every_file_is_described() -> None:
    assert {path.stem for path in GRAFANA.iterdir()} == set(DASHBOARDS)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_fit_beside_each_other(name: str) -> None:
    dashboard = json.loads((GRAFANA / f"{name}.json").read_text())
    assert dashboard["uid"] == name
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard["panels"]:
        place: dict[str, Any] = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                other = taken.setdefault((x, y), panel["title"])
                assert other == panel["title"]
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / "deploy" / "kubernetes-autoscaling" / name).read_text())


KEDA, HPA = read("keda.yml")["spec"], read("hpa.yml")["spec"]
(TRIGGER,) = KEDA["triggers"]
(EXTERNAL,) = (metric["external"] for metric in HPA["metrics"])
(RULE,) = read("prometheus_adapter.yml")["rules"]["external"]


def adapted() -> str:
    """The query that prometheus-adapter makes for what the HPA asks."""
    asked = EXTERNAL["metric"]["selector"]["matchLabels"]
    matchers = ",".join(f'{label}="{value}"' for label, value in asked.items())
    query: str = RULE["metricsQuery"].replace("<<.Series>>", RULE["seriesQuery"])
    return query.replace("<<.LabelMatchers>>", matchers)


QUERIES = {"keda": TRIGGER["metadata"]["query"], "hpa": adapted()}


@pytest.mark.parametrize("which", QUERIES)
def test_a_query_asks_for_what_a_proxy_exports(which: str, known: dict[str, set[str]]) -> None:
    assert result_labels(promql.parse(QUERIES[which]), known) == set(), "a single number"
    (matcher,) = (
        one for one in promql.parse(QUERIES[which]).expr.matchers.matchers if one.name == "seconds"
    )
    assert int(matcher.value) in HORIZONS


CASES = """
tests:
  - interval: 15s
    input_series:
      - {series: 'headway_proxy_wanted_instances{deployment="headway", job="headway", instance="a:8000", seconds="60"}', values: 2x40}
      - {series: 'headway_proxy_wanted_instances{deployment="headway", job="headway", instance="a:8000", seconds="300"}', values: 3x20 5x10 stale}
      - {series: 'headway_proxy_wanted_instances{deployment="other", job="headway", instance="b:8000", seconds="300"}', values: 9x40}
    promql_expr_test:
      - {expr: 'QUERY', eval_time: 4m, exp_samples: [{value: 3, labels: '{}'}]}
      - {expr: 'QUERY', eval_time: 7m, exp_samples: [{value: 5, labels: '{}'}]}
      - {expr: 'QUERY', eval_time: 9m}
"""  # noqa: E501


@needs_promtool
@pytest.mark.parametrize("which", QUERIES)
def test_prometheus_answers_how_many_engines_are_wanted(which: str, tmp_path: Path) -> None:
    (tmp_path / "cases.yml").write_text(CASES.replace("QUERY", QUERIES[which]))
    promtool("test rules cases.yml", tmp_path)


def test_both_scale_alike_by_fields_that_kubernetes_knows() -> None:
    for version in ("1.29", "1.37"):
        kubernetes_validate.validate(read("hpa.yml"), version, strict=True)
    assert TRIGGER["metricType"] == EXTERNAL["target"]["type"] == "AverageValue"
    assert TRIGGER["metadata"]["threshold"] == EXTERNAL["target"]["averageValue"] == "1"
    assert KEDA["scaleTargetRef"] == HPA["scaleTargetRef"]
    limits = KEDA["minReplicaCount"], KEDA["maxReplicaCount"]
    assert limits == (HPA["minReplicas"], HPA["maxReplicas"])
    assert KEDA["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == HPA["behavior"]
    assert TRIGGER["metadata"]["ignoreNullValues"] == "false", "else nothing known is none wanted"


def test_what_is_scaled_is_the_chart_s_and_the_proxy_knows_as_many_engines() -> None:
    most = HPA["maxReplicas"]
    fixed, scaled = (
        rendered("keys without forecasts", decode={"replicas": most, "autoscaled": autoscaled})
        for autoscaled in (False, True)
    )
    target = HPA["scaleTargetRef"]
    spec = scaled.of_kind(target["kind"])[target["name"]]["spec"]
    assert "replicas" not in spec, "it would be set back with every upgrade"
    assert spec | {"replicas": most} == fixed.workloads["decode"]["spec"]
    assert "replicas" in scaled.workloads["prefill"]["spec"]
    decodes = [one.name for one in scaled.deployment.instances if one.role == "decode"]
    assert decodes == [f"{target['name']}-{i}" for i in range(most)]
    assert scaled.deployment.coordinator is None, "which would export no such metric"
    kubernetes_validate.validate(scaled.workloads["decode"], "1.37", strict=True)
