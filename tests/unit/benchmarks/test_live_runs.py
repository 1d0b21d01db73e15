"""What live measurements are made of: loads, capacity, pairs, resumption."""

from math import inf, isnan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_rel
from scripted_cluster import PROMPT, cluster
from tokenizers import Tokenizer

from benchmarks import live_order
from benchmarks.live_order import ORDERS, Plan, Run
from benchmarks.support.deployments import StalledError
from benchmarks.support.live_runs import TimedAnswer, TokenTime, completed, round_load, served_rate
from benchmarks.support.report import mean_of, percent_change, rotated
from rescheduler.demo.load import LoadRequest, chat_body, serve_answers


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(1.0, 1e3)), min_size=2, max_size=12))
def test_a_paired_change_has_the_interval_of_the_paired_t_test(
    pairs: list[tuple[float, float]],
) -> None:
    a, b = np.array(pairs).T
    found = percent_change(dict(enumerate(a)), dict(enumerate(b)))
    relative = 100 * a / b
    assert found.mean == pytest.approx((relative - 100).mean(), abs=1e-9)
    assert found.rounds == len(pairs)
    if relative.std() > 1e-6:
        low, high = ttest_rel(relative, np.full(len(a), 100.0)).confidence_interval(0.95)
        assert found.half == pytest.approx((high - low) / 2)


def test_only_rounds_that_both_arms_have_are_compared() -> None:
    found = percent_change({0: 1.0, 1: 5.0, 3: 6.0}, {1: 2.0, 2: 100.0, 3: 3.0})
    assert (found.mean, found.rounds) == (125.0, 2)


def test_one_round_is_no_certainty_and_a_round_that_says_nothing_is_none() -> None:
    assert isnan(mean_of({0: 2.0}).half)
    assert mean_of({0: 2.0, 1: float("nan"), 2: 4.0}).rounds == 2


def test_a_round_asks_the_same_under_every_load_and_another_asks_something_else() -> None:
    slow, fast = round_load(3, 20, 0.5, 100), round_load(3, 20, 1.0, 100)
    assert [one.prompt for one in slow] == [one.prompt for one in fast]
    assert [one.seed for one in slow] == [one.seed for one in fast]
    np.testing.assert_allclose(
        [one.arrives for one in slow], [2 * one.arrives for one in fast], rtol=1e-12
    )
    assert {one.prompt for one in slow} != {one.prompt for one in round_load(4, 20, 0.5, 100)}
    assert len({one.name for one in slow}) == 20
    assert all(one.arrives == 0.0 for one in round_load(3, 20, inf, 100))


@given(st.floats(0.2, 5.0), st.integers(20, 60), st.floats(0.0, 30.0))
def test_the_served_rate_is_that_of_the_middle_whatever_beginning_and_end_take(
    rate: float, requests: int, idle: float
) -> None:
    """Ten tokens a request at a steady rate, but for the first and the last tenth of them."""
    served, at = [], 0.0
    for i in range(requests):
        chunks = []
        for token in range(1, 11):
            done = (10 * i + token) / (10 * requests)
            at += 1 / (10 * rate) + (idle / requests if done < 0.1 or done > 0.9 else 0.0)
            chunks.append(TokenTime(token, at))
        served.append(TimedAnswer(LoadRequest(f"{i}", "", 10, 0, 0.0), chunks=chunks))
    assert served_rate(served) == pytest.approx(rate, rel=0.02)


def test_what_is_finished_with_the_same_settings_is_not_run_again(tmp_path: Path) -> None:
    runs = [
        Run(load, number, arm)
        for number in range(2)
        for load in ("0.7", "0.9")
        for arm in ("fcfs", "boost", "exact")
    ]

    def missing(requests: int = 6, capacity: float = 0.8) -> list[Run]:
        plan = Plan(tmp_path, requests, capacity)
        return [run for run in runs if plan.result(run) is None]

    assert missing() == runs
    plan, served = Plan(tmp_path, 6, 0.8), {"seconds": 1.0}
    for run in runs[:2]:
        requests = [{"name": one.name, "tokens": 9} for one in plan.requests_of(run)]
        run.cells(tmp_path, plan.settings(run)).write(run.arm, served | {"requests": requests})
    assert missing() == runs[2:]
    assert missing(requests=7) == missing(capacity=1.0) == runs
    assert {one.max_tokens for one in plan.requests_of(runs[2])} == {9}, "exact lengths are known"
    assert plan.settings(runs[0])["order"] == ORDERS["fcfs"]


def test_every_round_begins_with_another_arm() -> None:
    assert [rotated(["a", "b", "c"], number)[0] for number in range(4)] == [*"abca"]


async def test_a_load_that_gets_no_tokens_is_said_to_hang(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer) as it:
        answers = [TimedAnswer(LoadRequest("held", PROMPT, 40, 0, 0.0))]
        load = serve_answers(it.url, answers, lambda request: chat_body("m", request, ""))
        for engine in it.engines.values():
            engine.stalls_at = 5
        with pytest.raises(StalledError, match=r"no token came for .* 1 of 1 requests run .held."):
            await completed(load, answers, patience=0.5)


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
