"""What the measurements of orders of service make of their runs."""

import pytest

from benchmarks import order


def simulated(latency: float, ttft: float) -> dict[str, float]:
    names = ("latency", "latency_p50", "latency_p99", "ttft", "slowdown", "longest_wait")
    return dict.fromkeys(names, latency) | {"ttft": ttft, "preemptions": 3.0}


def test_changes_are_paired_by_seed() -> None:
    """Each run is half as long as that with the same requests, however long that is."""
    runs = {
        order.BASE: {0: simulated(10.0, 1.0), 1: simulated(1000.0, 4.0)},
        "boost, oracle": {0: simulated(5.0, 1.0), 1: simulated(500.0, 5.0)},
    }
    found = order.figures_of("smollm2_staged_120", runs)
    assert found["latency_smollm2_staged_120_boost, oracle"] == pytest.approx(-50.0)
    assert found["ttft_smollm2_staged_120_boost, oracle"] == pytest.approx(12.5)
    assert "| boost, oracle | -50 ± 0% |" in order.table("smollm2", runs)
