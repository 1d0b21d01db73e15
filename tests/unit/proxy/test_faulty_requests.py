"""A request over which the proxy itself fails ends alone: all others are served."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_requests import live_request
from scripted_cluster import PROMPT, Cluster, cluster
from scripted_engine import NarrowEngine
from tokenizers import Tokenizer

from rescheduler.finish_times.finish_times import FinishTimes
from rescheduler.finish_times.lengths import LatelyEnded
from rescheduler.openai.openai_request import CHAT, COMPLETIONS, RequestRefusedError
from rescheduler.openai.request_reader import read_forwarded, read_request
from rescheduler.placement.background import Background
from rescheduler.placement.dispatcher import Dispatcher
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.placeable import Placeable
from rescheduler.placement.stream_watch import StreamWatch
from rescheduler.placement.waiting_line import WaitingLine
from rescheduler.proxy.finish_reports import FinishReports
from rescheduler.proxy.token_relay import TokenRelay

FAULTY = "faulty"
STEPS = [
    (LiveForecasts, "forecast"),
    (LiveForecasts, "ended"),
    (LatelyEnded, "quantiles"),
    (LatelyEnded, "curves"),
    (WaitingLine, "expected_left"),
    (WaitingLine, "ended"),
    (Background, "_with_leftover"),
    (Dispatcher, "_place_on"),
    (Background, "began"),
    (LiveRequest, "begin_prefill"),
    (LiveRequest, "place"),
    (LiveRequest, "accepted"),
    (LiveRequest, "token"),
    (StreamWatch, "_is_due"),
    (TokenRelay, "_pass_on"),
    (FinishTimes, "arrived"),
    (FinishTimes, "first_token"),
    (FinishTimes, "ended"),
    (FinishTimes, "_follow"),
    (FinishReports, "token"),
    (FinishReports, "headers"),
]
"""A request's way, in order: what is given the request fails."""


def concerns(value: Any) -> bool:
    """Whether the faulty request is among some arguments."""
    if isinstance(value, list | tuple):
        return any(map(concerns, value))
    return getattr(getattr(value, "request", value), "name", None) == FAULTY


def failing(method: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **options: Any) -> Any:
        if concerns(args):
            raise ArithmeticError("injected")
        return method(*args, **options)

    return wrapped


@pytest.mark.parametrize("tier", ["default", "flex"])
@pytest.mark.parametrize(("kind", "method"), STEPS, ids=[f"{k.__name__}-{m}" for k, m in STEPS])
async def test_a_request_that_fails_at_any_step_stops_no_other(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, kind: type, method: str, tier: str
) -> None:
    monkeypatch.setattr(kind, method, failing(getattr(kind, method)))
    async with cluster(tokenizer, 1, kind=NarrowEngine, order={"name": "shortest"}) as it:
        async with asyncio.timeout(60):
            before = [asyncio.create_task(ask(it, f"before-{i}", tier)) for i in range(2)]
            faulty = asyncio.create_task(ask(it, FAULTY, tier))
            after = [
                asyncio.create_task(ask(it, f"after-{i}", tiers))
                for i, tiers in enumerate(["default", "flex", tier])
            ]
            assert await asyncio.gather(*before, *after) == [200] * 5
            await faulty
            assert await ask(it, "later", tier) == 200
        assert "headway_proxy_requests" in await it.text("/metrics")


async def ask(it: Cluster, name: str, tier: str) -> int:
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 4, "service_tier": tier, "stream": True}
    headers = {"X-Request-Id": name}
    try:
        async with it.session.post(it.url + COMPLETIONS, json=body, headers=headers) as response:
            done = (await response.read()).endswith(b"data: [DONE]\n\n")
            return response.status if done or response.status != 200 else 0
    except OSError:
        return 0


WORST = [-(2**63), 2**63 - 1, -1, 0, 1, 2**62]


@given(st.sampled_from(WORST) | st.integers(-(2**63), 2**63 - 1), st.integers(1, 2**40))
def test_whatever_is_asked_for_can_be_forecast(most: int, expected: int) -> None:
    """What is refused is; and what is not, or comes from elsewhere, leaves the others alone."""
    try:
        request: Placeable = live_request("a", max_tokens=most)
        assert request.max_tokens is not None and 1 <= request.max_tokens <= 2**24
    except RequestRefusedError:
        request = Placeable("a", max_tokens=most)  # as of another version's proxy
    request.expected_tokens = expected
    other = Placeable("b", expected_tokens=50)
    means = LiveForecasts(None).forecast([request, other]).mean()
    assert means[1] == pytest.approx(50, rel=0.1)
    assert means[0] >= 0


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        (COMPLETIONS, {"max_tokens": -(2**63)}, "max_tokens must be at least 1, got -9223372036"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens must be at least 1, got 0."),
        (CHAT, {"max_tokens": -1}, "max_tokens must be at least 1, got -1."),
        (CHAT, {"max_completion_tokens": 0, "max_tokens": 5}, "max_tokens must be at least 1"),
        (COMPLETIONS, {"min_tokens": -1}, "min_tokens must be greater than or equal to 0, got -1."),
        (COMPLETIONS, {"n": 0}, "n must be at least 1, got 0."),
        (CHAT, {"n": -3}, "n must be at least 1, got -3."),
    ],
)
@pytest.mark.cluster(decodes=1)
async def test_numbers_without_sense_are_refused_in_vllms_words(
    it: Cluster, path: str, fields: dict[str, Any], said: str
) -> None:
    body = {"model": "m", "prompt": PROMPT, "messages": [], **fields}
    for tier in ("default", "flex"):
        status, answer, _ = await it.post({**body, "service_tier": tier}, path)
        assert status == 400
        assert answer["error"]["message"].startswith(said)
        assert answer["error"]["type"] == "BadRequestError"


def test_more_tokens_than_any_model_has_are_the_engines_to_judge() -> None:
    raw = b'{"max_tokens": 9223372036854775807, "min_tokens": 9223372036854775807}'
    request = read_request(COMPLETIONS, raw)
    assert request.max_tokens == request.text.min_tokens == 2**24
    assert bytes(request.body["max_tokens"]) == b"9223372036854775807"
    assert read_request(COMPLETIONS, b'{"echo": true, "max_tokens": 0}').max_tokens == 1
    for given_, most in ((-5, None), (0, None), (7, 7), (2**63 - 1, 2**24)):
        raw = b'{"max_output_tokens": %d}' % given_
        assert read_forwarded("/v1/responses", raw).max_tokens == most
