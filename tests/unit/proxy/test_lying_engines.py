"""One engine that is broken, lies, or comes and goes hundreds of times; the others serve on."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from fuzzing import fuzzed
from hypothesis import example, given
from hypothesis import strategies as st
from live_requests import instance_state, live_request
from published_telemetry import Engine, GivenTelemetry, endpoint_of, frames, publisher
from scripted_cluster import PROMPT, Cluster, cluster, tokens_of, until
from scripted_engine import ScriptedEngine
from tokenizers import Tokenizer

from benchmarks.support.engine_states import engine_state
from predictor.live.telemetry_messages import Gauges
from rescheduler.engines.proxy_options import ProxyOptions
from rescheduler.page.live_snapshots import LiveSnapshots
from rescheduler.placement.dispatcher import Dispatcher
from rescheduler.placement.guarded_policy import PrefillBudgets
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.placeable import Placements
from rescheduler.routing import create_policy
from rescheduler.step_time.profile import MeanStepTime
from rescheduler.telemetry.subscriber import TelemetrySubscriber
from rescheduler.transfer.control_messages import EngineState

BODY = {"model": "m", "prompt": PROMPT, "max_tokens": 5}
PLANNER = {"name": "star", "prediction": False, "interval_seconds": 0.05}
HUGE = [2**31, 2**53, 2**62, 2**63, 2**64 - 1]

LIES: list[dict[str, Any]] = [
    {"max_num_seqs": 2**63},
    {"max_num_seqs": 2**64 - 1},
    {"max_num_seqs": 0},
    {"max_model_len": 2**63},
    {"max_model_len": 0},
    {"max_model_len": 1},
    {"num_blocks": 2**62, "block_size": 16, "free_blocks": 2**62},
    {"num_blocks": 2**32, "block_size": 2**20},
    {"num_blocks": 0, "free_blocks": 0},
    {"block_size": 0},
    {"free_blocks": 2**40},
    {"waiting": 2**40},
    {"running": 2**63},
    {"frozen": ["x" * 10_000]},
    {"version": "v" * 100_000},
]


async def served(it: Cluster, n: int = 6) -> None:
    """Whatever an engine says, every request gets its tokens."""
    await asyncio.gather(*(it.answered(5) for _ in range(n)))
    async with it.session.get(it.url + "/metrics") as response:
        assert response.status == 200


@pytest.mark.parametrize("lie", LIES, ids=str)
@pytest.mark.cluster(migration=PLANNER)
async def test_one_engine_lies_about_its_state_and_all_requests_are_served(
    it: Cluster, lie: dict[str, Any]
) -> None:
    liar = it.engines["decode-1"]
    liar.says = lie
    await asyncio.sleep(0.3)  # it is probed every 0.1 s
    await served(it)
    if lie.get("max_num_seqs") == 0 or lie.get("num_blocks") == 0:
        assert len(it.engines["decode-0"].bodies) == 6
    status, _ = await it.admin("GET", "instances")
    assert status == 200


async def test_an_invalid_state_is_reported_at_once_with_the_engine_and_the_field(
    it: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    it.engines["decode-1"].says = {"max_num_seqs": 2**63}
    await until(lambda: "max_num_seqs" in caplog.text)
    endpoint = it.proxy.cluster.instances["decode-1"].instance.control
    assert f"decode-1: {endpoint}: invalid control message" in caplog.text
    await asyncio.sleep(0.5)
    assert caplog.text.count("max_num_seqs") == 1, "once, not with every probe"


@pytest.mark.cluster(pool_seconds=3600.0)
async def test_a_request_that_fits_nowhere_is_refused_at_once(it: Cluster) -> None:
    it.set_decodes(says={"max_num_seqs": 0})
    states = [it.proxy.cluster.instances[engine.name] for engine in it.decodes]
    await until(lambda: not any(state.slots for state in states))
    status, answer, headers = await it.post(BODY)
    assert status == 503
    assert "Retry-After" in headers
    assert "can hold" in answer["error"]["message"]


@pytest.mark.parametrize("tokens", [2**24, 2**31, 2**62, 2**63, 2**64, 10**30])
@pytest.mark.cluster(decodes=1, progress_seconds=0.1)
async def test_a_prompt_that_no_engine_takes_leaves_finish_times_to_all_others(
    it: Cluster, tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(60):
        await it.answered(5)
    engine = it.decodes[0]
    engine.says = {"max_model_len": 10_000}
    state = it.proxy.cluster.instances["decode-0"]
    await until(lambda: state.engine is not None and state.engine.max_model_len == 10_000)
    engine.hangs = True
    it.engines["prefill-0"].counts = tokens
    odd = asyncio.create_task(it.answered(5))
    await until(lambda: len(engine.running) == 1)
    it.engines["prefill-0"].counts = None
    shown = {**BODY, "stream": True, "stream_options": {"headway": True}}
    async with it.session.post(it.url + "/v1/completions", json=shown) as response:
        async with asyncio.timeout(20):
            for _ in range(25):  # what is expected is computed anew every 2 s at least
                assert (await response.content.readuntil(b"\n\n")).startswith(b": headway ")
        engine.hangs = False
        await response.read()
    await odd
    assert "cannot be told" not in caplog.text


def absurd_messages(n: int) -> list[list[bytes]]:
    """What no engine should publish of itself."""
    engine = Engine(epoch=2**62, instance="decode-1")
    begun, snapshot = engine.start(), engine.snapshot()
    (request,) = begun.requests
    edges = list(range(100_000))
    curve = np.full(len(edges), 65_535, dtype="<u2").tobytes()
    replace = msgspec.structs.replace
    gauges = [
        Gauges(kv_usage=float("nan")),
        Gauges(waiting=2**40),
        Gauges(prefill_budget=float("inf")),
        Gauges(prefill_budget=float("nan")),
        Gauges(prefill_budget=1e308),
        Gauges(kv_capacity_tokens=2**53),
    ]
    messages = [
        replace(begun, edges=edges, requests=[replace(request, survival=curve)]),
        replace(begun, requests=[replace(request, prompt_tokens=2**53)]),
        replace(begun, instance="decode-0", epoch=2**63 - 1),
        replace(begun, instance="prefill-0", seq=2**53),
        replace(begun, rank=2**16 - 1),
        *(replace(snapshot, gauges=one) for one in gauges),
        *(replace(begun, epoch=i, edges=[0, *range(i + 1, i + 6)]) for i in range(n)),
    ]
    return [frames(replace(one, seq=i)) for i, one in enumerate(messages)]


@pytest.mark.parametrize("routing", ["jsq_load", "fast_phi"])
async def test_one_engine_publishes_what_is_absurd_and_all_requests_are_served(
    tokenizer: Tokenizer, routing: str
) -> None:
    with publisher(bind=True) as honest, publisher(bind=True) as lying:
        telemetry = {"decode-0": endpoint_of(honest), "decode-1": endpoint_of(lying)}
        engine = Engine(instance="decode-0")
        async with cluster(tokenizer, routing={"name": routing}, telemetry=telemetry) as it:
            heard = it.proxy.cluster.telemetry
            assert heard is not None

            def publish() -> bool:
                honest.send_multipart(frames(engine.snapshot()))
                for message in absurd_messages(20):
                    lying.send_multipart(message)
                return {key.name for key in heard.view.instances} == {"decode-0", "decode-1"}

            await until(publish)
            await served(it)
            await until(lambda: publish() and heard.view.malformed >= 8)
            await served(it)
            with heard.lock:
                said = {key.name: view.epoch for key, view in heard.view.instances.items()}
            assert said["decode-0"] == engine.epoch
            forecasts = it.proxy.cluster.forecasts
            assert forecasts is not None
            forecasts.refresh()
            assert len(forecasts.forecast([]).edges) < 2 * 512


@pytest.fixture(scope="module")
def telemetry() -> Iterator[TelemetrySubscriber]:
    with GivenTelemetry() as subscriber:
        yield subscriber


numbers = st.sampled_from([0, 1, 16, 1000, *HUGE, 2**70]) | st.integers(0, 2**64)
states = st.builds(
    EngineState,
    number=st.just(0),
    version=st.just("v"),
    block_size=numbers,
    max_num_seqs=numbers,
    max_model_len=numbers,
    prefix_caching=st.booleans(),
    num_blocks=numbers,
    free_blocks=numbers,
    running=numbers,
    waiting=numbers,
    frozen=st.just([]),
)
floats = st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e308, 0.0]) | st.floats()
HEALTHY = engine_state(num_blocks=10_000, free_blocks=10_000, running=0)
OVERFLOWING = msgspec.structs.replace(HEALTHY, max_num_seqs=2**63)


@fuzzed(batch=5)
@given(
    st.lists(st.none() | states, min_size=1, max_size=3),
    st.lists(floats, min_size=4, max_size=4),
    st.lists(st.integers(0, 2**70), min_size=1, max_size=5),
    st.sampled_from(["jsq_load", "pab", "fast_phi", "round_robin"]),
)
@example([OVERFLOWING], [1e308] * 4, [1, 2, 3], "pab")
@example([OVERFLOWING, None], [0.0] * 4, [2**70], "jsq_load")
async def test_placing_on_the_healthy_never_stops(
    telemetry: TelemetrySubscriber,
    lies: list[EngineState | None],
    budgets: list[float],
    prompts: list[int],
    name: str,
) -> None:
    """Whatever is known of the others, also what is refused where it is read."""
    options, clock = ProxyOptions(), asyncio.get_running_loop().time
    instances = []
    for i, said in enumerate([HEALTHY, *lies]):
        instance = instance_state(f"{i}")
        instance.engine = said
        instances.append(instance)
    placements, policy = Placements[LiveRequest](), create_policy(name)
    forecasts = LiveForecasts(telemetry)
    with telemetry.lock:
        telemetry.view.instances.clear()
        for i, budget in enumerate(budgets):
            engine = Engine(instance=f"{i}")
            telemetry.view.receive(frames(engine.snapshot()), 0.0)
            for key, view in telemetry.view.instances.items():
                if key.name == f"{i}":
                    view.gauges = Gauges(prefill_budget=budget)
    dispatcher: Dispatcher[LiveRequest] = Dispatcher(
        placements,
        instances,
        policy,
        options,
        MeanStepTime(),
        clock,
        forecasts,
        PrefillBudgets(telemetry),
    )
    for i, prompt in enumerate(prompts):
        request = live_request(str(i), placements=placements)
        request.prompt_tokens = prompt
        async with asyncio.timeout(60):
            await dispatcher.place(request)
    assert dispatcher.choose([], instances[0]) == []


@pytest.mark.cluster(probe_seconds=3600.0)
async def test_what_cannot_be_viewed_is_left_out_counted_and_said_once(
    it: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    await asyncio.sleep(0.3)  # each has been probed
    it.proxy.cluster.instances["decode-1"].engine = OVERFLOWING
    await served(it)
    assert len(it.engines["decode-0"].bodies) == 6
    text = await it.text("/metrics")
    metric = "headway_proxy_instances_left_out_total"
    counted = [line for line in text.splitlines() if line.startswith(metric)]
    placing = f'{metric}{{instance_name="decode-1",reason="placing"}}'
    assert any(line.startswith(placing) and not line.endswith(" 0.0") for line in counted)
    assert all(line.endswith(" 0.0") for line in counted if "decode-1" not in line)
    assert caplog.text.count("left out of decisions") == 1
    status, _ = await it.admin("GET", "page")
    assert status == 200
    shown = LiveSnapshots(it.proxy.cluster).look().snapshot()
    assert [one.name for one in shown.instances] == list(it.proxy.cluster.instances)
    await it.admin("POST", "drain/decode-0")
    await served(it)
    it.proxy.cluster.instances["decode-1"].engine = None
    await it.admin("POST", "undrain/decode-0")


async def test_a_probe_that_raises_ends_no_other(
    it: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    control, failed = it.proxy.cluster.instances["decode-1"].control, 0
    assert control is not None

    async def state(timeout: float) -> EngineState:
        nonlocal failed
        failed += 1
        raise OverflowError("scripted")

    monkeypatch.setattr(control, "state", state)
    await until(lambda: failed >= 3)
    await served(it)


FLAPS = 200
RESTARTS = 10
TOKENS = 12
KINDS: tuple[dict[str, Any], ...] = ({"stream": True}, {}, {"n": 2}, {"n": 2, "stream": True})
UNUSED_SECONDS = 4.0  # for longer than connections are kept
HONEST = (200, 429, 502, 503)


def held() -> tuple[int, int]:
    """Tasks and open files."""
    return len(asyncio.all_tasks()), len(list(Path("/proc/self/fd").iterdir()))


async def asked(it: Cluster, session: aiohttp.ClientSession, kind: dict[str, Any]) -> str:
    """Ask once; return how that ended."""
    body = {"model": "m", "prompt": PROMPT, "max_tokens": TOKENS, "return_token_ids": True, **kind}
    async with session.post(it.url + "/v1/completions", json=body) as response:
        told = await response.read()  # raises if it is cut
    if response.status != 200:
        assert response.status in HONEST, told
        assert "error" in json.loads(told)
        return "refused"
    if not kind.get("stream"):
        choices = json.loads(told)["choices"]
        assert len(choices) == kind.get("n", 1)
        if "n" not in kind:
            assert choices[0]["token_ids"] == it.expected(TOKENS)
        return "ok"
    assert told.endswith(b"data: [DONE]\n\n"), told[-200:]
    events = [json.loads(line[6:]) for line in told.splitlines() if line.startswith(b"data: {")]
    failed = any("error" in one for one in events)
    tokens = tokens_of(events)
    if "n" not in kind:
        assert tokens == it.expected(TOKENS)[: len(tokens)]
        assert failed or len(tokens) == TOKENS
    return "failed" if failed else "ok"


async def flapped(engine: ScriptedEngine, generator: random.Random) -> None:
    """Vanish from HTTP for a moment, and come back."""
    await engine.stop_http()
    await asyncio.sleep(generator.uniform(0.0, 0.02))
    await engine.start_http()
    await asyncio.sleep(generator.uniform(0.0, 0.04))


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.cluster(prefix_caching=False, control_seconds=1.0, probe_seconds=10.0)
async def test_requests_end_well_or_honestly_and_nothing_is_left(it: Cluster, whole: bool) -> None:
    """Either their HTTP comes and goes, or the engines do, control sockets and all."""
    generator, outcomes, flapping = random.Random(0), Counter[str](), True

    async def ask() -> None:
        async with aiohttp.ClientSession() as session:
            while flapping:
                outcomes[await asked(it, session, generator.choice(KINDS))] += 1

    for kind in KINDS:
        assert await asked(it, it.session, kind) == "ok"
    await asyncio.sleep(UNUSED_SECONDS)
    before = held()
    asking = [asyncio.create_task(ask()) for _ in range(6)]
    for _ in range(RESTARTS if whole else FLAPS):
        engine = generator.choice(list(it.engines.values()))
        if whole:
            await engine.stop()
            await asyncio.sleep(generator.uniform(0.0, 0.1))
            await engine.start()
            await asyncio.sleep(generator.uniform(0.0, 0.3))
        else:
            await flapped(engine, generator)
        for task in asking:
            if task.done():
                task.result()
    flapping = False
    await asyncio.gather(*asking)
    for engine in it.engines.values():  # what it kept died with it, or is released by now
        engine.kept.clear()
    await it.idle()
    await until(lambda: it.in_service)
    assert outcomes["ok"] > 0
    for kind in KINDS:
        assert await asked(it, it.session, kind) == "ok"
    assert not any(one.control and one.control._asked for one in it.proxy.cluster.all)
    await until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))
