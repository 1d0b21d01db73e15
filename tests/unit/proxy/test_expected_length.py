"""What the proxy expects of a request by its prompt, before anything of it is computed."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from math import isnan
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rescheduler.engines.deployment import DeploymentError
from rescheduler.openai.openai_request import (
    CHAT,
    COMPLETIONS,
    ClientRequest,
    prompt_text,
    temperature,
)
from rescheduler.openai.request_reader import read_request
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.placeable import Placeable
from rescheduler.proxy.prompt_forecasts import ExpectedLengths, PromptForecasts


def asked(path: str = COMPLETIONS, **fields: Any) -> ClientRequest:
    return read_request(path, json.dumps(fields).encode())


def test_a_prompt_is_read_however_it_is_given() -> None:
    part = {"type": "text", "text": "Be brief."}
    messages = [{"role": "system", "content": [part]}, {"role": "user", "content": "Why?"}]
    assert prompt_text(asked(CHAT, messages=messages).body) == "Be brief.\nWhy?"
    assert prompt_text(asked(prompt="Why?").body) == "Why?"
    assert prompt_text(asked(prompt=["Why?"]).body) == "Why?"
    assert prompt_text(asked(prompt=[5, 6, 7]).body) == [5, 6, 7]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": ""},
        {"prompt": []},
        {"prompt": ["a", "b"]},
        {"prompt": [1, "b"]},
        {"prompt": {"a": 1}},
        {"prompt": "a" * (1 << 20)},
        {"prompt": [5] * 5000},
        {"prompt": [5, -1]},
        {"prompt": [5, 1 << 63]},
        {"messages": [{}] * 5000},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": "a"},
    ],
)
def test_of_what_is_no_prompt_nothing_is_expected(fields: dict[str, Any]) -> None:
    body = {name: json.dumps(value).encode() for name, value in fields.items()}
    assert prompt_text(body) is None  # type: ignore[arg-type]


def test_the_temperature_is_the_clients_or_unknown() -> None:
    assert temperature(asked(temperature=0.5).body) == 0.5
    for fields in ({}, {"temperature": None}, {"temperature": "hot"}, {"temperature": [1]}):
        assert isnan(temperature(asked(**fields).body))


@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner)))
def test_no_prompt_is_too_strange(value: Any) -> None:
    body = {"prompt": json.dumps(value).encode()}
    read = prompt_text(body)  # type: ignore[arg-type]
    assert read is None or isinstance(read, str | list)


def test_what_a_prompt_lets_expect_stands_until_an_engine_forecasts() -> None:
    forecasts = LiveForecasts(None)
    requests = [
        Placeable("a", 10, None, 50),
        Placeable("b", 10, None, 400),
        Placeable("c", 10, 30, 400),
        Placeable("d", 10),
    ]
    found = forecasts.forecast(requests)
    short, long, capped, unknown = found.mean()
    assert short < unknown < long
    assert capped == pytest.approx(30, rel=0.03)
    np.testing.assert_allclose(found.at([64])[:2, 0], np.exp([-64 / 50, -64 / 400]))


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_what_is_expected_is_cut_once(expected: int, most: int) -> None:
    """The mean of the curve is what was expected of the prompt, up to its grid."""
    expected = min(expected, most)
    forecasts = LiveForecasts(None)
    (mean,) = forecasts.forecast([Placeable("a", 10, most, expected)]).mean()
    assert mean == pytest.approx(expected, rel=0.16, abs=1.0)


class _Predictor:
    """Says what it was asked, or fails."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.asked: list[tuple[Any, ...]] = []

    def expected_tokens(self, *asked: Any) -> float:
        self.asked.append(asked)
        if self.fails:
            raise RuntimeError("no")
        return 41.6


@contextmanager
def forecasts_by(predictor: _Predictor) -> Iterator[PromptForecasts]:
    made = ExpectedLengths.__new__(ExpectedLengths)
    made._predictor = predictor  # type: ignore[assignment]
    forecasts = PromptForecasts(made.of)
    yield forecasts
    forecasts.close()


async def test_a_request_without_one_prompt_is_not_asked_about() -> None:
    predictor = _Predictor()
    with forecasts_by(predictor) as forecasts:
        asks = asked(prompt="Why?", max_tokens=100, temperature=0.0)
        assert await forecasts.expected(asks) == 42
        assert predictor.asked == [("Why?", 100, 0.0)]
        assert await forecasts.expected(asked(prompt=["a", "b"], max_tokens=100)) is None
        assert await forecasts.expected(asked(prompt="Why?", n=3)) is None
        assert len(predictor.asked) == 1


async def test_a_predictor_that_fails_refuses_no_client(caplog: pytest.LogCaptureFixture) -> None:
    with forecasts_by(_Predictor(fails=True)) as forecasts:
        for _ in range(3):
            assert await forecasts.expected(asked(prompt="Why?")) is None
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("model", "warnings"), [("smollm2", 0), ("acme/other", 1)])
def test_a_checkpoint_of_another_models_answers_is_warned_of(
    model: str, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    ExpectedLengths("checkpoints/smollm2-135m-instruct-prompt", model)
    assert sum("was trained on answers" in one.message for one in caplog.records) == warnings


def test_a_checkpoint_that_cannot_be_used_is_refused(survival_checkpoint: Any) -> None:
    for checkpoint in (str(survival_checkpoint), "/nowhere/at/all"):
        with pytest.raises(DeploymentError, match=r"^prompt_checkpoint: "):
            ExpectedLengths(checkpoint, "smollm2")
