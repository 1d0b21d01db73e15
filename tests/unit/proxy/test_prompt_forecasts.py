"""What is expected of a request by its prompt: it costs a budget of time, and holds up nobody."""

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Callable
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_cluster import PROMPT, cluster, until
from tokenizers import Tokenizer

from predictor.prompts.prompt_predictor import PromptPredictor
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
from rescheduler.proxy import prompt_forecasts
from rescheduler.proxy.prompt_forecasts import ExpectedLengths, PromptForecasts

CHECKPOINT = Path("checkpoints/smollm2-135m-instruct-prompt")


def asked(path: str = COMPLETIONS, **fields: Any) -> ClientRequest:
    return read_request(path, json.dumps({"prompt": "Why?", **fields}).encode())


def busy(seconds: float) -> None:
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


class Forecasts(PromptForecasts):
    """With a clock that a test sets."""

    def __init__(self, of: Callable[[ClientRequest], int | None]) -> None:
        self.now = 0.0
        super().__init__(of, lambda: self.now)


async def test_a_forecast_is_made_in_another_thread() -> None:
    threads = []

    def of(client: ClientRequest) -> int:
        threads.append(threading.current_thread())
        return 7

    forecasts = Forecasts(of)
    assert await forecasts.expected(asked()) == 7
    assert await forecasts.expected(asked(n=3)) is None, "it is handed through"
    assert len(threads) == 1 and threads[0] is not threading.current_thread()
    forecasts.close()
    await until(lambda: not threads[0].is_alive())


def of_busy(seconds: float) -> tuple[Callable[[ClientRequest], int], list[bytes]]:
    """A forecast that takes so long, and the prompts that it was asked for."""
    prompts = []

    def of(client: ClientRequest) -> int:
        prompts.append(bytes(client.body["prompt"]))
        busy(seconds)
        return 7

    return of, prompts


async def used(forecasts: Forecasts, times: int, account: str) -> None:
    """Have an account use the thread so often."""
    for _ in range(times):
        done = len(forecasts._done) + 1
        await forecasts.expected(asked(), account)
        await until(lambda done=done: len(forecasts._done) == done)
        forecasts._is_spent("")


async def test_over_budget_requests_have_no_forecast() -> None:
    of, prompts = of_busy(0.3)
    forecasts = Forecasts(of)
    for account in ("a", "b", "c", "d"):
        await used(forecasts, 1, account)
    for account in "abcdefghijkl":
        assert await forecasts.expected(asked(), account) is None
    assert len(prompts) == 4, "a second is used up"
    forecasts.now = 0.5
    assert await forecasts.expected(asked()) is None, "0.2 are owed, a quarter of a half is 0.125"
    forecasts.now = 100.0
    await used(forecasts, 1, "a")
    assert len(prompts) == 5
    forecasts.close()


async def test_what_is_left_is_for_those_who_have_used_least() -> None:
    of, prompts = of_busy(0.3)
    forecasts = Forecasts(of)
    await used(forecasts, 2, "hog")
    assert await forecasts.expected(asked(), "hog") is None
    assert len(prompts) == 2, "it has used more than half of what may be saved up, though alone"
    await used(forecasts, 1, "other")
    assert len(prompts) == 3
    forecasts.close()


async def test_two_that_use_most_leave_some_to_a_third() -> None:
    of, prompts = of_busy(0.3)
    forecasts = Forecasts(of)
    await used(forecasts, 1, "hog")
    await used(forecasts, 1, "other hog")
    await used(forecasts, 1, "honest")
    assert len(prompts) == 3
    forecasts._lately.update({"hog": 1.0, "other hog": 1.0})
    forecasts._left = 0.4
    assert await forecasts.expected(asked(), "hog") is None
    assert await forecasts.expected(asked(), "other hog") is None
    await used(forecasts, 1, "honest")
    assert len(prompts) == 4
    forecasts.close()


async def test_accounts_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_forecasts, "_PATIENCE", 60.0)
    free = threading.Event()
    prompts: list[bytes] = []

    def of(client: ClientRequest) -> int:
        prompts.append(bytes(client.body["prompt"]))
        free.wait(60)
        return 7

    forecasts = Forecasts(of)
    many = [asyncio.create_task(forecasts.expected(asked(prompt="many"), "many")) for _ in range(9)]
    await until(lambda: len(prompts) == 1)
    other = asyncio.create_task(forecasts.expected(asked(prompt="other"), "other"))
    await until(lambda: forecasts._asked.qsize() == 9)
    free.set()
    assert await asyncio.gather(*many, other) == [7] * 10
    assert b"other" in prompts[1] + prompts[2]
    forecasts.close()


