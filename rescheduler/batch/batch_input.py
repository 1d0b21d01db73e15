"""The requests of a batch, as OpenAI's batch files have them, a line each."""

import gzip
import hashlib
import os
import tempfile
import weakref
import zlib
from codecs import BOM_UTF8
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, NamedTuple

import msgspec
from msgspec import Raw

from data_collection.files import text_lines
from rescheduler.engines.deployment import ProxyOptions
from rescheduler.openai.openai_request import CHAT, COMPLETIONS, FORWARDED

__all__ = ["LARGEST_LINE", "SERVED", "Batch", "BatchFileError", "BatchRequest", "read_batch"]

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


class _Line(msgspec.Struct):
    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: _Body


class _Sent(msgspec.Struct):
    url: str
    body: dict[str, Raw]


_lines = msgspec.json.Decoder(_Line)
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
        self.path, self.requests, self.targets = path, requests, targets
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
