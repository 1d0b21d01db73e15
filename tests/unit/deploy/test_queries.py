"""Every query of a dashboard or an alert can be answered: by what is exported, with its labels."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from exported_metrics import labels_by_name, scraped_proxy
from promql_labels import result_labels
from tokenizers import Tokenizer
from vllm_source import metric_labels

from rescheduler.engines.deployment import read_deployment

ROOT = Path(__file__).parents[3]
PROMETHEUS = ROOT / "deploy" / "prometheus"
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
    for path in sorted((ROOT / "deploy" / "grafana").glob("*.json"))
    for panel in json.loads(path.read_text())["panels"]
    if panel["type"] != "row"
]


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
