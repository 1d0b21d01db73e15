"""No request holds up the others: what the event loop computes at a stretch, whatever is asked."""

import asyncio
import gc
import io
import json
import threading
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from scripted_cluster import names, scripted, served
from scripted_engine import ScriptedEngine
from tokenizers import Tokenizer

from rescheduler.engines.deployment import Deployment
from rescheduler.openai.openai_request import CHAT, COMPLETIONS, FORWARDED, NOT_SERVED

MOST_SECONDS = 0.05
"""Of the processor, for one callback of the event loop."""
HEAD = {"model": "m", "max_tokens": 3}
LETTERS = {"latin": "a river ", "chinese": "天地玄黄宇宙洪荒", "emoji": "😀🎉🚀🤖", "rare": "ꙮ𒐫𓀀"}
MOST_BYTES = 6 << 20


@dataclass
class Indifferent(ScriptedEngine):
    """Answers any prompt, however long, with three tokens; refuses what it cannot read."""

    says: dict[str, Any] = field(default_factory=lambda: {"max_model_len": 8_000})

    def _context(self, body: dict[str, Any], params: dict[str, Any], chat: bool) -> list[int]:
        return [1, 2, 3]

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        try:
            return await super()._generate(http)
        except (RecursionError, TypeError, ValueError, KeyError):
            return web.json_response({"error": {"message": "scripted"}}, status=400)

    async def _respond(self, http: web.Request) -> web.StreamResponse:
        try:
            body = await http.json()
        except (RecursionError, ValueError):
            return web.json_response({"error": {"message": "scripted"}}, status=400)
        return web.json_response({"size": len(body)})


PROMPTS = {COMPLETIONS: "prompt", CHAT: "messages", "/v1/responses": "input"}
"""The field of an endpoint's prompt."""


def worst_bodies(path: str) -> Iterator[tuple[str, bytes]]:
    """All that has been found to take long, or was meant to."""
    others = {*PROMPTS.values()} - {PROMPTS[path]}

    def asks(name: str, **fields: Any) -> tuple[str, bytes]:
        own = {key: value for key, value in {**HEAD, **fields}.items() if key not in others}
        return name, json.dumps(own, ensure_ascii=False).encode()

    for name, letters in LETTERS.items():
        for size in (6_144, MOST_BYTES):
            text = letters * (size // len(letters.encode()))
            message = {"role": "user", "content": text}
            fields = {"prompt": text, "messages": [message], "input": text}
            yield asks(f"{size} bytes of {name}", stream=True, **fields)
    said = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "input": "a"}
    parts = [{"type": "text", "text": "a"}] * 20_000
    yield asks("parts of a message", messages=[{"role": "user", "content": parts}])
    yield asks("messages", messages=[{"role": "user", "content": "a"}] * 20_000)
    yield asks("most messages", messages=[{"role": "user", "content": "a"}] * 150_000)
    yield asks("token ids", prompt=[31_530] * 4_000)
    yield asks("most token ids", prompt=[7] * 1_500_000)
    yield asks("prompts", prompt=["a"] * 100_000)
    yield asks("most prompts", prompt=[""] * 1_800_000)
    yield asks("most items", input=[""] * 900_000, documents=[[]] * 900_000)
    yield asks("choices", n=1_000, **said)
    yield asks("stops", stop=["never"] * 64, stream=True, **said)
    yield asks("long stops", stop=["n" * 250] * 64, stream=True, **said)
    yield asks("most stops", stop=["n"] * 60_000, stream=True, **said)
    yield asks("a bias", logit_bias={str(i): 1.0 for i in range(100_000)}, **said)
    yield asks("tools", tools=[{"type": "function"}] * 100_000, stream=True, **said)
    yield asks("a long id", request_id="i" * 200_000, **said)
    yield asks("a long model", **{**said, "model": "m" * 200_000})
    yield asks("small fields", **{f"f{i}": i for i in range(18_000)}, **said)
    yield asks("most small fields", **{f"f{i}": i for i in range(100_000)}, **said)
    yield asks("promises", finish_in_s=600, stream_options={"headway": True}, stream=True, **said)
    yield (
        "a number of many digits",
        b'{"model": "m", "max_tokens": 3, "prompt": "a", "n": ' + b"9" * 200_000 + b"}",
    )
    for name in ("messages", "tools", "stop", "any", "stream_options"):
        for depth in (900, 100_000):
            deep = "[" * depth + "]" * depth
            yield (
                f"{depth} deep {name}",
                f'{{"model": "m", "max_tokens": 3, "{name}": {deep}}}'.encode(),
            )
    yield "objects in objects", b'{"a":' * 30_000 + b"1" + b"}" * 30_000
    escaped = b"\\u0061" * 1_000_000
    yield "escapes", b'{"model": "m", "max_tokens": 3, "prompt": "' + escaped + b'"}'
    yield "no JSON", b"\xff" * MOST_BYTES
    yield "UTF-16", json.dumps({**HEAD, "prompt": "a" * 1_000_000}).encode("utf-16")
    yield "a gap", b'{"model": "m", "max_tokens": 3, "prompt": "a"' + b" " * MOST_BYTES + b"}"


