"""Reading what `/metrics` answers."""

from prometheus_client.parser import text_string_to_metric_families

__all__ = ["metric", "metric_by"]


def metric_by(text: str, name: str, label: str, **labels: str) -> dict[str, float]:
    """Return a metric by the values of one label, summed over the labels that are not given."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                key = sample.labels.get(label, "")
                found[key] = found.get(key, 0.0) + sample.value
    return found


def metric(text: str, name: str, **labels: str) -> float:
    """Return a metric, summed over the labels that are not given; 0 where it is missing."""
    return sum(metric_by(text, name, "", **labels).values())
