"""Clients that ask for a bit of everything, leave, and send what has to be refused."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks.support.erratic_engines import FAULTS, MODEL

_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_LONG = 30
"""Tokens of a request that runs for long enough to be moved when its engine is drained."""


@dataclass(frozen=True)
class _Kind:
    """What a client asks, how often, and the outcomes that are as they should be."""

    weight: float
    expected: tuple[str, ...]
    body: dict[str, Any]
    path: str = _COMPLETIONS
    leaves: bool = False
    raw: bytes = b""
    chunked: bool = False


_TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
KINDS: dict[str, _Kind] = {
    "completion": _Kind(8, ("ok",), {}),
    "streamed completion": _Kind(20, ("ok",), {"stream": True}),
    "chat": _Kind(6, ("ok",), {}, _CHAT),
    "streamed chat": _Kind(14, ("ok",), {"stream": True}, _CHAT),
    "two answers": _Kind(4, ("ok",), {"n": 2}),
    "two streamed answers": _Kind(4, ("ok",), {"n": 2, "stream": True}),
    "streamed chat with tools": _Kind(3, ("ok",), {"stream": True, "tools": [_TOOL]}, _CHAT),
    "long": _Kind(6, ("ok",), {"stream": True, "max_tokens": _LONG}),
    "chunked body": _Kind(5, ("ok",), {"stream": True}, chunked=True),
    "embeddings": _Kind(3, ("ok",), {"input": "a"}, "/v1/embeddings"),
    "leaves at once": _Kind(3, ("left",), {"stream": True}, leaves=True),
    "leaves a long stream": _Kind(4, ("left",), {"stream": True, "max_tokens": _LONG}, leaves=True),
    "leaves two answers": _Kind(2, ("left",), {"n": 2, "stream": True}, leaves=True),
    "invalid JSON": _Kind(3, ("400",), {}, raw=b'{"model": '),
    "reserved field": _Kind(2, ("400",), {"kv_transfer_params": {}}),
    "unknown model": _Kind(3, ("404",), {"model": "unknown"}),
    "unknown path": _Kind(1, ("404",), {}, "/v1/unknown"),
    "too long": _Kind(3, ("400",), {"user": "too long"}),
    "error 500": _Kind(2, ("502",), {"user": "error 500"}),
    "error 429": _Kind(2, ("429",), {"user": "error 429"}),
    "error event": _Kind(2, ("502",), {"user": "error event", "stream": True}),
    "prefill 500": _Kind(2, ("ok",), {"user": "prefill 500", "stream": True}),
    "breaks": _Kind(2, ("ok",), {"user": "breaks", "stream": True}),
}
"""By what a client asks for."""
OUTCOMES = ("ok", "left", "400", "404", "429", "502", "503", "cut", "broken", "unexpected")
"""How a request may end: its last event or its whole answer came, its client left, its HTTP status;
its stream ended without its end, or its connection broke; something else."""

assert {kind.body["user"] for kind in KINDS.values() if "user" in kind.body} == set(FAULTS)


class MixedClients:
    def __init__(self, generator: random.Random) -> None:
        self.outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self.unexpected: Counter[str] = Counter()
        self.ended = 0
        self._random = generator
        self._names, self._weights = list(KINDS), [kind.weight for kind in KINDS.values()]

    async def ask(
        self, session: aiohttp.ClientSession, requests: int, at_once: int, ended: Callable[[], None]
    ) -> None:
        left = iter(range(requests))

        async def client() -> None:
            for _ in left:
                (name,) = self._random.choices(self._names, self._weights)
                outcome = await self._ask(session, KINDS[name])
                self.outcomes[outcome] += 1
                if outcome not in KINDS[name].expected:
                    self.unexpected[f"{name}: {outcome}"] += 1
                self.ended += 1
                ended()

        await asyncio.gather(*(client() for _ in range(at_once)))

    async def _ask(self, session: aiohttp.ClientSession, kind: _Kind) -> str:
        number = self._random.getrandbits(64)
        body: dict[str, Any] = {"model": MODEL, "max_tokens": 4, **kind.body}
        if kind.path == _CHAT:
            body["messages"] = [{"role": "user", "content": f"Tell me of river {number}"}]
        elif kind.path == _COMPLETIONS:
            body["prompt"] = f"Tell me of river {number}"
        raw = kind.raw or json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if number % 2:
            headers["X-Request-Id"] = f"request-{number:x}"
        if number % 3 == 0:
            headers["traceparent"] = f"00-{number:032x}-{number | 1:016x}-01"
        if number % 11 == 0:
            headers["Connection"] = "close"
        data = _pieces(raw) if kind.chunked else raw
        try:
            async with session.post(kind.path, data=data, headers=headers) as response:
                if response.status != 200:
                    await response.read()
                    status = str(response.status)
                    return status if status in OUTCOMES else "unexpected"
                if kind.leaves:
                    if number % 5:
                        await response.content.readany()
                    response.close()
                    return "left"
                return _ended(await response.read(), streams=bool(body.get("stream")))
        except (aiohttp.ClientError, ConnectionError):
            return "broken"


def _ended(answer: bytes, streams: bool) -> str:
    if not streams:
        return "ok"
    if b'"error"' in answer:
        return "502"
    return "ok" if b"[DONE]" in answer[-32:] else "cut"


async def _pieces(raw: bytes) -> AsyncIterator[bytes]:
    yield raw[:20]
    await asyncio.sleep(0)
    yield raw[20:]
