"""Measurements on emulated engines: their load, rounds and figures."""

import json
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from tokenizers import Tokenizer

from benchmarks.emulated_barrier import PLACES, simulated, step_figures
from benchmarks.emulated_barrier import STEP as BARRIER_STEP
from benchmarks.emulated_star import KV_TOKENS, RATE, SECONDS, STEP, drawn, step_variance
from benchmarks.emulator_check import FLEET, MOST_ERROR, comparison, emulated_runs
from benchmarks.support import experiment
from benchmarks.support.experiment import Experiment, PromptLengths, Run, drawn_load
from rescheduler.demo.load import (
    EmulatedAnswer,
    EmulatedRequest,
    answer_figures,
    changed_answers,
    step_sums,
)
from rescheduler.emulation.emulate_options import AnswerLengths
from rescheduler.emulation.scripted_answers import scripted_token


class MadeUp(Experiment):
    """Arms whose figures are known, on engines that do nothing."""

    name = "made_up"
    arms: ClassVar[dict[str, float]] = {"base": 1.0, "half": 0.5, "other": 2.0}
    base = "base"
    figures = ("latency", "goodput")
    counts = ("preemptions",)
    excess = 0.0

    def __init__(self, options: Namespace) -> None:
        super().__init__(options)
        self.log: list[Any] = []

    def engines_of(self, arm: str) -> bool:
        return arm == "other"

    def deployment(self, key: bool) -> Any:
        self.log.append(key)
        return key

    def settings(self, run: Run | None) -> dict[str, Any]:
        return {"requests": self.options.requests, "capacity": run and run.load * self.capacity}

    async def measure(self, deployment: Any) -> float:
        self.log.append("measured")
        return 10.0

    async def serve(self, deployment: Any, run: Run, salt: int) -> dict[str, float]:
        self.log.append((run, salt))
        value = self.arms[run.arm] * (1 + run.round)
        figures = dict.fromkeys(("latency", "goodput", "preemptions"), value)
        return figures | {"excess": self.excess, "changed": 1.0, "failed": 0.0}


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    @contextmanager
    def engines(deployment: Any, logs: Path) -> Iterator[None]:
        yield

    monkeypatch.setattr(experiment, "engines", engines)
    monkeypatch.chdir(tmp_path)
    options = {"requests": 9, "loads": [0.9], "rounds": 2, "out": tmp_path / "kept"}
    more = {"arms": list(MadeUp.arms), "report": False, "quick": False, "json": None}
    return MadeUp(Namespace(**options, **more))


def test_arms_run_in_rotated_rounds_on_engines_that_they_share(made_up: MadeUp) -> None:
    made_up.run_missing(list(MadeUp.arms), 2)
    runs = [entry[0] for entry in made_up.log if isinstance(entry, tuple)]
    assert [run.arm for run in runs] == ["base", "half", "other", "half", "base", "other"]
    assert [run.round for run in runs] == [0, 0, 0, 1, 1, 1]
    kinds = [entry for entry in made_up.log if not isinstance(entry, tuple)]
    assert kinds == [False, "measured", True, False, True], "the capacity is measured once"


def test_what_is_kept_with_the_same_settings_is_not_run_again(made_up: MadeUp) -> None:
    made_up.run_missing(["base", "half"], 1)
    again = MadeUp(made_up.options)
    again.run_missing(["base", "half"], 2)
    assert again.capacity == 10.0
    assert [entry[0].round for entry in again.log if isinstance(entry, tuple)] == [1, 1]
    again.log.clear()
    again.run_missing(["base", "half"], 2)
    assert not again.log, "no engine is started"
    made_up.options.requests = 10
    assert again.valid(Run(0.9, 0, "base")) is None


def test_a_run_whose_steps_took_too_long_is_repeated_and_not_reported(made_up: MadeUp) -> None:
    made_up.excess = 0.1
    made_up.run_missing(["base"], 1)
    runs = [entry for entry in made_up.log if isinstance(entry, tuple)]
    assert len(runs) == len({salt for _, salt in runs}) == 3
    assert made_up.results(0.9, ["base"]) == {"base": {}}


