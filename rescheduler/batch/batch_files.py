"""The files of a batch: its requests, and its answers, kept through whatever ends it."""

import fcntl
import gzip
import hashlib
import os
import tempfile
import weakref
import zlib
from codecs import BOM_UTF8
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, NamedTuple, Self
from uuid import uuid4

import msgspec
from msgspec import Raw

from data_collection.files import text_lines
from rescheduler.engines.proxy_options import ProxyOptions
from rescheduler.openai.openai_request import CHAT, COMPLETIONS, FORWARDED

LARGEST_LINE = ProxyOptions().bodies_mb << 20
"""Bytes of the longest line: what a proxy keeps of all bodies by default.

How large a body may be is for the proxy to say, which answers 413.
"""

SERVED = (CHAT, COMPLETIONS, *FORWARDED)
"""The endpoints that requests may be to: those of `headway serve`."""

_SHOWN = 10
_PACKED = b"\x1f\x8b"


class BatchFileError(ValueError):
    """A batch that cannot be used; the message names the file, its lines, and what is wrong."""


class BatchRequest(NamedTuple):
    """Where a request of a batch is.

    Attributes:
        custom_id: what the file calls it.
        number: of its line, from 1.
        begin: of its line, in bytes.
        size: of its line, in bytes.
        digest: SHA-256 of its line, without white space around it.
        target: number of its endpoint and model.
    """

    custom_id: str
    number: int
    begin: int
    size: int
    digest: bytes
    target: int


class _Body(msgspec.Struct):
    stream: bool | None = False
    background: bool | None = False
    model: Raw = Raw(b"null")


class _RequestLine(msgspec.Struct):
    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: _Body


class _Sent(msgspec.Struct):
    url: str
    body: dict[str, Raw]


_lines = msgspec.json.Decoder(_RequestLine)
_sent = msgspec.json.Decoder(_Sent)
_NULL = Raw(b"null")


class Batch:
    """A file of requests, all of which are valid. Only where they are is kept in memory.

    Attributes:
        path: the file.
        requests: in the file's order.
        targets: endpoints with the models that are asked for there, as JSON.
    """

    def __init__(
        self,
        path: Path,
        requests: list[BatchRequest],
        targets: list[tuple[str, str]],
        text: BinaryIO,
    ) -> None:
        self.path = path
        self.requests = requests
        self.targets = targets
        self._file = os.dup(text.fileno())
        weakref.finalize(self, os.close, self._file)

    def read(self, request: BatchRequest) -> tuple[str, bytes]:
        """Return the endpoint and the body of a request.

        The body has ``service_tier: flex``, unless the file gives it another tier.

        Raises:
            BatchFileError: the file has changed since it was checked.
        """
        raw = os.pread(self._file, request.size, request.begin)
        if _digest(raw) != request.digest:
            raise BatchFileError(
                f"{self.path}:{request.number}: the file has been changed meanwhile"
            )
        sent = _sent.decode(raw)
        if sent.body.get("service_tier", _NULL) == _NULL:
            sent.body["service_tier"] = Raw(b'"flex"')
        return sent.url, msgspec.json.encode(sent.body)


