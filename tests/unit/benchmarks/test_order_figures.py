"""What the measurements of orders of service make of their runs."""

from typing import Any

import pytest

from benchmarks import live_order, order


def simulated(latency: float, ttft: float) -> dict[str, float]:
    names = ("latency", "latency_p50", "latency_p99", "ttft", "slowdown", "longest_wait")
    return dict.fromkeys(names, latency) | {"ttft": ttft, "preemptions": 3.0}


def test_changes_are_paired_by_seed() -> None:
    """Each run is half as long as that with the same requests, however long that is."""
    runs = {
        order.BASE: {0: simulated(10.0, 1.0), 1: simulated(1000.0, 4.0)},
        "boost, oracle": {0: simulated(5.0, 1.0), 1: simulated(500.0, 5.0)},
        "boost, replay": {0: simulated(8.0, 1.0), 1: simulated(800.0, 4.0)},
    }
    found = order.figures_of("smollm2_staged_120", runs)
    assert found["latency_smollm2_staged_120_boost, oracle"] == pytest.approx(-50.0)
    assert found["ttft_smollm2_staged_120_boost, oracle"] == pytest.approx(12.5)
    goals = order.goals(found)
    assert goals["latency_gain_smollm2_staged_120"] == pytest.approx(20.0)
    assert goals["kept_of_exact"] == pytest.approx(0.4)
    assert goals["worst_mean_change_replay"] == pytest.approx(-20.0)
    assert "| boost, oracle | -50 ± 0% |" in order.table("smollm2", runs)


def live(*latencies: float, text: str = "a") -> dict[str, Any]:
    requests = [
        {"arrives": 1.0, "ended": 1.0 + latency, "ttft": latency / 2, "tokens": 10, "text": text}
        for latency in latencies
    ]
    return {"requests": requests, "seconds": 9.0, "failed": 0.0, "preemptions": 0.0}


def test_live_rounds_are_paired_and_answers_compared() -> None:
    results: live_order.Results = {
        "fcfs": {0: live(4.0, 8.0), 1: live(1.0, 1.0), 2: None},
        "boost": {0: live(3.0, 6.0), 1: live(0.5, 1.0, text="b"), 2: live(9.0)},
        "exact": {0: live(2.0, 4.0), 1: None, 2: None},
    }
    found = live_order.figures_of(results)
    assert found["latency_gain_boost"] == pytest.approx(25.0)
    assert found["latency_gain_half_interval_boost"] == pytest.approx(0.0)
    assert found["tokens_changed_boost"] == 2.0
    assert found["latency_gain_exact"] == pytest.approx(50.0)
    assert found["kept_of_exact_boost"] == pytest.approx(0.5)
    assert "| boost | 3 | -25 ± 0% |" in live_order.table("burst", results)
    assert live_order.exact_last(["exact", "boost", "fcfs"]) == ["boost", "fcfs", "exact"]
