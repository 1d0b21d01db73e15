"""Chaos: whom it blames, which engines it takes to have lived, killers, and slowed engines."""

import asyncio
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.chaos.clients import HonestClients
from benchmarks.chaos.harm import Killers, StepLog, slow_steps
from benchmarks.chaos.ledger import (
    Ledger,
    Lives,
    Outage,
    PromptTokens,
    ProxyCounters,
    ServiceWatch,
    read_prompt_tokens,
)

EXPECTED = [1, 2, 3]


@pytest.mark.parametrize(
    ("tokens", "how", "counted", "requests"),
    [
        ([], "refused", "refused_at_proxy_restart", 0),
        ([], "503", "refused_at_proxy_restart", 0),  # by a proxy that is about to end
        ([], "5xx", "cut_by_proxy_restart", 1),
        ([1, 2], "5xx", "cut_by_proxy_restart", 1),
        ([1], "broken", "cut_by_proxy_restart", 1),
        ([1], "silent", "lost", 1),
    ],
)
def test_only_a_request_that_had_begun_is_cut_by_a_restart(
    tokens: list[int], how: str, counted: str, requests: int
) -> None:
    ledger = Ledger()
    with ledger.outage("proxy"):
        ledger.failed(0, tokens, EXPECTED, time.monotonic(), "why", how)
    assert ledger.counts[counted] == 1
    assert ledger.counts["requests"] == requests
    assert ledger.counts["tokens_changed"] == 0


@pytest.mark.parametrize(
    ("how", "counted"),
    [("5xx", "honest_5xx"), ("503", "honest_5xx"), ("refused", "lost"), ("429", "honest_429")],
)
def test_in_peace_every_failure_is_somebody_s_fault(how: str, counted: str) -> None:
    ledger = Ledger()
    ledger.failed(0, [], EXPECTED, time.monotonic(), "why", how)
    assert ledger.counts[counted] == ledger.counts["requests"] == 1


def test_who_fails_while_a_killer_is_about_is_an_innocent_that_was_lost() -> None:
    ledger = Ledger()
    with ledger.outage("killer"):
        ledger.failed(0, [], EXPECTED, time.monotonic(), "why", "5xx")
        ledger.failed(0, [1], EXPECTED, time.monotonic(), "why", "4xx")
        ledger.failed(0, [], EXPECTED, time.monotonic(), "why", "503")  # no engine is left
    names = ("innocents_lost", "honest_5xx_at_a_kill", "honest_4xx", "honest_5xx")
    assert [ledger.counts[name] for name in names] == [2, 1, 1, 0]
    assert ledger.counts["refused_without_engines"] == 1


@pytest.mark.parametrize(
    ("tokens", "how", "outage", "counted", "changed"),
    [
        (EXPECTED, "ended", "engine", "silent_ended", 0),
        ([1, 2], "ended", None, "silent_failed", 1),
        ([1, 2], "without_end", "engine", "silent_without_end", 0),
        ([2], "without_end", None, "silent_failed", 1),
        ([1], "APIError: no token in time", None, "silent_failed", 0),
        ([1], "APIError: its stream broke", "killer", "silent_failed_at_a_kill", 0),
        ([1], "APIError: the proxy stops", "proxy", "silent_cut_by_proxy_restart", 0),
    ],
)
def test_a_silent_stream_ends_rightly_with_all_of_its_tokens(
    tokens: list[int], how: str, outage: Outage | None, counted: str, changed: int
) -> None:
    ledger = Ledger()
    with nullcontext() if outage is None else ledger.outage(outage):
        ledger.silent(0, tokens, EXPECTED, how)
    assert ledger.counts[counted] == 1
    assert ledger.counts["tokens_changed"] == changed


