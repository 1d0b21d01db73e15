"""What happens to engines and to the proxy: killed, stopped, slowed, filled, drained, restarted.

Requests that kill are among it: the engine of each dies as soon as the request runs there.
"""

import asyncio
import json
import os
import random
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import zmq

from benchmarks.chaos.ledger import SCRAPE_SECONDS, Ledger, Lives, prompt_tokens
from predictor.live.zmq_sockets import Side, apply_curve
from rescheduler.emulation.scripted_answers import LENGTH
from rescheduler.engines.deployment import Deployment, Instance
from rescheduler.engines.launch_engines import Launched
from rescheduler.engines.launch_process import ServerProcess
from rescheduler.openai.openai_stream import read_events
from rescheduler.transfer.control_messages import TOPIC

_GARBAGE_SECONDS = 4.0
_LONG_PROMPT = "and then " * 180  # about 360 tokens
_BLOCKS_OF_FILLER = 22
_FILLERS = 5
_OVERLOAD = 1.3
_MOVES = ("moves", "moves_rolled_back", "moves_not_copied", "moves_not_frozen", "moves_no_answer")
_STOPS = 3
"""Of which the last may be one of a prefill instance."""


LOGS_REQUESTS = "--enable-log-requests"
"""vLLM's flag with which an engine's log names each request as it comes."""
REFUSED = 422
MOST_ENGINES = 2
"""That a request may take, until it is refused."""
_SPARED = MOST_ENGINES + 1
"""Engines after which the harness spares the others."""
_KILLER_SECONDS = 240.0
_KILLER_TOKENS = 400
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
        tails = {
            engine: _LogTail(log)
            for engine, log in self.logs.items()
            if number % 3 == 2 or engine in self.decodes
        }
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
        body: dict[str, Any] = {"model": self.model, "prompt": f"{name} kills"}
        body |= {"stream": stream, "ignore_eos": True}
        body |= {"max_tokens": _KILLER_TOKENS, "vllm_xargs": {LENGTH: _KILLER_TOKENS}}
        url, timeout = f"{self.url}/v1/completions", aiohttp.ClientTimeout(total=_KILLER_SECONDS)
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

    async def _kill_where_it_runs(
        self, name: str, tails: Mapping[str, "_LogTail"], seconds: float
    ) -> None:
        self._lost = 0
        while self._lost < _SPARED:
            for engine, tail in tails.items():
                came = [line for line in tail.new_lines() if b"Received request" in line]
                if any(name.encode() in line for line in came) and not self.is_dead(engine):
                    await asyncio.sleep(seconds)
                    self._lost += 1
                    await self.kill(engine)
            await asyncio.sleep(_LOOK_SECONDS)


class _LogTail:
    """What an engine logs from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size
        self._part = b""

    def new_lines(self) -> list[bytes]:
        """Return the whole lines since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        *lines, self._part = (self._part + data).split(b"\n")
        return lines


def _code(status: int, answer: Any) -> int | str:
    """Return an error's code if it is one of a request that no engine survives, else its words."""
    error = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(error, dict):
        code = error.get("code", status)
        if code == REFUSED and error.get("type") == "UnprocessableEntityError":
            return REFUSED
    return f"HTTP {status}: {json.dumps(answer)[:200]}"


TIMES = 10
"""As long slow steps take."""
_RUN_SECONDS = 0.01
_CORE = b"VLLM::EngineCore"
_COLUMNS = 7


