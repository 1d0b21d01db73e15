"""HTTP to the engines: every call ends in an answer, or in an error that says what to do."""

import asyncio
import errno
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, NoReturn

import aiohttp
import msgspec
from aiohttp.client_reqrep import ConnectionKey
from aiohttp.tracing import Trace

from data_collection.files import read_text, warn_of_open_secret
from rescheduler.engines.deployment import DeploymentError, Instance
from rescheduler.engines.proxy_options import ProxyOptions
from rescheduler.openai.openai_request import (
    COMPLETIONS,
    MOST_TOKENS,
    RequestRefusedError,
    error_body,
)

_LONGEST_HEADER = 1 << 18  # bytes: one describes every embedding of a request
_KEPT_SECONDS = 1.0
"""For which an idle connection is kept: vLLM closes it after five."""
_LARGEST_ANSWER = 8 << 20
"""Bytes of any answer that is read as a whole: of a prefill, a copy, a probe, an error."""
_LONGEST_RETRY = 3600
_FULL, _MISSING = 429, 404
_NO_MODEL = re.compile(r"The model `.*` does not exist\.")
_RETRIED = (408, 425)  # the engine's own trouble, not the request's
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


class _Usage(msgspec.Struct):
    prompt_tokens: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: dict[str, Any]
    usage: _Usage


class UpstreamError(Exception):
    """Raised when an engine fails; the request can be tried again.

    Args:
        unsent: the request never reached it.
        answered: it answered with an error, perhaps because of the request.
        gone: nothing listens on its port.
    """

    def __init__(
        self,
        instance: Instance,
        reason: str,
        unsent: bool = False,
        answered: bool = False,
        gone: bool = False,
    ) -> None:
        super().__init__(f"{instance.name}: {reason}")
        self.instance = instance.name
        self.unsent = unsent
        self.answered = answered
        self.gone = gone


class EngineFullError(UpstreamError):
    """Raised when an engine has no room for a request for some seconds; another one may have."""

    def __init__(self, instance: Instance, seconds: int) -> None:
        super().__init__(instance, f"has no room for a request for {seconds} s")
        self.seconds = seconds


