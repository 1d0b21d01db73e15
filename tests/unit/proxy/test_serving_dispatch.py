"""When the proxy asks its routing policy, and which instances it shows."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from live_requests import instance_state, live_request
from router_tasks import checkpoint, random_layers
from tokenizers import Tokenizer

from rescheduler.cluster.cluster_view import Assignment, ClusterView
from rescheduler.engines.deployment import Deployment, DeploymentError, Instance, ProxyOptions
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
