import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_collection.capture.requests import parse_request_id

tails = st.text("abcdefghijklmnopqrstuvwxyzABCDEF0123456789-_.", min_size=1, max_size=40)
suffixes = st.text("0123456789abcdef", min_size=8, max_size=8)
counts = st.integers(0, 10_000)


@given(st.sampled_from(["chatcmpl-", "prompt-", "req_"]), tails, suffixes)
def test_the_random_suffix_is_removed_once(kind: str, tail: str, suffix: str) -> None:
    assert parse_request_id(f"{kind}{tail}-{suffix}") == (kind + tail, 0, 0)


@given(st.sampled_from(["chatcmpl-", "prompt-"]), tails, counts, suffixes)
def test_children_of_a_request_are_its_samples(
    kind: str, tail: str, sample: int, suffix: str
) -> None:
    assert parse_request_id(f"{sample}_{kind}{tail}-{suffix}") == (kind + tail, 0, sample)


@given(tails, counts, counts, suffixes)
def test_completions_number_their_prompts(tail: str, prompt: int, sample: int, suffix: str) -> None:
    internal = f"{sample}_cmpl-{tail}-{prompt}-{suffix}"
    assert parse_request_id(internal) == (f"cmpl-{tail}", prompt, sample)


def test_the_examples_of_the_docstring() -> None:
    assert parse_request_id("1_chatcmpl-77-0a1b2c3d") == ("chatcmpl-77", 0, 1)
    assert parse_request_id("cmpl-77-4-0a1b2c3d") == ("cmpl-77", 4, 0)


def test_an_empty_id_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be empty"):
        parse_request_id("")
