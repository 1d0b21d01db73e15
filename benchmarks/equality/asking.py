"""What a server answers to a case, without what no two answers share."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai

from benchmarks.equality.cases import CHAT, Case
from benchmarks.equality.joined_stream import joined_chunks, joined_events

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
