"""What live measurements are made of: loads, capacity, pairs, resumption, the log of moves."""

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from math import inf, isnan
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_rel
from scripted_cluster import PROMPT, cluster, until
from tokenizers import Tokenizer

from benchmarks import live_rescheduling
from benchmarks.support.deployments import StalledError
from benchmarks.support.live_machine import Machine, read_machine, served_rate
from benchmarks.support.live_runs import completed, round_load
from benchmarks.support.move_log import (
    overflows_after,
    read_moves,
    read_placements,
    with_overflows,
)
from benchmarks.support.paired_rounds import mean_of, paired_difference
from rescheduler.commands.log_format import LOG_FORMAT, LOG_TIME, EscapingFormatter
from rescheduler.demo.demo_load import LoadRequest, LoadRun, ServedRequest, StreamChunk

MACHINE = Machine(0.3, 0.03, 0.02, 0.8, 0.08, 0.3, 0.1)


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3)), min_size=2, max_size=12))
def test_a_paired_difference_has_the_interval_of_the_paired_t_test(
    pairs: list[tuple[float, float]],
) -> None:
    a, b = np.array(pairs).T
    found = paired_difference(dict(enumerate(a)), dict(enumerate(b)))
    assert found.mean == pytest.approx((a - b).mean(), abs=1e-9)
    assert found.rounds == len(pairs)
    if (a - b).std() > 1e-6:
        low, high = ttest_rel(a, b).confidence_interval(0.95)
        assert found.half == pytest.approx((high - low) / 2)
        assert found.is_certain == (low > 0 or high < 0)


def test_only_rounds_that_both_arms_have_are_compared() -> None:
    found = paired_difference({0: 1.0, 1: 5.0, 3: 7.0}, {1: 2.0, 2: 100.0, 3: 3.0})
    assert (found.mean, found.rounds) == (3.5, 2)


def test_one_round_is_no_certainty_and_a_round_that_says_nothing_is_none() -> None:
    assert isnan(mean_of({0: 2.0}).half)
    assert not mean_of({0: 2.0}).is_certain
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
            chunks.append(StreamChunk(token, "a", at))
        served.append(ServedRequest(LoadRequest(f"{i}", "", 10, 0, 0.0), 0.0, chunks))
    assert served_rate(served) == pytest.approx(rate, rel=0.02)


def test_what_is_finished_with_the_same_settings_is_not_run_again(tmp_path: Path) -> None:
    runs = [
        live_rescheduling.Run(load, number, arm)
        for number in range(2)
        for load in (0.7, 0.9)
        for arm in ("jsq_load", "reserve", "survival")
    ]

    def missing(reserve: float = 0.1, requests: int = 6, machine: Machine = MACHINE) -> list:
        return live_rescheduling.missing_of(tmp_path, runs, requests, reserve, machine)

    assert missing() == runs
    for run in runs[:4]:
        arm = live_rescheduling.arm_of(run.arm, MACHINE, 0.1)
        load = live_rescheduling.load_of(run, 6, MACHINE)
        file = run.file(tmp_path)
        file.parent.mkdir(parents=True, exist_ok=True)
        settings = live_rescheduling.settings_of(arm, load)
        file.write_text(json.dumps({"settings": settings, "result": {"seconds": 1.0}}))
    assert missing() == runs[4:]
    assert missing(reserve=0.2) == [runs[1], *runs[4:]]
    assert missing(requests=7) == runs
    faster = Machine(**asdict(MACHINE) | {"capacity": 1.0})
    assert missing(machine=faster) == runs
    found = live_rescheduling.finished(tmp_path, 0.7, ["jsq_load", "survival"], 2)
    assert {arm: list(rounds) for arm, rounds in found.items()} == {
        "jsq_load": [0],
        "survival": [0],
    }


