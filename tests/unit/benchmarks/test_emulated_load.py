"""The load of emulated engines: drawn alike, its answers checked, its steps summed."""

from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from benchmarks.support.experiment import PromptLengths, drawn_load
from rescheduler.demo.scripted_load import (
    EmulatedAnswer,
    EmulatedRequest,
    answer_figures,
    changed_answers,
    step_sums,
)
from rescheduler.emulation.emulate_options import AnswerLengths
from rescheduler.emulation.scripted_answers import scripted_token

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
    return EmulatedAnswer(request, tokens=6, text=tokenizer.decode(ids))


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


def test_steps_are_summed_from_a_log_that_is_being_written(tmp_path: Path) -> None:
    log = tmp_path / "steps.csv"
    head = "end,requests,new_tokens,context_tokens,seconds,asked_seconds,cpu\n"
    log.write_text(head + "1.0,1,1,1,0.5,0.4,0\n2.0,1,1,1,0.6,0.5,0\n3.0,1,1,1,0.7,0.6,0\n4.0,1")
    sums = step_sums([log, log], 1.5)
    assert sums.steps == 4
    assert (sums.asked, sums.real) == pytest.approx((2.2, 2.6))
    assert (sums.excess, sums.jitter) == pytest.approx((0.4 / 2.2, 0.4 / 2.2))  # none too short
    log.write_text(head)
    assert step_sums([log], 0.0).excess == 0.0
    assert np.isfinite(step_sums([], 0.0).excess)
