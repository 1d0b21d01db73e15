"""`headway batch`: a file of requests, sent to a server until each has its answer."""

import asyncio
import io
import math
import os
import random
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import aiohttp
import msgspec
from msgspec import Raw

from rescheduler.batch.batch_files import (
    LARGEST_ANSWER,
    Answer,
    Batch,
    BatchOutput,
    BatchRequest,
    read_batch,
    result_path,
)
from rescheduler.batch.batch_progress import (
    MOST_REFUSALS,
    BatchProgress,
    Refusal,
    Refusals,
    is_of_the_server,
)
from rescheduler.commands.event_loop import end_when_asked, escaped
from rescheduler.openai.openai_request import CHAT, COMPLETIONS
from rescheduler.placement.upstream import probed_by_kernel

_SOME_FAILED, _INTERRUPTED = 3, 130
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 15.0
_LONGEST_RETRY_AFTER = 600.0
_CONNECT_SECONDS, _LOOK_SECONDS = 10.0, 1.0
_NOT_FINAL = (408, 425, 429)
_NEVER = 501
_NOT_BEGUN = (*_NOT_FINAL, 503, 529)
"""What a server answers to a request that it did not begin: only its waits are bounded."""
_BROKEN = 0
"""In place of a status: the request was sent, and the connection broke before the answer."""
_MOST_OWN_FAULTS, _OWN_FAULT_SECONDS = 5, 1800.0
"""How often a request is begun that breaks its engines, or whose answer cannot be read."""
_SMALL_ANSWER, _LARGE_SECONDS = 1 << 20, 300.0
"""Bytes that every answer may have in memory, and seconds for the rest of a larger one."""
_SHOWN_IDS, _LONGEST_NAME = 10, 100
_WHAT_TO_CHECK = {
    401: "OPENAI_API_KEY",
    402: "what the key may spend",
    403: "what OPENAI_API_KEY may do",
    404: "--url and the name of the model",
}
_SPARE_FILES = 64


class BatchStoppedError(RuntimeError):
    """Raised when a batch is given up; what is answered is kept."""


def batch(
    file: Path,
    out: Path | None = None,
    url: str = "http://127.0.0.1:8000",
    concurrency: int = 128,
    give_up_seconds: float | None = None,
) -> int:
    """Answer a file of requests with what online traffic leaves of a deployment.

    FILE has OpenAI's batch format: a line for each request, with custom_id, method, url and body.
    All lines are checked before the first one is sent. Requests are sent with service_tier flex,
    which `headway serve` serves after all others, unless a body names another tier.

    Each answer is a line of the output, in OpenAI's format, and requests that the server refuses
    are lines of a file of errors next to it. Whatever ends this command, the proxy or an engine,
    the same command goes on with the requests that have no answer: none is lost, and none is there
    twice. While the server is down or full, requests are sent again, ever less often. A request
    that is begun and fails 5 times, with 5xx or a broken connection, is an error. After 5 answers
    of 401, 403, 404 or the like in a row it stops: the key, the model or the address is wrong.

    A line tells how many requests are answered, and when the last answer is expected, with an 80%
    interval. The exit status is 0 if all were answered, 3 if some ended with errors, 130 after
    Ctrl-C. An API key is read from OPENAI_API_KEY.

    Args:
        file: The requests: a JSONL file, which may be gzipped.
        out: Write the answers to this file. If not set, x.jsonl gives x.results.jsonl. Errors go to
            x.errors.jsonl.
        url: Address of `headway serve`, or of another OpenAI-compatible server.
        concurrency: Requests sent at a time. The server decides how many of them run.
        give_up_seconds: Give up when nothing has been answered for this long. If not set, never.

    Returns:
        The exit status.

    Raises:
        ValueError: a file that is no batch, or an option that cannot be.
        BatchStoppedError: it is given up.
        OSError: a file cannot be read or written.
    """
    if concurrency < 1:
        raise ValueError(f"--concurrency must be at least 1, not {concurrency}")
    if give_up_seconds is not None and not give_up_seconds > 0:
        raise ValueError(f"--give-up-seconds must be positive, not {give_up_seconds:g}")
    server = server_address(url)
    _allow_files(concurrency)
    requests = read_batch(file)
    with BatchOutput(requests, out or result_path(file)) as output:
        known = len(output.tokens)
        if known:
            _say(f"{known:,} of {len(requests.requests):,} are answered already")
        sender = BatchSender(requests, output, server, give_up_seconds)
        ended = asyncio.run(sender.run(concurrency))
        left = len(requests.requests) - len(output.tokens)
        said = f"{len(output.tokens) - output.failed:,} answered: {output.results}"
        if output.failed:
            said += f"\n{output.failed:,} errors: {output.errors}"
        if lost := output.lost_engines:
            more = ", ..." if len(lost) > _SHOWN_IDS else ""
            names = escaped(", ".join(lost[:_SHOWN_IDS]).replace("\n", "\\n"))
            said += (
                f"\n{len(lost):,} of them must not be sent again: under each the server lost two "
                f"engines (HTTP 422): {names}{more}"
            )
        if not ended:
            _say(f"{said}\n{left:,} are left; the same command goes on with them")
            return _INTERRUPTED
        print(said)
        return _SOME_FAILED if output.failed else 0


