"""Where the answers of vLLM and of the proxy differ, without what no two answers share.

Streams are compared as what they say in all, wherever they are cut into chunks.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import httpx
import msgspec
import openai

from benchmarks.equality.cases import CHAT, Case

_AT_A_TIME = 4
_NEAR = 2e-3
"""Of logprobs: a prompt computed in other pieces rounds otherwise."""
_ABSENT = "(absent)"


class Difference(msgspec.Struct, frozen=True):
    """A request that the proxy answers otherwise; ``fields`` where the statuses are the same."""

    request: str
    vllm: int
    proxy: int
    fields: list[str]
    reason: str = ""


async def compare(cases: Sequence[Case], vllm: str, proxy: str) -> list[Difference]:
    """Ask both servers everything, and return what they answer otherwise, in the cases' order."""
    servers, gate = (Server(vllm), Server(proxy)), asyncio.Semaphore(_AT_A_TIME)

    async def one(case: Case) -> Difference | None:
        async with gate:
            direct, served = [await server.ask(case) for server in servers]
        fields = sorted(set(_differ(direct, served)))
        if not fields:
            return None
        statuses = direct["status"], served["status"]
        return Difference(case.request, *statuses, [] if statuses[0] != statuses[1] else fields)

    try:
        found = await asyncio.gather(*map(one, cases))
    finally:
        for server in servers:
            await server.close()
    return [difference for difference in found if difference is not None]


def _differ(vllm: Any, proxy: Any, at: str = "") -> Iterator[str]:
    """Yield the names of what differs; an element of a list has that of the list."""
    if isinstance(vllm, dict) and isinstance(proxy, dict):
        for key in dict.fromkeys([*vllm, *proxy]):
            where = f"{at}.{key}" if at else key
            yield from _differ(vllm.get(key, _ABSENT), proxy.get(key, _ABSENT), where)
    elif isinstance(vllm, list) and isinstance(proxy, list) and len(vllm) == len(proxy):
        for one, other in zip(vllm, proxy, strict=True):
            yield from _differ(one, other, at)
    elif isinstance(vllm, float) and isinstance(proxy, int | float):
        if not abs(vllm - proxy) <= _NEAR:
            yield at
    elif at.endswith("system_fingerprint"):  # it ends with a hash of the engine's configuration
        if str(vllm).rpartition("-")[0] != str(proxy).rpartition("-")[0]:
            yield at
    elif vllm != proxy:
        yield at


_SECONDS = 600.0
_HEADERS = (
    "content-type",
    "location",
    "allow",
    "retry-after",
    "access-control-allow-origin",
    "access-control-allow-methods",
    "access-control-allow-headers",
    "access-control-max-age",
)
_OF_ITS_OWN = ("id", "created", "created_at", "completed_at", "item_id", "request_id")
"""Names and times that no two answers share."""
_BY_NAME = ("model", "prompt", "messages", "stream")
"""Fields that `openai`'s client takes as arguments; it is given the others as further ones."""


class Server:
    def __init__(self, url: str) -> None:
        self._url = url
        # vLLM closes an idle connection perhaps in the moment in which it is used again.
        headers = {"Connection": "close"}
        self._http = httpx.AsyncClient(timeout=_SECONDS, headers=headers)
        self._openai = openai.AsyncOpenAI(
            base_url=url + "/v1",
            api_key="none",
            timeout=_SECONDS,
            max_retries=0,
            default_headers=headers,
        )

    async def close(self) -> None:
        await self._http.aclose()
        await self._openai.close()

    async def ask(self, case: Case) -> dict[str, Any]:
        """Return the answer: ``status``, ``headers`` that matter, and ``body`` or ``stream``."""
        answer = await (self._by_client(case) if case.by_client else self._plainly(case))
        found: dict[str, Any] = _comparable(answer)
        return found

    async def _by_client(self, case: Case) -> dict[str, Any]:
        assert case.fields is not None
        chat, completions = self._openai.chat.completions, self._openai.completions
        endpoint: Any = chat if case.path == CHAT else completions
        given = {name: case.fields[name] for name in _BY_NAME if name in case.fields}
        rest = {name: value for name, value in case.fields.items() if name not in given}
        try:
            raw = await endpoint.with_raw_response.create(**given, extra_body=rest)
            if not case.fields.get("stream"):
                return _answer(raw.http_response, raw.text)
            chunks = [chunk.to_dict() async for chunk in raw.parse()]
        except openai.APIStatusError as error:
            return _answer(error.response, error.response.text)
        except openai.APIConnectionError:
            raise
        except openai.APIError as error:  # an event of a stream that has begun
            return {"status": 200, "stream": {"error": error.body}}
        return {**_answer(raw.http_response), "stream": joined_chunks(chunks)}

    async def _plainly(self, case: Case) -> dict[str, Any]:
        headers, parts = dict(case.headers), case.raw
        if case.fields is not None:
            headers["Content-Type"] = "application/json"
            parts = (json.dumps(case.fields).encode(),)
        content = _in_turn(parts) if len(parts) > 1 else b"".join(parts) or None
        response = await self._http.request(
            case.method, self._url + case.path, content=content, headers=headers
        )
        if "event-stream" not in response.headers.get("content-type", ""):
            return _answer(response, response.text)
        return {**_answer(response), "stream": joined_events(response.text)}


