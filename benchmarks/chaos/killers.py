"""Requests that kill: the engine of each dies as soon as the request runs there."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.chaos.ledger import Ledger
from rescheduler.emulation.scripted_answers import LENGTH
from rescheduler.openai.openai_stream import read_events

LOGS_REQUESTS = "--enable-log-requests"
"""vLLM's flag with which an engine's log names each request as it comes."""
REFUSED = 422
MOST_ENGINES = 2
"""That a request may take, until it is refused."""
_SPARED = MOST_ENGINES + 1
"""Engines after which the harness spares the others."""
_SECONDS = 240.0
_TOKENS = 400
_LOOK_SECONDS = 0.02
_BEGUN_SECONDS = 0.5
"""After which a killer's stream has begun."""


@dataclass
class Killers:
    """Sends such requests, and sees what becomes of them.

    An engine's log names a request when it comes. Of three killers the first kills each decode
    engine at once, the second after half a second, when its stream has begun, and the third at once
    and prefill engines, too. Streams and whole answers take turns.

    Args:
        logs: of the engines, by name, those of prefill engines first.
        decodes: names of the decode engines.
        kill: kills an engine, and begins to start it again.
        is_dead: whether an engine is being killed or started again.
    """

    url: str
    model: str
    session: aiohttp.ClientSession
    ledger: Ledger
    logs: Mapping[str, Path]
    decodes: frozenset[str]
    kill: Callable[[str], Awaitable[None]]
    is_dead: Callable[[str], bool]
    _lost: int = 0

    async def send(self) -> None:
        """Send one, and kill its engines, three at most."""
        counts = self.ledger.counts
        number = counts["killers_sent"]
        counts["killers_sent"] += 1
        name = f"killer-{number:04}"
        tails = [
            _LogTail(engine, log)
            for engine, log in self.logs.items()
            if number % 3 == 2 or engine in self.decodes
        ]
        seconds = _BEGUN_SECONDS if number % 3 == 1 else 0.0
        killing = asyncio.create_task(self._kill_where_it_runs(name, tails, seconds))
        try:
            answer = await self._ask(name, stream=number % 2 == 1)
        finally:
            killing.cancel()
            await asyncio.gather(killing, return_exceptions=True)
        lost = self._lost
        counts["engines_lost_to_killers"] += lost
        counts["killers_beyond_two"] += lost > MOST_ENGINES
        if answer == REFUSED and 0 < lost <= MOST_ENGINES:
            counts["killers_refused_after_two"] += 1
        else:
            self.ledger.notes.append(f"{name} took {lost} engines and ended with {answer}")

    async def _ask(self, name: str, stream: bool) -> int | str:
        """Return the status or the code with which a killer ended, or else how it ended."""
        body: dict[str, Any] = {"model": self.model, "prompt": f"{name} kills", "stream": stream}
        body |= {"max_tokens": _TOKENS, "ignore_eos": True, "vllm_xargs": {LENGTH: _TOKENS}}
        url, timeout = f"{self.url}/v1/completions", aiohttp.ClientTimeout(total=_SECONDS)
        headers = {"X-Request-Id": name}
        try:
            async with self.session.post(
                url, json=body, headers=headers, timeout=timeout
            ) as response:
                if response.status != 200:
                    return _code(response.status, await response.json(content_type=None))
                if not stream:
                    await response.read()
                    return "an answer"
                async for event in read_events(response.content):
                    if "error" in event:
                        return _code(0, event)
                return "an answer"
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            return f"{type(error).__name__}: {error}"

    async def _kill_where_it_runs(self, name: str, tails: "list[_LogTail]", seconds: float) -> None:
        self._lost = 0
        while self._lost < _SPARED:
            for tail in tails:
                if tail.has_come(name) and not self.is_dead(tail.engine):
                    await asyncio.sleep(seconds)
                    self._lost += 1
                    await self.kill(tail.engine)
            await asyncio.sleep(_LOOK_SECONDS)


class _LogTail:
    """What an engine logs from now on."""

    def __init__(self, engine: str, path: Path) -> None:
        self.engine = engine
        self._path = path
        self._offset = path.stat().st_size
        self._part = b""

    def has_come(self, request: str) -> bool:
        """Return whether a request has come since the last look."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        *lines, self._part = (self._part + data).split(b"\n")
        return any(b"Received request" in line and request.encode() in line for line in lines)


def _code(status: int, answer: Any) -> int | str:
    """Return an error's code if it is one of a request that no engine survives, else its words."""
    error = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(error, dict):
        code = error.get("code", status)
        if code == REFUSED and error.get("type") == "UnprocessableEntityError":
            return REFUSED
    return f"HTTP {status}: {json.dumps(answer)[:200]}"
