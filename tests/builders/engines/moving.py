"""Streams of decode engines, and moving a request between them as a proxy does."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import uuid4

import aiohttp

from rescheduler.demo.load import metric_by, metric_in
from rescheduler.engines.deployment import Instance
from rescheduler.openai.openai_stream import read_events
from rescheduler.transfer.control_client import ControlClient
from rescheduler.transfer.control_messages import EngineState, Frozen, NotFrozenError

STORY = "Once upon a time, in a small village by the sea, there lived a"
PATIENCE = 120.0
"""Seconds for any exchange with a control socket, on a busy machine too."""
GREEDY = {"prompt": STORY, "max_tokens": 48, "temperature": 0, "ignore_eos": True}


@dataclass
class Engine:
    """A decode engine: where it answers."""

    url: str
    control: ControlClient
    session: aiohttp.ClientSession

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async with self.session.post(self.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            async for chunk in read_events(response.content):
                yield chunk

    async def prompt_tokens(self) -> dict[str, float]:
        """Prompt tokens so far, by where their KV cache came from."""
        return metric_by(await self._metrics(), "vllm:prompt_tokens_by_source_total", "source")

    async def preemptions(self) -> float:
        return metric_in(await self._metrics(), "vllm:num_preemptions_total")

    async def _metrics(self) -> str:
        async with self.session.get(self.url + "/metrics") as response:
            return await response.text()


@dataclass
class Generation:
    """What a client has read so far, and where its request moved."""

    id: str = field(default_factory=lambda: uuid4().hex)
    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    params: dict[str, Any] = field(default_factory=dict)  # for the next engine, if it was frozen
    cut_at: list[int] = field(default_factory=list)  # tokens generated at each move

    @property
    def hops(self) -> int:
        return len(self.cut_at)

    def take(self, chunk: dict[str, Any]) -> None:
        assert "choices" in chunk, chunk
        for choice in chunk["choices"]:
            given = choice.get("prompt_token_ids") or chunk.get("prompt_token_ids")
            self.prompt = self.prompt or given or []
            self.tokens += choice.get("token_ids") or []
            self.text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            if (choice.get("logprobs") or {}).get("token_logprobs"):
                self.logprobs += choice["logprobs"]["token_logprobs"]
            self.finish_reason = choice.get("finish_reason") or self.finish_reason


async def moved(
    engines: list[Engine], body: dict[str, Any], cuts: Sequence[int], chat: bool = False
) -> Generation:
    """Generate with a move to the next engine after each of the cuts, in tokens.

    A cut that meets the end of the request moves nothing.
    """
    generation, params, at = Generation(), {}, 0
    for hop, cut in enumerate([*cuts, None]):
        engine = engines[at % len(engines)]
        freezing = await _until_asked(engine, body, generation, params, hop, cut, chat)
        if freezing is None:
            return generation
        try:
            frozen = await freezing
        except NotFrozenError:  # it ended first
            return generation
        assert frozen.output_token_ids == generation.tokens
        assert generation.finish_reason == "length"
        generation.cut_at.append(len(generation.tokens))
        params, at = frozen.params, at + 1
    return generation


def place(
    body: dict[str, Any], generation: Generation, params: dict[str, Any], hop: int, chat: bool
) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a request at its next engine."""
    done = len(generation.tokens)
    moving = {"id": generation.id, "hop": hop, "generated": done}
    sent = body | {
        "model": "smollm2",
        "stream": True,
        "return_token_ids": True,
        "max_tokens": body["max_tokens"] - done,
        "kv_transfer_params": params | {"headway": moving},
    }
    if body.get("min_tokens"):
        sent["min_tokens"] = max(0, body["min_tokens"] - done)
    tokens = generation.prompt + generation.tokens
    if done and chat:
        sent["kv_transfer_params"]["prompt_token_ids"] = tokens
    elif done:
        sent["prompt"] = tokens
    return ("/v1/chat/completions" if chat else "/v1/completions"), sent


async def finish(
    engine: Engine,
    body: dict[str, Any],
    generation: Generation,
    params: dict[str, Any],
    hop: int,
    chat: bool = False,
) -> None:
    """Go on with a request at an engine to its end."""
    await _until_asked(engine, body, generation, params, hop, None, chat)


