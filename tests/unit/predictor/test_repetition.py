"""How much an answer repeats itself, against the definition spelled out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.models.hidden_state_mlp import NO_REPETITION
from predictor.models.repetition import repetition


def spelled_out(answer: list[int]) -> tuple[float, float]:
    seen = answer[-256:]
    n = len(seen)
    grams = {end: tuple(seen[end - 3 : end + 1]) for end in range(3, n)}
    newest = [end for end in grams if end >= n - 64]
    repeated = [any(grams[e] == grams[end] for e in grams if e < end) for end in newest]
    suffixes = [
        length
        for length in range(1, min(64, n - 1) + 1)
        if any(
            seen[end - length + 1 : end + 1] == seen[n - length :]
            for end in range(length - 1, n - 1)
        )
    ]
    return sum(repeated) / max(1, len(newest)), float(max(suffixes, default=0))


loops = st.builds(
    lambda start, loop, times: start + loop * times,
    st.lists(st.integers(0, 60_000), max_size=40),
    st.lists(st.integers(0, 60_000), min_size=1, max_size=90),
    st.integers(1, 8),
)


@given(st.lists(st.integers(0, 3), max_size=400) | loops)
def test_it_is_what_its_definition_says(answer: list[int]) -> None:
    found = repetition(np.array(answer, dtype=np.int64))
    assert found == pytest.approx(spelled_out(answer))


@given(st.lists(st.integers(0, 3), min_size=256, max_size=400), st.lists(st.integers(0, 3)))
def test_only_the_last_tokens_are_read(answer: list[int], before: list[int]) -> None:
    tokens = np.array(answer, dtype=np.int64)
    assert repetition(tokens) == repetition(tokens[-256:])
    assert repetition(np.array(before + answer, dtype=np.int64)) == repetition(tokens)


def test_a_beginning_repeats_nothing_and_a_loop_everything() -> None:
    for n in range(2):
        assert repetition(np.arange(n)) == NO_REPETITION
    assert repetition(np.tile([7, 8, 9], 40)) == (1.0, 64.0)
    assert repetition(np.arange(300)) == (0.0, 0.0)
