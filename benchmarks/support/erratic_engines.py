"""Engines, in one process, that move requests, publish forecasts, and fail as a request asks.

Each answers HTTP and a control socket as vLLM with this project's connector does, and computes
nothing. What is to go wrong with a request its field `user` says: one of `FAULTS`. Nothing is kept
of a request once it has ended, so that days of them need no more memory than a minute.
"""

import argparse
import asyncio
import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import numpy as np
import zmq
import zmq.asyncio
from aiohttp import web

import predictor.live.telemetry_messages as telemetry
import rescheduler.transfer.control_messages as control
from benchmarks.support.engine_states import engine_state

MODEL = "smollm2"
FAULTS = ("error 500", "error 429", "error event", "prefill 500", "breaks", "too long")
"""What may go wrong with a request: answered with 500, with 429, with an error as the first event;
its prefill fails; its first stream breaks after two tokens; its prompt is too long."""

_BLOCK, _BLOCKS, _SEQUENCES, _CONTEXT = 16, 10_000, 256, 8192
_KEPT = 256
_LEASE_SECONDS = 30.0
_TELEMETRY_SECONDS = 0.25
_EDGES = [0, 8, 32, 128]
_CURVE = telemetry.encode_survival(np.exp(-np.array(_EDGES) / 16.0)[None])[0]
_LARGEST_BODY = 1 << 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--decodes", type=int, default=2)
    parser.add_argument("--token-seconds", type=float, default=0.02)
    options = parser.parse_args()
    asyncio.run(_serve(options.decodes, options.token_seconds))


async def _serve(decodes: int, token_seconds: float) -> None:
    engines: dict[str, _Engine] = {}
    for name in ("prefill-0", *(f"decode-{i}" for i in range(decodes))):
        engines[name] = _Engine(name, engines, token_seconds)
    instances = [await engine.start() for engine in engines.values()]
    print(json.dumps(instances), flush=True)
    async with asyncio.TaskGroup() as tasks:
        for engine in engines.values():
            tasks.create_task(engine.obey())
            tasks.create_task(engine.publish())


@dataclass(eq=False)
class _Running:
    id: str
    hop: int
    name: str
    prompt: list[int]
    output: list[int]
    most: int
    left: int | None = None
    asked: tuple[bytes, int] | None = None


