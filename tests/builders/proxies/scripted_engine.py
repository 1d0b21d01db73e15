"""An engine that speaks vLLM's HTTP and our control socket, and misbehaves on command.

No real engine hangs at a given token, or disagrees about one, when it is asked to: the proxy's
answers to such faults are tested with this, what clients are promised with real engines in
`tests/e2e`.

Each token is a hash of all tokens before it, so that one lost or repeated token changes every
token that follows. Blocks are not simulated, but what is kept for other engines is.
"""

import asyncio
import json
import math
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from aiohttp import web
from chosen_ports import free_port
from msgspec import structs
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from benchmarks.support.engine_states import engine_state
from predictor.live.zmq_sockets import tcp_endpoint
from rescheduler.engines.deployment import Instance
from rescheduler.openai.openai_request import FORWARDED
from rescheduler.serving.connection import url_of
from rescheduler.transfer.control_messages import (
    Find,
    Found,
    Freeze,
    Frozen,
    GetState,
    NotFrozen,
    Release,
    Released,
    Renew,
    Renewed,
    Reply,
    RequestStatus,
    Snapshot,
    TakeSnapshot,
    Unfreeze,
    Unfrozen,
)
from rescheduler.transfer.control_server import Asked, ControlServer

Script = Callable[[web.Request], Awaitable[web.StreamResponse]]
"""Answers a request."""

_BLOCKS = 1000
_BLOCK = 16


def next_token(context: list[int]) -> int:
    """A printable token decided by all before it."""
    return 1000 + zlib.crc32(json.dumps(context).encode()) % 2000


def reference(prompt: list[int], tokens: int) -> list[int]:
    """What any engine generates after a prompt."""
    context = list(prompt)
    for _ in range(tokens):
        context.append(next_token(context))
    return context[len(prompt) :]


@dataclass
class Running:
    """A request on an engine."""

    id: str
    hop: int
    context: list[int]
    prompt_length: int
    freezing: Asked | None = None
    left: int | None = None
    given: int = 0

    @property
    def output(self) -> list[int]:
        return self.context[self.prompt_length :]


