"""The proxy's own text after a move is the text that vLLM would have gone on with."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from rescheduler.openai.continued_text import ContinuedText
from rescheduler.openai.openai_request import TextRules


@pytest.fixture(scope="session")
def tokenizer(smollm2: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    prompt=st.lists(st.integers(0, 49_151), min_size=1, max_size=8),
    tokens=st.lists(st.integers(0, 49_151) | st.integers(0, 300), min_size=1, max_size=60),
    stop=st.lists(st.text("abcde t\n.", min_size=1, max_size=3), max_size=3),
    include=st.booleans(),
    special=st.booleans(),
    spaces=st.booleans(),
    least=st.integers(0, 20),
)
def test_tokens_become_text_and_stop_as_in_vllm(
    tokenizer: Any,
    prompt: list[int],
    tokens: list[int],
    stop: list[str],
    include: bool,
    special: bool,
    spaces: bool,
    least: int,
) -> None:
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

    sampling = SimpleNamespace(
        stop=stop,
        min_tokens=least,
        include_stop_str_in_output=include,
        skip_special_tokens=special,
        spaces_between_special_tokens=spaces,
    )
    request = SimpleNamespace(sampling_params=sampling, prompt_token_ids=prompt, request_id="r")
    theirs = FastIncrementalDetokenizer(tokenizer, request)  # type: ignore[arg-type]
    rules = TextRules(tuple(stop), include, least, special, spaces)
    ours = ContinuedText(tokenizer._tokenizer, prompt, rules)
    for i, token in enumerate(tokens):
        stopped = theirs.update([token], False)
        counted = ours.add([token])
        assert counted == 1
        assert ours.stopped == stopped
        last = stopped is not None or i + 1 == len(tokens)
        assert ours.take(last) == theirs.get_next_output_text(last, delta=True)
        if stopped is not None:
            break
    assert ours.text == theirs.output_text
    assert ours.tokens == theirs.num_output_tokens()
