"""Which request goes first to a prefill and to a decode instance."""

import asyncio
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from live_requests import instance_state, live_request
from scripted_cluster import PROMPT, Cluster, cluster, until
from tokenizers import Tokenizer

from rescheduler.engines.deployment import Deployment, DeploymentError
from rescheduler.ordering import create_order
from rescheduler.placement.guarded_policy import deployed_order
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.waiting_line import WaitingLine
from rescheduler.step_time.mean_step_time import MeanStepTime

PROMPTS = [30, 5, 20, 5]


def line_of(
    tokenizer: Tokenizer, order: dict[str, Any], now: float = 100.0, longest: float = 1e6
) -> tuple[WaitingLine[LiveRequest], list[LiveRequest]]:
    """A line without forecasts, and requests that came one second apart."""
    made, decodes = create_order(**order), [instance_state("d")]
    line = WaitingLine[LiveRequest](made, decodes, None, MeanStepTime(), lambda: now, longest)
    requests = []
    for i, tokens in enumerate(PROMPTS):
        request = live_request(str(i), tokenizer, arrived=float(i), max_tokens=10)
        request.prompt_tokens = tokens
        requests.append(request)
    return line, requests


def names(line: WaitingLine[LiveRequest], requests: list[LiveRequest]) -> list[str]:
    return [request.id for request in line.in_order(requests)[0]]


def test_what_holds_the_memory_for_least_goes_first(tokenizer: Tokenizer) -> None:
    """Equally long answers: short prompts cost less, and of those alike the first came first."""
    line, requests = line_of(tokenizer, {"name": "shortest", "starvation": 1e9})
    assert names(line, requests) == ["1", "3", "2", "0"]


def test_one_that_may_not_wait_longer_goes_first_and_holds_back_the_others(
    tokenizer: Tokenizer,
) -> None:
    options = {"name": "shortest", "starvation": 1e9}
    line, requests = line_of(tokenizer, options, now=40.5, longest=120.0)
    assert line.in_order(requests)[1] is False
    assert names(line, requests) == ["0", "1", "3", "2"], "only the first has waited for a third"
    line, requests = line_of(tokenizer, options, now=80.5, longest=120.0)
    assert names(line, requests) == ["0", "1", "2", "3"]
    assert line.in_order(requests)[1] is True


def test_lengths_of_requests_that_ended_are_learned(tokenizer: Tokenizer) -> None:
    """The longer the answers, the less the prompts count against the client's own cap."""
    line, requests = line_of(tokenizer, {"name": "boost"}, now=10.0)
    ended = requests[0]
    ended._generated = 8
    for _ in range(100):
        line.ended(ended)
    assert names(line, requests[1:]) == ["1", "3", "2"]


@pytest.fixture
def prefilled(monkeypatch: pytest.MonkeyPatch) -> list[LiveRequest]:
    """Requests in the order in which they are sent to a prefill instance."""
    sent: list[LiveRequest] = []
    begin_prefill = LiveRequest.begin_prefill

    def begin(request: LiveRequest, instance: InstanceState) -> None:
        sent.append(request)
        begin_prefill(request, instance)

    monkeypatch.setattr(LiveRequest, "begin_prefill", begin)
    return sent


async def serve_after_another(it: Cluster, prompts: Sequence[str], max_tokens: int) -> None:
    """Ask one after the other while a first request occupies the prefill instance."""
    dispatcher, prefill = it.proxy.cluster.dispatcher, it.engines["prefill-0"]
    prefill.answers_late = True
    began = [asyncio.create_task(it.stream({"prompt": PROMPT, "max_tokens": 5}))]
    await until(lambda: bool(prefill.kept))
    for n, prompt in enumerate(prompts, 1):
        asked = {"prompt": prompt, "max_tokens": max_tokens}
        began.append(asyncio.create_task(it.stream(asked)))
        await until(partial(lambda n: dispatcher.waiting_for_prefill == n, n))
    prefill.answers_late = False
    await asyncio.gather(*began)


@pytest.mark.parametrize("order", ["shortest", "boost"])
async def test_a_short_prompt_passes_long_ones_on_the_way_to_a_prefill_instance(
    tokenizer: Tokenizer, prefilled: list[LiveRequest], order: str
) -> None:
    by_prompt = {"name": order, "by": "prompt"}
    async with cluster(tokenizer, prefill_concurrency=1, order=by_prompt) as it:
        await serve_after_another(it, (PROMPT * 40, PROMPT * 20, PROMPT), max_tokens=5)
    lengths = [request.client.size for request in prefilled]
    assert len(lengths) == 4
    assert lengths == sorted(lengths), "the last three came in the opposite order"


async def test_a_prompt_with_a_short_answer_passes_before_anything_is_computed(
    tokenizer: Tokenizer, prefilled: list[LiveRequest]
) -> None:
    """Two prompts of about one length, of which the later one asks for a word."""
    long = "Write a detailed story of 900 words about a lighthouse keeper and the sea."
    short = "Is the sea red? Answer with one word only, yes or no, and nothing else at all."
    async with cluster(
        tokenizer,
        prefill_concurrency=1,
        order={"name": "shortest"},
        prompt_checkpoint="checkpoints/smollm2-135m-instruct-prompt",
    ) as it:
        await serve_after_another(it, (long, short), max_tokens=500)
        pattern = r'wait_seconds_count\{.*expected_tokens="(.+?)".*\} (\d)'
        waits = re.findall(pattern, await it.text("/metrics"))
    assert sum(int(count) for _, count in waits) == 3
    assert "unknown" not in {expected for expected, _ in waits}
    _, first, second = (request.expected_tokens for request in prefilled)
    assert first is not None
    assert second is not None
    assert 2 * first < second


async def test_what_cannot_be_ordered_is_served_as_it_came(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine may say anything of itself; no request waits for that."""
    async with cluster(tokenizer, order={"name": "boost"}) as it:
        monkeypatch.setattr(WaitingLine, "_expected_left", lambda line, requests: 1 / 0)
        await asyncio.gather(*(it.stream({"prompt": PROMPT, "max_tokens": 5}) for _ in range(3)))
    assert sum("as they came instead" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ({"name": "shortes"}, "order: no order of service 'shortes'"),
        ({"name": "boost", "gama": 1}, "order: boost has no option 'gama'.*did you mean 'gamma'"),
        ({}, "order.name: the policy's name is required"),
    ],
)
def test_an_order_that_cannot_be_is_refused(order: dict[str, Any], message: str) -> None:
    with pytest.raises(DeploymentError, match=message):
        deployed_order(
            Deployment.from_values(
                {
                    "model": "m",
                    "instances": [{"name": "d", "role": "decode", "url": "http://d:1"}],
                    "order": order,
                }
            )
        )