@dataclass
class _Engine:
    name: str
    engines: dict[str, "_Engine"]
    token_seconds: float
    kept: dict[str, None] = field(default_factory=dict)
    running: dict[str, _Running] = field(default_factory=dict)
    steps: int = 0
    incarnation: str = field(default_factory=lambda: uuid4().hex)

    async def start(self) -> dict[str, str]:
        app = web.Application(client_max_size=_LARGEST_BODY)
        app.router.add_get("/health", self._health)
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._generate)
        app.router.add_post("/v1/embeddings", self._embed)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        self._ended: list[telemetry.FinishedEvent] = []
        self._seq, self._epoch = 0, time.time_ns()
        context = zmq.asyncio.Context.instance()
        self._control, self._publisher = context.socket(zmq.ROUTER), context.socket(zmq.PUB)
        role = self.name.partition("-")[0]
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        instance = {"name": self.name, "role": role, "url": url}
        for key, bound in (("control", self._control), ("telemetry", self._publisher)):
            instance[key] = f"tcp://127.0.0.1:{bound.bind_to_random_port('tcp://127.0.0.1')}"
        return instance

    async def _health(self, http: web.Request) -> web.Response:
        del http
        return web.Response()

    async def _embed(self, http: web.Request) -> web.Response:
        await http.read()
        return web.json_response({"object": "list", "data": [{"embedding": [0.5, 0.25]}]})

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        params = body.get("kv_transfer_params") or {}
        moving = params.get("headway") or {"id": uuid4().hex, "hop": 0}
        prefills, generated = bool(params.get("do_remote_decode")), moving.get("generated", 0)
        fault = body.get("user", "")
        if body.get("model") != MODEL:
            return _error(404)
        if fault == "too long":
            return _error(400)
        if fault == "error 500" or (fault == "prefill 500" and prefills):
            return _error(500)
        if fault == "error 429" and not prefills:
            return _error(429)
        if prefills:
            return self._prefilled(moving["id"])
        if params.get("do_remote_prefill"):
            source = self.engines.get(params["remote_engine_id"])
            if source is not None:
                source.kept.pop(params["remote_request_id"], None)
        if moving.get("copies"):
            return web.json_response({"choices": []})
        chat = http.path.endswith("chat/completions")
        context = params.get("prompt_token_ids") or body.get("prompt") or []
        if not isinstance(context, list) or not context:
            context = list(range(1000, 1024))
        split = len(context) - generated
        most = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        running = _Running(
            moving["id"],
            moving["hop"],
            f"{'chatcmpl' if chat else 'cmpl'}-{http.headers.get('X-Request-Id')}",
            context[:split],
            context[split:],
            most,
        )
        self.running[running.id] = running
        try:
            if body.get("stream"):
                return await self._stream(http, running, chat, "" if generated else fault)
            await asyncio.sleep(self.token_seconds * most)
            choice = {"index": 0, "text": "tokens", "finish_reason": "length"}
            return web.json_response({**_head(chat), "choices": [choice] * body.get("n", 1)})
        finally:
            self._end(running, frozen=False)

    def _prefilled(self, id: str) -> web.Response:
        params = {**self._keep(id), "do_remote_decode": False}
        usage = {"prompt_tokens": 24, "completion_tokens": 1}
        return web.json_response({"choices": [], "usage": usage, "kv_transfer_params": params})

    async def _stream(
        self, http: web.Request, running: _Running, chat: bool, fault: str
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        head = _head(chat)
        with suppress(ConnectionResetError):  # its client has left
            if fault == "error event":
                await response.write(_event({"error": {"message": "as asked", "code": 500}}))
                return response
            given = 0
            while True:
                await asyncio.sleep(self.token_seconds)
                given += 1
                if fault == "breaks" and given > 2 and http.transport is not None:
                    http.transport.abort()
                    return response
                token = 1000 + len(running.output) % 2000
                running.output.append(token)
                self.steps += 1
                if running.left is not None:
                    running.left -= 1
                ended = given >= running.most or running.left == 0
                choice: dict[str, Any] = {"index": 0, "token_ids": [token]}
                choice.update({"delta": {"content": "t "}} if chat else {"text": "t "})
                choice["finish_reason"] = "length" if ended else None
                chunk: dict[str, Any] = {**head, "choices": [choice]}
                if given == 1:
                    (chunk if chat else choice)["prompt_token_ids"] = running.prompt
                if ended:
                    self._end(running, frozen=given < running.most)
                await response.write(_event(chunk))
                if ended:
                    break
            counts = {"prompt_tokens": len(running.prompt), "completion_tokens": given}
            await response.write(_event({**head, "choices": [], "usage": counts}))
            await response.write(b"data: [DONE]\n\n")
        return response

    def _keep(self, id: str) -> dict[str, Any]:
        """Keep blocks for another engine, of the latest requests only: others never ask."""
        self.kept[id] = None
        if len(self.kept) > _KEPT:
            del self.kept[next(iter(self.kept))]
        ids = {"remote_engine_id": self.name, "remote_request_id": id}
        return {"do_remote_prefill": True, **ids}

    def _end(self, running: _Running, frozen: bool) -> None:
        if self.running.get(running.id) is running:
            del self.running[running.id]
            reason, generated = "moved" if frozen else "length", len(running.output)
            event = telemetry.FinishedEvent(
                _internal(running), reason, len(running.prompt), generated, 64
            )
            self._ended.append(event)
        if running.asked is None:
            return
        (peer, number), running.asked = running.asked, None
        if not frozen:
            self._reply(peer, control.NotFrozen(number=number, reason="it has ended"))
            return
        params, output = self._keep(running.id), running.output
        self._reply(peer, control.Frozen(number=number, output_token_ids=output, params=params))

    async def obey(self) -> None:
        while True:
            peer, *frames = await self._control.recv_multipart()
            if (reply := self._carried_out(peer, control.decode_command(frames))) is not None:
                self._reply(peer, reply)

    def _carried_out(self, peer: bytes, command: control.Command) -> control.Reply | None:
        """Return the answer to a command, unless it comes later."""
        number = command.number
        if isinstance(command, control.GetState):
            return engine_state(
                number=number,
                version="erratic",
                block_size=_BLOCK,
                max_num_seqs=_SEQUENCES,
                max_model_len=_CONTEXT,
                prefix_caching=self.name == "decode-0",  # of moves to it only there are copies
                num_blocks=_BLOCKS,
                free_blocks=_BLOCKS - 8 * len(self.running),
                running=len(self.running),
                frozen=list(self.kept),
                incarnation=self.incarnation,
                steps=self.steps,
            )
        if isinstance(command, control.Find):
            statuses = [
                control.RequestStatus.RUNNING
                if id in self.running or any(id == one.name for one in self.running.values())
                else control.RequestStatus.UNKNOWN
                for id in command.ids
            ]
            return control.Found(number=number, statuses=statuses, steps=self.steps)
        if isinstance(command, control.Renew):
            ids = [id for id in command.ids if id in self.kept]
            until = time.time() + _LEASE_SECONDS
            return control.Renewed(number=number, ids=ids, seconds=_LEASE_SECONDS, until=until)
        if isinstance(command, control.Release):
            done = command.id in self.kept
            self.kept.pop(command.id, None)
            return control.Released(number=number, done=done)
        running = self.running.get(command.id)
        if isinstance(command, control.Unfreeze):
            if running is not None:
                running.left = running.asked = None
            return control.Unfrozen(number=number, done=running is not None)
        if running is None or (isinstance(command, control.Freeze) and running.hop != command.hop):
            return control.NotFrozen(number=number, reason="unknown")
        if isinstance(command, control.TakeSnapshot):
            tokens = running.prompt + running.output
            whole = tokens[: len(tokens) // _BLOCK * _BLOCK]
            params = self._keep(f"{command.id}-snapshot")
            return control.Snapshot(number=number, token_ids=whole, params=params)
        running.asked, running.left = (peer, number), 2
        return None

    def _reply(self, peer: bytes, reply: control.Reply) -> None:
        self._control.send_multipart([peer, *control.encode(reply)])  # at once: there is room

    async def publish(self) -> None:
        while True:
            await asyncio.sleep(_TELEMETRY_SECONDS)
            ended, self._ended = self._ended, []
            requests = [
                telemetry.RequestForecast(
                    _internal(one), len(one.prompt), len(one.output), len(one.output), 64, _CURVE
                )
                for one in self.running.values()
            ]
            gauges = telemetry.Gauges(len(requests), 0, 0.1, _BLOCK * _BLOCKS)
            snapshot = telemetry.Snapshot(
                **self._header(),
                gauges=gauges,
                model=MODEL,
                checkpoint="0123456789ab",
                k=20,
                edges=_EDGES,
                requests=requests,
            )
            for message in (snapshot, telemetry.Finished(**self._header(), requests=ended)):
                await self._publisher.send_multipart(
                    [telemetry.TOPIC, telemetry.encode_message(message)]
                )

    def _header(self) -> dict[str, Any]:
        seq, self._seq = self._seq, self._seq + 1
        times = {"step": seq, "time": time.time()}
        return {"instance": self.name, "rank": 0, "epoch": self._epoch, "seq": seq, **times}


def _internal(running: _Running) -> str:
    """Return what vLLM calls a request inside."""
    number = "-0" if running.name.startswith("cmpl") else ""
    return f"{running.name}{number}-0123abcd"


def _head(chat: bool) -> dict[str, Any]:
    kind = "chat.completion.chunk" if chat else "text_completion"
    return {"id": "cmpl-0", "object": kind, "created": 1795293437, "model": MODEL}


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


def _error(status: int) -> web.Response:
    error = {"message": "as it was asked", "type": "Error", "param": None, "code": status}
    return web.json_response({"error": error}, status=status)


if __name__ == "__main__":
    main()
