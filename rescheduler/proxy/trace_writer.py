"""`headway serve --trace`: arrivals and lengths of the requests, as `headway advise` reads them."""

import asyncio
import fcntl
import logging
import os
import re
import stat
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from data_collection.workload.arrivals import LONGEST
from rescheduler.engines.deployment import DeploymentError
from rescheduler.placement.placeable import Placeable

logger = logging.getLogger("headway.serve")

HEADER = "arrival_s,input_tokens,output_tokens,client\n"

_SECONDS = 1.0
"""Between two writes."""
_MOST_HELD, _LONGEST_HELD = 65_536, 300.0
"""Requests that wait for the line of one that came before them, and seconds for which they do."""
_AT_ONCE = 4_096
"""Lines of one write."""
_BLOCK = 1 << 16
_DAY = 86_400.0
_LINE = re.compile(rb"(\d{1,12}\.\d{6}),\d{1,12},\d{1,12},\S{0,256}", re.ASCII)
_OWN_LENGTH = ("ok", "client_gone")
"""Outcomes of requests that had the length which they or their clients gave them."""


class TraceWriter:
    """Appends a line for each request that has ended to a CSV file, in the order of arrival.

    A request waits for the line of one that came before it and still runs, for five minutes: one
    that runs for longer is written as it ends, as if it had come then. The file gets whole lines
    only: a write that fails is undone, and what a crash has left behind the last whole line is
    removed when the file is opened again. Left out are requests without a token, with several
    answers, or with a prompt whose length no engine has said.

    Args:
        path: of the file; it is created for its owner alone, or continued.
        most_bytes: of the file.
        clock: seconds since 1970.

    Raises:
        DeploymentError: another process writes the file, or it holds something else.
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, most_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._most_bytes = most_bytes
        self._clock = clock
        # None: it still runs.
        self._lines: OrderedDict[Placeable, tuple[float, str | None]] = OrderedDict()
        self._late: list[str] = []
        self._written = 0
        self._left_out = 0
        self._stopped = False
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o600)
        try:
            self._size, self._last = self._continued()
        except BaseException:
            os.close(self._file)
            raise

    def _continued(self) -> tuple[int, float]:
        """Return how large the file is, and the arrival of its last line."""
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            raise DeploymentError(f"--trace: {self._path} is no file that could be continued")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DeploymentError(
                f"--trace: {self._path} is written by another proxy; name another file"
            ) from error
        size, header = os.fstat(self._file).st_size, HEADER.encode()
        if not header.startswith(os.pread(self._file, len(header), 0)):
            raise DeploymentError(
                f"--trace: {self._path} exists and is not a trace of `headway serve`; name another "
                "file"
            )
        if size < len(header):  # empty, or a crash has cut its first line
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, header, 0)
            return len(header), 0.0
        end = self._after_newline(size)
        os.ftruncate(self._file, end)
        begin = self._after_newline(end - 1)
        if begin == 0:  # the header
            return end, 0.0
        line = _LINE.fullmatch(os.pread(self._file, min(end - 1 - begin, _BLOCK), begin))
        last = float(line[1]) if line else -1.0
        if not 0.0 <= last <= self._clock() + _DAY:
            raise DeploymentError(
                f"--trace: the last line of {self._path} is no request, or none of the past; "
                "remove it or name another file"
            )
        return end, last

    def _after_newline(self, end: int) -> int:
        """Return where the line begins that some place of the file is in."""
        while end > 0:
            begin = max(0, end - _BLOCK)
            found = os.pread(self._file, end - begin, begin).rfind(b"\n")
            if found >= 0:
                return begin + found + 1
            end = begin
        return 0

    def began(self, request: Placeable) -> None:
        """Note a request that has just arrived."""
        if self._stopped:
            return
        self._lines[request] = self._clock(), None
        if len(self._lines) > _MOST_HELD:
            self._lines.popitem(last=False)

    def ended(self, request: Placeable, outcome: str, client: str) -> None:
        """Note a request that has ended, and a name of its client that does not tell who it is."""
        if self._stopped:
            return
        prompt, output = request.prompt_tokens, request.generated_tokens
        known = request.prompt_is_known and not request.several and outcome in _OWN_LENGTH
        line = ""
        if known and 0 < prompt <= LONGEST and 0 < output <= LONGEST:
            line = f"{prompt},{output},{client}\n"
        self._left_out += not line
        if request in self._lines:
            self._lines[request] = self._lines[request][0], line
        elif line:
            self._late.append(line)

    def _due(self, everything: bool = False) -> bytes:
        """Take the lines that nothing holds up any more, each with an arrival after the last."""
        due: list[str] = []
        now = self._clock()
        while self._lines and (everything or len(due) < _AT_ONCE):
            arrival, line = next(iter(self._lines.values()))
            if line is None and not everything and now - arrival < _LONGEST_HELD:
                break
            self._lines.popitem(last=False)
            if line:
                self._last = max(self._last, arrival)
                due.append(f"{self._last:.6f},{line}")
        due += [f"{self._last:.6f},{line}" for line in self._late]
        self._late.clear()
        return "".join(due).encode()

    def _append(self, lines: bytes) -> None:
        if self._stopped:
            return
        if self._size + len(lines) > self._most_bytes:
            lines = lines[: lines.rfind(b"\n", 0, max(0, self._most_bytes - self._size)) + 1]
            self._stopped = True
            logger.warning("%s is as large as --trace-mb allows: no more is written", self._path)
        left, end = memoryview(lines), self._size
        try:
            while left:
                written = os.pwrite(self._file, left, end)
                left, end = left[written:], end + written
        except OSError as error:
            self._stopped = True
            logger.error("%s is written no further: %s", self._path, error.strerror or error)
            with suppress(OSError):
                os.ftruncate(self._file, self._size)
        else:
            self._size = end
            self._written += lines.count(b"\n")

    def flush(self) -> None:
        """Write what is due."""
        self._append(self._due())

    async def _run(self) -> None:
        """Write what is due, forever; when cancelled, everything."""
        try:
            while not self._stopped:
                await asyncio.sleep(_SECONDS)
                writing = asyncio.ensure_future(asyncio.to_thread(self._append, self._due()))
                try:
                    await asyncio.shield(writing)
                except asyncio.CancelledError:
                    await asyncio.wait([writing])
                    raise
        finally:
            self._append(self._due(everything=True))

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Write while the body runs, and all that has ended as it ends."""
        task = asyncio.get_running_loop().create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            logger.info(
                "%s: %d requests; %d left out, without a token or a length that is known",
                self._path,
                self._written,
                self._left_out,
            )

    def close(self) -> None:
        """Close the file; another process may write it then."""
        os.close(self._file)