def test_changes_are_relative_to_the_base_and_gains_have_their_sign(
    made_up: MadeUp, capsys: pytest.CaptureFixture[str]
) -> None:
    found = made_up.main({})
    assert "| half | 2 | -50 ± 0% | -50 ± 0% | 1 |" in capsys.readouterr().out
    figures = made_up.summary(found)
    assert figures["capacity"] == 10.0
    assert figures["90_latency_gain_half"] == pytest.approx(50.0)
    assert figures["90_goodput_gain_half"] == pytest.approx(-50.0)
    assert figures["90_rounds_other"] == 2.0
    assert figures["90_answers_changed"] == 6.0


LAW = AnswerLengths(median=100, sigma=1.0, longest=500)
PROMPTS = PromptLengths(50, 400)


def test_a_round_draws_the_same_and_a_rate_only_stretches_it() -> None:
    slow, fast = (drawn_load(3, 200, rate, PROMPTS, LAW) for rate in (1.0, 4.0))
    assert slow == drawn_load(3, 200, 1.0, PROMPTS, LAW)
    assert [replace(one, arrives=0.0) for one in slow] == [
        replace(one, arrives=0.0) for one in fast
    ]
    assert [one.arrives for one in slow] == pytest.approx([4 * one.arrives for one in fast])
    assert slow != drawn_load(4, 200, 1.0, PROMPTS, LAW)
    assert all(50 <= one.prompt_tokens <= 400 for one in slow)
    assert all(2 <= one.answer_tokens <= 500 for one in slow)
    assert {one.arrives for one in drawn_load(3, 9, inf, PROMPTS, LAW)} == {0.0}


def answered(smollm2: Path, *tokens: int) -> EmulatedAnswer:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    ids = [scripted_token(7, n, tokenizer.get_vocab_size()) for n in tokens]
    request = EmulatedRequest(7, 10, 6, 0.0)
    return EmulatedAnswer(request, tokens=6, pieces=[tokenizer.decode(ids)])


def test_an_answer_that_is_cut_or_doubled_is_one_that_changed(smollm2: Path) -> None:
    whole = answered(smollm2, 0, 1, 2, 3, 4)
    cut, doubled = answered(smollm2, 0, 1, 2, 3), answered(smollm2, 0, 1, 1, 2, 3, 4)
    assert changed_answers([whole], smollm2) == 0
    assert changed_answers([whole, cut, doubled], smollm2) == 2
    assert changed_answers([replace(whole, tokens=5)], smollm2) == 1
    assert changed_answers([replace(cut, error="HTTP 500")], smollm2) == 0


def test_figures_are_in_the_time_of_the_emulated_engines() -> None:
    request = EmulatedRequest(1, 10, 11, 0.0)
    answers = [
        EmulatedAnswer(request, sent=10.0, first=14.0, last=34.0, longest_gap=3.0, tokens=11),
        EmulatedAnswer(request, sent=12.0, error="HTTP 500"),
    ]
    figures = answer_figures(answers, 2.0)
    assert (figures["requests"], figures["failed"]) == (2, 1)
    assert (figures["ttft"], figures["latency"], figures["tpot"]) == (2.0, 12.0, 1.0)
    assert figures["gap_p99"] == 1.5
    assert figures["seconds"] == 12.0


HEAD = "end,requests,new_tokens,context_tokens,seconds,asked_seconds,cpu\n"


def step_logs(
    folder: Path, contexts: tuple[int, int], new: int, ends: list[float], seconds: float
) -> list[Path]:
    """Write the logs of two ranks whose steps took as long as asked."""
    logs = [folder / "0.csv", folder / "1.csv"]
    for log, context in zip(logs, contexts, strict=True):
        rows = [f"{end},{new},{new},{context},{seconds},{seconds},0.0\n" for end in ends]
        log.write_text("".join([HEAD, *rows]))
    return logs


