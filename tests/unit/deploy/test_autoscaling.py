"""What scales decode engines on Kubernetes asks for what a proxy exports, and gets one number."""

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import promql_parser as promql
import pytest
import yaml
from exported_metrics import labels_by_name, scraped_proxy
from promql_labels import result_labels
from promtool import PROMTOOL
from rendered_chart import rendered
from tokenizers import Tokenizer

from rescheduler.finish_times.fleet_load import HORIZONS

ROOT = Path(__file__).parents[3]


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / "deploy" / "kubernetes-autoscaling" / name).read_text())


KEDA, HPA, ADAPTER = (
    read("keda.yml")["spec"],
    read("hpa.yml")["spec"],
    read("prometheus_adapter.yml"),
)
(TRIGGER,) = KEDA["triggers"]
(EXTERNAL,) = (metric["external"] for metric in HPA["metrics"])
(RULE,) = ADAPTER["rules"]["external"]


def adapted() -> str:
    """The query that prometheus-adapter makes for what the HPA asks."""
    asked = EXTERNAL["metric"]["selector"]["matchLabels"]
    matchers = ",".join(f'{label}="{value}"' for label, value in asked.items())
    query: str = RULE["metricsQuery"].replace("<<.Series>>", RULE["seriesQuery"])
    return query.replace("<<.LabelMatchers>>", matchers)


QUERIES = {"keda": TRIGGER["metadata"]["query"], "hpa": adapted()}


@pytest.mark.parametrize("which", QUERIES)
def test_a_query_asks_for_what_a_proxy_exports(which: str, tokenizer: Tokenizer) -> None:
    scraped = labels_by_name(asyncio.run(scraped_proxy(tokenizer)))
    known = {name: labels | {"deployment"} for name, labels in scraped.items()}
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


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is missing: .ci/run fetches it")
@pytest.mark.parametrize("which", QUERIES)
def test_prometheus_answers_how_many_engines_are_wanted(which: str, tmp_path: Path) -> None:
    (tmp_path / "cases.yml").write_text(CASES.replace("QUERY", QUERIES[which]))
    words = [str(PROMTOOL), "test", "rules", "cases.yml"]
    judged = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert judged.returncode == 0, judged.stdout + judged.stderr


def test_both_scale_alike() -> None:
    assert TRIGGER["metricType"] == EXTERNAL["target"]["type"] == "AverageValue"
    assert TRIGGER["metadata"]["threshold"] == EXTERNAL["target"]["averageValue"] == "1"
    assert KEDA["scaleTargetRef"] == HPA["scaleTargetRef"]
    limits = KEDA["minReplicaCount"], KEDA["maxReplicaCount"]
    assert limits == (HPA["minReplicas"], HPA["maxReplicas"])
    assert KEDA["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == HPA["behavior"]
    assert TRIGGER["metadata"]["ignoreNullValues"] == "false", "else nothing known is none wanted"


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_kubernetes_knows_every_field_of_the_autoscaler(version: str) -> None:
    kubernetes_validate.validate(read("hpa.yml"), version, strict=True)


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
