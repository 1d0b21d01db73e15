"""ASGI middleware that answers rejected requests with 429 and absurd objectives with 400.

Given to vLLM as ``--middleware rescheduler.batching.admission.AdmissionMiddleware``. The engine
rejects a request by ending it with a `stop_reason` of ours (see `rejection_reason`); vLLM alone
would answer it with 200 and an empty text.
"""

import json
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from math import ceil
from typing import Any

from rescheduler.batching.objectives import TPOT_KEY, TTFT_KEY, Objectives, read_objectives
from rescheduler.openai.openai_request import CHAT, COMPLETIONS, error_body

REASON = "headway: prefill budget"
"""How the `stop_reason` of a rejected request begins."""

_BEFORE, _AFTER = f"{REASON}, retry in ", " s"
_LONGEST = 60


def retry_seconds(excess: float, token_seconds: float) -> int:
    """Return after how many whole seconds a rejected request is worth another try.

    Until then the engine, if nothing else arrives, has computed what is too much.

    Args:
        excess: tokens by which the prompt exceeds the budget.
        token_seconds: of a prompt's token, b + c.
    """
    return ceil(min(max(excess * token_seconds, 1.0), _LONGEST))


def rejection_reason(seconds: int) -> str:
    """Return the ``stop_reason`` of a rejected request."""
    return f"{_BEFORE}{seconds}{_AFTER}"


def read_rejection(finish_reason: object, stop_reason: object) -> int | None:
    """Return the seconds of a rejection, or None if this is none.

    A client's own stop string may read the same, but ends a request with another finish reason.
    """
    if finish_reason != "abort" or not isinstance(stop_reason, str):
        return None
    seconds = stop_reason.removeprefix(_BEFORE).removesuffix(_AFTER)
    return int(seconds) if seconds.isdecimal() and stop_reason.startswith(_BEFORE) else None


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

_PATHS = (COMPLETIONS, CHAT)
_ANY = Objectives(1.0, 1.0)
_EVENT = b"data: "


class AdmissionMiddleware:
    """Reads the objectives of a request, and the beginning of its answer.

    Bodies pass as they are. The head of an answer waits for its first chunk with content, which
    says whether the request was rejected; nothing after it is looked at.

    Args:
        app: the server.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve a request."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or scope["method"] != "POST" or path not in _PATHS:
            await self._app(scope, receive, send)
            return
        body = deque(await _whole_body(receive))
        refusal = _refusal(b"".join(message.get("body", b"") for message in body))
        if refusal is not None:
            await _answer(send, 400, refusal, "vllm_xargs")
            return

        async def replay() -> Message:
            return body.popleft() if body else await receive()

        await self._app(scope, replay, _HeldAnswer(send))


class _HeldAnswer:
    """Holds an answer back until it is known not to be a rejection."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._held: list[Message] = []
        self._passes = self._rejected = False

    async def __call__(self, message: Message) -> None:
        if self._passes:
            await self._send(message)
        elif not self._rejected:
            await self._look_at(message)

    async def _look_at(self, message: Message) -> None:
        self._held.append(message)
        if message["type"] == "http.response.start" and message["status"] == 200:
            return
        body: bytes = message.get("body", b"")
        choices = list(_choices(body))
        seconds = [read_rejection(c.get("finish_reason"), c.get("stop_reason")) for c in choices]
        known = [value for value in seconds if value is not None]
        if known:
            self._rejected = True
            text = "the engine has no budget for this prompt now: its first token would be late"
            await _answer(self._send, 429, text, retry_after=max(known))
            return
        only_opens = not body or (bool(choices) and all(map(_only_opens, choices)))
        if not (message.get("more_body", False) and only_opens):
            self._passes = True
            for held in self._held:
                await self._send(held)
            self._held.clear()


async def _whole_body(receive: Receive) -> list[Message]:
    """Return the messages up to the end of the body, or until the client has gone."""
    messages = [await receive()]
    while messages[-1]["type"] == "http.request" and messages[-1].get("more_body", False):
        messages.append(await receive())
    return messages


def _refusal(body: bytes) -> str | None:
    """Return what is wrong with the objectives in a body, if there are any."""
    if b"vllm_xargs" not in body:
        return None
    try:
        given = json.loads(body).get("vllm_xargs")
        if isinstance(given, dict):
            read_objectives({key: given[key] for key in (TTFT_KEY, TPOT_KEY) if key in given}, _ANY)
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError):
        return None  # no request at all: the server says so
    except ValueError as error:
        return f"vllm_xargs: {error}"
    return None


def _choices(body: bytes) -> Iterator[dict[str, Any]]:
    """Yield the choices of a stream's events; of a whole answer only if it may be a rejection."""
    if REASON.encode() not in body and not body.startswith(_EVENT):
        return
    for line in body.splitlines():
        text = line.removeprefix(_EVENT)
        if text.startswith(b"{"):
            try:
                yield from json.loads(text).get("choices", [])
            except ValueError:  # a part of an answer, which is longer than a rejection
                return


def _only_opens(choice: dict[str, Any]) -> bool:
    """Whether a choice only says who speaks; what it says comes right after."""
    delta = choice.get("delta") or {}
    return bool(delta.get("role")) and not delta.get("content") and not choice.get("finish_reason")


async def _answer(
    send: Send, status: int, text: str, param: str | None = None, retry_after: int | None = None
) -> None:
    """Send an error in OpenAI's shape."""
    body = error_body(status, text, param)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if retry_after is not None:
        headers.append((b"retry-after", b"%d" % retry_after))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