class _NotAnsweredError(Exception):
    """Raised when a request has to be sent again.

    Args:
        status: that was answered; None: the server was not reached.
        retry_after: seconds that the server asks to wait for.
    """

    def __init__(self, why: str, status: int | None = None, retry_after: float = 0.0) -> None:
        super().__init__(why)
        self.status, self.retry_after = status, retry_after
        self.was_begun = status is not None and status not in _NOT_BEGUN


class BatchSender:
    """Sends what has no answer yet, in the file's order.

    Args:
        batch: the requests.
        output: what is answered, to which answers are added.
        url: of the server, without a path.
        give_up_seconds: without any answer; None: never.
    """

    def __init__(
        self, batch: Batch, output: BatchOutput, url: str, give_up_seconds: float | None
    ) -> None:
        self._batch = batch
        self._output = output
        self._url = url
        self._give_up_seconds = give_up_seconds
        self._random = random.Random()
        self._reads_large = asyncio.Lock()
        self._answered_at = time.monotonic()
        self._trouble = "no answer"
        tokens = output.tokens
        self._todo = [one for one in batch.requests if one.custom_id not in tokens]
        self._refusals = Refusals({request.target for request in self._todo})
        earlier = [count for count in tokens.values() if count is not None]
        self._progress = BatchProgress(len(batch.requests), len(tokens), earlier)

    async def run(self, concurrency: int) -> bool:
        """Send everything, so many requests at a time; return False if a signal ended it early.

        Raises:
            BatchStoppedError: nothing has been answered for too long, or the server refuses
                requests for a fault that is not theirs.
        """
        stopped = asyncio.Event()
        end_when_asked(stopped)
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        # Servers close idle connections, perhaps just as one is used again.
        probed = partial(probed_by_kernel, idle_seconds=60, between_seconds=15, count=4)
        connector = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=probed)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=headers
        ) as session:
            todo = iter(self._todo)
            senders = [
                asyncio.create_task(self._send_all(session, todo))
                for _ in range(min(concurrency, len(self._todo)))
            ]
            if not senders:
                return True
            with self._progress:
                ended = await self._ended(senders, stopped)
                if ended:
                    self._keep_what_was_refused()
                return ended

    async def _ended(self, senders: list[asyncio.Task[None]], stopped: asyncio.Event) -> bool:
        """Wait until all senders are done, one of them fails, or it is to stop."""
        others = [asyncio.create_task(self._watch(stopped))]
        left = {*senders, *others}
        try:
            while left.intersection(senders):
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                if done.intersection(others):
                    return False
            return True
        finally:
            for task in left:
                task.cancel()
            # All of them: several may have failed at the same time.
            await asyncio.gather(*senders, *others, return_exceptions=True)

    async def _watch(self, stopped: asyncio.Event) -> None:
        """Write lines now and then until it is to stop, and give up in the end."""
        while not stopped.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), _LOOK_SECONDS)
            self._progress.tell()
            silent = time.monotonic() - self._answered_at
            if self._give_up_seconds is not None and silent > self._give_up_seconds:
                raise BatchStoppedError(
                    f"nothing was answered for {silent:.0f} s: {self._trouble}. The same command "
                    "goes on with what is left"
                )

    async def _send_all(self, session: aiohttp.ClientSession, todo: Iterator[BatchRequest]) -> None:
        for request in todo:
            if self._refusals.is_closed(request.target):
                continue
            url, body = self._batch.read(request)
            answer = await self._answer(session, url, body)
            if _refuses_background(answer, body):
                raise BatchStoppedError(
                    f"{url}: the server serves no background requests (`service_tier`: flex), as "
                    f"behind a coordinator: {_shown(bytes(answer.body))}. To send them like all "
                    'others, give each body "service_tier": "default"'
                )
            if is_of_the_server(answer):
                self._refusals.hold(Refusal(request, answer))
                if self._refusals.all_closed:
                    self._stop()
                continue
            if not answer.is_error:
                for refusal in self._refusals.answered(request.target):
                    self._keep(*refusal)
            self._keep(request, answer)

    def _keep(self, request: BatchRequest, answer: Answer) -> None:
        self._output.add(request, answer)
        self._answered_at = time.monotonic()
        self._progress.answered(self._output.tokens[request.custom_id])

    def _keep_what_was_refused(self) -> None:
        """Keep refusals that are the requests' own; raise `BatchStoppedError` for all others."""
        for refusal in self._refusals.rest():
            self._keep(*refusal)
        if self._refusals.last is not None:
            self._stop()

    def _stop(self) -> NoReturn:
        assert self._refusals.last is not None
        request, answer = self._refusals.last
        url, model = self._batch.targets[request.target]
        left = len(self._batch.requests) - len(self._output.tokens)
        closed = self._refusals.is_closed(request.target)
        in_a_row = f", {MOST_REFUSALS} times in a row" if closed else ""
        named = "" if model == "null" else f", model {escaped(model[:_LONGEST_NAME])}"
        check = _WHAT_TO_CHECK.get(answer.status_code, "--url and what answers there")
        raise BatchStoppedError(
            f"{url}{named}: the server answers HTTP {answer.status_code}{in_a_row}: "
            f"{_shown(bytes(answer.body))}. {left:,} requests are left, none of these counts as an "
            f"error. Check {check}; then the same command goes on"
        )

    async def _answer(self, session: aiohttp.ClientSession, path: str, body: bytes) -> Answer:
        """Send a request until it is answered, or refused.

        A fault of the server's is the request's own once it was met five times, each after others
        had been answered since the time before, or in a row for half an hour. A request that the
        server did not begin waits for as long as it takes.
        """
        wait, own, met, since = _FIRST_WAIT, 0, 0.0, math.inf
        while True:
            try:
                return await self._sent(session, path, body)
            except _NotAnsweredError as error:
                why, seconds, now = str(error), error.retry_after, time.monotonic()
                if error.was_begun:
                    own += self._answered_at > met
                    met, since = now, min(since, now)
                else:
                    own, since = 0, math.inf
                if own >= _MOST_OWN_FAULTS or now - since > _OWN_FAULT_SECONDS:
                    status = 502 if error.status in (None, _BROKEN, 200) else error.status
                    return _refused(status, f"the server failed again and again: {why}")
            self._trouble = why
            self._progress.retrying(why)
            await asyncio.sleep(max(seconds, wait * self._random.uniform(0.5, 1.0)))
            wait = min(2 * wait, _LONGEST_WAIT)

    async def _sent(self, session: aiohttp.ClientSession, path: str, body: bytes) -> Answer:
        """Send a request once; raises `_NotAnsweredError` where another try may be answered."""
        try:
            async with session.post(
                f"{self._url}{path}", data=io.BytesIO(body), allow_redirects=False
            ) as response:
                raw, status = await self._read(response), response.status
                retry_after = _seconds(response.headers.get("Retry-After", ""))
                id, location = (
                    _text(response.headers.get(name, "")) for name in ("X-Request-Id", "Location")
                )
        except (aiohttp.InvalidURL, aiohttp.ClientConnectorCertificateError) as error:
            raise BatchStoppedError(f"--url {self._url}: {error}") from error
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise _NotAnsweredError(f"{type(error).__name__}: {error}") from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _NotAnsweredError(f"{type(error).__name__}: {error}", _BROKEN) from error
        if 300 <= status < 400:
            raise BatchStoppedError(
                f"the server wants requests sent to {location}: give that --url"
            )
        if status in _NOT_FINAL or (status >= 500 and status != _NEVER):
            raise _NotAnsweredError(f"HTTP {status}: {_shown(raw)}", status, retry_after)
        if status == 200 and len(raw) > LARGEST_ANSWER:
            mib = LARGEST_ANSWER >> 20
            return _refused(502, f"the answer has more than {mib} MiB; ask for less in a request")
        whole = _one_line(raw) if status == 200 or len(raw) <= _SMALL_ANSWER else None
        if status < 300 and (status != 200 or whole is None or not _is_answer(path, whole)):
            raise _NotAnsweredError(f"HTTP {status}, no answer of OpenAI's: {_shown(raw)}", 200)
        if whole is None:
            return _refused(status, _shown(raw))
        return Answer(status, id, Raw(whole))

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        """Return a body, of one that is too large a part; large ones are read one at a time."""
        raw = await _up_to(response, _SMALL_ANSWER)
        if len(raw) <= _SMALL_ANSWER or response.status != 200:
            return raw
        async with self._reads_large, asyncio.timeout(_LARGE_SECONDS):
            return raw + await _up_to(response, LARGEST_ANSWER - len(raw))


