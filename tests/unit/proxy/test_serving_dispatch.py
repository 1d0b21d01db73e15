"""When the proxy asks its routing policy, and which instances it shows."""

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from router_tasks import checkpoint, random_layers
from tokenizers import Tokenizer

from rescheduler.cluster.cluster_view import Assignment, ClusterView
from rescheduler.engines.deployment import Deployment, DeploymentError, Instance, ProxyOptions
from rescheduler.openai.openai_request import COMPLETIONS
from rescheduler.openai.request_reader import read_request
from rescheduler.placement.dispatcher import Dispatcher
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.placeable import Placements
from rescheduler.proxy.proxy import Proxy
from rescheduler.routing import JSQ, Needs, RoutingPolicy
from rescheduler.step_time.mean_step_time import MeanStepTime

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


def requests(
    tokenizer: Tokenizer, n: int, placements: Placements[LiveRequest]
) -> list[LiveRequest]:
    client = read_request(COMPLETIONS, b'{"prompt": "a"}')
    return [LiveRequest(str(i), str(i), client, {}, 0.0, tokenizer, placements) for i in range(n)]


async def test_a_policy_that_decides_at_intervals_is_asked_at_intervals(
    tokenizer: Tokenizer,
) -> None:
    clock = asyncio.get_running_loop().time
    options, policy = ProxyOptions(), OneAtATime()
    states = [
        InstanceState(Instance(name, "decode", f"http://{name}:1"), options, None) for name in "abc"
    ]
    placements: Placements[LiveRequest] = Placements()
    dispatcher = Dispatcher(placements, states, policy, options, MeanStepTime(), clock)

    async def place(request: LiveRequest) -> str:
        return (await dispatcher.place(request)).name

    states[0].draining = True
    began = time.monotonic()
    where = await asyncio.gather(*(place(r) for r in requests(tokenizer, 4, placements)))
    assert where == ["b"] * 4, "the one that drains is shown, without slots"
    assert policy.slots == [[0, states[1].slots, states[2].slots]] * 4
    # Each may come late, but none before as many intervals are over.
    assert (np.array(policy.decided) - began >= 0.9 * EVERY * np.arange(4)).all()
    states[0].draining = False
    assert [await place(r) for r in requests(tokenizer, 1, placements)] == ["a"]
    await asyncio.sleep(2 * EVERY)
    assert len(policy.slots) == 5, "nobody waits, so that nothing is decided"


async def test_requests_that_avoid_other_instances_share_the_room(tokenizer: Tokenizer) -> None:
    options, placements = ProxyOptions(), Placements[LiveRequest]()
    states = [
        InstanceState(Instance(name, "decode", f"http://{name}:1"), options, None) for name in "ab"
    ]
    clock = asyncio.get_running_loop().time
    dispatcher = Dispatcher(placements, states, JSQ(), options, MeanStepTime(), clock)
    first, second = requests(tokenizer, 2, placements)
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


async def test_requests_are_placed_after_many_tokens_that_came_in_one_packet(
    tokenizer: Tokenizer,
) -> None:
    """As when the proxy is late, so that there is no time between them."""
    placements: Placements[LiveRequest] = Placements()
    options, step = ProxyOptions(), MeanStepTime()
    state = InstanceState(Instance("decode-0", "decode", "http://127.0.0.1:1"), options, None)
    clock = asyncio.get_running_loop().time
    dispatcher = Dispatcher(placements, [state], JSQ(), options, step, clock)
    for _ in range(10_000):
        step.took(0.0)
    (request,) = requests(tokenizer, 1, placements)
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