async def _in_turn(parts: tuple[bytes, ...]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def _answer(response: Any, text: str | None = None) -> dict[str, Any]:
    """Return an answer of httpx, or of what `openai`'s client has in its place."""
    headers = {key: response.headers[key] for key in _HEADERS if key in response.headers}
    if "location" in headers:
        headers["location"] = response.url.join(headers["location"]).raw_path.decode()
    answer: dict[str, Any] = {"status": response.status_code, "headers": headers}
    if text is not None:
        try:
            answer["body"] = json.loads(text)
        except ValueError:
            answer["body"] = text
    return answer


def _comparable(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            str(key): "(its own)" if key in _OF_ITS_OWN and inner else _comparable(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_comparable(inner) for inner in value]
    return value


def joined_events(text: str) -> dict[str, Any]:
    """Return what server-sent events say, of any endpoint."""
    lines = text.splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    chunks = [json.loads(one) for one in data if one != "[DONE]"]
    if any("choices" in chunk for chunk in chunks):
        said = joined_chunks(chunks)
    else:
        said = {"text": "".join(map(_delta, chunks)), "fields": _fields(chunks)}
    events = sorted({line for line in lines if line.startswith("event: ")})
    return {**said, "events": events, "done": data[-1:] == ["[DONE]"]}


def joined_chunks(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the chunks of a completion or a chat say."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.get("choices", ()):
            _add(choices.setdefault(choice["index"], {"fields": set()}), choice)
    for joined in choices.values():
        joined["fields"] = sorted(joined["fields"])
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    fingerprints = (chunk.get("system_fingerprint") for chunk in chunks)
    return {
        "fields": _fields(chunks),
        "models": sorted({str(chunk.get("model")) for chunk in chunks}),
        "ids": len({chunk.get("id") for chunk in chunks}),
        "choices": choices,
        "usage": usages[-1:],
        "every_chunk_has_usage": len(usages) == len(chunks),
        "chunks_without_choices": sum(not chunk.get("choices") for chunk in chunks),
        "system_fingerprint": next(filter(None, fingerprints), None),
        "prompt_token_ids": [
            one for chunk in chunks for one in chunk.get("prompt_token_ids") or ()
        ],
    }


def _fields(chunks: Sequence[dict[str, Any]]) -> list[str]:
    return sorted({key for chunk in chunks for key in chunk})


def _delta(event: dict[str, Any]) -> str:
    delta = event.get("delta") or ""
    return delta if isinstance(delta, str) else str(delta.get("text") or "")


def _add(joined: dict[str, Any], choice: dict[str, Any]) -> None:
    said = choice.get("delta", choice)
    joined["fields"] |= {*choice, *(f"delta.{key}" for key in choice.get("delta", ()))}
    for key in ("text", "content", "reasoning"):
        if said.get(key):
            joined[key] = joined.get(key, "") + said[key]
    for key, value in (
        ("role", said.get("role")),
        ("finish_reason", choice.get("finish_reason")),
        ("stop_reason", choice.get("stop_reason")),
    ):
        if value is not None:
            joined[key] = [*joined.get(key, ()), value]
    for key in ("token_ids", "prompt_token_ids"):
        joined[key] = [*joined.get(key, ()), *(choice.get(key) or ())]
    for key, entries in (choice.get("logprobs") or {}).items():
        joined.setdefault("logprobs", {}).setdefault(key, []).extend(entries or ())
    for call in said.get("tool_calls") or ():
        function = call.get("function") or {}
        name, arguments = function.get("name"), function.get("arguments") or ""
        joined["tool_calls"] = (
            joined.get("tool_calls", "") + (f"{name}: " if name else "") + arguments
        )
