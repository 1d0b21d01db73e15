"""What the page shows of a cluster at one moment, and what a log has a line of."""

import asyncio
import gzip
import logging
import os
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO, Literal, Protocol

import msgspec

from data_collection.files import refuse_unwritable

UNKNOWN = -1
"""In a column of numbers: not known, or on no instance."""


class Phase(IntEnum):
    """How far a request is."""

    WAITING = 0
    """On no decode instance yet."""
    PREFILLING = 1
    """On a prefill instance."""
    PLACED = 2
    """On a decode instance, which has not generated a token of it since it came."""
    DECODING = 3
    """Generating tokens."""
    MOVING = 4
    """On its way from one decode instance to another; it generates tokens until it is frozen."""


class About(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a row of snapshots is of: sent before them, and the first line of a log.

    Attributes:
        format: always the same, by which a log is told from other files.
        version: of this format.
        source: whether the cluster is a proxy's or a simulated one.
        title: of the picture, as the name of the model, or of the simulated policy.
        routing: name of the routing policy.
        migration: name of the migration planner; empty without one.
        seconds: between two snapshots.
    """

    format: Literal["headway-log"] = "headway-log"
    version: Literal[1] = 1
    source: Literal["proxy", "simulation"]
    title: str
    routing: str
    migration: str
    seconds: float


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """One engine.

    Attributes:
        name: of the deployment.
        role: what it does; replicas, which do both, are decode instances.
        in_service: whether it works.
        draining: whether it gets no new requests.
        slots: requests that it runs at a time; `UNKNOWN` if nobody says.
        kv_capacity: tokens that its KV cache holds; `UNKNOWN` if nobody says.
        kv_tokens: context tokens of the requests on it, or on their way to it.
        ahead: [P] tokens that they are expected to hold at `Snapshot.points`; empty without
            forecasts.
        deviation: [P] standard deviation of that.
        overflow: [P] probability that they then hold more than its capacity; empty without
            forecasts, or if the capacity is unknown.
        step_seconds: mean duration of its engine's steps lately; None if nobody measures it, or
            it does nothing.
        without: endpoints of Headway that its engine does not have: ``control``, ``telemetry``.
        other_requests: of other clients there, as its ``/metrics`` told.
    """

    name: str
    role: Literal["prefill", "decode"]
    in_service: bool
    draining: bool
    slots: int
    kv_capacity: int
    kv_tokens: int
    ahead: list[int] = []
    deviation: list[int] = []
    overflow: list[float] = []
    step_seconds: float | None = None
    without: list[str] = []
    other_requests: int = 0


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """The requests, as columns of one length: there may be thousands.

    Attributes:
        number: tells requests apart for as long as they run.
        name: as its client called it, cut to 40 characters.
        phase: a `Phase`.
        instance: index of the instance that it is on; `UNKNOWN` while it waits.
        target: index of the instance that it is moving to; `UNKNOWN` if it is not.
        prompt: tokens.
        generated: tokens so far.
        low: remaining tokens that it exceeds with probability 0.9; `UNKNOWN` without a forecast,
            as are the other two.
        median: of the remaining tokens.
        high: remaining tokens that it exceeds with probability 0.1.
    """

    number: list[int] = []
    name: list[str] = []
    phase: list[int] = []
    instance: list[int] = []
    target: list[int] = []
    prompt: list[int] = []
    generated: list[int] = []
    low: list[int] = []
    median: list[int] = []
    high: list[int] = []

    def __post_init__(self) -> None:
        """Refuse columns of different lengths.

        Raises:
            ValueError: as msgspec reports it.
        """
        if len({len(getattr(self, name)) for name in self.__struct_fields__}) > 1:
            raise ValueError("the columns of requests have different lengths")


class MoveReport(msgspec.Struct, frozen=True, kw_only=True):
    """A move that has ended, well or not.

    Attributes:
        time: when, on the clock of `Snapshot.time`.
        number: of the request; `UNKNOWN` if it has ended.
        name: of the request.
        source: name of the instance that it left.
        target: name of the instance that it was to go to.
        tokens: that it had generated.
        reason: of the move.
        outcome: ``moved``, or why it was not; `docs/serve.md` lists them.
        pause: seconds from the last token at the source to the first at the target; None if it
            did not move, or nobody measures it.
    """

    time: float
    number: int
    name: str
    source: str
    target: str
    tokens: int
    reason: str
    outcome: str
    pause: float | None = None


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """How good the forecasts of the requests were that ended within the last hour.

    Every forecast of a request counts, against the tokens that came after it.

    Attributes:
        requests: how many.
        coverage: [3] share of the ends inside the central 50, 80 and 90% interval.
        error: tokens that the median was off by, on average.
        bias: mean of the median less what came, in tokens: above 0 it was too long.
        late: share of the ends after the median; a half when it is not biased.
        alarm: what is wrong with the intervals; empty if nothing is, None if too few requests
            have ended to say.
        drift: in which way the forecasts have become worse within the hour; empty and None
            likewise.
    """

    requests: int
    coverage: list[float]
    error: float
    bias: float
    late: float
    alarm: str | None = None
    drift: str | None = None


class LengthErrors(msgspec.Struct, frozen=True, kw_only=True):
    """How good forecasts of lengths were that were made as requests arrived.

    Attributes:
        source: ``prompt``, ``past`` or ``both``.
        answers: the latest that have come out, at most 500.
        factor: half of them were at most so many times as long as forecast, or as short.
    """

    source: str
    answers: int
    factor: float


class Finishes(msgspec.Struct, frozen=True, kw_only=True):
    """How forecasts and promises of when requests finish came out.

    Attributes:
        forecasts: the latest forecasts of a finish that have come out, at most 500.
        held: share of their 80% intervals that held; None without any.
        kept: promises that were kept since the proxy started.
        broken: that were not.
        refused: that were asked for and not given.
    """

    forecasts: int
    held: float | None
    kept: int
    broken: int
    refused: int


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """The load ahead of all decode instances, if requests go on coming as in the last minute.

    Attributes:
        seconds: how far ahead ``tokens`` is, and how long ago ``foretold`` was.
        tokens: [3] context tokens expected then: the 10, 50 and 90% quantile.
        foretold: [3] likewise, what had been expected of now; empty if nobody looked then.
        wanted: decode instances that hold the load of 300 seconds ahead nine times in ten; None if
            what an instance holds is not known.
    """

    seconds: float
    tokens: list[int]
    foretold: list[int] = []
    wanted: int | None = None


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster at one moment.

    Attributes:
        time: seconds since 1970, or since the start of a simulation.
        step_seconds: mean duration of a decode step lately; None if nobody measures it.
        points: [P] decode steps ahead at which loads are expected; empty without forecasts.
        instances: all.
        requests: all that an instance has, and those that wait for a decode instance.
        further_waiting: requests that wait and are not among these, since they wait for a prefill
            instance, or are too many.
        moves: the latest that have ended, oldest first.
        accuracy: of the forecasts; None before a request with a forecast has ended, and where
            nobody scores them.
        joules: energy that all instances have used since the start; None if nobody measures it.
        finishes: how forecasts of finish times came out; None before any has, and where none are
            made.
        outlook: the load ahead; None likewise.
        length_errors: of each source that forecast lengths of requests that have ended.
    """

    time: float
    step_seconds: float | None
    points: list[int]
    instances: list[Instance]
    requests: Requests
    further_waiting: int = 0
    moves: list[MoveReport] = []
    accuracy: Accuracy | None = None
    joules: float | None = None
    finishes: Finishes | None = None
    outlook: Outlook | None = None
    length_errors: list[LengthErrors] = []


logger = logging.getLogger("headway.serve")

Following = Callable[[], Awaitable[bytes | None]]


class _Look(Protocol):
    def snapshot(self) -> Snapshot: ...


class Source(Protocol):
    """What can be looked at again and again, as `LiveSnapshots` can."""

    about: About

    def look(self) -> _Look:
        """Look, in the event loop; what was seen becomes a snapshot in another thread."""
        ...


class SnapshotFeed:
    """Looks at a source while anybody watches, once for all ``watchers``."""

    def __init__(self, source: Source) -> None:
        self._source, self.about = source, source.about
        self.watchers = 0
        self._looking: asyncio.Task[None] | None = None
        self._newest: asyncio.Future[bytes | None] | None = None
        self._closed = False

    @contextmanager
    def watching(self) -> Iterator[Following]:
        """Watch while the body runs; yield what waits for the next snapshot.

        As JSON in one line; None: no more will come. Who is slow misses some.
        """
        self.watchers += 1
        if self._looking is None and not self._closed:
            self._looking = asyncio.get_running_loop().create_task(self._look())
        try:
            yield self._next
        finally:
            self.watchers -= 1
            if not self.watchers:
                self._stop()

    def close(self) -> None:
        """Let every watcher know that nothing comes any more."""
        self._closed = True
        self._stop()
        self._publish(None)

    async def _next(self) -> bytes | None:
        if self._newest is None:
            self._newest = asyncio.get_running_loop().create_future()
            if self._closed:
                self._newest.set_result(None)
        return await asyncio.shield(self._newest)

    def _publish(self, line: bytes | None) -> None:
        future, self._newest = self._newest, None
        if future is not None and not future.done():
            future.set_result(line)

    def _stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            try:
                self._publish(await asyncio.to_thread(_line, self._source.look().snapshot))
            except Exception:  # the next one may succeed
                logger.exception("a snapshot failed")
            due = max(due + self._source.about.seconds, loop.time())
            await asyncio.sleep(due - loop.time())


def _line(snapshot: Callable[[], Snapshot]) -> bytes:
    return msgspec.json.encode(snapshot())


def refuse_log(path: Path) -> None:
    """Make a log's folder, and raise now the `OSError` that `LogWriter` would raise."""
    if path.exists():
        raise _exists(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    refuse_unwritable(path)


class LogWriter:
    """Writes a gzip file of JSON lines: what is logged, and then a line a snapshot.

    Each line is a gzip member of its own, written at once: a process that is killed leaves a file
    that can be read to its last whole line, and a reader finds any line without those before.

    Raises:
        OSError: the file exists, or cannot be written.
    """

    def __init__(self, path: Path, about: About) -> None:
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError as error:
            raise _exists(path) from error
        self.write(msgspec.json.encode(about))

    def write(self, line: bytes) -> None:
        """Append a line; raises `OSError` where there is no room."""
        left = memoryview(gzip.compress(line + b"\n", mtime=0))
        while left:
            left = left[os.write(self._file, left) :]

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def __enter__(self) -> "LogWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _exists(path: Path) -> FileExistsError:
    return FileExistsError(f"{path} exists: delete it, or name another file")


_BLOCK = 1 << 16
_GZIP = 16 + zlib.MAX_WBITS
_LONGEST_LINE = 64 << 20


class LogError(ValueError):
    """A file that is no log, or a damaged one."""


class Log:
    """A log whose lines have all been read once.

    The ``times`` [n] are seconds from the first snapshot to each, ascending. Where each snapshot's
    line begins in the file, and the last one ends, are ``ends`` [n + 1]. The file of a killed
    process ``is_cut`` within a line.
    """

    def __init__(
        self, path: Path, about: About, times: list[float], ends: list[int], is_cut: bool
    ) -> None:
        self.path = path
        self.about = about
        self.times = times
        self.is_cut = is_cut
        self._ends = ends

    def packed(self, number: int) -> bytes:
        """Return a snapshot as JSON, packed by gzip, as it is in the file.

        Raises:
            IndexError: there is no such snapshot.
            OSError: the file cannot be read any more.
        """
        if not 0 <= number < len(self.times):
            raise IndexError(f"{self.path} has no snapshot {number}")
        begin, end = self._ends[number : number + 2]
        with self.path.open("rb") as file:
            return os.pread(file.fileno(), end - begin, begin)

    def snapshot(self, number: int) -> Snapshot:
        """Return a snapshot; raises as `packed` does."""
        return msgspec.json.decode(zlib.decompress(self.packed(number), _GZIP), type=Snapshot)


def read_log(path: Path) -> Log:
    """Read a log, to its last whole line.

    Raises:
        LogError: it does not exist, is empty, something else, or damaged.
        OSError: it cannot be read.
    """
    if not path.exists():
        raise LogError(f"{path} does not exist")
    times: list[float] = []
    about, last, end = None, 0.0, 0
    ends: list[int] = []
    decoder = msgspec.json.Decoder(Snapshot)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            raise LogError(f"{path} is empty: was it recorded with --record?")
        try:
            for end, line in _lines(file):
                ends.append(end)
                if about is None:
                    about = msgspec.json.decode(line, type=About)
                    continue
                time = decoder.decode(line).time
                # A clock that was set back must not stop the log until it has caught up.
                times.append(times[-1] + max(0.0, time - last) if times else 0.0)
                last = time
        except (zlib.error, msgspec.MsgspecError, UnicodeDecodeError) as error:
            if about is None:
                raise LogError(
                    f"{path} is not a log of `headway serve` or `headway simulate --record`"
                ) from error
            raise LogError(f"{path} is damaged after {len(times)} snapshots: {error}") from error
    if about is None or not times:
        raise LogError(f"{path} holds no snapshot: it was cut off before the first")
    return Log(path, about, times, ends, is_cut=end != size)


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield each line, with where it ends in the file; what is cut off at the end is left out."""
    rest, end = b"", 0
    while True:
        unpacking, line, read = zlib.decompressobj(_GZIP), b"", 0
        parts = []
        while not unpacking.eof:
            rest = rest or file.read(_BLOCK)
            if not rest:
                return
            read += len(rest)
            parts.append(unpacking.decompress(rest, _LONGEST_LINE))
            read -= len(unpacking.unconsumed_tail) + len(unpacking.unused_data)
            rest = unpacking.unconsumed_tail or unpacking.unused_data
            if sum(map(len, parts)) > _LONGEST_LINE:
                raise zlib.error("a line is too long")
        line = b"".join(parts)
        end += read
        yield end, line


@asynccontextmanager
async def recording(feed: SnapshotFeed, path: Path | None) -> AsyncIterator[None]:
    """Record a feed while the body runs; without a path, nothing.

    A file that cannot be written any more ends the recording, and nothing else.

    Raises:
        OSError: the file exists, or cannot be created.
    """
    if path is None:
        yield
        return
    with LogWriter(path, feed.about) as log:
        task = asyncio.get_running_loop().create_task(_record(feed, log, path))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])


async def _record(feed: SnapshotFeed, log: LogWriter, path: Path) -> None:
    with feed.watching() as following:
        while (line := await following()) is not None:
            writing = asyncio.ensure_future(asyncio.to_thread(log.write, line))
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                await asyncio.wait([writing])  # the file is closed next
                raise
            except OSError as error:
                logger.error("%s is recorded no further: %s", path, error.strerror or error)
                return
