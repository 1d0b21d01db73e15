"""Prometheus finds the chart's pods by the example configuration, and labels them as it should."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from rendered_chart import VALUES, Rendered, rendered

CONFIG = Path(__file__).parents[3] / "deploy" / "prometheus" / "kubernetes.yml"
JOBS = {job["job_name"]: job for job in yaml.safe_load(CONFIG.read_text())["scrape_configs"]}


def discovered(release: Rendered) -> Iterator[dict[str, str]]:
    """What Prometheus knows of each port of each pod, by its own names."""
    for component, workload in release.workloads.items():
        pod = release.pod(component)
        labels = {
            f"__meta_kubernetes_pod_label_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}": value
            for name, value in pod["metadata"]["labels"].items()
        }
        for i in range(workload["spec"]["replicas"]):
            for port in release.container(component)["ports"]:
                yield labels | {
                    "__meta_kubernetes_pod_name": f"{workload['metadata']['name']}-{i}",
                    "__meta_kubernetes_pod_container_port_name": port["name"],
                }


def relabelled(job: dict[str, Any], target: dict[str, str]) -> dict[str, str] | None:
    """The labels of a target that a job scrapes; None if it does not."""
    found = {}
    for rule in job["relabel_configs"]:
        value = ";".join(target[label] for label in rule["source_labels"])
        if rule.get("action") == "keep":
            if not re.fullmatch(rule["regex"], value):
                return None
        else:
            found[rule["target_label"]] = value
    return found


@pytest.mark.parametrize("which", VALUES)
def test_prometheus_finds_the_proxies_the_coordinator_and_every_engine(which: str) -> None:
    release = rendered(which)
    scraped = {
        name: [labels for target in discovered(release) if (labels := relabelled(job, target))]
        for name, job in JOBS.items()
    }
    proxies = release.workloads["proxy"]["spec"]["replicas"]
    coordinators = 0 if release.deployment.coordinator is None else 1
    assert scraped["headway"] == [{"deployment": "headway"}] * (proxies + coordinators)
    assert scraped["vllm"] == [
        {"deployment": "headway", "role": one.role, "instance_name": one.name}
        for one in release.deployment.instances
    ]
