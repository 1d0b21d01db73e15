import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_collection.capture.requests import parse_request_id

tails = st.text("abcdefghijklmnopqrstuvwxyzABCDEF0123456789-_.", min_size=1, max_size=40)
suffixes = st.text("0123456789abcdef", min_size=8, max_size=8)
counts = st.integers(0, 10_000)


@given(st.sampled_from(["chatcmpl-", "prompt-", "req_"]), tails, st.none() | counts, suffixes)
def test_the_suffix_is_removed_once_and_children_are_samples(
    kind: str, tail: str, sample: int | None, suffix: str
) -> None:
    child = "" if sample is None else f"{sample}_"
    assert parse_request_id(f"{child}{kind}{tail}-{suffix}") == (kind + tail, 0, sample or 0)


@given(tails, counts, counts, suffixes)
def test_completions_number_their_prompts(tail: str, prompt: int, sample: int, suffix: str) -> None:
    internal = f"{sample}_cmpl-{tail}-{prompt}-{suffix}"
    assert parse_request_id(internal) == (f"cmpl-{tail}", prompt, sample)


def test_an_empty_id_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be empty"):
        parse_request_id("")