def read_batch(path: Path) -> Batch:
    """Check every line of a batch file, which may be gzipped, and return the batch.

    Raises:
        BatchFileError: lines that are no requests, or two with the same ``custom_id``; the first
            ten are named. Or it has none at all, is no text, or is a pipe, which cannot be read
            again. Or what is gzipped is not whole, or too large for the folder of temporary files.
        OSError: it cannot be read.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise BatchFileError(f"{path} is not a regular file; write the requests to one")
    try:
        next(text_lines(path, LARGEST_LINE), None)  # names other encodings and archives
    except ValueError as error:
        raise BatchFileError(str(error)) from error
    with path.open("rb") as file:
        if file.peek(len(_PACKED))[: len(_PACKED)] != _PACKED:
            return _read(path, file, file)
        try:
            with gzip.GzipFile(fileobj=file) as packed, tempfile.TemporaryFile() as unpacked:
                return _read(path, packed, unpacked)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise BatchFileError(f"{path}: the gzip file is not whole: {error}") from error
        except OSError as error:
            raise BatchFileError(
                f"{path}: it cannot be unpacked into {tempfile.gettempdir()}: {error.strerror}; "
                "unpack it yourself, or name another folder in TMPDIR"
            ) from error


def _read(path: Path, lines: BinaryIO | gzip.GzipFile, text: BinaryIO) -> Batch:
    """Check all lines; ``text`` is where they can be read again, and is written if it is not."""
    requests: list[BatchRequest] = []
    wrong: list[str] = []
    seen: dict[str, int] = {}
    targets: dict[tuple[str, str], int] = {}
    begin, number = 0, 0
    while line := lines.readline(LARGEST_LINE + 1):
        number += 1
        why, size = None, len(line)
        if size > LARGEST_LINE:
            wrong.append(f"{path}:{number}: it has more than {LARGEST_LINE >> 20} MiB")
            break
        line = line.removeprefix(BOM_UTF8)
        begin += size - len(line)
        if line.strip():
            try:
                custom_id, *target = _checked(line)
            except ValueError as error:
                why = str(error)
            else:
                if custom_id in seen:
                    why = f"custom_id {custom_id!r} is also that of line {seen[custom_id]}"
                seen.setdefault(custom_id, number)
                where = targets.setdefault((target[0], target[1]), len(targets))
                if text is not lines:
                    begin = text.tell()
                    text.write(line)
                requests.append(
                    BatchRequest(custom_id, number, begin, len(line), _digest(line), where)
                )
        if why is not None:
            wrong.append(f"{path}:{number}: {why}")
            if len(wrong) == _SHOWN:
                wrong.append("...")
                break
        begin += len(line)
    if wrong:
        raise BatchFileError("\n".join(wrong))
    if not requests:
        raise BatchFileError(f"{path}: it has no requests")
    text.flush()
    return Batch(path, requests, list(targets), text)


def _digest(line: bytes) -> bytes:
    return hashlib.sha256(line.strip()).digest()


def _checked(line: bytes) -> tuple[str, str, str]:
    """Return a valid line's ``custom_id``, endpoint and model; raise `ValueError` if it is none."""
    try:
        line.decode()  # what is skipped below may be anything
        read = _lines.decode(line)
    except msgspec.ValidationError as error:
        raise ValueError(f"{error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"no JSON object: {error}") from error
    if read.url not in SERVED:
        raise ValueError(f"url {read.url[:100]!r} is not served: {', '.join(SERVED)} are")
    for field in ("stream", "background"):
        if getattr(read.body, field):
            raise ValueError(f"`{field}`: a batch has whole answers; leave it out")
    return read.custom_id, read.url, bytes(read.body.model).decode()


LARGEST_ANSWER = 64 << 20
"""Bytes of the largest answer that is kept."""

_LONGEST_LINE = LARGEST_ANSWER + (1 << 20)
_ID = "batch_req_"
_FIRST_BYTES = f'{{"id":"{_ID}'.encode()
_SHOWN_NAME = 100


class Answer(msgspec.Struct):
    """What the server answered to a request, or that it did not.

    Attributes:
        status_code: of HTTP.
        request_id: what the server calls the request.
        body: of the answer, as it came.
    """

    status_code: int
    request_id: str
    body: Raw

    @property
    def is_error(self) -> bool:
        """Whether the request has been refused."""
        return self.status_code != 200


class _AnswerLine(msgspec.Struct):
    id: str
    custom_id: str
    request_sha256: str
    response: Answer
    error: None = None


_Tokens = Annotated[int, msgspec.Meta(ge=0, le=10**9)]


class _Usage(msgspec.Struct):
    completion_tokens: _Tokens | None = None
    output_tokens: _Tokens | None = None
    total_tokens: _Tokens | None = None


class _Counted(msgspec.Struct):
    usage: _Usage | None = None


class _Error(msgspec.Struct):
    type: str | None = None


class _Failed(msgspec.Struct):
    error: _Error | None = None


class _KeptAnswer(msgspec.Struct):
    status_code: int = 0
    body: Raw = Raw(b"null")


class _Kept(msgspec.Struct):
    custom_id: str
    response: _KeptAnswer
    request_sha256: str = ""


_kept = msgspec.json.Decoder(_Kept)
_counted = msgspec.json.Decoder(_Counted)
_failed = msgspec.json.Decoder(_Failed)

_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_LOST_ENGINES = 422, "UnprocessableEntityError"
"""What the proxy answers to a request under which two engines were lost."""


def result_path(path: Path) -> Path:
    """Return where the answers to a batch go by default: ``x.results.jsonl`` for ``x.jsonl``."""
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    return path.with_name(f"{name}.results.jsonl")


def error_path(results: Path) -> Path:
    """Return where the errors go beside the answers: ``x.errors.jsonl``."""
    stem = results.name.removesuffix(".jsonl").removesuffix(".results")
    return results.with_name(f"{stem}.errors.jsonl")


class BatchOutput:
    """The files of the answers and of the errors, and what they have already.

    A line is on the disk before its request counts as answered. A program that was killed while
    it wrote one leaves a part of it: that part is cut off, and the request is sent again. Each
    line has the digest of its request's line: it counts for that request only, whatever the files
    are called and wherever they are copied. A program locks what it writes.

    Args:
        batch: whose answers they are.
        results: file of the answers; that of the errors is beside it.

    Attributes:
        tokens: generated for each answer, by the answer's ``custom_id``; None for an error. Where
            none are generated, as for embeddings, tokens that were read.
        lost_engines: ``custom_id`` of the requests under which the proxy lost two engines.

    Raises:
        BatchFileError: another program writes them, they have answers to other requests, or they
            are no regular files.
        OSError: they cannot be written.
    """

    def __init__(self, batch: Batch, results: Path) -> None:
        self.results, self.errors = results, error_path(results)
        self.tokens: dict[str, int | None] = {}
        self.lost_engines: list[str] = []
        self._refuse_other_files(batch.path)
        results.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            requests = {request.custom_id: request for request in batch.requests}
            self._files = {path: self._locked(stack, path) for path in (results, self.errors)}
            for path, file in self._files.items():
                self._read(file, path, requests, batch.path)
            self._closing = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()

    @property
    def failed(self) -> int:
        """How many requests have ended with an error."""
        return sum(tokens is None for tokens in self.tokens.values())

    def add(self, request: BatchRequest, answer: Answer) -> None:
        """Keep the answer to a request, for good once this returns.

        Raises:
            OSError: the disk is full, or fails; what was written of it is cut off again, now or
                by the next run.
        """
        path = self.errors if answer.is_error else self.results
        id, digest = f"{_ID}{uuid4().hex}", request.digest.hex()
        line = msgspec.json.encode(_AnswerLine(id, request.custom_id, digest, answer)) + b"\n"
        try:
            _append(self._files[path], line)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        self._note(request.custom_id, answer.status_code, answer.body, answer.is_error)

    def _note(self, custom_id: str, status: int, body: Raw, is_error: bool) -> None:
        self.tokens[custom_id] = None if is_error else _generated_tokens(body)
        if is_error and status == _LOST_ENGINES[0] and _error_type(body) == _LOST_ENGINES[1]:
            self.lost_engines.append(custom_id)

    def _refuse_other_files(self, asked: Path) -> None:
        """Refuse what is not to be written: the input, whatever its names, and what is no file."""
        for path in (self.results, self.errors):
            if path.exists() and path.samefile(asked):
                raise BatchFileError(f"{asked}: it would be overwritten; give another --out")
            if path.exists() and not path.is_file():
                raise BatchFileError(f"{path} is not a regular file; give another --out")
        if self.errors.exists() and self.results.exists() and self.results.samefile(self.errors):
            raise BatchFileError(f"{self.results} and {self.errors} are one file; remove the link")

    def _locked(self, stack: ExitStack, path: Path) -> int:
        file = self._opened(stack, path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BatchFileError(f"{path}: another `headway batch` writes it") from error
        return file

    def _opened(self, stack: ExitStack, path: Path) -> int:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        stack.callback(os.close, file)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)  # else a crash may lose the file's name
        finally:
            os.close(folder)
        return file

    def _read(self, file: int, path: Path, requests: dict[str, BatchRequest], asked: Path) -> None:
        """Take over the whole lines of a file, and cut off what follows them if it is ours."""
        whole = 0
        with path.open("rb") as lines:
            for number in count(1):
                line = lines.readline(_LONGEST_LINE)
                if not line.endswith(b"\n"):
                    begin = line[: len(_FIRST_BYTES)]
                    if len(line) == _LONGEST_LINE or not (whole or _FIRST_BYTES.startswith(begin)):
                        message = f"{path}:{number}: no line of `headway batch`"
                        raise BatchFileError(f"{message}; give another --out")
                    break
                whole += len(line)
                try:
                    kept = _kept.decode(line)
                except _UNREADABLE as error:
                    message = f"{path}:{number}: not an answer of `headway batch`: {error}"
                    raise BatchFileError(f"{message}; give another --out") from error
                if why := self._foreign(kept, path, requests, asked):
                    name = kept.custom_id[:_SHOWN_NAME]
                    raise BatchFileError(f"{path}:{number}: {name!r} {why}")
                response, is_error = kept.response, path is self.errors
                self._note(kept.custom_id, response.status_code, response.body, is_error)
        os.ftruncate(file, whole)

    def _foreign(
        self, kept: _Kept, path: Path, requests: dict[str, BatchRequest], asked: Path
    ) -> str | None:
        """Return why a line cannot be taken for the answer to a request; None if it is one."""
        if kept.custom_id in self.tokens:
            return "is twice"
        remedy = f"give another --out, or remove {path}"
        request = requests.get(kept.custom_id)
        if request is None:
            return f"is not in the input {asked}; {remedy}"
        if not kept.request_sha256:
            return f"has no `request_sha256` that says which request it answers; {remedy}"
        if kept.request_sha256 != request.digest.hex():
            return f"answers another request than {asked}:{request.number}; {remedy}"
        if (kept.response.status_code == 200) != (path is self.results):
            kinds = "errors", "answers"
            here, there = kinds if path is self.errors else kinds[::-1]
            return f"belongs to the file of {there}, not of {here}; were the files renamed?"
        return None


def _generated_tokens(body: Raw) -> int:
    """Return the tokens that an answer says it has, or was computed from; 0 if it does not say."""
    try:
        usage = _counted.decode(body).usage or _Usage()
    except _UNREADABLE:
        return 0
    return usage.completion_tokens or usage.output_tokens or usage.total_tokens or 0


def _error_type(body: Raw) -> str | None:
    try:
        error = _failed.decode(body).error
    except _UNREADABLE:
        return None
    return error.type if error is not None else None


def _append(file: int, line: bytes) -> None:
    """Append a line and wait until it is on the disk; if that fails, cut it off again."""
    before, left = os.fstat(file).st_size, memoryview(line)
    try:
        while left:
            left = left[os.write(file, left) :]
        os.fsync(file)
    except OSError:
        os.ftruncate(file, before)
        raise