class EngineRefusedError(Exception):
    """Raised when an engine refuses a request as invalid; the body is in OpenAI's shape."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"{status}: {body[:500].decode(errors='replace')}")
        self.status, self.body = status, body


class ModelMissingError(EngineFullError):
    """Raised when an engine does not have a request's model; another one may have it.

    Args:
        refusal: for the client, if none has.
    """

    def __init__(self, instance: Instance, refusal: EngineRefusedError) -> None:
        UpstreamError.__init__(self, instance, f"refuses a model: {refusal}", answered=True)
        self.seconds, self.refusal = 1, refusal


class Upstream:
    """Connections to all engines; use it within one event loop.

    Every call raises `UpstreamError` if there is no answer in time, or one of the engine's own
    trouble, `EngineRefusedError` if the request is wrong or not allowed, and `RequestRefusedError`,
    503, if this process can open no more connections.

    Args:
        key: API key of the engines, for the proxy's own calls; None: they need none.
    """

    def __init__(self, options: ProxyOptions, key: str | None = None) -> None:
        self._options = options
        self._own_headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        return self._connecting(keepalive_timeout=_KEPT_SECONDS)

    @cached_property
    def _anew(self) -> aiohttp.ClientSession:
        """Connects anew for each request."""
        return self._connecting(force_close=True)

    def _connecting(self, **kept: Any) -> aiohttp.ClientSession:
        noted = aiohttp.TraceConfig()
        noted.on_connection_reuseconn.append(_note_reuse)
        return aiohttp.ClientSession(
            connector=_Connector(limit=0, socket_factory=probed_by_kernel, **kept),
            trace_configs=[noted],
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._options.connect_seconds),
            headers={"Accept-Encoding": "identity"},
            cookie_jar=aiohttp.DummyCookieJar(),  # one client's cookies are not another's
            max_field_size=_LONGEST_HEADER,
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()
        await self._anew.close()

    async def open(
        self, instance: Instance, path: str, body: bytes, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """Send a request; return its answer once the status is known to be 200."""
        try:
            response = await self._post(instance, path, body, headers)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            _cannot_connect(instance, error)
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamError(instance, f"{type(error).__name__}: {error}") from error
        if response.status == 200:
            return response
        try:
            async with asyncio.timeout(self._options.control_seconds):
                answer = await self._whole(instance, response)
        except TimeoutError as error:
            reason = f"HTTP {response.status}, and no end to it"
            raise UpstreamError(instance, reason, answered=True) from error
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamError(instance, f"{type(error).__name__}: {error}") from error
        finally:
            response.release()
        raise _refusal(instance, response.status, answer, response.headers.get("Retry-After", ""))

    async def _whole(self, instance: Instance, response: aiohttp.ClientResponse) -> bytes:
        """Return the body of an answer that is expected to be small."""
        parts, size = [], 0
        async for part in response.content.iter_any():
            parts.append(part)
            size += len(part)
            if size > _LARGEST_ANSWER:
                response.close()
                raise UpstreamError(
                    instance, f"an answer of more than {_LARGEST_ANSWER >> 20} MiB", answered=True
                )
        return b"".join(parts)

    async def _post(
        self, instance: Instance, path: str, body: bytes, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """Send a request, again where the engine has closed the kept connection that it went by.

        An engine that was stopped for a while closes those that it kept as it goes on. A connection
        that breaks otherwise may have been broken by the request: so the second one is a new one.
        """
        url = instance.url.rstrip("/") + path
        headers = {**headers, "Content-Type": "application/json"}
        way: dict[str, bool] = {}
        try:
            return await self._session.post(
                url, data=body, headers=headers, allow_redirects=False, trace_request_ctx=way
            )
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            if not way.get("reused"):
                raise
            broken = error
        try:
            return await self._anew.post(url, data=body, headers=headers, allow_redirects=False)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            raise broken from None  # where nobody listens any more, what broke first tells why

    async def prefill(
        self, instance: Instance, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[dict[str, Any], int]:
        """Prefill a request; return the parameters for its decode instance, and its length."""
        try:
            with _answering(instance, "no prefill in time"):
                response = await self.open(instance, path, body, headers)
                async with response:
                    answer = msgspec.json.decode(await self._whole(instance, response))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UpstreamError(instance, f"its answer to a prefill is no JSON: {error}") from error
        try:
            read = msgspec.convert(answer, _PrefillAnswer)
        except msgspec.ValidationError as error:
            reason = f"its answer to a prefill is wrong: {error}; does it run with a KV connector?"
            raise UpstreamError(instance, reason) from error
        return read.kv_transfer_params, read.usage.prompt_tokens

    async def copy(
        self, instance: Instance, body: bytes, headers: Mapping[str, str], seconds: float
    ) -> None:
        """Have an engine copy a running request's KV cache from another one."""
        with _answering(instance, f"no copy within {seconds:g} s"):
            async with asyncio.timeout(seconds):
                async with await self.open(instance, COMPLETIONS, body, headers) as response:
                    await self._whole(instance, response)

    async def generate_one(self, instance: Instance, model: str) -> None:
        """Have an engine generate one token, or refuse to for want of a key."""
        body = msgspec.json.encode({"model": model, "prompt": "1", "max_tokens": 1})
        try:
            with _answering(instance, "it generates no token"):
                async with asyncio.timeout(self._options.token_seconds):
                    opened = self.open(instance, COMPLETIONS, body, self._own_headers)
                    async with await opened as response:
                        await self._whole(instance, response)
        except EngineRefusedError as error:
            if error.status not in (401, 403):
                raise UpstreamError(instance, f"refuses a probe: {error}") from error

    async def get(
        self, instance: Instance, path: str, headers: Mapping[str, str] | None = None
    ) -> bytes:
        """Return what an engine answers to a GET with a client's headers, or the proxy's own."""
        timeout = self._options.control_seconds
        url = instance.url.rstrip("/") + path
        if headers is None:
            headers = self._own_headers
        with _answering(instance, f"{path}: no answer within {timeout:g} s", path):
            async with (
                asyncio.timeout(timeout),
                self._session.get(url, headers=headers, allow_redirects=False) as response,
            ):
                answer = await self._whole(instance, response)
        if 400 <= response.status < 500:
            raise EngineRefusedError(response.status, answer)
        if response.status != 200:
            raise UpstreamError(instance, f"{path}: HTTP {response.status}", answered=True)
        return answer


def _refusal(
    instance: Instance, status: int, body: bytes, retry_after: str = ""
) -> EngineRefusedError | UpstreamError:
    """Return what an answer means whose status, or whose error's code, is not 200."""
    if status == _FULL:
        known = retry_after.isdecimal() and len(retry_after) < 8
        return EngineFullError(instance, min(int(retry_after), _LONGEST_RETRY) if known else 1)
    if not 400 <= status < 500 or status in _RETRIED:  # a redirect, or no content, is no answer
        return UpstreamError(instance, f"HTTP {status}: {body[:300]!r}", answered=True)
    refusal = EngineRefusedError(status, _as_json(status, body))
    return ModelMissingError(instance, refusal) if _lacks_model(refusal) else refusal


