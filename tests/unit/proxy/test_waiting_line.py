"""When the proxy asks its routing policy, which request goes first, and what waits."""

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from live_requests import instance_state, live_request
from router_tasks import checkpoint, random_layers
from scripted_cluster import PROMPT, Cluster, cluster, until
from tokenizers import Tokenizer

from rescheduler.cluster.cluster_view import Assignment, ClusterView
from rescheduler.engines.deployment import Deployment, DeploymentError, Instance
from rescheduler.engines.proxy_options import ProxyOptions
from rescheduler.ordering import create_order
from rescheduler.placement.dispatcher import Dispatcher
from rescheduler.placement.guarded_policy import deployed_order
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.placeable import Placements
from rescheduler.placement.waiting_line import WaitingLine
from rescheduler.proxy.proxy import Proxy
from rescheduler.routing import JSQ, Needs, RoutingPolicy
from rescheduler.step_time.profile import MeanStepTime

EVERY = 0.02


@dataclass(frozen=True)
class OneAtATime(RoutingPolicy):
    """Sends the first request where there is a slot, and keeps what it was shown."""

    name: ClassVar[str] = "one_at_a_time"
    needs: ClassVar[Needs] = Needs.COUNTS
    whole_cluster: ClassVar[bool] = True

    slots: list[list[int]] = field(default_factory=list)
    decided: list[float] = field(default_factory=list)

    def decide_every(self) -> float:
        return EVERY

    def assign(self, view: ClusterView) -> Assignment:
        self.slots.append(view.slots.tolist())
        self.decided.append(time.monotonic())
        target = np.full(view.n_waiting, -1)
        target[:1] = int((view.slots > 0).argmax())
        return Assignment(target)


def dispatcher_of(
    states: Sequence[InstanceState], policy: RoutingPolicy, step: MeanStepTime | None = None
) -> tuple[Dispatcher[LiveRequest], Callable[[int], list[LiveRequest]]]:
    """A dispatcher, and what makes some requests for it."""
    placements, clock = Placements[LiveRequest](), asyncio.get_running_loop().time
    options = ProxyOptions()
    made = Dispatcher(placements, states, policy, options, step or MeanStepTime(), clock)
    return made, lambda n: [live_request(str(i), placements=placements) for i in range(n)]


async def test_a_policy_that_decides_at_intervals_is_asked_at_intervals() -> None:
    policy, states = OneAtATime(), [*map(instance_state, "abc")]
    dispatcher, requests = dispatcher_of(states, policy)

    async def place(request: LiveRequest) -> str:
        return (await dispatcher.place(request)).name

    states[0].drained = True
    began = time.monotonic()
    where = await asyncio.gather(*map(place, requests(4)))
    assert where == ["b"] * 4, "the one that drains is shown, without slots"
    assert policy.slots == [[0, states[1].slots, states[2].slots]] * 4
    # Each may come late, but none before as many intervals are over.
    assert (np.array(policy.decided) - began >= 0.9 * EVERY * np.arange(4)).all()
    states[0].drained = False
    assert [await place(r) for r in requests(1)] == ["a"]
    await asyncio.sleep(2 * EVERY)
    assert len(policy.slots) == 5, "nobody waits, so that nothing is decided"


async def test_requests_that_avoid_other_instances_share_the_room() -> None:
    states = [*map(instance_state, "ab")]
    dispatcher, requests = dispatcher_of(states, JSQ())
    first, second = requests(2)
    first.avoid = frozenset({states[1]})
    where = await asyncio.gather(dispatcher.place(first), dispatcher.place(second))
    assert where == states, "the second sees the first where it has just been placed"


def test_a_pause_is_no_step() -> None:
    """Steps of 0.1 s, and among them one request that waits 60 s for room."""
    step = MeanStepTime()
    for _ in range(1000):
        step.took(0.1)
    assert step.seconds == pytest.approx(0.1, rel=0.01)
    step.took(60.0)
    assert step.seconds < 0.11
    for _ in range(1000):
        step.took(2.0)
    assert step.seconds == pytest.approx(2.0, rel=0.05), "a slower engine is believed"


async def test_requests_are_placed_after_many_tokens_that_came_in_one_packet() -> None:
    """As when the proxy is late, so that there is no time between them."""
    state, step = instance_state("a"), MeanStepTime()
    dispatcher, requests = dispatcher_of([state], JSQ(), step)
    for _ in range(10_000):
        step.took(0.0)
    (request,) = requests(1)
    async with asyncio.timeout(60):
        assert await dispatcher.place(request) is state
    for _ in range(1000):
        step.took(0.1)
    assert step.seconds == pytest.approx(0.1, rel=0.01)


