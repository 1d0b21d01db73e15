"""STAR's setting on emulated engines: its requests, and the variance of steps that differ."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.emulated_star import KV_TOKENS, RATE, SECONDS, STEP, drawn, step_variance


def test_lengths_are_a_quarter_of_those_of_the_papers_table() -> None:
    load = drawn(0, 100 * SECONDS)
    assert len(load) == pytest.approx(100 * RATE * SECONDS, rel=0.03)
    answers = 4 * np.array([one.answer_tokens for one in load])
    assert np.mean(answers) == pytest.approx(7_542, rel=0.05)
    assert np.median(answers) == pytest.approx(1_536, rel=0.05)
    assert np.mean(answers > 30_000) == pytest.approx(0.173, abs=0.01)
    assert max(one.prompt_tokens + one.answer_tokens for one in load) <= 8_320


def test_a_full_cache_costs_what_the_paper_measured() -> None:
    assert STEP.of(10, KV_TOKENS // 2) == pytest.approx(18.2e-3, rel=0.03)


def test_the_variance_is_that_of_the_steps_under_way(tmp_path: Path) -> None:
    logs = [tmp_path / "0.csv", tmp_path / "1.csv"]
    for log, context in zip(logs, (10_000, 30_000), strict=True):
        rows = [f"{end},1,1,{context},1.0,1.0,0.0" for end in (1.0, 2.0, 3.0)]
        log.write_text("end,requests,new_tokens,context_tokens,seconds,asked_seconds,cpu\n")
        with log.open("a") as file:
            file.write("\n".join(rows) + "\n")
    apart = 1e3 * STEP.per_context * 20_000
    assert step_variance(logs, 0.05, 2.95) == pytest.approx((apart / 2) ** 2)
    logs[0].write_text("\n".join(logs[0].read_text().split("\n")[:2]) + "\n")
    late = (1e3 * (STEP.per_new + STEP.per_context * 30_000) / 2) ** 2
    assert step_variance(logs, 1.05, 2.95) == pytest.approx(late)