def test_a_damaged_measurement_of_the_machine_is_named(tmp_path: Path) -> None:
    (tmp_path / "machine.json").write_text('{"alone_ttft": 1.0}')
    with pytest.raises(ValueError, match="damaged, remove it to measure anew"):
        read_machine(tmp_path)


def test_every_round_begins_with_another_arm() -> None:
    arms = ["a", "b", "c"]
    assert [live_rescheduling.rotated(arms, number)[0] for number in range(4)] == [*"abca"]


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30)), min_size=1, max_size=5),
    st.integers(1, 120),
)
def test_overflows_are_those_of_going_step_by_step(
    requests: list[tuple[int, int]], capacity: int
) -> None:
    expected = None
    for step in range(32):
        running = [context + step for context, left in requests if left > step]
        if sum(running) > capacity:
            expected = step
            break
    assert overflows_after(requests, capacity) == expected


def test_nobody_overflows_nothing() -> None:
    assert overflows_after([], 10) is None


@contextmanager
def proxy_log(path: Path) -> Iterator[None]:
    """Write what `headway serve --verbose` would."""
    logger, handler = logging.getLogger("headway.serve"), logging.FileHandler(path)
    handler.setFormatter(EscapingFormatter(LOG_FORMAT, LOG_TIME))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()


async def test_placements_and_moves_are_read_from_the_log_of_the_proxy(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    planner = {"name": "star", "prediction": False, "interval_seconds": 0.05}
    started = time.time()
    with proxy_log(tmp_path / "proxy.log"):
        async with cluster(tokenizer, migration=planner) as it:
            await it.admin("POST", "drain/decode-1")
            streams = [
                asyncio.create_task(
                    it.stream({"prompt": f"{PROMPT} {i} " * (9 - i), "max_tokens": 400})
                )
                for i in range(6)
            ]
            await until(lambda: len(it.engines["decode-0"].bodies) == 6)
            await it.admin("POST", "undrain/decode-1")
            await asyncio.gather(*streams)
    ended = time.time() - started
    names, placements = read_placements(tmp_path / "proxy.log", started)
    moves = read_moves(tmp_path / "proxy.log", started, names)
    assert len(placements) == len(names) == 6
    assert {one["target"] for one in placements} == {"decode-0"}
    assert any(one["outcome"] == "moved" for one in moves)
    for move in moves:
        assert move["request"] in names.values()
        assert {move["source"], move["target"]} == {"decode-0", "decode-1"}
        assert 0 < move["gain"] <= 1
        assert -0.01 <= move["seconds"] <= move["seconds"] + move["took"] <= ended + 0.01
        assert move["planner"] == "star"


def test_a_move_is_held_against_what_would_have_come_without_it() -> None:
    """Two requests of 50 tokens with 100 to come, on a source with room for 200."""
    times = [[1, 1.0], [101, 101.0]]
    requests = [
        {"name": name, "prompt": 49, "tokens": 101, "ended": 101.0, "times": times}
        for name in ("a", "b")
    ]
    placements = [
        {"seconds": 0.0, "request": name, "tokens": 49, "target": "x"} for name in ("a", "b")
    ]
    move = {"seconds": 2.0, "took": 1.0, "request": "a", "source": "x", "target": "y"}
    (found,) = with_overflows([move | {"outcome": "moved"}], placements, requests, 200)
    assert found["left"] == 100
    assert found["source_overflows"] == 51
    assert found["target_overflows"] is None
    (found,) = with_overflows([move | {"outcome": "moved"}], placements, requests, 140)
    assert found["target_overflows"] == 91


async def test_a_load_that_gets_no_tokens_is_said_to_hang(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer) as it:
        load = [LoadRequest("held", PROMPT, 40, 0, 0.0)]
        run = LoadRun(it.url, "m", load, salt="")
        for engine in it.engines.values():
            engine.stalls_at = 5
        with pytest.raises(StalledError, match=r"no token came for .* 1 of 1 requests run .held."):
            await completed(run, patience=0.5)
