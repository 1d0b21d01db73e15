"""Chaos with requests that kill, before a server that plays a proxy."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.chaos.harm import Killers
from benchmarks.chaos.ledger import Ledger

NAMES = ("killers_refused_after_two", "killers_beyond_two", "engines_lost_to_killers")
ENGINES = ("prefill-0", "decode-0", "decode-1", "decode-2")
REFUSAL = {"error": {"message": "no", "type": "UnprocessableEntityError", "code": 422}}
OTHER = {"error": {"message": "no", "type": "ServerError", "code": 502}}


class PlayedProxy:
    """Has each killer on one engine after the other, until so many have died, then answers."""

    def __init__(self, logs: Path, engines: list[str], ends: dict[str, Any], status: int) -> None:
        self.logs = {name: logs / f"{name}.log" for name in ENGINES}
        self._engines = iter(engines)
        self._ends = ends
        self._status = status
        self._left = len(engines)
        self._killed = asyncio.Event()
        self._name = ""
        self.dead: list[str] = []
        for log in self.logs.values():
            log.write_text("Received request cmpl-killer-0000 of an earlier time\n")

    async def kill(self, name: str) -> None:
        self.dead.append(name)
        if len(self.dead) == self._left:
            self._killed.set()
        else:
            self._run()

    def _run(self) -> None:
        """Have the killer come to its next engine, and an innocent to all of them."""
        engine = next(self._engines)
        for name, log in self.logs.items():
            with log.open("a") as file:
                file.write("Received request cmpl-innocent-0-1: params: killed by a killer\n")
                if name == engine:
                    file.write(f"Received request cmpl-{self._name}-0-1: params: none\n")

    async def completions(self, http: web.Request) -> web.StreamResponse:
        self._name = http.headers["X-Request-Id"]
        self._run()
        if not (await http.json())["stream"]:
            await self._killed.wait()
            return web.json_response(self._ends, status=self._status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        await response.write(b'data: {"choices": []}\n\n')
        await self._killed.wait()
        await response.write(b"data: " + msgspec.json.encode(self._ends) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


@asynccontextmanager
async def killers(proxy: PlayedProxy, ledger: Ledger) -> AsyncIterator[Killers]:
    app = web.Application()
    app.router.add_post("/v1/completions", proxy.completions)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        url = str(server.make_url("")).rstrip("/")
        decodes = frozenset(ENGINES[1:])
        is_dead = proxy.dead.__contains__
        yield Killers(url, "m", session, ledger, proxy.logs, decodes, proxy.kill, is_dead)


@pytest.mark.parametrize("already_sent", [0, 1], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("engines", "ends", "status", "counts"),
    [
        (1, REFUSAL, 422, (1, 0, 1)),
        (2, REFUSAL, 422, (1, 0, 2)),
        (2, OTHER, 502, (0, 0, 2)),
        (3, REFUSAL, 422, (0, 1, 3)),
        (3, {"choices": []}, 200, (0, 1, 3)),
    ],
)
async def test_only_a_refusal_after_two_engines_counts_as_one(
    engines: int,
    ends: dict[str, Any],
    status: int,
    counts: tuple[int, ...],
    already_sent: int,
    tmp_path: Path,
) -> None:
    dead = list(ENGINES[1 : 1 + engines])
    ledger, proxy = Ledger(), PlayedProxy(tmp_path, dead, ends, status)
    ledger.counts["killers_sent"] = already_sent
    async with asyncio.timeout(60), killers(proxy, ledger) as sender:
        await sender.send()
    assert tuple(ledger.counts[name] for name in NAMES) == counts
    assert proxy.dead == dead


async def test_every_third_kills_prefill_engines_too(tmp_path: Path) -> None:
    dead = ["prefill-0", "decode-1"]
    ledger, proxy = Ledger(), PlayedProxy(tmp_path, dead, REFUSAL, 422)
    ledger.counts["killers_sent"] = 2
    async with asyncio.timeout(60), killers(proxy, ledger) as sender:
        await sender.send()
    assert ledger.counts["killers_refused_after_two"] == 1
    assert proxy.dead == dead
