"""The answer to a client: a stream of events, or one document."""

from collections.abc import Mapping

from aiohttp import web

from rescheduler.openai.openai_request import ClientRequest, error_body
from rescheduler.openai.openai_response import ResponseCollector
from rescheduler.openai.openai_stream import DONE, event

__all__ = ["ClientAnswer", "ClientGoneError"]

_EVENTS = "text/event-stream; charset=utf-8"


class ClientGoneError(Exception):
    """Raised when the client has closed its connection."""


class ClientAnswer:
    """Writes what a request generates, in the shape that its client asked for.

    Nothing is sent before the first chunk, so that what fails until then still has an HTTP
    status of its own.

    Args:
        http: the client's request.
        request: what it asks for.
        headers: of the answer.
    """

    def __init__(
        self, http: web.Request, request: ClientRequest, headers: Mapping[str, str]
    ) -> None:
        self._http, self._headers = http, dict(headers)
        self._stream: web.StreamResponse | None = None
        self._collector = None if request.stream else ResponseCollector(request)

    @property
    def begun(self) -> bool:
        """Whether the client has got something."""
        return self._stream is not None

    async def chunks(self, chunks: list[bytes]) -> None:
        """Take chunks, as JSON.

        Raises:
            ClientGoneError: nobody reads them.
        """
        if self._collector is not None:
            for chunk in chunks:
                self._collector.add(chunk)
        elif chunks:
            await self.write(b"".join(map(event, chunks)))

    async def write(self, data: bytes) -> None:
        """Send bytes of a stream of events.

        Raises:
            ClientGoneError: nobody reads them.
        """
        try:
            if self._stream is None:
                self._stream = web.StreamResponse(
                    headers={**self._headers, "Content-Type": _EVENTS, "Cache-Control": "no-cache"}
                )
                await self._stream.prepare(self._http)
            await self._stream.write(data)
        except (ConnectionError, RuntimeError) as error:
            raise ClientGoneError(str(error)) from error

    async def finish(self) -> web.StreamResponse:
        """Return the whole answer.

        Raises:
            ClientGoneError: nobody reads it.
        """
        if self._collector is not None:
            return self.document(200, self._collector.response())
        await self.write(event(DONE))
        return await self._end()

    async def finish_raw(self) -> web.StreamResponse:
        """Return an answer that was handed through, its last event included."""
        return await self._end()

    async def fail(
        self, status: int, body: bytes, retry_after: int | None = None
    ) -> web.StreamResponse:
        """Return an error: an HTTP status, or the last event of a stream that has begun."""
        if self._stream is None:
            answer = self.document(status, body)
            if retry_after is not None:
                answer.headers["Retry-After"] = str(retry_after)
            return answer
        await self.write(event(body) + event(DONE))
        return await self._end()

    async def fail_with(self, status: int, message: str) -> web.StreamResponse:
        """Return an error of the proxy's own."""
        return await self.fail(status, error_body(status, message))

    def document(self, status: int, body: bytes) -> web.Response:
        """Return one JSON document."""
        return web.Response(
            status=status, body=body, headers=self._headers, content_type="application/json"
        )

    async def _end(self) -> web.StreamResponse:
        assert self._stream is not None
        try:
            await self._stream.write_eof()
        except (ConnectionError, RuntimeError) as error:
            raise ClientGoneError(str(error)) from error
        return self._stream