def engine_core(server: ServerProcess) -> int | None:
    """Return the process id of an engine's core, which takes its steps; None: there is none."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                pid = int(folder.name)
                if os.getpgid(pid) == server.pid and _CORE in (folder / "cmdline").read_bytes():
                    return pid
    return None


@dataclass
class StepLog:
    """The steps that an emulated engine logs, from now on.

    Attributes:
        asked: seconds that the steps read so far should have taken.
        taken: seconds that they took.
    """

    path: Path
    asked: float = 0.0
    taken: float = 0.0

    def __post_init__(self) -> None:
        self._tail = _LogTail(self.path)

    def read(self) -> float:
        """Return the seconds that the steps should have taken which ended since the last call."""
        before = self.asked
        for line in self._tail.new_lines():
            values = line.split(b",")
            if len(values) == _COLUMNS and not line.startswith(b"end"):
                self.taken += float(values[4])
                self.asked += float(values[5])
        return self.asked - before


def slow_steps(core: int, log: StepLog | None, seconds: float, ended: threading.Event) -> None:
    """Have an engine's steps take ten times as long for a while, or until an event is set.

    Its core runs for a hundredth of a second at a time. Then it is stopped until the steps that it
    took meanwhile have had ten times their time: an emulated engine catches up with steps that are
    late, and takes several at once. One that logs no steps computes all the time, and is stopped
    for nine hundredths.
    """
    end = due = time.monotonic() + seconds
    due -= seconds
    try:
        while (began := time.monotonic()) < end and not ended.is_set():
            os.kill(core, signal.SIGCONT)
            ended.wait(_RUN_SECONDS)
            os.kill(core, signal.SIGSTOP)
            asked = _RUN_SECONDS if log is None else log.read()
            due = max(due, began) + TIMES * asked
            ended.wait(max(0.0, min(due, end) - time.monotonic()))
    except ProcessLookupError:
        pass  # it has ended, which others notice
    finally:
        with suppress(ProcessLookupError):
            os.kill(core, signal.SIGCONT)


class Setting(NamedTuple):
    """For how long things last, in seconds; of two numbers, the least and the most.

    Attributes:
        pause: between two kinds of harm.
        drained: each decode instance in its turn.
        stopped: by SIGSTOP.
        slowed: one instance, whose steps take ten times as long.
        overloaded: all decode instances, while their steps do; leases of prefills are shorter.
        first_token: that the proxy waits for a first token.
        token: that it waits for any other.
        silent_streams: that are under way at a time.
        silent_tokens: of the answer of each.
        silent: for which the client of such a stream waits for its end.
    """

    pause: tuple[float, float] = (5.0, 20.0)
    drained: tuple[float, float] = (3.0, 6.0)
    stopped: tuple[float, float] = (5.0, 40.0)
    slowed: tuple[float, float] = (20.0, 60.0)
    overloaded: tuple[float, float] = (40.0, 60.0)
    first_token: float = 120.0
    token: float = 20.0
    silent_streams: int = 0
    silent_tokens: int = 0
    silent: float = 400.0


SETTING = Setting()


@dataclass
class Harm:
    """Does to a deployment what may happen to one.

    Only a request that kills, and an overload, harm all decode instances at a time.
    """

    engines: Launched
    proxy: ServerProcess
    deployment: Deployment
    ledger: Ledger
    random: random.Random
    session: aiohttp.ClientSession
    token: str
    setting: Setting = SETTING

    def __post_init__(self) -> None:
        self.lives = Lives(lambda name: self.engines.servers[name].is_running)
        self._drains = asyncio.Lock()
        self._restarts: list[asyncio.Task[None]] = []
        self.step_logs: list[StepLog] = []
        self._killers = Killers(
            self.deployment.proxy_url,
            self.deployment.served_name,
            self.session,
            self.ledger,
            {one.name: self.engines.servers[one.name].log for one in self.deployment.instances},
            frozenset(instance.name for instance in self.deployment.decode),
            lambda name: asyncio.shield(self._kill_and_restart(name)),
            self.lives.is_dead,
        )

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}

    async def run(
        self, kinds: tuple[str, ...], until: asyncio.Event, burst: Callable[[int], Awaitable[None]]
    ) -> None:
        """Do one thing after the other until an event is set; then all is in service again.

        In the given order at first, then at random, each once before any is done again. ``burst``
        asks so many honest requests at once, and waits for their ends.
        """
        actions: dict[str, Callable[[], Awaitable[None]]] = {
            "kill_decode": lambda: self._kill("decode"),
            "kill_prefill": lambda: self._kill("prefill"),
            "stop": self._stop,
            "fill": self._fill,
            "garbage": self._garbage,
            "restart": self._restart_proxy,
            "slow": self._slow,
            "overload": lambda: self._overload(burst),
            "killer": self._killer,
        }
        waiting = [*reversed(kinds)]
        while not until.is_set():
            if not waiting:
                waiting = self.random.sample(kinds, len(kinds))
            await self.all_in_service()
            await actions[waiting.pop()]()
            with suppress(TimeoutError):
                await asyncio.wait_for(until.wait(), self.random.uniform(*self.setting.pause))
        await self.all_in_service()

    async def drain_in_turns(self) -> None:
        """Drain one decode instance after the other, as an update of all engines would, forever."""
        while True:
            for instance in self.deployment.decode:
                if await self._is_up(instance) != {True}:
                    await asyncio.sleep(1)
                    continue
                async with self._drains:
                    try:
                        await self._admin("drain", instance)
                        await asyncio.sleep(self.random.uniform(*self.setting.drained))
                    finally:
                        await asyncio.shield(self._admin("undrain", instance))

    async def all_in_service(self) -> None:
        while await self._is_up() != {True}:
            await asyncio.sleep(0.5)

    async def breakers(self) -> dict[str, str] | None:
        """Return the state of each instance's breaker; None if the proxy does not say."""
        with suppress(aiohttp.ClientError, OSError, TimeoutError):
            url = f"{self.deployment.admin_url}/admin/instances"
            async with self.session.get(url, headers=self._headers) as response:
                listed = (await response.json())["instances"]
            return {one["name"]: one["state"] for one in listed}
        return None

    async def _is_up(self, instance: Instance | None = None) -> set[bool]:
        """Return whether the proxy uses an instance, or all: one value for each answer."""
        states = await self.breakers()
        if states is None:
            return {False}
        return {
            state == "closed"
            for name, state in states.items()
            if instance is None or name == instance.name
        }

    async def _admin(self, verb: str, instance: Instance) -> None:
        with suppress(aiohttp.ClientError, OSError, TimeoutError):  # the proxy restarts
            url = f"{self.deployment.admin_url}/admin/{verb}/{instance.name}"
            async with self.session.post(url, headers=self._headers):
                pass

    def _chosen(self, role: str) -> Instance:
        return self.random.choice([one for one in self.deployment.instances if one.role == role])

    async def _kill(self, role: str) -> None:
        """Kill an engine, have somebody else answer in its place for a while, start it again."""
        if not any(one.role == role for one in self.deployment.instances):
            return
        instance = self._chosen(role)
        self.ledger.counts["kills"] += 1
        with self.ledger.outage("engine"):
            with self.lives.dead(instance.name):
                await asyncio.to_thread(self.engines.kill, instance.name)
                await asyncio.to_thread(self._impersonate, instance)
                await asyncio.to_thread(self.engines.restart, instance.name)
            await self.all_in_service()

    async def _killer(self) -> None:
        """Send a request whose engines die.

        Nothing is drained meanwhile: the request could move before the harness kills its engine.
        """
        async with self._drains:
            with self.ledger.outage("killer"):
                try:
                    await self._killers.send()
                finally:
                    restarts, self._restarts = self._restarts, []
                    await asyncio.gather(*restarts)
                await self.all_in_service()

    async def _kill_and_restart(self, name: str) -> None:
        """Kill an engine, and begin to start it again."""
        killed = asyncio.Event()

        async def replaced() -> None:
            with self.lives.dead(name):
                try:
                    await asyncio.to_thread(self.engines.kill, name)
                finally:
                    killed.set()
                await asyncio.to_thread(self.engines.restart, name)

        self._restarts.append(asyncio.create_task(replaced()))
        await killed.wait()

    async def _stop(self) -> None:
        """Suspend an engine, all of its processes: its connections stay, and nothing comes."""
        turn = self.ledger.counts["stops"] % _STOPS
        instance = self._chosen("decode")
        if turn == _STOPS - 1:
            instance = self.random.choice(self.deployment.instances)
        self.ledger.counts["stops"] += 1
        with self.lives.stopped(instance.name):
            self.engines.signal(instance.name, signal.SIGSTOP)
            try:
                await asyncio.sleep(self.random.uniform(*self.setting.stopped))
            finally:
                self.engines.signal(instance.name, signal.SIGCONT)

    async def _slow(self) -> None:
        """Have a decode instance's steps take ten times as long."""
        self.ledger.counts["slowed"] += 1
        await self._slowed([self._chosen("decode")], self.setting.slowed)

    async def _overload(self, burst: Callable[[int], Awaitable[None]]) -> None:
        """Ask more than all decode instances have places for, while their steps are slow.

        Who moves meanwhile leaves what is in a block that is not full to be computed: at the
        target, and once more at the source if the move is rolled back.
        """
        self.ledger.counts["overloads"] += 1
        places = len(self.deployment.decode) * self.deployment.engine.max_num_seqs
        urls = [instance.url for instance in self.deployment.decode]
        async with self._drains:
            before = await prompt_tokens(urls, self.session)
            moves = self._moves()
            asked = asyncio.ensure_future(burst(round(_OVERLOAD * places)))
            try:
                await self._slowed(self.deployment.decode, self.setting.overloaded)
                await asked
            finally:
                asked.cancel()
            after = await prompt_tokens(urls, self.session)
            await asyncio.sleep(2 * SCRAPE_SECONDS)  # until the proxy's counters are read
        of_moves = 2 * self.deployment.engine.block_size * (self._moves() - moves)
        more = after.prompts_since(before, of_moves)
        self.ledger.counts["prompts_computed_twice_in_overloads"] += more

    def _moves(self) -> int:
        """Return how many moves have reached an engine, however they ended."""
        return sum(self.ledger.counts[name] for name in _MOVES)

    async def _slowed(self, instances: Sequence[Instance], spell: tuple[float, float]) -> None:
        """Slow engines down for a while, each from a thread of its own."""
        seconds, ended = self.random.uniform(*spell), threading.Event()
        with ExitStack() as stack:
            stack.callback(ended.set)
            slowing = []
            for instance in instances:
                core = engine_core(self.engines.servers[instance.name])
                assert core is not None, f"{instance.name}: its core is not known by its name"
                log = self._step_log(instance)
                slowing.append(asyncio.to_thread(slow_steps, core, log, seconds, ended))
                if log is not None:
                    self.step_logs.append(log)
            await asyncio.gather(*slowing)

    def _step_log(self, instance: Instance) -> StepLog | None:
        emulate = self.deployment.engine.emulate
        if emulate is None or emulate.logs is None:
            return None
        return StepLog(Path(emulate.logs) / f"{instance.name}.csv")

    async def _fill(self) -> None:
        """Fill a decode instance's KV cache past the proxy."""
        instance = self._chosen("decode")
        self.ledger.counts["fills"] += 1

        async def long(number: int) -> None:
            body = {
                "model": self.deployment.served_name,
                "prompt": f"{number} {_LONG_PROMPT}",
                "max_tokens": 60,
            }
            with suppress(aiohttp.ClientError, OSError):
                url = f"{instance.url}/v1/completions"
                async with self.session.post(url, json=body) as response:
                    await response.read()

        blocks = self.deployment.engine.kv_blocks or 0
        await asyncio.gather(*map(long, range(max(_FILLERS, blocks // _BLOCKS_OF_FILLER))))

    async def _garbage(self) -> None:
        """Send an engine commands that are none; with keys, as one who has the proxy's."""
        instance = self._chosen("decode")
        self.ledger.counts["garbage"] += 1
        await asyncio.to_thread(self._send_garbage, instance)

    async def _restart_proxy(self) -> None:
        self.ledger.counts["proxy_restarts"] += 1
        with self.ledger.outage("proxy"):
            self.proxy.signal(signal.SIGTERM)
            await asyncio.to_thread(self.proxy.end_by, float("inf"))
            await asyncio.to_thread(self.proxy.start)
            while not await asyncio.to_thread(self.proxy.is_healthy):
                await asyncio.sleep(0.1)
            await self.all_in_service()

    def _impersonate(self, instance: Instance) -> None:
        """Publish nonsense, and answer commands with it, where a killed engine did."""
        self.ledger.counts["garbage"] += 1
        end = time.monotonic() + _GARBAGE_SECONDS
        with (
            self._socket(zmq.PUB, "engine", instance.telemetry, binds=True) as publisher,
            self._socket(zmq.ROUTER, "engine", instance.control, binds=True) as router,
        ):
            while time.monotonic() < end:
                time.sleep(0.02)
                if publisher is not None:
                    publisher.send_multipart(self._nonsense(b"headway/1"))
                if router is not None and router.poll(0):
                    peer = router.recv_multipart()[0]
                    router.send_multipart([peer, *self._nonsense(TOPIC)])

    def _send_garbage(self, instance: Instance) -> None:
        with self._socket(zmq.DEALER, "watcher", instance.control, binds=False) as dealer:
            for _ in range(200):
                if dealer is not None and dealer.poll(10, zmq.POLLOUT):
                    dealer.send_multipart(self._nonsense(TOPIC))

    def _nonsense(self, topic: bytes) -> list[bytes]:
        r = self.random
        return r.choice(
            (
                [r.randbytes(r.randrange(1, 64)) for _ in range(r.randrange(1, 4))],
                [topic, r.randbytes(r.randrange(2_000))],
                [topic, b"\x82\xa4type\xa6freeze\xa6number\xcf" + r.randbytes(8)],
                [topic, json.dumps({"number": 1}).encode(), b""],
            )
        )

    @contextmanager
    def _socket(
        self, kind: int, side: Side, endpoint: str | None, binds: bool
    ) -> Iterator["zmq.Socket[bytes] | None"]:
        """Open a socket in a context of its own, with keys where there are some."""
        if endpoint is None:
            yield None
            return
        keys = self.deployment.keys_folder
        with zmq.Context() as context, context.socket(kind) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            handler = None if keys is None else apply_curve(socket, keys, side, binds)
            try:
                (socket.bind if binds else socket.connect)(endpoint)
                yield socket
            finally:
                socket.close()
                if handler is not None:
                    handler.stop()
