"""What a barrier costs by the logs of its ranks, and what the simulator says of the same."""

from pathlib import Path

import pytest

from benchmarks.emulated_barrier import PLACES, STEP, simulated, step_figures

DILATION = 4.0


def test_the_barriers_cost_is_the_time_beyond_the_ranks_own_steps(tmp_path: Path) -> None:
    logs = [tmp_path / "0.csv", tmp_path / "1.csv"]
    asked = DILATION * STEP.of(0, 300_000)
    for log, context in zip(logs, (300_000, 200_000), strict=True):
        rows = [f"{n * asked},70,70,{context},{asked},{asked},0.0" for n in range(1, 11)]
        head = "end,requests,new_tokens,context_tokens,seconds,asked_seconds,cpu"
        log.write_text("\n".join([head, *rows]) + "\n")
    figures = step_figures(logs, 2.5 * asked, 8.5 * asked, DILATION)
    own = STEP.constant + STEP.per_context * 250_000
    assert figures["steps"] == 2 * 6
    assert figures["step_ms"] == pytest.approx(1e3 * asked / DILATION)
    assert figures["barrier_share"] == pytest.approx(STEP.of(0, 300_000) / own - 1)
    assert figures["tokens_per_s"] == pytest.approx(2 * 70 / (asked / DILATION))
    assert figures["excess"] == pytest.approx(0)


def test_the_simulator_finds_less_to_wait_for_where_loads_are_balanced() -> None:
    counts, balanced = (simulated(2, 0, arm) for arm in ("jsq", "bfio_0"))
    assert 0 < balanced["barrier_share"] < counts["barrier_share"] / 2
    full = 2 * PLACES / (counts["step_ms"] / 1e3)
    assert counts["tokens_per_s"] == pytest.approx(full, rel=0.02)
