"""Clients that leave, stall, or send what nobody should send."""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks.chaos.ledger import Ledger

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