class Measured:
    """The longest callbacks of one thread's event loop, by what was asked meanwhile."""

    def __init__(self) -> None:
        self.longest: dict[str, float] = {}
        self.asked = ""
        self.thread = 0

    @contextmanager
    def measuring(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        run = asyncio.Handle._run

        def measured(handle: asyncio.Handle) -> None:
            if threading.get_ident() != self.thread or not self.asked:
                run(handle)
                return
            began = time.thread_time()
            run(handle)
            took = time.thread_time() - began
            self.longest[self.asked] = max(self.longest.get(self.asked, 0.0), took)

        with monkeypatch.context() as patched:
            patched.setattr(asyncio.Handle, "_run", measured)
            gc.disable()  # what the test and its engines leave is not the proxy's to look through
            try:
                yield
            finally:
                gc.enable()


@asynccontextmanager
async def proxy_apart(
    deployment: Deployment, tokenizer: Tokenizer, measured: Measured
) -> AsyncIterator[str]:
    """Run a proxy in a thread of its own; yield its address."""
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    loop, ended = asyncio.get_running_loop(), threading.Event()

    async def serve() -> None:
        measured.thread = threading.get_ident()
        async with served(deployment, tokenizer) as (_, listeners):
            loop.call_soon_threadsafe(ready.set_result, listeners.url)
            while not ended.is_set():
                await asyncio.sleep(0.01)

    serving = asyncio.create_task(asyncio.to_thread(lambda: asyncio.run(serve())))
    try:
        await asyncio.wait([serving, ready], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        yield await ready
    finally:
        ended.set()
        await serving


@pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")
async def test_no_request_holds_up_the_loop(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = "checkpoints/smollm2-135m-instruct-prompt"
    engines, deployment = await scripted(
        tokenizer, names(1), kind=Indifferent, prompt_checkpoint=checkpoint, body_seconds=60.0
    )
    measured = Measured()
    try:
        async with (
            proxy_apart(deployment, tokenizer, measured) as url,
            aiohttp.ClientSession() as session,
        ):

            async def ask(method: str, path: str, body: bytes | None, **more: str) -> int:
                headers = {"Content-Type": "application/json", **more}
                data = None if body is None else io.BytesIO(body)
                async with session.request(method, url + path, data=data, headers=headers) as got:
                    await got.read()
                    return got.status

            for path in (COMPLETIONS, CHAT):  # what is loaded, or compiled, once
                for stream in (False, True):
                    said = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
                    body = json.dumps({**HEAD, **said, "stream": stream}).encode()
                    assert await ask("POST", path, body) == 200
            assert await ask("GET", "/metrics", None) == 200
            with measured.measuring(monkeypatch):
                for path in PROMPTS:
                    for name, body in worst_bodies(path):
                        measured.asked = f"{path}: {name}"
                        await ask("POST", path, body)
                large = json.dumps({**HEAD, "input": "a" * MOST_BYTES}).encode()
                for path in (*FORWARDED, *(p for p in NOT_SERVED if "{" not in p)):
                    measured.asked = path
                    await ask("POST", path, large)
                measured.asked = "compressed"
                packed = zlib.compress(
                    b'{"model": "m", "max_tokens": 3, "prompt": "' + b"a" * MOST_BYTES + b'"}'
                )
                await ask("POST", COMPLETIONS, packed, **{"Content-Encoding": "deflate"})
                for path in ("/metrics", "/v1/models", "/version", "/health", "/ready", "/nowhere"):
                    measured.asked = path
                    await asyncio.gather(*(ask("GET", path, None) for _ in range(20)))
    finally:
        for engine in engines.values():
            await engine.stop()
    worst = sorted(measured.longest.items(), key=lambda one: -one[1])
    print("\n".join(f"{1e3 * seconds:6.1f} ms  {asked}" for asked, seconds in worst[:12]))
    assert len(worst) > 130
    assert not [one for one in worst if one[1] >= MOST_SECONDS]