def test_steps_are_summed_from_a_log_that_is_being_written(tmp_path: Path) -> None:
    log = tmp_path / "steps.csv"
    log.write_text(HEAD + "1.0,1,1,1,0.5,0.4,0\n2.0,1,1,1,0.6,0.5,0\n3.0,1,1,1,0.7,0.6,0\n4.0,1")
    sums = step_sums([log, log], 1.5)
    assert sums.steps == 4
    assert (sums.asked, sums.real) == pytest.approx((2.2, 2.6))
    assert (sums.excess, sums.jitter) == pytest.approx((0.4 / 2.2, 0.4 / 2.2))  # none too short
    log.write_text(HEAD)
    assert step_sums([log], 0.0).excess == 0.0
    assert np.isfinite(step_sums([], 0.0).excess)


DILATION = 4.0


def test_the_barriers_cost_is_the_time_beyond_the_ranks_own_steps(tmp_path: Path) -> None:
    asked = DILATION * BARRIER_STEP.of(0, 300_000)
    ends = [n * asked for n in range(1, 11)]
    logs = step_logs(tmp_path, (300_000, 200_000), 70, ends, asked)
    figures = step_figures(logs, 2.5 * asked, 8.5 * asked, DILATION)
    own = BARRIER_STEP.constant + BARRIER_STEP.per_context * 250_000
    assert figures["steps"] == 2 * 6
    assert figures["step_ms"] == pytest.approx(1e3 * asked / DILATION)
    assert figures["barrier_share"] == pytest.approx(BARRIER_STEP.of(0, 300_000) / own - 1)
    assert figures["tokens_per_s"] == pytest.approx(2 * 70 / (asked / DILATION))
    assert figures["excess"] == pytest.approx(0)


def test_the_simulator_finds_less_to_wait_for_where_loads_are_balanced() -> None:
    counts, balanced = (simulated(2, 0, arm) for arm in ("jsq", "bfio_0"))
    assert 0 < balanced["barrier_share"] < counts["barrier_share"] / 2
    full = 2 * PLACES / (counts["step_ms"] / 1e3)
    assert counts["tokens_per_s"] == pytest.approx(full, rel=0.02)


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
    logs = step_logs(tmp_path, (10_000, 30_000), 1, [1.0, 2.0, 3.0], 1.0)
    apart = 1e3 * STEP.per_context * 20_000
    assert step_variance(logs, 0.05, 2.95) == pytest.approx((apart / 2) ** 2)
    logs[0].write_text("\n".join(logs[0].read_text().split("\n")[:2]) + "\n")
    late = (1e3 * (STEP.per_new + STEP.per_context * 30_000) / 2) ** 2
    assert step_variance(logs, 1.05, 2.95) == pytest.approx(late)


KEPT = Path("benchmarks/results/emulator_check")
REPORT = KEPT.with_suffix(".json")
SIMULATED = 2
BY_CHANCE = 5.0
"""Percent, of two simulations in place of eight."""


@pytest.mark.parametrize(
    ("load", "arm"),
    [
        ("90", "jsq_load"),
        ("105", "jsq_load"),
        ("105", "jsq_load_age"),
        ("105", "max_capacity"),
        ("130", "reserve"),
    ],
)
def test_preemptions_and_latencies_are_those_of_vllm(load: str, arm: str) -> None:
    found = emulated_runs((FLEET, KEPT))
    assert (load, arm) in found, "the kept runs are of other settings: measure them again"
    runs = found[load, arm]
    dispatch = json.loads(REPORT.read_text())["figures"]["dispatch"]
    compared = comparison(arm, runs[:2], dispatch, SIMULATED)
    for name, one in compared.items():
        assert not one.counts or abs(one.error) <= MOST_ERROR + BY_CHANCE, (name, one)


def test_runs_of_other_engines_are_none(tmp_path: Path) -> None:
    kept = json.loads((KEPT / "90" / "round-0" / "vllm.json").read_text())
    file = tmp_path / "90" / "round-0" / "vllm.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(kept))
    assert list(emulated_runs((tmp_path,))) == [("90", "vllm")]
    kept["settings"]["emulate"]["kv_tokens"] += 1
    file.write_text(json.dumps(kept))
    assert emulated_runs((tmp_path,)) == {}