def reported_error(instance: Instance, error: dict[str, Any]) -> EngineRefusedError | UpstreamError:
    """Return what the error means that a stream reports in an event: as that of an answer."""
    code = error.get("code")
    if isinstance(code, int) and 400 <= code < 500:
        return _refusal(instance, code, msgspec.json.encode({"error": error}))
    return UpstreamError(instance, str(error.get("message"))[:300], answered=True)


class _Error(msgspec.Struct):
    message: str = ""
    param: Any = None


class _Refusal(msgspec.Struct):
    error: _Error


def _lacks_model(refusal: EngineRefusedError) -> bool:
    """Return whether an engine says that it does not have the model, as vLLM does."""
    try:
        error = msgspec.json.decode(refusal.body, type=_Refusal).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    named = error.param == "model" or _NO_MODEL.match(error.message) is not None
    return refusal.status == _MISSING and named


def _as_json(status: int, body: bytes) -> bytes:
    """Return an error as it is if it is vLLM's: not all that answers is an engine."""
    try:
        msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return error_body(status, "the engine refuses the request")
    return body


class _Connector(aiohttp.TCPConnector):
    """Uses no connection again on which an engine has said more than it was asked.

    A whole answer too many, as after one with a wrong ``Content-Length``, would be taken for that
    to the next request, and the next one's for that after it.
    """

    async def _get(
        self, key: ConnectionKey, traces: list[Trace]
    ) -> aiohttp.connector.Connection | None:
        kept = self._conns.get(key, ())
        while kept and kept[0][0].should_close:
            kept.popleft()[0].close()
        return await super()._get(key, traces)


async def _note_reuse(
    session: aiohttp.ClientSession,
    context: SimpleNamespace,
    params: aiohttp.TraceConnectionReuseconnParams,
) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx["reused"] = True


def probed_by_kernel(
    address: aiohttp.AddrInfoType, idle_seconds: int = 5, between_seconds: int = 5, count: int = 3
) -> socket.socket:
    """Return a socket whose connection breaks when the other machine is gone.

    After some seconds without a byte the kernel asks that many times, at intervals. The machine of
    a process that is slow, or stopped, still answers.
    """
    family, kind, protocol, *_ = address
    connection = socket.socket(family, kind, protocol)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    values = idle_seconds, between_seconds, count
    for option, value in zip(("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"), values, strict=True):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return connection


@contextmanager
def _answering(instance: Instance, late: str, what: str = "") -> Iterator[None]:
    """Raise an error that names what is wrong with an engine that does not answer.

    That is ``late`` if time runs out, else what it is asked for, or the kind of the error.
    """
    try:
        yield
    except TimeoutError as error:
        raise UpstreamError(instance, late) from error
    except aiohttp.ClientConnectorError as error:
        _cannot_connect(instance, error)
    except (aiohttp.ClientError, OSError) as error:
        raise UpstreamError(instance, f"{what or type(error).__name__}: {error}") from error


def _cannot_connect(
    instance: Instance, error: aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError
) -> NoReturn:
    """Raise what a failed connection means: the engine does not listen, or nobody can connect."""
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno in _NO_DESCRIPTORS:
        raise RequestRefusedError(
            503, "too many connections are open; try again later", retry_after=1
        ) from error
    gone = isinstance(error, aiohttp.ClientConnectorError) and isinstance(
        error.os_error, ConnectionRefusedError
    )
    raise UpstreamError(instance, f"cannot connect: {error}", unsent=True, gone=gone) from error


def engine_key(options: ProxyOptions) -> str | None:
    """Return the API key of the engines, if they have one.

    Raises:
        DeploymentError: its file cannot be read, or is empty, or no header can hold the key.
    """
    if options.engine_key_file is None:
        key = os.environ.get("VLLM_API_KEY", "")
        _refuse_unsendable("VLLM_API_KEY", key)
        return key or None
    path = Path(options.engine_key_file).expanduser()
    try:
        key = read_text(path).strip()
        warn_of_open_secret(path)
    except (OSError, ValueError) as error:
        raise DeploymentError(f"proxy.engine_key_file: {error}") from error
    if not key:
        raise DeploymentError(f"proxy.engine_key_file: {options.engine_key_file} is empty")
    _refuse_unsendable("proxy.engine_key_file", key)
    return key


def _refuse_unsendable(where: str, key: str) -> None:
    if not key.isprintable():
        raise DeploymentError(
            f"{where}: the key holds a line end or another character that no header can, so that "
            "no client could send it: was the Secret, or the file, made with `echo`?"
        )
