"""The answers of a batch, a line each, kept through whatever ends the program."""

import fcntl
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import msgspec
from msgspec import Raw

from rescheduler.batch.batch_input import Batch, BatchFileError

__all__ = ["Answer", "BatchOutput", "error_path", "result_path"]


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


class _Line(msgspec.Struct):
    id: str
    custom_id: str
    response: Answer
    error: None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    output_tokens: int | None = None
    total_tokens: int | None = None


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


_kept = msgspec.json.Decoder(_Kept)
_counted = msgspec.json.Decoder(_Counted)
_failed = msgspec.json.Decoder(_Failed)

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
    it wrote one leaves a part of it: that part is cut off, and the request is sent again. Beside
    the answers, ``.NAME.batch`` holds the digest of the input. A program locks what it writes.

    Args:
        batch: whose answers they are.
        results: file of the answers; that of the errors is beside it.

    Attributes:
        tokens: generated for each answer, by the answer's ``custom_id``; None for an error. Where
            none are generated, as for embeddings, tokens that were read.
        lost_engines: ``custom_id`` of the requests under which the proxy lost two engines.

    Raises:
        BatchFileError: another program writes them, or they are those of another input.
        OSError: they cannot be written.
    """

    def __init__(self, batch: Batch, results: Path) -> None:
        self.results, self.errors = results, error_path(results)
        self.tokens: dict[str, int | None] = {}
        self.lost_engines: list[str] = []
        if batch.path.resolve() in (results.resolve(), self.errors.resolve()):
            raise BatchFileError(f"{batch.path}: it would be overwritten; give another --out")
        results.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            known = {request.custom_id for request in batch.requests}
            self._files = {path: self._locked(stack, path) for path in (results, self.errors)}
            digest = self._opened(stack, results.with_name(f".{results.name}.batch"))
            begun = self._is_begun(digest, batch)
            for path, file in self._files.items():
                self._read(file, path, known, begun)
            if not begun:
                os.ftruncate(digest, 0)
                _append(digest, batch.digest.encode())
            self._closing = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()

    @property
    def failed(self) -> int:
        """How many requests have ended with an error."""
        return sum(tokens is None for tokens in self.tokens.values())

    def add(self, id: str, custom_id: str, answer: Answer) -> None:
        """Keep the answer to a request, for good once this returns.

        Raises:
            OSError: the disk is full, or fails; what was written of it is cut off again, now or
                by the next run.
        """
        path = self.errors if answer.is_error else self.results
        line = msgspec.json.encode(_Line(id, custom_id, answer)) + b"\n"
        try:
            _append(self._files[path], line)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        self._note(custom_id, answer.status_code, answer.body, answer.is_error)

    def _note(self, custom_id: str, status: int, body: Raw, is_error: bool) -> None:
        self.tokens[custom_id] = None if is_error else _generated_tokens(body)
        if is_error and status == _LOST_ENGINES[0] and _error_type(body) == _LOST_ENGINES[1]:
            self.lost_engines.append(custom_id)

    def _is_begun(self, file: int, batch: Batch) -> bool:
        """Return whether the files are this batch's, by the digest beside them."""
        digest = os.pread(file, 64, 0).decode(errors="replace")
        if len(digest) == 64 and digest != batch.digest and any(map(_size, self._files)):
            raise BatchFileError(
                f"{self.results}: it has answers to another {batch.path.name}: the input was "
                "changed since; give another --out"
            )
        return digest == batch.digest

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

    def _read(self, file: int, path: Path, known: set[str], begun: bool) -> None:
        """Take over the whole lines of a file, and cut off what follows them if it is ours."""
        whole = 0
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    if not begun:
                        raise BatchFileError(f"{path}:{number}: no line of `headway batch`")
                    break
                whole += len(line)
                try:
                    kept = _kept.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    message = f"{path}:{number}: not an answer of `headway batch`: {error}"
                    raise BatchFileError(message) from error
                if kept.custom_id not in known or kept.custom_id in self.tokens:
                    what = "twice" if kept.custom_id in self.tokens else "not in the input"
                    raise BatchFileError(f"{path}:{number}: {kept.custom_id!r} is {what}")
                response, is_error = kept.response, path is self.errors
                self._note(kept.custom_id, response.status_code, response.body, is_error)
        os.ftruncate(file, whole)


def _generated_tokens(body: Raw) -> int:
    """Return the tokens that an answer says it has, or was computed from; 0 if it does not say."""
    try:
        usage = _counted.decode(body).usage or _Usage()
    except msgspec.DecodeError:
        return 0
    return usage.completion_tokens or usage.output_tokens or usage.total_tokens or 0


def _error_type(body: Raw) -> str | None:
    try:
        error = _failed.decode(body).error
    except msgspec.DecodeError:
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


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
