"""A scripted engine that refuses what vLLM would refuse, so that no nonsense costs it time."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from scripted_engine import ScriptedEngine

from rescheduler.openai.openai_request import error_body

_LARGEST = 4096
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=32)] | None
_Few = Annotated[int, msgspec.Meta(ge=1, le=4)] | None


class _Generation(msgspec.Struct):
    model: Literal["m"]
    max_tokens: _Tokens = None
    max_completion_tokens: _Tokens = None
    n: _Few = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None


class _Completion(_Generation, kw_only=True):
    prompt: str | list[Annotated[int, msgspec.Meta(ge=0, le=40_000)]]


class _Chat(_Generation, kw_only=True):
    messages: list[dict[str, Any]]


_KINDS: dict[str, Any] = {"/v1/completions": _Completion, "/v1/chat/completions": _Chat}


@dataclass
class StrictEngine(ScriptedEngine):
    """An engine whose requests are small and of the right types, or get 400."""

    token_seconds: float = 0.0
    longest: int = 4

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        refusal = await _refusal(http, _KINDS[http.path])
        return refusal or await super()._generate(http)

    async def _respond(self, http: web.Request) -> web.StreamResponse:
        refusal = await _refusal(http, dict[str, Any])
        return refusal or await super()._respond(http)


async def _refusal(http: web.Request, kind: Any) -> web.Response | None:
    """Return the answer to a body that is not of a kind."""
    try:
        body = await http.read()
        if len(body) > _LARGEST:
            raise ValueError(f"{len(body)} bytes")
        msgspec.json.decode(body, type=kind)
        await http.json()
    except (ValueError, RecursionError) as error:
        return web.Response(
            status=400, body=error_body(400, str(error)), content_type="application/json"
        )
    return None
