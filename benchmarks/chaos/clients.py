"""Honest clients, and clients that leave, stall, or send what nobody should send.

Honest ones use OpenAI's own library, and know their answers beforehand. Some have their streams
silent: each asks for all of its answer in a single event, the half of them with tools, with which a
request stays where it is.
"""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai

from benchmarks.chaos.ledger import Ledger
from rescheduler.emulation.scripted_answers import LENGTH, SEED

_TEXTS = (
    "Once upon a time, in a small village by the sea, there lived a",
    "The three most important inventions of the last century are",
    "A short history of the bicycle begins in",
    "Dear Sir or Madam, I am writing to you because",
)
_SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    {"temperature": 0, "extra_body": {"repetition_penalty": 1.2, "min_tokens": 30}},
    {
        "temperature": 1.0,
        "extra_body": {"structured_outputs": {"regex": "([a-z]{2,9} ){30}[a-z]{2,9}"}},
    },
)
_SECONDS = 600.0
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
_SILENT_QUESTIONS = 4
_AGAIN_SECONDS = 5.0
"""After which a silent stream that failed is asked for again."""


class HonestClients:
    """Ask the same few things again and again, and compare each answer with that in peace.

    Args:
        url: of the proxy.
        model: that is asked.
        questions: how many.
        ledger: counts.
        scripted: whether engines are emulated.
        silent_tokens: of the answer of a silent stream; 0: there are none.
    """

    def __init__(
        self,
        url: str,
        model: str,
        questions: int,
        ledger: Ledger,
        scripted: bool = False,
        silent_tokens: int = 0,
    ) -> None:
        self._client = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=_SECONDS
        )
        self._model = model
        self._questions = questions
        self._ledger = ledger
        self._sampling = _SAMPLING[:2] if scripted else _SAMPLING
        self._silent_tokens = silent_tokens
        self._expected: list[list[int]] = []
        self._expected_of_silent: list[list[int]] = []

    async def learn(self, at_once: int) -> None:
        limit = asyncio.Semaphore(at_once)

        async def one(fields: dict[str, Any]) -> list[int]:
            async with limit:
                tokens: list[int] = []
                assert await self._ask(fields, tokens), f"{fields} has no end"
                return tokens

        asked = [self._fields(number) for number in range(self._questions)]
        if self._silent_tokens:
            asked += [self._silent_fields(number) for number in range(_SILENT_QUESTIONS)]
        expected = await asyncio.gather(*map(one, asked))
        self._expected = expected[: self._questions]
        self._expected_of_silent = expected[self._questions :]

    async def run(self, at_once: int, until: asyncio.Event, generator: random.Random) -> None:
        """Keep so many requests under way until an event is set, and then until they have ended."""

        async def client() -> None:
            while not until.is_set():
                await self._one(generator.randrange(self._questions))

        await asyncio.gather(*(client() for _ in range(at_once)))

    async def burst(self, count: int, generator: random.Random) -> None:
        """Ask so many at once, and wait for their ends."""
        numbers = [generator.randrange(self._questions) for _ in range(count)]
        await asyncio.gather(*map(self._one, numbers))

    async def run_silent(self, at_once: int, until: asyncio.Event, patience: float) -> None:
        """Keep so many silent streams under way; each is left after so many seconds."""

        async def client(number: int) -> None:
            while not until.is_set():
                await self._silent(number % _SILENT_QUESTIONS, patience)
                number += at_once

        await asyncio.gather(*map(client, range(at_once)))

    async def _silent(self, number: int, patience: float) -> None:
        tokens, how = list[int](), "no end"
        fields = self._silent_fields(number)
        fields["extra_body"]["stream_interval"] = self._silent_tokens
        self._ledger.counts["silent_sent"] += 1
        try:
            async with asyncio.timeout(patience):
                how = "ended" if await self._ask(fields, tokens) else "no end"
        except TimeoutError:
            how = "without_end"
        except openai.APIError as error:
            how = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        self._ledger.silent(number, tokens, self._expected_of_silent[number], how)
        if how != "ended":
            await asyncio.sleep(_AGAIN_SECONDS)

    async def close(self) -> None:
        await self._client.close()

    async def _one(self, number: int) -> None:
        began, tokens, expected = time.monotonic(), list[int](), self._expected[number]

        def failed(how: str, why: object) -> None:
            why = " ".join(f"{type(why).__name__}: {why}".split())[:300]
            self._ledger.failed(number, tokens, expected, began, why, how)

        try:
            ended = await self._ask(self._fields(number), tokens)
        except openai.APIStatusError as error:
            status = error.status_code
            how = "5xx" if status >= 500 else "4xx"
            failed(str(status) if status in (429, 503) else how, error)
        except openai.APIConnectionError as error:
            # Of httpx, or of what `openai` has in its place.
            refused = type(error.__cause__).__name__ == "ConnectError"
            failed("refused" if refused else "broken", error)
        except openai.APIError as error:  # an event of the stream
            failed("5xx", error)
        else:
            if ended:
                self._ledger.ended(number, tokens, expected)
                return
            failed("silent", "no end")
        await asyncio.sleep(0.5)  # as a client that tries again

    def _fields(self, number: int) -> dict[str, Any]:
        """Return what a question asks."""
        text = f"{number}. {_TEXTS[number % len(_TEXTS)]}"
        fields = dict(self._sampling[number % len(self._sampling)])
        extra = {**fields.pop("extra_body", {}), "return_token_ids": True}
        # Where engines are emulated; others do not read it.
        extra["vllm_xargs"] = {LENGTH: 150 + number * 53 % 250, SEED: number}
        fields |= {"max_tokens": 200 + number * 37 % 200, "seed": number}
        return fields | self._prompt(text, chat=number % 4 == 3) | {"extra_body": extra}

    def _silent_fields(self, number: int) -> dict[str, Any]:
        """Return what a silent stream asks."""
        tokens, pinned = self._silent_tokens, number % 2 == 1
        extra: dict[str, Any] = {"return_token_ids": True, "ignore_eos": True}
        extra["vllm_xargs"] = {LENGTH: tokens, SEED: 10_000 + number}
        fields: dict[str, Any] = {"temperature": 0, "max_tokens": tokens}
        if pinned:
            fields |= {"tools": [_TOOL], "tool_choice": "none"}
        text = f"silent {number}. {_TEXTS[number % len(_TEXTS)]}"
        return fields | self._prompt(text, chat=pinned) | {"extra_body": extra}

    def _prompt(self, text: str, chat: bool) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}

    async def _ask(self, fields: dict[str, Any], tokens: list[int]) -> bool:
        """Ask one thing and take its tokens; return whether the answer had an end."""
        chat = "messages" in fields
        create: Any = self._client.chat.completions if chat else self._client.completions
        stream: Any = await create.create(model=self._model, stream=True, **fields)
        ended = False
        async with stream:
            async for chunk in stream:
                for choice in chunk.choices:
                    tokens += (choice.model_extra or {}).get("token_ids") or []
                    ended |= choice.finish_reason in ("stop", "length")
        return ended