async def test_no_proxy_is_a_refused_connection_and_not_a_cut_request() -> None:
    ledger, ending = Ledger(), asyncio.Event()
    with socket.socket() as silent, ledger.outage("proxy"):
        silent.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        clients = HonestClients(url, "m", 1, ledger)
        clients._expected = [[1]]
        asking = asyncio.create_task(clients.run(1, ending, random.Random(0)))
        async with asyncio.timeout(60):
            while not ledger.counts["refused_at_proxy_restart"] and not asking.done():
                await asyncio.sleep(0.01)
            ending.set()
            await asking
    await clients.close()
    assert ledger.counts["refused_at_proxy_restart"] == 1
    assert ledger.counts["requests"] == ledger.counts["cut_by_proxy_restart"] == 0


OUT = ("living_out_of_service", "stopped_out_of_service", "dead_out_of_service")
UP = {"decode-0": "closed", "decode-1": "closed"}
DOWN = {"decode-0": "open", "decode-1": "closed"}


def lives(*ended: str) -> Lives:
    return Lives(lambda name: name not in ended)


def counted(ledger: Ledger, *names: str) -> tuple[int, ...]:
    return tuple(ledger.counts[name] for name in names)


def test_an_engine_that_lives_and_is_taken_out_is_counted_once_until_it_is_back() -> None:
    ledger = Ledger()
    watch = ServiceWatch(lives(), ledger)
    for states in (UP, DOWN, DOWN, {**DOWN, "decode-0": "half_open"}, UP, DOWN):
        watch.see(states, 1, time.monotonic())
    assert counted(ledger, *OUT) == (2, 0, 0)
    assert "decode-0 is taken out of service, and lives (running)" in ledger.notes[0]


def test_an_engine_that_is_stopped_lives() -> None:
    ledger, alive = Ledger(), lives()
    watch = ServiceWatch(alive, ledger)
    watch.see(UP, 1, time.monotonic())
    with alive.stopped("decode-0"):
        watch.see(DOWN, 1, time.monotonic())
    assert counted(ledger, *OUT) == (1, 1, 0)


@pytest.mark.parametrize("started", [True, False])
def test_a_killed_engine_is_dead_until_its_successor_has_started(started: bool) -> None:
    ledger, alive = Ledger(), lives()
    watch = ServiceWatch(alive, ledger)
    with alive.dead("decode-0"):
        watch.see(UP, 1, time.monotonic())
        if not started:
            watch.see(DOWN, 1, time.monotonic())
    watch.see(DOWN, 1, time.monotonic() + 1)  # it is noticed late
    assert counted(ledger, *OUT) == (0, 0, 1)
    watch.see(UP, 1, time.monotonic() + 60)
    watch.see(DOWN, 1, time.monotonic() + 61)
    assert counted(ledger, *OUT) == (1, 0, 1)


def test_an_engine_that_has_ended_on_its_own_is_dead() -> None:
    ledger = Ledger()
    watch = ServiceWatch(lives("decode-0"), ledger)
    watch.see(DOWN, 1, time.monotonic())
    assert counted(ledger, *OUT) == (0, 0, 1)


def test_a_new_proxy_takes_an_engine_out_anew() -> None:
    ledger = Ledger()
    watch = ServiceWatch(lives(), ledger)
    for proxy in (1, 1, 2):
        watch.see(DOWN, proxy, time.monotonic())
    assert counted(ledger, *OUT) == (2, 0, 0)


def metrics(recomputed: int, twice: int) -> str:
    return (
        f'headway_proxy_recomputed_requests_total{{instance_name="decode-0"}} {recomputed}\n'
        "# TYPE headway_proxy_prompts_computed_twice_total counter\n"
        f'headway_proxy_prompts_computed_twice_total{{why="lease"}} {twice}\n'
        f'headway_proxy_migrations_total{{source="a",target="b",outcome="moved"}} {twice}\n'
    )