@dataclass
class ScriptedEngine:
    """One engine."""

    name: str
    role: str
    tokenizer: Tokenizer
    engines: dict[str, "ScriptedEngine"]
    token_seconds: float = 0.002
    script: Script | None = None  # answers in place of the engine whatever is no prefill
    prefill_script: Script | None = None  # the same for prefills
    asked: int = 0  # how many requests a script has answered
    pulls: bool = True  # what is kept elsewhere for such a request, as one that accepts it does
    hangs: bool = False  # gives no tokens
    deaf: bool = False  # does not answer its control socket
    deaf_to_freezes: bool = False  # answers only what is not about a freeze
    full: bool = False  # has no free blocks, says its state
    fails: int = 0  # HTTP status of every answer; 0: none
    stalls_at: int = 0  # total tokens of a request at which it gives no more
    breaks_at: int = 0  # total tokens of a request at which its connection breaks
    errs_at: int = 0  # total tokens of a request at which an error follows in the same packet
    breaks_after_the_end: bool = False  # its connection breaks right after a request's last token
    never_freezes: bool = False  # says "not frozen"
    says: dict[str, Any] = field(default_factory=dict)  # of its state instead of the truth
    lies: bool = False  # reports a token more than it gave, when it freezes
    answers_late: bool = False  # gives no answer to a prefill that is done
    lease_seconds: float = 1000.0  # for which it keeps a prefill, unless that is renewed
    lapses: dict[str, float] = field(default_factory=dict)
    counts: int | None = None  # what it says that a prefilled prompt has, instead of its tokens
    poisoned: str = ""  # answers 500 to requests whose prompt holds this word; empty: to none
    queue_seconds: float = 0.0  # before a request's first token, while it makes steps for others
    comment_seconds: float = 0.0  # between two comments of a stream meanwhile; 0: it sends none
    holds_from: int = 0  # total tokens of a request from which chunks come at its end only; 0: none
    kills: str = ""  # prompts with this word end it, and it starts again; empty: none does
    kills_at: int = 0  # with which token of such a prompt it ends
    lives: int = 0  # how often it has started
    cuts_the_end: bool = False  # its streams close before their last token's chunk
    metrics: bool = True  # it has ``/metrics``
    metrics_seconds: float = 0.0  # that it takes to answer there
    strangers: int = 0  # requests of other clients that it says it runs
    used: float = 0.0  # share of its KV cache that it says is in use
    page: str = ""  # what ``/metrics`` answers instead; empty: the truth
    models: list[str] = field(default_factory=lambda: ["m"])  # that it lists and serves
    key: str = ""  # API key that requests must have; empty: none
    padding: int = 0  # bytes added to every chunk
    longest: int = 100_000  # tokens of a chat that sets no limit
    over: dict[str, int] = field(default_factory=dict)
    kept: dict[str, list[int]] = field(default_factory=dict)  # tokens kept for other engines, by id
    running: dict[str, Running] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)  # every request body
    headers: list[Mapping[str, str]] = field(default_factory=list)
    pulled: int = 0  # requests whose context came from elsewhere
    copied: list[list[int]] = field(default_factory=list)  # tokens of each copied request
    spares_copies: bool = False  # `hangs` and `fails` are not for copies
    prefix_caching: bool = True  # shares blocks, says its state
    recomputed: int = 0
    port: int = 0
    host: str = "127.0.0.1"
    endpoint: str = ""
    most_running: int = 0
    steps: int = 0
    incarnation: str = ""
    prefilling: set[str] = field(default_factory=set)
    names: dict[str, str] = field(default_factory=dict)

    async def start_http(self) -> None:
        """Answer HTTP."""
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        for path in FORWARDED:
            app.router.add_post(path, self._respond)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        self.port = self.port or free_port()  # it may come back there
        self._site = web.TCPSite(self._runner, self.host, self.port)
        await self._site.start()

    async def stop_listening(self) -> None:
        """Take no connections any more, and close those without a request; streams stay."""
        assert self._site._server is not None and self._runner.server is not None
        self._site._server.close()
        self._runner.server.pre_shutdown()

    async def start(self) -> Instance:
        """Serve; return what a deployment says of it."""
        await self.start_http()
        self.incarnation = uuid4().hex
        self.lives += 1
        self.engines[self.name] = self
        endpoint = self.endpoint or tcp_endpoint(self.host, 0)
        self._control: ControlServer | None = ControlServer(endpoint, None, self._answer)
        self.endpoint = self._control._socket.getsockopt_string(32)  # zmq.LAST_ENDPOINT
        self._commands = asyncio.get_running_loop().create_task(self._obey())
        return Instance(self.name, self.role, url_of(self.host, self.port), self.endpoint)

    async def stop(self) -> None:
        """Vanish, connections and all."""
        if self._control is not None:
            self._commands.cancel()
            self._control.close()
            self._control = None
        await self.stop_http()

    async def stop_http(self) -> None:
        """Vanish from HTTP, connections and all, also those that are just being accepted."""
        assert self._site._server is not None
        self._site._server.close()
        await asyncio.sleep(0.005)
        for server in [self._runner.server]:
            for connection in list(server.connections if server else []):
                if connection.transport is not None:
                    connection.transport.abort()
        await self._runner.cleanup()

    async def _health(self, http: web.Request) -> web.Response:
        if self.hangs:
            await asyncio.sleep(60)
        return web.Response(status=self.fails if self.fails >= 500 else 200)

    async def _metrics(self, http: web.Request) -> web.Response:
        if not self.metrics:
            raise web.HTTPNotFound
        await asyncio.sleep(self.metrics_seconds)
        if self.page:
            return web.Response(text=self.page)
        labels = 'engine="0",model_name="m"'
        cache = f'block_size="{_BLOCK}",engine="0",num_gpu_blocks="{_BLOCKS}"'
        return web.Response(
            text=f"vllm:generation_tokens_total{{{labels}}} {self.steps}.0\n"
            f"vllm:prompt_tokens_total{{{labels}}} 12.0\n"
            f"vllm:num_requests_running{{{labels}}} {len(self.running) + self.strangers}.0\n"
            f"vllm:num_requests_waiting{{{labels}}} 0.0\n"
            f"vllm:kv_cache_usage_perc{{{labels}}} {self.used}\n"
            f"vllm:cache_config_info{{{cache}}} 1.0\n"
        )

    async def _models(self, http: web.Request) -> web.Response:
        if self.key and http.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        listed = [{"id": name, "object": "model"} for name in self.models]
        return web.json_response({"object": "list", "data": listed})

    async def _version(self, http: web.Request) -> web.Response:
        return web.json_response({"version": "scripted"})

    async def _respond(self, http: web.Request) -> web.StreamResponse:
        """Answer what the proxy only forwards."""
        if self.script is not None:
            self.asked += 1
            return await self.script(http)
        body = await http.json()
        self.bodies.append(body)
        if self.fails:
            return web.json_response({"error": {"message": "scripted"}}, status=self.fails)
        if not body.get("stream"):
            return web.json_response({"asked": body, "path": http.path})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        for number in range(3):
            await response.write(f'event: a.delta\ndata: {{"n": {number}}}\n\n'.encode())
            await asyncio.sleep(self.token_seconds)
        await response.write(b'event: end\ndata: {"type": "response.completed"}\n\n')
        return response

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        params = body.get("kv_transfer_params") or {}
        headway = params.get("headway") or {"id": uuid4().hex, "hop": 0}
        copies = headway.get("copies", False)
        script = self.prefill_script if params.get("do_remote_decode") else self.script
        if script is not None and not copies:
            self.asked += 1
            if self.pulls and params.get("do_remote_prefill"):
                del self.engines[params["remote_engine_id"]].kept[params["remote_request_id"]]
            return await script(http)
        self.headers.append(http.headers)
        self.bodies.append(body)
        if self.key and http.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if self.poisoned and self.poisoned in json.dumps(body.get("prompt")):
            return web.json_response({"error": {"message": "scripted"}}, status=500)
        if self.fails and not (copies and self.spares_copies):
            answer = {"error": {"message": "scripted"}}
            return web.json_response(answer, status=self.fails, headers={"Retry-After": "7"})
        if body.get("model") not in self.models:
            error = {"message": f"no model {body.get('model')}", "code": 404, "param": "model"}
            return web.json_response({"error": error}, status=404)
        chat = http.path.endswith("chat/completions")
        context = self._context(body, params, chat)
        if params.get("do_remote_decode"):
            self.prefilling.add(headway["id"])
            try:
                return await self._prefill(context, headway)
            finally:
                self.prefilling.discard(headway["id"])
        if copies:
            return await self._copy(context, params)
        if params.get("do_remote_prefill"):
            source = self.engines.get(params["remote_engine_id"])
            name = params["remote_request_id"]
            found = source.kept.pop(name, None) if source else None
            if source is not None and source.lapses.pop(name, math.inf) < time.monotonic():
                found = None
            self.pulled += found is not None
            self.recomputed += found is None
        generated = headway.get("generated", 0)
        running = Running(headway["id"], headway["hop"], context, len(context) - generated)
        self.running[running.id] = running
        kind = "chatcmpl" if chat else "cmpl"
        self.names[running.id] = f"{kind}-{http.headers.get('X-Request-Id')}"
        self.most_running = max(self.most_running, len(self.running))
        try:
            if not body.get("stream"):
                for _ in range(body.get("max_tokens") or 16):
                    await self._next(running)
                choice = {"index": 0, "text": self.tokenizer.decode(running.output)}
                choices = [choice] * body.get("n", 1)
                return web.json_response({**self._head(http, chat), "choices": choices})
            return await self._stream(running, http, body, chat)
        finally:
            self.names.pop(running.id, None)
            if self.running.get(running.id) is running:
                del self.running[running.id]
            if running.freezing is not None:
                self._reply(running.freezing, NotFrozen(number=0, reason="it has ended"))

    def _context(self, body: dict[str, Any], params: dict[str, Any], chat: bool) -> list[int]:
        if chat:
            if "prompt_token_ids" in params:
                return list(params["prompt_token_ids"])
            return self.tokenizer.encode(json.dumps(body["messages"])).ids
        prompt = body["prompt"]
        return list(prompt) if isinstance(prompt, list) else self.tokenizer.encode(prompt).ids

    async def _prefill(self, context: list[int], headway: dict[str, Any]) -> web.Response:
        while self.hangs:
            await asyncio.sleep(0.01)
        id = headway["id"]
        if self.over.get(id, -1) < headway["hop"]:
            self.kept[id] = context
            self.lapses[id] = time.monotonic() + self.lease_seconds
        while self.answers_late:
            await asyncio.sleep(0.01)
        params = self._kept_as(id)
        params |= {"do_remote_decode": False, "headway_lease_seconds": self.lease_seconds}
        counted = len(context) if self.counts is None else self.counts
        usage = {"prompt_tokens": counted, "completion_tokens": 1}
        return web.json_response({"choices": [], "usage": usage, "kv_transfer_params": params})

    async def _copy(self, context: list[int], params: dict[str, Any]) -> web.Response:
        while self.hangs and not self.spares_copies:
            await asyncio.sleep(0.01)
        source = self.engines[params["remote_engine_id"]]
        assert source.kept.pop(params["remote_request_id"]) == context
        self.copied.append(context)
        return web.json_response({"choices": [], "usage": {"prompt_tokens": len(context)}})

    async def _next(self, running: Running) -> int:
        while self.hangs or (self.stalls_at and len(running.output) >= self.stalls_at):
            await asyncio.sleep(0.01)
        await asyncio.sleep(self.token_seconds)
        token = next_token(running.context)
        running.context.append(token)
        running.given += 1
        self.steps += 1
        return token

    def _head(self, http: web.Request, chat: bool) -> dict[str, Any]:
        kind = "chatcmpl" if chat else "cmpl"
        name = http.headers.get("X-Request-Id")
        return {"id": f"{kind}-{name}", "object": kind, "created": self.port, "model": "m"}

    async def _stream(
        self, running: Running, http: web.Request, body: dict[str, Any], chat: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        head, prompt = self._head(http, chat), list(running.context)
        text = DecodeStream(ids=prompt, skip_special_tokens=True)
        most = body.get("max_completion_tokens") or body.get("max_tokens")
        most = self.longest if most is None and chat else int(most or 16)
        while self.hangs:
            await asyncio.sleep(0.01)
        await self._kill(http, body, 0)
        await response.prepare(http)
        held = bytearray()

        async def write(chunk: dict[str, Any], more: bytes = b"") -> None:
            padding = {"padding": "x" * self.padding} if self.padding else {}
            data = json.dumps({**head, **chunk, **padding}, separators=(",", ":"))
            held.extend(f"data: {data}\n\n".encode() + more)
            finished = any(choice.get("finish_reason") for choice in chunk["choices"])
            if finished or not 0 < self.holds_from <= len(running.output):
                await response.write(bytes(held))
                held.clear()

        await self._queue(response)

        if chat:
            delta = {"role": "assistant", "content": ""}
            role = {"index": 0, "delta": delta, "finish_reason": None}
            await write({"choices": [role], "prompt_token_ids": prompt})
        while True:
            token = await self._next(running)
            await self._kill(http, body, running.given)
            if self.breaks_at and len(running.output) >= self.breaks_at:
                http.transport.abort()  # type: ignore[union-attr]
                return response
            if running.left is not None:
                running.left -= 1
            ended = running.given >= most or running.left == 0
            choice: dict[str, Any] = {"index": 0}
            said = text.step(self.tokenizer, token) or ""
            choice.update({"delta": {"content": said}} if chat else {"text": said})
            choice["finish_reason"] = "length" if ended else None
            choice["token_ids"] = [token]
            if not chat:
                choice["prompt_token_ids"] = prompt if running.given == 1 else None
            if ended:
                self._end(running, frozen=running.given < most)
            if ended and self.cuts_the_end:
                return response
            if self.errs_at and len(running.output) >= self.errs_at:
                error = b'data: {"error": {"message": "scripted", "code": 500}}\n\n'
                await write({"choices": [choice]}, error)
                return response
            await write({"choices": [choice]})
            if ended:
                break
        if self.breaks_after_the_end:
            await asyncio.sleep(0.05)
            http.transport.abort()  # type: ignore[union-attr]
            return response
        if (body.get("stream_options") or {}).get("include_usage"):
            counts = {"prompt_tokens": len(prompt), "completion_tokens": running.given}
            total = len(prompt) + running.given
            await write({"choices": [], "usage": {**counts, "total_tokens": total}})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _queue(self, response: web.StreamResponse) -> None:
        """Wait as a request does whose engine serves others first."""
        loop = asyncio.get_running_loop()
        until = said = loop.time()
        until += self.queue_seconds
        while loop.time() < until:
            await asyncio.sleep(0.01)
            self.steps += 1
            if self.comment_seconds and loop.time() - said >= self.comment_seconds:
                await response.write(b": engine\n\n")
                said = loop.time()

    async def _kill(self, http: web.Request, body: dict[str, Any], given: int) -> None:
        """End, and start again, if a prompt is one that the engine does not survive."""
        if not self.kills or given != self.kills_at:
            return
        prompt = body["prompt"]
        if self.kills in (self.tokenizer.decode(prompt) if isinstance(prompt, list) else prompt):
            asyncio.get_running_loop().create_task(self._restart())
            await asyncio.sleep(60)

    async def _restart(self) -> None:
        await self.stop()
        await asyncio.sleep(0.1)
        await self.start()

    def _end(self, running: Running, frozen: bool) -> None:
        del self.running[running.id]
        asked, running.freezing = running.freezing, None
        if asked is None:
            return
        if not frozen:
            self._reply(asked, NotFrozen(number=0, reason="it has ended"))
            return
        self.kept[running.id] = running.context
        output = running.output + ([7] if self.lies else [])
        params = self._kept_as(running.id)
        self._reply(asked, Frozen(number=0, output_token_ids=output, params=params))

    def _kept_as(self, id: str) -> dict[str, Any]:
        """Return the parameters with which another engine reads what is kept."""
        named = {"remote_engine_id": self.name, "remote_request_id": id}
        return {"do_remote_prefill": True, **named}

    def _answer(self, command: Any) -> Reply | None:
        if self.deaf:
            return None
        if isinstance(command, Find):
            known = {*self.running, *self.prefilling, *self.names.values()}
            statuses = [
                RequestStatus.RUNNING if id in known else RequestStatus.UNKNOWN
                for id in command.ids
            ]
            return Found(number=command.number, statuses=statuses, steps=self.steps)
        if not isinstance(command, GetState):
            return None
        state = engine_state(
            number=command.number,
            version="scripted",
            block_size=_BLOCK,
            max_model_len=100_000,
            prefix_caching=self.prefix_caching,
            num_blocks=_BLOCKS,
            free_blocks=0 if self.full else _BLOCKS - len(self.running),
            running=len(self.running),
            frozen=list(self.kept),
            incarnation=self.incarnation,
            steps=self.steps,
        )
        return structs.replace(state, **self.says)

    async def _obey(self) -> None:
        while True:
            await asyncio.sleep(0.001)
            for asked in self._control.take() if self._control else ():
                about_freezes = isinstance(asked.command, (Freeze, Unfreeze))
                if not self.deaf and not (self.deaf_to_freezes and about_freezes):
                    self._carry_out(asked)

    def _carry_out(self, asked: Asked) -> None:
        command = asked.command
        running = self.running.get(getattr(command, "id", ""))
        if isinstance(command, Freeze):
            if running is None or running.hop != command.hop or self.never_freezes:
                self._reply(asked, NotFrozen(number=0, reason="unknown"))
            else:
                running.freezing, running.left = asked, 2
        elif isinstance(command, TakeSnapshot):
            whole = running.context[: len(running.context) // _BLOCK * _BLOCK] if running else []
            if not whole:
                self._reply(asked, NotFrozen(number=0, reason="it fills no block yet"))
                return
            name = f"{command.id}-snapshot"
            self.kept[name] = whole
            self._reply(asked, Snapshot(number=0, token_ids=whole, params=self._kept_as(name)))
        elif isinstance(command, Unfreeze):
            done = running is not None and running.freezing is not None
            if running is not None:
                running.freezing = running.left = None
            self._reply(asked, Unfrozen(number=0, done=done))
        elif isinstance(command, Renew):
            until = time.monotonic() + self.lease_seconds
            ids = [id for id in command.ids if self.lapses.get(id, 0.0) > time.monotonic()]
            self.lapses.update(dict.fromkeys(ids, until))
            seconds = self.lease_seconds
            self._reply(asked, Renewed(number=0, ids=ids, seconds=seconds, until=until))
        elif isinstance(command, Release):
            self.over[command.id] = command.hop
            done = self.kept.pop(command.id, None) is not None
            self._reply(asked, Released(number=0, done=done))

    def _reply(self, asked: Asked, reply: Reply) -> None:
        if self._control is not None:
            numbered = structs.replace(reply, number=asked.command.number)
            self._control.reply(asked.peer, numbered)


@dataclass
class StockEngine(ScriptedEngine):
    """Has nothing of Headway in it: no control socket."""

    async def start(self) -> Instance:
        return structs.replace(await super().start(), control=None)


@dataclass
class NarrowEngine(ScriptedEngine):
    """Runs one request at a time, so that the others wait."""

    says: dict[str, Any] = field(default_factory=lambda: {"max_num_seqs": 1})