async def _until_asked(
    engine: Engine,
    body: dict[str, Any],
    generation: Generation,
    params: dict[str, Any],
    hop: int,
    cut: int | None,
    chat: bool = False,
) -> "asyncio.Task[Frozen] | None":
    """Generate at an engine, which is asked to freeze the request after a token; None: it ends."""
    freezing: asyncio.Task[Frozen] | None = None
    path, sent = place(body, generation, params, hop, chat)
    async for chunk in engine.stream(path, sent):
        generation.take(chunk)
        if cut is not None and freezing is None and len(generation.tokens) >= cut:
            freezing = asyncio.create_task(engine.control.freeze(generation.id, hop, PATIENCE))
    return freezing


class Copied(NamedTuple):
    """A request of which a copy was made ahead of its move."""

    body: dict[str, Any]  # what was asked for
    generation: Generation  # until it was frozen
    copied: int  # tokens of the copy
    frozen: Frozen  # what the next engine gets
    before: dict[str, float]  # prompt tokens of the target after the copy, by their source


async def copied_ahead(
    source: Engine, target: Engine, body: dict[str, Any], cut: int = 8
) -> Copied:
    """Copy a request to another engine once it has some tokens, and freeze it after that."""
    for number in range(20):  # on a busy machine a request may end before it is frozen
        generation, taken, freezing, before = Generation(), None, None, {}
        asked = body | {"prompt": f"{number}. {body['prompt']}"}  # not what an earlier one copied
        path, sent = place(asked, generation, {}, 0, False)
        async for chunk in source.stream(path, sent):
            generation.take(chunk)
            if len(generation.tokens) >= cut and taken is None:
                try:
                    taken = await source.control.snapshot(generation.id, PATIENCE)
                except NotFrozenError:  # what a window needs was freed: not so after a token or two
                    continue
                known = generation.prompt + generation.tokens
                assert taken.token_ids[: len(known)] == known[: len(taken.token_ids)]
                copies = {"headway": {"id": generation.id, "hop": 0, "copies": True}}
                copy = {"prompt": taken.token_ids, "max_tokens": 1}
                copy["kv_transfer_params"] = taken.params | copies
                async for _ in target.stream(path, sent | copy):
                    pass
                before = await target.prompt_tokens()
                freezing = asyncio.create_task(source.control.freeze(generation.id, 0, PATIENCE))
        if taken is None or freezing is None:
            continue
        try:
            return Copied(asked, generation, len(taken.token_ids) - 1, await freezing, before)
        except NotFrozenError as error:
            assert len(generation.tokens) == body["max_tokens"], error
    raise AssertionError("the request ended each time before it was frozen")


async def until_frozen(engine: Engine, body: dict[str, Any] = GREEDY) -> Generation:
    """Generate at an engine until it has frozen the request; its parameters are kept."""
    for _ in range(20):  # a request may end before it is frozen
        generation = Generation()
        freezing = await _until_asked(engine, body, generation, {}, 0, 6)
        assert freezing is not None
        try:
            frozen = await freezing
        except NotFrozenError as error:
            assert len(generation.tokens) == body["max_tokens"], error
            continue
        assert frozen.output_token_ids == generation.tokens
        generation.params = frozen.params
        return generation
    raise AssertionError("the request ended each time before it was frozen")


async def idle_state(engine: Engine, seconds: float = PATIENCE) -> EngineState:
    """Return the engine's state once it holds nothing, or what it holds after a while."""
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        state = await engine.control.state(PATIENCE)
        if state.free_blocks == state.num_blocks or asyncio.get_running_loop().time() > deadline:
            return state
        await asyncio.sleep(0.1)


Run = Callable[[Callable[[list[Engine]], Awaitable[Any]]], Any]
"""Runs a coroutine on the decode engines, and sees that they hold nothing afterwards."""


@asynccontextmanager
async def engines_of(
    instances: Sequence[Instance], patience: float = PATIENCE
) -> AsyncIterator[list[Engine]]:
    """Connect to engines, which have to let everything go soon after the body."""
    # Kept connections are closed by the server now and then, just as they are used again.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        engines = [Engine(one.url, ControlClient(one.control or ""), session) for one in instances]
        try:
            yield engines
            for engine in engines:
                state = await idle_state(engine, patience)
                assert state.free_blocks == state.num_blocks
                assert (state.running, state.waiting, state.frozen) == (0, 0, [])
        finally:
            for engine in engines:
                engine.control.close()


def runner_on(instances: Sequence[Instance], patience: float = PATIENCE) -> Run:
    """Return what runs a coroutine on engines, see `engines_of`."""

    async def run(work: Callable[[list[Engine]], Awaitable[Any]]) -> Any:
        async with engines_of(instances, patience) as engines:
            return await work(engines)

    return lambda work: asyncio.run(run(work))
