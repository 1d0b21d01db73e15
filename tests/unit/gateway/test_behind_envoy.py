"""The picker behind a real Envoy, before scripted engines."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import zmq
from gateway import Config, Gateway, gateway
from published_telemetry import frames, snapshot
from scripted_cluster import until
from scripted_engine import NarrowEngine, ScriptedEngine
from tokenizers import Tokenizer

from predictor.live.telemetry_messages import RequestForecast, encode_survival

PROMPT = "Tell me of a river"
CHAT = {"model": "m", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12}


async def held(one: Gateway, streams: int, tokens: int = 5_000) -> list[asyncio.Task[bytes]]:
    """Start streams that go on until they are cancelled, and wait until all are under way."""
    body = {"prompt": PROMPT, "max_tokens": tokens}
    before = len(one.requests())
    tasks = [asyncio.create_task(one.stream(body)) for _ in range(streams)]
    await until(lambda: sum(r.generating for r in one.requests()) == before + streams)
    return tasks


async def left(tasks: list[asyncio.Task[bytes]]) -> None:
    """Have the clients of streams leave."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def error_of(answer: bytes) -> str:
    """The message of an error, which has OpenAI's shape."""
    error = json.loads(answer)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


async def test_a_stream_passes_byte_for_byte_and_is_known_while_it_runs(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with gateway(tokenizer, tmp_path, engines=1) as one:
        (engine,) = one.engines.values()
        engine.token_seconds = 0.05  # several pieces, however seldom Envoy gets to run
        counted: list[tuple[int, int]] = []

        async def look(events: int) -> None:
            if one.requests():
                counted.append((events, one.requests()[0].generated_tokens))

        body = {"prompt": PROMPT, "max_tokens": 40, "stream_options": {"include_usage": True}}
        name = {"X-Request-Id": "river-1"}
        through = await one.stream(body, at=look, **name)
        await one.idle()
        direct = await one.stream(body, url=f"http://127.0.0.1:{engine.port}", **name)
        assert through == direct
        assert len(counted) > 1
        # The picker has seen what the client got, and perhaps a little more.
        assert all(min(events, 40) <= tokens <= 40 for events, tokens in counted)
        assert engine.bodies[0] == engine.bodies[1]


async def test_a_chat_passes_byte_for_byte(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with gateway(tokenizer, tmp_path, engines=1) as one:
        (engine,) = one.engines.values()
        name, path = {"X-Request-Id": "river-2"}, "/v1/chat/completions"
        for stream in (True, False):
            body = {**CHAT, "stream": stream}
            status, through, _ = await one.post(body, path, **name)
            direct = await one.post(body, path, url=f"http://127.0.0.1:{engine.port}", **name)
            assert (status, through) == direct[:2]


async def test_requests_go_where_the_policy_says(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with gateway(tokenizer, tmp_path, engines=3, routing={"name": "jsq"}) as one:
        tasks = await held(one, 9)
        assert [len(engine.running) for engine in one.engines.values()] == [3, 3, 3]
        for name, engine in one.engines.items():
            assert len(one.requests(name)) == len(engine.running)
        await left(tasks[:4])
        await until(lambda: len(one.requests()) == 5)
        counts = {name: len(one.requests(name)) for name in one.engines}
        fewest = [name for name in counts if counts[name] == min(counts.values())]
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 5_000, "stream": True}
        before = Counter(counts)
        task = asyncio.create_task(one.stream(body))
        await until(lambda: len(one.requests()) == 6)
        (chosen,) = Counter({name: len(one.requests(name)) for name in counts}) - before
        assert chosen in fewest
        await left([*tasks, task])


async def test_a_request_whose_client_leaves_is_forgotten(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with gateway(tokenizer, tmp_path) as one:
        tasks = await held(one, 4)
        document = asyncio.create_task(one.post({"model": "m", "prompt": "a", "max_tokens": 9_000}))
        await until(lambda: len(one.requests()) == 5)
        await left([*tasks, document])
        await one.idle()
        assert all(instance.breaker.closed for instance in one.picker.cluster.all)


async def test_a_request_waits_at_the_gateway_until_there_is_room(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with gateway(tokenizer, tmp_path, 1, kind=NarrowEngine, pool=1) as one:
        first = await held(one, 1)
        second = asyncio.create_task(one.post({"model": "m", "prompt": "a", "max_tokens": 2}))
        await until(lambda: len(one.picker.cluster.dispatcher.waiting) == 1)
        status, answer, headers = await one.post({"model": "m", "prompt": "a", "max_tokens": 2})
        assert (status, headers["Retry-After"]) == (429, "1")
        assert "1 requests wait already" in error_of(answer)
        await left(first)
        assert (await second)[0] == 200
        (engine,) = one.engines.values()
        assert engine.most_running == 1


async def test_a_request_does_not_wait_for_ever(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with gateway(tokenizer, tmp_path, 1, kind=NarrowEngine, pool_seconds=0.05) as one:
        first = await held(one, 1)
        status, answer, headers = await one.post({"model": "m", "prompt": "a"})
        assert (status, headers["Retry-After"]) == (503, "5")
        assert "had room within 0.05 s" in error_of(answer)
        await left(first)


async def test_an_engine_that_dies_gets_no_more_requests_until_it_is_back(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    # Nobody asks for its health by the clock: what requests see of it has to do.
    async with gateway(tokenizer, tmp_path, probe_seconds=3_600.0) as one:
        tasks = await held(one, 4)
        dead, alive = one.engines["decode-0"], one.engines["decode-1"]
        await dead.stop()
        await until(lambda: sum(task.done() for task in tasks) == 2)
        await until(lambda: not one.picker.cluster.instances["decode-0"].breaker.closed)
        dead.running.clear()
        assert not one.requests("decode-0")
        served = len(alive.bodies)
        for _ in range(6):
            assert (await one.post({"model": "m", "prompt": "a", "max_tokens": 2}))[0] == 200
        assert len(alive.bodies) == served + 6
        await left(tasks)
        await alive.stop()
        alive.running.clear()
        status, _, _ = await one.post({"model": "m", "prompt": "a"})
        assert status == 503
        await until(lambda: not one.picker.ready)
        for path in ("/v1/completions", "/v1/models"):
            status, answer, headers = await one.post({"model": "m", "prompt": "a"}, path)
            assert status == 503
            assert int(headers["Retry-After"]) >= 1
            assert "in service" in error_of(answer)
        await alive.start()


def probed(engine: ScriptedEngine) -> bool:
    """Whether an engine was asked for a token to see that it works."""
    return any(body.get("prompt") == "1" for body in engine.bodies)


async def test_it_is_the_engine_that_is_blamed_for_errors_and_no_request(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with gateway(tokenizer, tmp_path, probe_seconds=3_600.0, breaker_seconds=60.0) as one:
        for engine in one.engines.values():
            engine.poisoned = "venom"
        for _ in range(6):
            assert (await one.post({"model": "m", "prompt": "venom"}))[0] == 500
        # It is asked for a token, and generates it.
        await until(lambda: any(probed(engine) for engine in one.engines.values()))
        assert all(instance.breaker.closed for instance in one.picker.cluster.all)
        broken = one.engines["decode-0"]
        broken.fails = 500
        while one.picker.cluster.instances["decode-0"].breaker.closed:
            await one.post({"model": "m", "prompt": "a", "max_tokens": 1})
        for _ in range(4):
            assert (await one.post({"model": "m", "prompt": "a", "max_tokens": 1}))[0] == 200


BAD: list[tuple[str, bytes, dict[str, str], int, str]] = [
    ("/v1/completions", b'{"prompt": ', {}, 400, "not a valid JSON object"),
    ("/v1/completions", b"", {}, 400, "not a valid JSON object"),
    ("/v1/completions", b"[]", {}, 400, "not a valid JSON object"),
    ("/v1/completions?a=b", b'{"stream": ', {}, 400, "not a valid JSON object"),
    ("/v1/%63ompletions", b'{"kv_transfer_params": {}}', {}, 400, "is set by the proxy"),
    ("/v1/responses", b'{"background": true}', {}, 400, "`background` is not supported"),
    ("/v1/responses/resp_1", b"", {}, 501, "a response is not kept"),
    ("/v1/completions", b" " * (1 << 20) + b"{}", {}, 413, "larger than 1 MiB"),
    ("/v1/completions", b"{}", {"Content-Encoding": "gzip"}, 415, "compressed"),
]
"""Path, body, headers; status, what the error says."""


async def test_a_bad_body_is_refused_and_reaches_no_engine(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with gateway(tokenizer, tmp_path, 1, largest_body_mb=1) as one:
        for path, body, headers, status, message in BAD:
            answered, answer, kind = await one.post(body, path, **headers)
            assert (answered, kind["Content-Type"]) == (status, "application/json"), path
            assert message in error_of(answer)
        assert not one.engines["decode-0"].bodies


async def test_a_large_body_passes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with gateway(tokenizer, tmp_path, 1) as one:
        words = "river " * 1_200_000
        body = {"model": "m", "max_tokens": 1, "prompt": [1], "documents": [words]}
        status, _, _ = await one.post(body)
        assert status == 200
        assert one.engines["decode-0"].bodies == [body]


async def test_what_is_no_work_goes_to_any_engine_in_service(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with gateway(tokenizer, tmp_path) as one:
        async with one.session.get(one.url + "/v1/models") as response:
            assert (await response.json())["data"] == [{"id": "m", "object": "model"}]
        status, answer, _ = await one.post({"input": "a"}, "/v1/embeddings")
        assert status == 200
        assert json.loads(answer)["asked"] == {"input": "a"}
        status, answer, _ = await one.post({}, "/v1/nothing")
        assert status == 404


async def test_a_client_does_not_choose_its_engine(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with gateway(tokenizer, tmp_path, 1) as one:
        elsewhere = {"x-gateway-destination-endpoint": "127.0.0.1:1"}
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 1}
        assert (await one.post(body, **elsewhere))[0] == 200
        await one.picker.stop(0)
        assert (await one.post(body, **elsewhere))[0] == 503


def by_metadata(config: Config, engines: list[ScriptedEngine]) -> Config:
    """Have Envoy go by the metadata among known engines, in place of the header."""
    endpoints = [
        {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}}
        for port in (engine.port for engine in engines)
    ]
    source = {"metadata": {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint"}]}}
    prefix = "type.googleapis.com/envoy.extensions.load_balancing_policies"
    override: dict[str, Any] = {
        "@type": f"{prefix}.override_host.v3.OverrideHost",
        "override_host_sources": [source],
        "fallback_policy": {
            "policies": [
                {
                    "typed_extension_config": {
                        "name": "envoy.load_balancing_policies.round_robin",
                        "typed_config": {"@type": f"{prefix}.round_robin.v3.RoundRobin"},
                    }
                }
            ]
        },
    }
    policy = {"name": "envoy.load_balancing_policies.override_host", "typed_config": override}
    clusters = config["static_resources"]["clusters"]
    clusters[0] = {
        "name": "engines",
        "type": "STATIC",
        "connect_timeout": "2s",
        "load_balancing_policy": {"policies": [{"typed_extension_config": policy}]},
        "load_assignment": {"cluster_name": "engines", "endpoints": [{"lb_endpoints": endpoints}]},
    }
    return config


async def test_a_gateway_may_go_by_the_metadata(tokenizer: Tokenizer, tmp_path: Path) -> None:
    routing = {"name": "fcfs"}  # which fills the first engine first
    async with gateway(tokenizer, tmp_path, 3, by_metadata, routing=routing) as one:
        for _ in range(5):
            assert (await one.post({"model": "m", "prompt": "a", "max_tokens": 1}))[0] == 200
        assert [len(engine.bodies) for engine in one.engines.values()] == [5, 0, 0]


async def test_a_restart_lets_running_requests_end(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with gateway(tokenizer, tmp_path) as one:
        for engine in one.engines.values():
            engine.token_seconds = 1.0  # all run until a new request has been refused
        tasks = await held(one, 6, tokens=60)
        port = int(one.picker.address.rpartition(":")[2])
        restart = asyncio.create_task(one.restart(port, seconds=60.0))
        refused = 0
        while not restart.done():
            status, _, _ = await one.post({"model": "m", "prompt": "a", "max_tokens": 1})
            assert status in (200, 503)
            refused += status == 503
            for engine in one.engines.values():
                engine.token_seconds = 0.002 if refused else 1.0
        assert refused > 0
        for stream in await asyncio.gather(*tasks):
            assert stream.endswith(b"data: [DONE]\n\n")
        body = {"model": "m", "prompt": "a", "max_tokens": 1}
        while (await one.post(body))[0] != 200:
            pass


async def test_a_picker_that_is_killed_cuts_streams_and_the_next_one_serves(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with gateway(tokenizer, tmp_path) as one:
        tasks = await held(one, 4)
        before, port = one.picker, int(one.picker.address.rpartition(":")[2])
        await one.restart(port, seconds=0.0)
        for cut in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(cut, aiohttp.ClientError)
        assert not any(before.cluster.placements.on(one) for one in before.cluster.all)
        body = {"model": "m", "prompt": "a", "max_tokens": 1}
        while (await one.post(body))[0] != 200:
            pass


def published_forecasts(**curves: list[float]) -> list[bytes]:
    """What an engine publishes of requests with 123 prompt tokens, as they begin."""
    coded = encode_survival(np.array(list(curves.values())))
    requests = [
        RequestForecast(f"cmpl-{name}-0-0123abcd", 123, 1, 1, 4_999, curve)
        for name, curve in zip(curves, coded, strict=True)
    ]
    return frames(snapshot("decode-0", requests, [0, 100, 1_000, 10_000]))


async def test_forecasts_find_their_requests(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Of two engines with a request each, a third request goes to the one that is free soon."""
    with zmq.Context() as context, context.socket(zmq.PUB) as published:
        published.linger = 0
        port = published.bind_to_random_port("tcp://127.0.0.1")
        hosts = {"decode-0": "127.0.0.1", "decode-1": "localhost"}
        telemetry = {name: f"tcp://{host}:{port}" for name, host in hosts.items()}
        routing = {"name": "decode_balancer"}
        async with gateway(tokenizer, tmp_path, 2, routing=routing, telemetry=telemetry) as one:
            tasks = []
            for name in ("long", "short"):
                body = {"prompt": PROMPT, "max_tokens": 5_000}
                tasks.append(asyncio.create_task(one.stream(body, **{"X-Request-Id": name})))
                await until(lambda: len(one.requests()) == len(tasks))
            (long,), (short,) = one.requests("decode-0"), one.requests("decode-1")
            assert (long.external_id, short.external_id) == ("cmpl-long", "cmpl-short")
            sent = published_forecasts(long=[1.0, 1.0, 1.0, 0.9], short=[1.0, 0.01, 0.0, 0.0])
            while long.prompt_tokens != 123:
                published.send_multipart(sent)
                status, _, _ = await one.post({"model": "m", "prompt": "a", "max_tokens": 1})
                assert status == 200
            for _ in range(3):
                tasks += await held(one, 1)
            assert [len(one.requests(name)) for name in one.engines] == [1, 4]
            await left(tasks)