_STALL_SECONDS = 20.0
_POISON_SECONDS = 120.0
_PROMPT = "Tell me everything about the sea, from the beginning"

_NO_JSON = (
    b"[" * 100_000,
    b'{"model": ' + b"9" * 5_000 + b"}",
    b"\xff\xfe\x00",
    b'{"prompt": "a", "prompt": "b", "kv_transfer_params": {"do_remote_decode": 1}}',
)
_POISON: tuple[dict[str, Any], ...] = (
    {"model": "no such model"},
    {"max_tokens": -1},
    {"max_tokens": 2**70},
    {"temperature": "hot"},
    {"prompt": [10**9]},
    {"prompt": []},
    {"prompt": ["a", 1]},
    {"prompt": "word " * 20_000},
    {"stop": ["x"] * 10_000},
    {"n": 0},
    {"logit_bias": {"no token": 1}},
    {"structured_outputs": {"regex": "(" * 50}},
    {"structured_outputs": {"json": "{"}},
    {"messages": [{"role": "robot", "content": None}]},
    {"vllm_xargs": {"kv_transfer_params": "{}"}},
    {"kv_transfer_params": {"headway": {"id": "x", "hop": 0}}},
    {"stream_options": 7},
    {"seed": 2**64},
)


@dataclass
class RudeClients:
    """Misbehave before the proxy."""

    host: str
    port: int
    model: str
    ledger: Ledger
    random: random.Random

    async def run(self, seconds_between: float) -> None:
        kinds = [self._leaves, self._leaves, self._stalls, self._poisons, self._poisons]
        clients: set[asyncio.Task[None]] = set()
        try:
            while True:
                await asyncio.sleep(self.random.expovariate(1 / seconds_between))
                task = asyncio.ensure_future(self._rude(self.random.choice(kinds)))
                clients.add(task)
                task.add_done_callback(clients.discard)
        finally:
            for task in clients:
                task.cancel()
            await asyncio.gather(*clients, return_exceptions=True)

    async def _rude(self, kind: Callable[[], Awaitable[None]]) -> None:
        with suppress(OSError, aiohttp.ClientError, asyncio.IncompleteReadError, TimeoutError):
            await kind()

    async def _leaves(self) -> None:
        """Leave at a random moment: before the answer, or in the middle of it."""
        self.ledger.counts["clients_left"] += 1
        _, writer = await self._sent(self._body(max_tokens=150))
        try:
            await asyncio.sleep(self.random.choice((0.0, 0.02, 0.2, 2.0, 6.0)))
        finally:
            if self.random.random() < 0.5:
                writer.transport.abort()
            writer.close()

    async def _stalls(self) -> None:
        """Send half of something, or read nothing, for a while."""
        self.ledger.counts["clients_stalled"] += 1
        how = self.random.choice(("headers", "body", "reader", "pinned reader"))
        body = self._body(max_tokens=400)
        if how == "pinned reader":
            tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
            body |= {"messages": [{"role": "user", "content": _PROMPT}], "tools": [tool]}
            body.pop("prompt")
        if how in ("headers", "body"):
            whole = self._request(body)
            cut = whole.index(b"\r\n\r\n") + (-5 if how == "headers" else 40)
            _, writer = await self._connected()
            writer.write(whole[:cut])
        else:
            path = "chat/completions" if "messages" in body else "completions"
            _, writer = await self._sent(body, path)
        try:
            await asyncio.sleep(_STALL_SECONDS)
        finally:
            writer.transport.abort()

    async def _poisons(self) -> None:
        """Send something that no engine can serve; it must be answered nevertheless."""
        self.ledger.counts["poison"] += 1
        r = self.random
        body = self._body(max_tokens=20)
        fields: dict[str, Any] = r.choice(_POISON)
        raw: bytes = r.choice([*_NO_JSON, *[json.dumps(body | fields).encode()] * 4])
        path = r.choice(("completions", "chat/completions", "responses", "embeddings", "nothing"))
        began, line = time.monotonic(), b""
        with suppress(OSError, TimeoutError):
            reader, writer = await self._connected()
            try:
                writer.write(self._head(path, len(raw)) + raw)
                async with asyncio.timeout(_POISON_SECONDS):
                    line = await reader.readline()
            finally:
                writer.close()
        counts, what = self.ledger.counts, f"poison to {path}: {line!r}: {raw[:200]!r}"
        if line.startswith(b"HTTP/1.1 "):
            counts["poison_answered"] += 1
            if line.startswith(b"HTTP/1.1 5") and line.split()[1] not in (b"501", b"503"):
                counts["poison_5xx"] += 1
                self.ledger.notes.append(what)
        elif not self.ledger.during("proxy", began):
            counts["poison_unanswered"] += 1
            self.ledger.notes.append(f"{what}, after {time.monotonic() - began:.0f} s")

    async def _sent(
        self, body: dict[str, Any], path: str = "completions"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await self._connected()
        writer.write(self._request(body, path))
        await writer.drain()
        return reader, writer

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port, limit=1024)

    def _body(self, **more: Any) -> dict[str, Any]:
        words = f"{_PROMPT} {self.random.random()}"
        return {"model": self.model, "prompt": words, "stream": True, "ignore_eos": True, **more}

    def _request(self, body: dict[str, Any], path: str = "completions") -> bytes:
        raw = json.dumps(body).encode()
        return self._head(path, len(raw)) + raw

    def _head(self, path: str, length: int) -> bytes:
        return (
            f"POST /v1/{path} HTTP/1.1\r\nHost: {self.host}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        ).encode()
