"""Forecasts from prompts cost a budget of time, and hold up nobody."""

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_cluster import PROMPT, cluster, until
from tokenizers import Tokenizer

from predictor.prompts.prompt_predictor import PromptPredictor
from rescheduler.openai.openai_request import COMPLETIONS, ClientRequest
from rescheduler.openai.request_reader import read_request
from rescheduler.proxy import prompt_forecasts
from rescheduler.proxy.prompt_forecasts import PromptForecasts

CHECKPOINT = Path("checkpoints/smollm2-135m-instruct-prompt")


def asked(**fields: Any) -> ClientRequest:
    return read_request(COMPLETIONS, json.dumps({"prompt": "Why?", **fields}).encode())


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
    checkpoint = slow_checkpoint(tmp_path / "slow")
    async with cluster(tokenizer, 1, prompt_checkpoint=checkpoint) as it:
        assert it.proxy._forecasts is not None
        slow = {"model": "m", "prompt": "x" * 1_600, "max_tokens": 3}
        status, _, _ = await it.post(slow)
        assert status == 200
        await it.answered(20)
        assert it.proxy._forecasts._since is not None, "it is still at the first prompt"


@pytest.mark.parametrize("letters", ["天地玄黄宇宙洪荒", "😀🎉🚀🤖", "ꙮ𒐫𓀀"])
def test_prompts_in_any_letters_are_cut_before_they_are_tokenized(letters: str) -> None:
    predictor = PromptPredictor.load(str(CHECKPOINT))
    text = letters * 4_000
    own, length = predictor._embedding.read(text)
    assert len(own) <= 2 * 512 * 6, "a token has at least a byte"
    assert length > len(own)
    assert predictor._embedding.read(PROMPT * 10)[1] == len(
        predictor._embedding.read(PROMPT * 10)[0]
    )
