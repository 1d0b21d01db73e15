"""What the span of a routing decision says, by who decided."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from scripted_cluster import until
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from rescheduler.cluster.cluster_view import Assignment, ClusterView
from rescheduler.engines.deployment import Instance, ProxyOptions, TraceOptions
from rescheduler.openai.openai_request import COMPLETIONS
from rescheduler.openai.request_reader import read_request
from rescheduler.placement.dispatcher import Dispatcher
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.placeable import Placements
from rescheduler.routing.heuristics import JSQ
from rescheduler.routing.policy import RoutingPolicy
from rescheduler.step_time.mean_step_time import MeanStepTime
from rescheduler.tracing.exporter import otlp_provider
from rescheduler.tracing.span import RequestTracer

CLIENT = read_request(COMPLETIONS, b'{"model": "m", "prompt": "a"}')
TOKENIZER = Tokenizer(WordLevel({"a": 0}, unk_token="a"))


class Broken(JSQ):
    def assign(self, view: ClusterView) -> Assignment:
        raise RuntimeError("broken")


async def said_of_a_place(policy: RoutingPolicy | None) -> Mapping[str, Any]:
    """The attributes of a placement on one of two instances, the first of which runs a request."""
    exporter = InMemorySpanExporter()
    traces = TraceOptions(endpoint="http://127.0.0.1:1", sample=1.0)
    tracer = RequestTracer(traces, otlp_provider(exporter), exporter)
    options, placements = ProxyOptions(), Placements[LiveRequest]()
    states = [
        InstanceState(Instance(name, "decode", f"http://{name}:1"), options, None) for name in "ab"
    ]
    other, request = (
        LiveRequest(name, name, CLIENT, {}, 0.0, TOKENIZER, placements) for name in ("r", "s")
    )
    other.place(states[0])
    request.trace, _ = tracer.begin(CLIENT, "s", {})
    if policy is None:
        request.place(states[1])
    else:
        clock = asyncio.get_running_loop().time
        dispatcher = Dispatcher(placements, states, policy, options, MeanStepTime(), clock)
        assert await dispatcher.place(request) is states[1]
    await until(lambda: bool(exporter.get_finished_spans()))
    (span,) = exporter.get_finished_spans()
    assert span.name == "place"
    await tracer.close()
    return dict(span.attributes or {})


@pytest.mark.parametrize(("policy", "decided"), [(JSQ(), "jsq"), (Broken(), "jsq_load")])
async def test_a_decision_names_who_decided_and_what_it_saw(
    policy: RoutingPolicy, decided: str
) -> None:
    said = await said_of_a_place(policy)
    assert said == {
        "headway.instance": "b",
        "headway.policy": decided,
        "headway.waiting": 1,
        "headway.instances": ("a", "b"),
        "headway.requests": (1, 0),
        "headway.kv_tokens": (max(1, CLIENT.size // 4), 0),
    }


async def test_of_a_coordinator_s_decision_only_the_place_is_known() -> None:
    said = await said_of_a_place(None)
    assert said == {"headway.instance": "b", "headway.policy": "coordinator"}