def test_recomputed_requests_are_divided_by_whether_their_engine_lived() -> None:
    ledger, alive = Ledger(), lives()
    counters = ProxyCounters(alive, ledger)
    counters.add(metrics(2, 1), time.monotonic())
    with alive.dead("decode-0"):
        counters.add(metrics(5, 1), time.monotonic())
    counters.add(metrics(4, 3), time.monotonic() + 60)  # of a new proxy
    counters.add(metrics(6, 3), time.monotonic() + 61)
    names = ("recomputed_of_living", "recomputed_after_deaths", "resumed_elsewhere")
    assert counted(ledger, *names) == (4, 7, 11)
    assert counted(ledger, "prompts_computed_twice", "moves") == (3, 3)
    assert counters.tells_of_prompts


def test_a_proxy_without_the_counter_does_not_tell_of_prompts() -> None:
    counters = ProxyCounters(lives(), Ledger())
    counters.add("headway_proxy_event_loop_max_stall_seconds 0.02\n", time.monotonic())
    assert not counters.tells_of_prompts


def engine_metrics(computed: int, requests: int) -> str:
    return (
        f'vllm:prompt_tokens_by_source_total{{source="local_compute"}} {computed}\n'
        'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"} 9000\n'
        f"vllm:request_prompt_tokens_sum {20 * requests}\n"
        f"vllm:request_prompt_tokens_count {requests}\n"
    )


def test_prompts_that_decode_engines_compute_are_counted_by_their_tokens() -> None:
    before = read_prompt_tokens(engine_metrics(30, 10))
    after = read_prompt_tokens(engine_metrics(160, 70) + engine_metrics(10, 5))
    assert before == PromptTokens(30, 10, 200)
    assert after.prompts_since(before) == 7
    assert after.prompts_since(before, of_moves=64) == 4
    assert after.prompts_since(before, of_moves=640) == 0
    assert after.prompts_since(after) == 0


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


HEADER = "end,requests,new_tokens,context_tokens,seconds,asked_seconds,cpu\n"
STEPS = f"""
import sys, time
with open(sys.argv[1], "a", buffering=1) as log:
    log.write({HEADER!r})
    print("ready", flush=True)
    while True:
        time.sleep(0.002)
        log.write("1,1,1,1,0.002,0.002,0\\n")
"""


@pytest.fixture
def stepping(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-c", STEPS, str(tmp_path / "steps.csv")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def state(process: "subprocess.Popen[bytes]") -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("logs", [True, False])
def test_a_slowed_engine_steps_and_goes_on_afterwards(
    stepping: "subprocess.Popen[bytes]", tmp_path: Path, logs: bool
) -> None:
    log = StepLog(tmp_path / "steps.csv")
    slow_steps(stepping.pid, log if logs else None, 0.5, threading.Event())
    assert state(stepping) != "T"
    log.read()
    assert log.asked > 0


def test_an_engine_that_is_to_be_slow_no_longer_goes_on_at_once(
    stepping: "subprocess.Popen[bytes]",
) -> None:
    ended = threading.Event()
    slowing = threading.Thread(target=slow_steps, args=(stepping.pid, None, 600.0, ended))
    slowing.start()
    ended.set()
    slowing.join(60)
    assert not slowing.is_alive()
    assert state(stepping) != "T"


def test_an_engine_that_dies_meanwhile_is_slow_no_longer(
    stepping: "subprocess.Popen[bytes]",
) -> None:
    stepping.kill()
    stepping.wait()
    slow_steps(stepping.pid, None, 600.0, threading.Event())


def test_steps_are_read_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(HEADER + "1,1,1,1,9,9,0\n")
    log = StepLog(path)
    with path.open("a") as file:
        file.write("2,1,1,1,0.4,0.2,0\n3,1,1,1,0.6")
        file.flush()
        assert log.read() == pytest.approx(0.2)
        file.write(",0.3,0\n" + HEADER)  # of the next engine in its place
        file.flush()
        assert log.read() == pytest.approx(0.3)
        assert log.read() == 0
    assert (log.taken, log.asked) == pytest.approx((1.0, 0.5))