async def test_a_router_for_other_instances_is_refused_at_the_start(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    checkpoint(random_layers(2)).save(tmp_path / "router")
    decodes = [Instance(name, "decode", f"http://{name}:1") for name in "abc"]
    routing = {"name": "rl", "checkpoint": str(tmp_path / "router")}

    message = "routing: rl: the router was trained for 2 instances, this cluster has 3"
    with pytest.raises(DeploymentError, match=message):
        Proxy(Deployment(model="m", instances=decodes, routing=routing), tokenizer)


PROMPTS = [30, 5, 20, 5]


def line_of(
    order: dict[str, Any], now: float = 100.0, longest: float = 1e6
) -> tuple[WaitingLine[LiveRequest], list[LiveRequest]]:
    """A line without forecasts, and requests that came one second apart."""
    made, decodes = create_order(**order), [instance_state("d")]
    line = WaitingLine[LiveRequest](made, decodes, None, MeanStepTime(), lambda: now, longest)
    requests = []
    for i, tokens in enumerate(PROMPTS):
        request = live_request(str(i), arrived=float(i), max_tokens=10)
        request.prompt_tokens = tokens
        requests.append(request)
    return line, requests


def names(line: WaitingLine[LiveRequest], requests: list[LiveRequest]) -> list[str]:
    return [request.id for request in line.in_order(requests)[0]]


def test_what_holds_the_memory_for_least_goes_first() -> None:
    """Equally long answers: short prompts cost less, and of those alike the first came first."""
    line, requests = line_of({"name": "shortest", "starvation": 1e9})
    assert names(line, requests) == ["1", "3", "2", "0"]


def test_one_that_may_not_wait_longer_goes_first_and_holds_back_the_others() -> None:
    options = {"name": "shortest", "starvation": 1e9}
    line, requests = line_of(options, now=40.5, longest=120.0)
    assert line.in_order(requests)[1] is False
    assert names(line, requests) == ["0", "1", "3", "2"], "only the first has waited for a third"
    line, requests = line_of(options, now=80.5, longest=120.0)
    assert names(line, requests) == ["0", "1", "2", "3"]
    assert line.in_order(requests)[1] is True


def test_lengths_of_requests_that_ended_are_learned() -> None:
    """The longer the answers, the less the prompts count against the client's own cap."""
    line, requests = line_of({"name": "boost"}, now=10.0)
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


@pytest.mark.cluster(
    prefill_concurrency=1,
    order={"name": "shortest"},
    prompt_checkpoint="checkpoints/smollm2-135m-instruct-prompt",
)
async def test_a_prompt_with_a_short_answer_passes_before_anything_is_computed(
    it: Cluster, prefilled: list[LiveRequest]
) -> None:
    """Two prompts of about one length, of which the later one asks for a word."""
    long = "Write a detailed story of 900 words about a lighthouse keeper and the sea."
    short = "Is the sea red? Answer with one word only, yes or no, and nothing else at all."
    await serve_after_another(it, (long, short), max_tokens=500)
    pattern = r'wait_seconds_count\{.*expected_tokens="(.+?)".*\} (\d)'
    waits = re.findall(pattern, await it.text("/metrics"))
    assert sum(int(count) for _, count in waits) == 3
    assert "unknown" not in {expected for expected, _ in waits}
    _, first, second = (request.expected_tokens for request in prefilled)
    assert first is not None
    assert second is not None
    assert 2 * first < second


@pytest.mark.cluster(order={"name": "boost"})
async def test_what_cannot_be_ordered_is_served_as_it_came(
    it: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine may say anything of itself; no request waits for that."""
    monkeypatch.setattr(WaitingLine, "expected_left", lambda line, requests: 1 / 0)
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
    instance = {"name": "d", "role": "decode", "url": "http://d:1"}
    values = {"model": "m", "instances": [instance], "order": order}
    with pytest.raises(DeploymentError, match=message):
        deployed_order(Deployment.from_values(values))


TWICE = "headway_proxy_prompts_computed_twice_total"


@pytest.mark.cluster(decodes=1)
async def test_no_prompt_is_computed_twice_however_long_requests_wait(it: Cluster) -> None:
    prefill, (decode,) = it.engines["prefill-0"], it.decodes
    prefill.lease_seconds = 12.0
    decode.token_seconds = 0.1
    await it.resized(2)
    await asyncio.gather(*(it.answered(13) for _ in range(24)))  # 16 s for all
    assert decode.most_running == 2
    assert (decode.pulled, decode.recomputed) == (24, 0)
    assert await it.metric(TWICE, instance_name="prefill-0") == 0


@pytest.mark.cluster(decodes=1)
async def test_what_nobody_can_read_any_more_is_not_pulled_and_counted(it: Cluster) -> None:
    prefill, (decode,) = it.engines["prefill-0"], it.decodes
    prefill.lease_seconds = 6.0
    await it.resized(1)
    decode.token_seconds = 0.5
    first = asyncio.create_task(it.answered(20))
    await until(lambda: len(decode.running) == 1)
    second = asyncio.create_task(it.answered(5))
    await until(lambda: len(prefill.lapses) == 1 and len(prefill.kept) == 1)
    await first
    decode.token_seconds = 0.002
    await second
    assert (decode.pulled, decode.recomputed) == (1, 0)
    assert await it.metric(TWICE, instance_name="prefill-0") == 1


@pytest.mark.cluster(decodes=1)
async def test_no_prompt_waits_in_an_engine_for_memory_that_only_decoding_frees(
    it: Cluster,
) -> None:
    prefill, (decode,) = it.engines["prefill-0"], it.decodes
    await it.resized(1)
    decode.stalls_at = 5
    streams = [asyncio.create_task(it.answered(10)) for _ in range(2)]
    await until(lambda: len(decode.running) == 1 and len(prefill.kept) == 1)
    prefill.full = True
    state = it.proxy.cluster.instances["prefill-0"]
    await until(lambda: state.engine is not None and state.engine.free_blocks == 0)
    streams += [asyncio.create_task(it.answered(10)) for _ in range(2)]
    await until(lambda: it.proxy.cluster.dispatcher.waiting_for_prefill == 2)
    await asyncio.sleep(0.3)
    assert it.proxy.cluster.dispatcher.waiting_for_prefill == 2
    decode.stalls_at = 0
    await asyncio.gather(*streams)  # what waits for nothing else is prefilled after all