async def _up_to(response: aiohttp.ClientResponse, most: int) -> bytes:
    """Return what comes of a body until it ends, or has more bytes than this."""
    raw = bytearray()
    while len(raw) <= most and (part := await response.content.readany()):
        raw += part
    return bytes(raw)


def server_address(url: str) -> str:
    """Return a server's address without a path, from one that may end with ``/v1``.

    Raises:
        ValueError: it is not an address of HTTP.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        usable = False
    if not usable or parts.query or parts.fragment or any(map(str.isspace, url)):
        raise ValueError(f"--url {url!r} is not like http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _allow_files(concurrency: int) -> None:
    """Raise the limit of open files to what so many connections need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = concurrency + _SPARE_FILES
    if resource.RLIM_INFINITY not in (soft, hard) and needed > hard:
        raise ValueError(
            f"--concurrency {concurrency}: this process may open {hard} files; give at most "
            f"{hard - _SPARE_FILES}, or raise the limit (ulimit -n)"
        )
    if soft != resource.RLIM_INFINITY and needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class _Answered(msgspec.Struct):
    choices: Raw = Raw(b"null")
    error: Raw = Raw(b"null")


class _Tier(msgspec.Struct):
    service_tier: Any = None


class _Fault(msgspec.Struct):
    param: Any = None