async def test_while_the_thread_is_held_up_all_others_go_without() -> None:
    free = threading.Event()

    def of(client: ClientRequest) -> int:
        if b"slow" in bytes(client.body["prompt"]):
            free.wait(60)
        return 7

    forecasts = Forecasts(of)
    assert await forecasts.expected(asked(prompt="slow")) is None
    forecasts.now = 10.0
    assert await asyncio.gather(*(forecasts.expected(asked()) for _ in range(50))) == [None] * 50
    assert forecasts._asked.empty(), "nobody joins a line that does not move"
    free.set()
    await until(lambda: forecasts._since is None)
    assert await forecasts.expected(asked()) == 7
    forecasts.close()


async def test_a_forecast_that_fails_or_panics_refuses_no_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def of(client: ClientRequest) -> int:
        raise BaseException("as tokenizers panic")

    forecasts = Forecasts(of)
    assert [await forecasts.expected(asked()) for _ in range(3)] == [None] * 3
    assert len(caplog.records) == 1
    forecasts.close()


def slow_checkpoint(folder: Path) -> str:
    """A checkpoint whose own tokenizer takes seconds for a text of one letter."""
    shutil.copytree(CHECKPOINT, folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    pattern = {"Regex": "x+x+[yz]"}
    tokenizer["pre_tokenizer"] = {
        "type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False
    }  # fmt: skip
    file.write_text(json.dumps(tokenizer))
    return str(folder)


async def test_a_slow_tokenizer_of_a_checkpoint_holds_up_no_stream(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with cluster(tokenizer, 1, prompt_checkpoint=slow_checkpoint(tmp_path / "slow")) as it:
        assert it.proxy._forecasts is not None
        assert (await it.post({"model": "m", "prompt": "x" * 1_600, "max_tokens": 3}))[0] == 200
        await it.answered(20)
        assert it.proxy._forecasts._since is not None, "it is still at the first prompt"


@pytest.mark.parametrize("letters", ["天地玄黄宇宙洪荒", "😀🎉🚀🤖", "ꙮ𒐫𓀀"])
def test_prompts_in_any_letters_are_cut_before_they_are_tokenized(letters: str) -> None:
    predictor = PromptPredictor.load(str(CHECKPOINT))
    text = letters * 4_000
    own, length = predictor._embedding.read(text)
    assert len(own) <= 2 * 512 * 6, "a token has at least a byte"
    assert length > len(own)
    own, length = predictor._embedding.read(PROMPT * 10)
    assert length == len(own)


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


async def test_a_request_without_one_prompt_is_not_asked_about() -> None:
    predicted: list[tuple[Any, ...]] = []

    class Predictor:
        def expected_tokens(self, *asked: Any) -> float:
            predicted.append(asked)
            return 41.6

    lengths = ExpectedLengths.__new__(ExpectedLengths)
    lengths._predictor = Predictor()  # type: ignore[assignment]
    forecasts = Forecasts(lengths.of)
    assert await forecasts.expected(asked(max_tokens=100, temperature=0.0)) == 42
    assert predicted == [("Why?", 100, 0.0)]
    assert await forecasts.expected(asked(prompt=["a", "b"], max_tokens=100)) is None
    assert await forecasts.expected(asked(n=3)) is None
    assert len(predicted) == 1
    forecasts.close()


@pytest.mark.parametrize(("model", "warnings"), [("smollm2", 0), ("acme/other", 1)])
def test_a_checkpoint_of_another_models_answers_is_warned_of(
    model: str, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    ExpectedLengths(str(CHECKPOINT), model)
    assert sum("was trained on answers" in one.message for one in caplog.records) == warnings


def test_a_checkpoint_that_cannot_be_used_is_refused(survival_checkpoint: Any) -> None:
    for checkpoint in (str(survival_checkpoint), "/nowhere/at/all"):
        with pytest.raises(DeploymentError, match=r"^prompt_checkpoint: "):
            ExpectedLengths(checkpoint, "smollm2")
