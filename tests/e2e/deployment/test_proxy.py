"""`headway serve` before real engines: clients never see that requests move or engines die."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from moving import STORY
from proxying import CHAT, COMPLETIONS, Client, Served, finished_tasks, logprobs_of, served, text_of
from running_deployment import RunningDeployment

from rescheduler.commands.command_line import main

pytestmark = pytest.mark.timeout(1200)

MESSAGES = [{"role": "user", "content": "Tell me a story of a river."}]
GREEDY = {"prompt": STORY, "messages": MESSAGES, "max_tokens": 40, "temperature": 0}
LONG = {**GREEDY, "max_tokens": 300, "ignore_eos": True}


@pytest.fixture(scope="module")
def proxy(
    deployment: RunningDeployment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    with served(deployment, tmp_path_factory.mktemp("proxy")) as running:
        yield running


@pytest.fixture
async def client(proxy: Served) -> AsyncIterator[Client]:
    async with proxy.client() as asking:
        yield asking


def said(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


ASKED = {
    "plain": {},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "seed": {"temperature": 1.0, "seed": 11},
    "stop": {"stop": [" the"]},
    "late-stop": {"min_tokens": 30, "stop": ["a"], "include_stop_str_in_output": True},
}
ANSWERS = {
    f"{endpoint}-{name}": (path, {**GREEDY, **asked})
    for endpoint, path in (("completion", COMPLETIONS), ("chat", CHAT))
    for name, asked in ASKED.items()
}
ANSWERS["completion-logprobs"][1]["logprobs"] = 2


@dataclass(frozen=True)
class Answers:
    """What an engine answers directly, and what the proxy answers at once and as a stream."""

    direct: dict[str, Any]
    status: int
    whole: dict[str, Any]
    headers: Any
    chunks: list[dict[str, Any]]


@pytest.fixture(scope="module")
def answers(proxy: Served) -> dict[str, "asyncio.Task[Answers]"]:
    """Answers to all requests, asked at the same time."""

    async def ask(client: Client, path: str, body: dict[str, Any]) -> Answers:
        usage = {"stream_options": {"include_usage": True}}
        (_, direct, _), (status, whole, headers), chunks = await asyncio.gather(
            client.post(body, path, client.direct),
            client.post(body, path),
            client.stream({**body, **usage}, path),
        )
        return Answers(direct, status, whole, headers, chunks)

    return finished_tasks(proxy, ask, ANSWERS)


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_are_those_of_an_engine_alone(
    answers: dict[str, "asyncio.Task[Answers]"], name: str
) -> None:
    got = answers[name].result()
    direct, whole, chunks = got.direct, got.whole, got.chunks
    assert got.status == 200
    assert said(whole) == said(direct)
    for key in ("finish_reason", "stop_reason"):
        assert whole["choices"][0][key] == direct["choices"][0][key]
    for key in ("object", "model"):
        assert whole[key] == direct[key]
    # It ends with a hash of the engine's own configuration.
    versions = (one["system_fingerprint"].rpartition("-")[0] for one in (whole, direct))
    assert len(set(versions)) == 1
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert whole["usage"][key] == direct["usage"][key]
    assert got.headers["X-Request-Id"] in whole["id"]
    assert text_of(chunks) == said(direct)
    assert chunks[-1]["usage"]["completion_tokens"] == direct["usage"]["completion_tokens"]
    expected = logprobs_of(direct["choices"])
    for choices in (whole["choices"], [c for chunk in chunks for c in chunk["choices"]]):
        served_logprobs = logprobs_of(choices)
        assert [token for token, _ in served_logprobs] == [token for token, _ in expected]
        values = [value for _, value in expected]
        assert [value for _, value in served_logprobs] == pytest.approx(values, abs=1e-3)
    offsets = (whole["choices"][0]["logprobs"] or {}).get("text_offset")
    assert offsets == (direct["choices"][0]["logprobs"] or {}).get("text_offset")


WORDS = {"structured_outputs": {"regex": "([a-z]{3,9} ){40}"}, "temperature": 1.0, "seed": 2}
MOVING = {"max_tokens": 50, "ignore_eos": True, "stream_options": {"include_usage": True}}
MOVED = {
    "greedy": (COMPLETIONS, {}),
    "chat": (CHAT, {}),
    "seed": (COMPLETIONS, {"temperature": 1.0, "seed": 5}),
    "chat-top-p": (CHAT, {"temperature": 0.8, "top_p": 0.9, "seed": 6}),
    "penalties": (COMPLETIONS, {"frequency_penalty": 0.7, "repetition_penalty": 1.2}),
    "logprobs": (COMPLETIONS, {"logprobs": 2}),
    "late-stop": (COMPLETIONS, {"max_tokens": 80, "min_tokens": 60, "stop": ["a", "e"]}),
    "grammar": (COMPLETIONS, WORDS | {"ignore_eos": False}),
}
Compared = tuple[list[dict[str, Any]], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def compared(proxy: Served) -> dict[str, "asyncio.Task[Compared]"]:
    """Streams of an engine alone, and those of the proxy while both instances drain in turn."""

    async def compare(client: Client, path: str, asked: dict[str, Any]) -> Compared:
        body = {**GREEDY, **MOVING, **asked}
        direct = await client.stream(body, path, url=client.direct)
        for _ in range(40):  # on a busy machine a stream may end before it has moved
            chunks = await client.stream(body, path)
            if proxy.moves(chunks[0]["id"]) > 0:
                return direct, chunks
        raise AssertionError("the stream ended before it moved")

    return finished_tasks(proxy, compare, MOVED, beside=lambda client: client.drain_in_turn())


@pytest.mark.parametrize("name", MOVED)
def test_moves_change_nothing_that_a_client_reads(
    compared: dict[str, "asyncio.Task[Compared]"], name: str
) -> None:
    direct, chunks = compared[name].result()
    assert text_of(chunks) == text_of(direct)
    last, of_direct = (some[-2]["choices"][0] for some in (chunks, direct))
    assert last["finish_reason"] == of_direct["finish_reason"]
    assert chunks[-1]["usage"] == direct[-1]["usage"]
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    moved, expected = (
        logprobs_of([choice for chunk in some for choice in chunk["choices"]])
        for some in (chunks, direct)
    )
    assert [token for token, _ in moved] == [token for token, _ in expected]
    assert [v for _, v in moved] == pytest.approx([v for _, v in expected], abs=1e-3)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("moment", ["at once", "soon", "while it moves"])
async def test_a_client_that_leaves_frees_everything(
    client: Client, stream: bool, moment: str
) -> None:
    asking = asyncio.create_task(client.post({**LONG, "stream": stream}))
    moving = None
    if moment == "soon":
        await asyncio.sleep(0.3)
    elif moment == "while it moves":
        while not sum(one["movable"] for one in (await client.instances()).values()):
            assert not asking.done(), "never movable"
            await asyncio.sleep(0.01)
        moving = asyncio.create_task(client.leave())
        await asyncio.sleep(0.05)  # the freeze is on its way
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    if moving is not None:
        await moving


@pytest.mark.parametrize(
    ("asked", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"max_tokens": 100_000}, 400, "max_tokens"),
        ({"temperature": -1}, 400, "temperature"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, 400, "kv_transfer_params"),
        ({"n": "three"}, 400, "body.n"),  # as vLLM names it
    ],
)
async def test_errors_have_openais_shape(
    client: Client, asked: dict[str, Any], status: int, param: str
) -> None:
    for stream in (False, True):
        got, answer, _ = await client.post({**GREEDY, **asked, "stream": stream})
        assert got == status
        assert answer["error"]["code"] == status
        assert answer["error"]["param"] == param


@pytest.mark.parametrize(
    "asked",
    [{"n": 2, "seed": 4, "temperature": 1.0}, {"echo": True}, {"prompt": [STORY, "The sea"]}],
)
async def test_what_cannot_move_is_answered_all_the_same(
    client: Client, asked: dict[str, Any]
) -> None:
    body = {**GREEDY, "max_tokens": 8, **asked}
    _, direct, _ = await client.post(body, url=client.direct)
    status, answer, _ = await client.post(body)
    assert status == 200
    assert [c["text"] for c in answer["choices"]] == [c["text"] for c in direct["choices"]]


async def test_models_health_and_metrics(client: Client) -> None:
    async with client.session.get(client.proxy + "/v1/models") as response:
        assert (await response.json())["data"][0]["id"] == "smollm2"
    for path in ("/health", "/ready"):
        async with client.session.get(client.proxy + path) as response:
            assert response.status == 200
    before = await client.metric("headway_proxy_generation_tokens_total")
    await client.post({**GREEDY, "max_tokens": 5, "ignore_eos": True})
    assert await client.metric("headway_proxy_generation_tokens_total") == before + 5
    assert await client.metric("headway_proxy_instance_up") == 3


@pytest.mark.slow
async def test_headway_drain_empties_an_instance_while_streams_go_on(
    proxy: Served, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    bodies = [{**LONG, "prompt": f"{STORY} {name}", "max_tokens": 240} for name in "ABCD"]
    alone = (client.stream(body, url=client.direct) for body in bodies)
    expected = [text_of(chunks) for chunks in await asyncio.gather(*alone)]
    config = ["--config", str(proxy.config)]
    for _ in range(10):  # a fast engine may be done before it is drained
        streams = [asyncio.create_task(client.stream(body)) for body in bodies]
        while not (await client.instances())["decode-0"]["movable"]:
            if any(stream.done() for stream in streams):
                break
            await asyncio.sleep(0.01)
        assert await asyncio.to_thread(main, ["drain", "decode-0", *config]) == 0
        printed = capsys.readouterr().out
        assert "decode-0 is empty" in printed
        assert (await client.instances())["decode-0"]["draining"]
        answers = await asyncio.gather(*streams)
        assert [text_of(chunks) for chunks in answers] == expected
        assert await asyncio.to_thread(main, ["drain", "decode-0", *config, "--undo"]) == 0
        assert not (await client.instances())["decode-0"]["draining"]
        if "requests left" in printed and any(proxy.moves(one[0]["id"]) for one in answers):
            return
    raise AssertionError("no request was ever moved by a drain that showed how many are left")


@pytest.fixture(scope="module")
def impatient_proxy(
    deployment: RunningDeployment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A proxy that soon gives an engine up that does not answer."""
    deadlines = {"connect_seconds": 2.0, "freeze_seconds": 5.0, "control_seconds": 5.0}
    deadlines |= {"token_seconds": 5.0, "moved_token_seconds": 10.0}
    port = deployment.deployment.proxy.port + 501
    ports = {"port": port, "admin_port": port + 50}
    folder = tmp_path_factory.mktemp("proxy")
    with served(deployment, folder, **ports, **deadlines) as running:
        yield running


@pytest.mark.slow
async def test_an_engine_that_hangs_loses_no_token(
    deployment: RunningDeployment, impatient_proxy: Served
) -> None:
    """One that is killed: see `test_chaos`."""
    async with impatient_proxy.client() as client:
        body = {**LONG, "max_tokens": 200}  # many more than may be on their way at the 30th
        expected = text_of(await client.stream(body, url=client.direct))
        victims: list[str] = []

        async def at(chunks: int) -> None:
            if chunks == 30 and not victims:
                busy = await client.busy()
                assert busy is not None, "the stream had ended before its 30th token was read"
                victims.append(busy)
                deployment.launched.signal(busy, signal.SIGSTOP)

        try:
            chunks = await client.stream(body, at=at)
        finally:
            for victim in victims:
                deployment.launched.signal(victim, signal.SIGCONT)
        assert text_of(chunks) == expected
        recomputed = "headway_proxy_recomputed_requests_total"
        assert await client.metric(recomputed, instance_name=victims[0]) >= 1
        await client.until_in_service(victims[0])
