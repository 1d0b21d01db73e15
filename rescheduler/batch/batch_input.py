"""The requests of a batch, as OpenAI's batch files have them, a line each."""

import hashlib
import os
import weakref
from pathlib import Path
from typing import Annotated, Literal, NamedTuple
from zlib import crc32

import msgspec
from msgspec import Raw

from rescheduler.engines.deployment import ProxyOptions

__all__ = ["LARGEST_LINE", "Batch", "BatchFileError", "BatchRequest", "read_batch"]

LARGEST_LINE = ProxyOptions().largest_body_mb << 20
"""Bytes of the longest line: of the largest body that a proxy takes by default."""

_SHOWN = 10


class BatchFileError(ValueError):
    """A batch that cannot be used; the message names the file, its lines, and what is wrong."""


class BatchRequest(NamedTuple):
    """Where a request of a batch is.

    Attributes:
        custom_id: what the file calls it.
        number: of its line, from 1.
        begin: of its line, in bytes.
        size: of its line, in bytes.
        checksum: CRC-32 of its line.
    """

    custom_id: str
    number: int
    begin: int
    size: int
    checksum: int


class _Body(msgspec.Struct):
    stream: bool | None = False


class _Line(msgspec.Struct):
    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions"]
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
        digest: SHA-256 of the file.
    """

    def __init__(self, path: Path, requests: list[BatchRequest], digest: str) -> None:
        self.path, self.requests, self.digest = path, requests, digest
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)

    def read(self, request: BatchRequest) -> tuple[str, bytes]:
        """Return the endpoint and the body of a request.

        The body has ``service_tier: flex``, unless the file gives it another tier.

        Raises:
            BatchFileError: the file has changed since it was checked.
        """
        raw = os.pread(self._file, request.size, request.begin)
        if crc32(raw) != request.checksum:
            raise BatchFileError(
                f"{self.path}:{request.number}: the file has been changed meanwhile"
            )
        sent = _sent.decode(raw)
        if sent.body.get("service_tier", _NULL) == _NULL:
            sent.body["service_tier"] = Raw(b'"flex"')
        return sent.url, msgspec.json.encode(sent.body)


def read_batch(path: Path) -> Batch:
    """Check every line of a batch file, and return the batch.

    Raises:
        BatchFileError: lines that are no requests, or two with the same ``custom_id``; the first
            ten are named. Or it has none at all, or is a pipe, which cannot be read again.
        OSError: it cannot be read.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise BatchFileError(f"{path} is not a regular file; write the requests to one")
    requests: list[BatchRequest] = []
    wrong: list[str] = []
    seen: dict[str, int] = {}
    digest, begin, number = hashlib.sha256(), 0, 0
    with path.open("rb") as file:
        while line := file.readline(LARGEST_LINE + 1):
            number += 1
            why, custom_id = None, ""
            if len(line) > LARGEST_LINE:
                wrong.append(f"{path}:{number}: it has more than {LARGEST_LINE >> 20} MiB")
                break
            digest.update(line)
            if line.strip():
                try:
                    custom_id = _checked(line)
                except ValueError as error:
                    why = str(error)
                else:
                    if custom_id in seen:
                        why = f"custom_id {custom_id!r} is also that of line {seen[custom_id]}"
                    seen.setdefault(custom_id, number)
                    size, checksum = len(line), crc32(line)
                    requests.append(BatchRequest(custom_id, number, begin, size, checksum))
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
    return Batch(path, requests, digest.hexdigest())


def _checked(line: bytes) -> str:
    """Return the ``custom_id`` of a valid line; raise `ValueError` if it is none."""
    try:
        line.decode()  # what is skipped below may be anything
        read = _lines.decode(line)
    except msgspec.ValidationError as error:
        raise ValueError(f"{error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"no JSON object: {error}") from error
    if read.body.stream:
        raise ValueError("`stream`: a batch has whole answers; leave it out")
    return read.custom_id
