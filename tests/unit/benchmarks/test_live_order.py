"""What the measurement of orders of service on engines makes of its runs."""

from typing import Any

import pytest

from benchmarks import live_order


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
