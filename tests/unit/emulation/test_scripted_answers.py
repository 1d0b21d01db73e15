"""Scripted answers: the same on every engine, drawn from their law, and never an error."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rescheduler.emulation.emulate_options import AnswerLengths
from rescheduler.emulation.scripted_answers import (
    ScriptedAnswers,
    refuse_unscripted,
    scripted_token,
    standard_normal,
)

LAW = AnswerLengths(median=200.0, sigma=0.7, longest=2_000)
VOCABULARY = 49_152

json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def answer(answers: ScriptedAnswers, name: str) -> list[int]:
    tokens, n = [], 0
    while (token := answers.token(name, n)) is not None:
        tokens.append(token)
        n += 1
    return tokens


def test_a_stated_length_counts_the_end() -> None:
    answers = ScriptedAnswers(LAW, VOCABULARY)
    answers.begin("cmpl-1-0-0a1b2c3d", {"emulated_length": 7, "emulated_seed": 3}, 0)
    assert answer(answers, "cmpl-1-0-0a1b2c3d") == [
        scripted_token(3, n, VOCABULARY) for n in range(6)
    ]
    assert answers.scripts["cmpl-1-0-0a1b2c3d"].length == 7
    assert answers.token("cmpl-1-0-0a1b2c3d", 7) is not None, "who ignores the end goes on"
    answers.forget(["cmpl-1-0-0a1b2c3d", "another"])
    assert answers.scripts == {}


def test_an_answer_begins_with_the_tokens_that_are_stated() -> None:
    answers = ScriptedAnswers(LAW, VOCABULARY)
    answers.begin("cmpl-1-0-0a1b2c3d", {"emulated_tokens": [7, 8, 9]}, 0)
    assert answer(answers, "cmpl-1-0-0a1b2c3d") == [7, 8, 9]
    answers.begin("cmpl-2-0-0a1b2c3d", {"emulated_tokens": [7, 8.0], "emulated_length": 5}, 0)
    assert answer(answers, "cmpl-2-0-0a1b2c3d")[:2] == [7, 8]
    assert len(answer(answers, "cmpl-2-0-0a1b2c3d")) == 4
    for wrong in ("7", [7, "8"], [-1], [7.5]):
        with pytest.raises(ValueError, match="emulated_tokens must be a list of token ids"):
            refuse_unscripted({"emulated_tokens": wrong})


def test_an_answer_is_the_same_on_the_engine_that_its_request_moves_to() -> None:
    moving = {"kv_transfer_params": {"headway": {"id": "abc", "hop": 0}}}
    moved = {"kv_transfer_params": {"headway": {"id": "abc", "hop": 1, "generated": 9}}}
    first, second = (ScriptedAnswers(LAW, VOCABULARY) for _ in range(2))
    first.begin("cmpl-1-0-0a1b2c3d", moving, 0)
    second.begin("cmpl-9-0-99999999", moved, 0)
    assert answer(first, "cmpl-1-0-0a1b2c3d") == answer(second, "cmpl-9-0-99999999")
    second.begin("1_cmpl-9-0-99999999", moved, 0)
    assert answer(second, "1_cmpl-9-0-99999999") != answer(second, "cmpl-9-0-99999999")


def test_an_answer_is_no_shorter_than_its_minimum() -> None:
    answers = ScriptedAnswers(LAW, VOCABULARY)
    answers.begin("a", {"emulated_length": 5}, 12)
    assert len(answer(answers, "a")) == 11


def test_lengths_that_are_not_stated_follow_the_law() -> None:
    answers = ScriptedAnswers(LAW, VOCABULARY)
    for i in range(4_000):
        answers.begin(f"cmpl-{i}-0-0a1b2c3d", {}, 0)
    lengths = np.array([script.length for script in answers.scripts.values()])
    assert np.median(lengths) == pytest.approx(LAW.median, rel=0.05)
    assert np.log(lengths).std() == pytest.approx(LAW.sigma, rel=0.05)
    assert lengths.min() >= 1 and lengths.max() <= LAW.longest


transfers = st.one_of(
    json,
    st.builds(lambda value: {"headway": value}, json),
    st.builds(lambda value: {"headway": {"id": value}}, json),
)


KEYS = ["emulated_length", "emulated_seed", "emulated_tokens", "x"]


@given(st.dictionaries(st.sampled_from(KEYS), json), transfers)
def test_whatever_clients_attach_gives_an_answer(
    arguments: dict[str, object], transfer: object
) -> None:
    answers = ScriptedAnswers(LAW, VOCABULARY)
    answers.begin("a", {**arguments, "kv_transfer_params": transfer}, 0)
    assert 1 <= answers.scripts["a"].length < 2**31
    token = answers.token("a", 0)
    assert token is None or 0 <= token < VOCABULARY


@pytest.mark.parametrize(
    ("key", "value"),
    [("length", value) for value in (0, -1, 2**31, 1.5, "120", True, None, [3], math.nan)]
    + [("seed", value) for value in (-1, 2**31, 0.5, "x", False)],
)
def test_a_script_that_cannot_be_is_refused(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"vllm_xargs, emulated_{key} must be a whole number"):
        refuse_unscripted({f"emulated_{key}": value})
    refuse_unscripted({})
    refuse_unscripted({"emulated_length": 1, "emulated_seed": 0.0, "x": "y"})


@given(st.integers(0, 2**31), st.integers(0, 10**6), st.integers(8, 300_000))
def test_a_word_is_in_the_vocabulary(seed: int, n: int, vocabulary: int) -> None:
    assert 0 <= scripted_token(seed, n, vocabulary) < vocabulary


def test_numbers_that_depend_on_a_text_are_standard_normal() -> None:
    z = np.array([standard_normal(f"key {i}") for i in range(20_000)])
    assert abs(z.mean()) < 0.03
    assert z.std() == pytest.approx(1.0, abs=0.02)
    assert np.mean(np.abs(z) < 1.96) == pytest.approx(0.95, abs=0.01)