class _Faulty(msgspec.Struct):
    error: _Fault


_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def _is_answer(path: str, whole: bytes) -> bool:
    """Return whether a JSON object without white space is an answer of OpenAI's."""
    fields = msgspec.json.decode(whole, type=_Answered)
    if path in (CHAT, COMPLETIONS):
        choices = bytes(fields.choices)
        return choices.startswith(b"[") and choices != b"[]"
    return whole != b"{}" and fields.error == _Answered().error


def _refuses_background(answer: Answer, body: bytes) -> bool:
    """Return whether a server refuses the tier that a batch's requests have by default."""
    if answer.status_code != 400:
        return False
    with suppress(*_UNREADABLE):
        param = msgspec.json.decode(answer.body, type=_Faulty).error.param
        return param == "service_tier" and msgspec.json.decode(body, type=_Tier) == _Tier("flex")
    return False


def _one_line(raw: bytes) -> bytes | None:
    """Return a JSON object without line breaks; None if it is none."""
    with suppress(*_UNREADABLE):
        raw.decode()  # what is skipped below may be anything
        msgspec.json.decode(raw, type=_Answered)
        return msgspec.json.format(raw, indent=-1)
    return None


def _refused(status: int, message: str) -> Answer:
    """Return an error in OpenAI's shape, for a server that has given none."""
    error = {"message": message, "type": "server_error", "param": None, "code": status}
    return Answer(status, "", Raw(msgspec.json.encode({"error": error})))


def _seconds(retry_after: str) -> float:
    with suppress(ValueError):
        return min(max(0.0, float(retry_after)), _LONGEST_RETRY_AFTER)
    return 0.0


def _shown(raw: bytes) -> str:
    return escaped(" ".join(raw[:200].decode(errors="replace").split()))


def _text(header: str) -> str:
    """Return a header's value, of which any byte may have come."""
    return header.encode(errors="surrogateescape").decode(errors="replace")


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
