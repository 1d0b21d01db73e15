"""The log that the page replays: whole, cut off, damaged, or none at all."""

import asyncio
import gzip
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_cluster import MadeUpCluster

from rescheduler.page.snapshot import (
    About,
    Log,
    LogError,
    LogWriter,
    Requests,
    Snapshot,
    SnapshotFeed,
    read_log,
    recording,
)

ABOUT = About(source="proxy", title="m", routing="jsq_load", migration="", seconds=0.5)

VALUES: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    float: st.floats(0, 1e9),
    int: st.integers(-1, 2**40),
    str: st.text(max_size=8),
    NoneType: st.none(),
}


@st.composite
def requests(draw: st.DrawFn) -> Requests:
    n = draw(st.integers(0, 3))
    of = {field.name: get_args(field.type)[0] for field in msgspec.structs.fields(Requests)}
    return Requests(
        **{name: draw(st.lists(VALUES[kind], min_size=n, max_size=n)) for name, kind in of.items()}
    )


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a type that a snapshot is made of."""
    if kind is Requests:
        return requests()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = msgspec.structs.fields(kind)
        return st.builds(kind, **{field.name: values(field.type) for field in fields})
    arguments, origin = get_args(kind), get_origin(kind)
    if origin is list:
        return st.lists(values(arguments[0]), max_size=3)
    if origin is Literal:
        return st.sampled_from(arguments)
    return st.one_of(*map(values, arguments)) if arguments else VALUES[kind]


def write(path: Path, written: list[Snapshot]) -> Path:
    path.unlink(missing_ok=True)
    with LogWriter(path, ABOUT) as log:
        for snapshot in written:
            log.write(msgspec.json.encode(snapshot))
    return path


def content(log: Log) -> list[Snapshot]:
    return [log.snapshot(i) for i in range(len(log.times))]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs") / "a.jsonl.gz"


def made_up(count: int) -> list[Snapshot]:
    source = MadeUpCluster(2, 3, 4096)
    return [source.look().snapshot() for _ in range(count)]


@given(written=st.lists(values(Snapshot), min_size=1, max_size=3))
def test_what_is_written_is_read(path: Path, written: list[Snapshot]) -> None:
    log = read_log(write(path, written))
    assert content(log) == written
    assert log.about == ABOUT
    assert not log.is_cut
    assert log.times[0] == 0
    assert log.times == sorted(log.times)


def test_it_is_what_other_programs_take_for_gzip_and_json_lines(path: Path) -> None:
    written = made_up(3)
    write(path, written)
    lines = gzip.decompress(path.read_bytes()).splitlines()
    assert len(lines) == 4
    assert msgspec.json.decode(lines[2], type=Snapshot) == written[1]


def test_logs_from_before_figures_were_recorded_are_read(path: Path) -> None:
    (written,) = made_up(1)
    line = msgspec.to_builtins(written)
    for name in ("accuracy", "joules", "finishes", "outlook"):
        del line[name]
    for instance in line["instances"]:
        del instance["step_seconds"]
    path.unlink(missing_ok=True)
    with LogWriter(path, ABOUT) as log:
        log.write(msgspec.json.encode(line))
    (read,) = content(read_log(path))
    assert read.accuracy is read.joules is read.finishes is read.outlook is None
    assert [one.step_seconds for one in read.instances] == [None, None]
    assert read.requests == written.requests


@given(data=st.data())
def test_a_killed_process_leaves_what_it_had_written(path: Path, data: st.DataObject) -> None:
    written = made_up(4)
    whole = write(path, written).read_bytes()
    cut = data.draw(st.integers(1, len(whole) - 1))
    path.write_bytes(whole[:cut])
    try:
        log = read_log(path)
    except LogError as error:
        assert "no snapshot" in str(error)
        assert cut < len(whole) / 2
        return
    read = content(log)
    assert read == written[: len(read)]
    assert log.is_cut or len(read) < 4


@given(data=st.data())
def test_damage_is_an_error_or_does_no_harm(path: Path, data: st.DataObject) -> None:
    written = made_up(3)
    whole = bytearray(write(path, written).read_bytes())
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole)
    try:
        read = content(read_log(path))
    except LogError as error:
        assert str(path) in str(error)
        return
    assert read == written[: len(read)]


@pytest.mark.parametrize(
    ("written", "says"),
    [
        (b"", "is empty"),
        (b"time,load\n0,1\n", "is not a log"),
        (gzip.compress(b"not JSON\n", mtime=0), "is not a log"),
        (gzip.compress(b'{"format":"another"}\n', mtime=0), "is not a log"),
        (
            gzip.compress(msgspec.json.encode(ABOUT).replace(b'n":1', b'n":2'), mtime=0),
            "is not a log",
        ),
        (gzip.compress(msgspec.json.encode(ABOUT), mtime=0), "holds no snapshot"),
        (
            gzip.compress(msgspec.json.encode(ABOUT), mtime=0)
            + gzip.compress(b'{"time":1}\n', mtime=0),
            "damaged after 0 snapshots",
        ),
    ],
    ids=["empty", "csv", "text", "another", "version", "headless", "damaged"],  # gzip has the time
)
def test_files_that_are_no_logs(path: Path, written: bytes, says: str) -> None:
    path.write_bytes(written)
    with pytest.raises(LogError, match=says):
        read_log(path)


def test_a_line_that_unpacks_to_more_than_any_snapshot_is_refused(path: Path) -> None:
    bomb = gzip.compress(b" " * (80 << 20), 1)
    path.write_bytes(gzip.compress(msgspec.json.encode(ABOUT)) + bomb)
    with pytest.raises(LogError, match="too long"):
        read_log(path)


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="different lengths"):
        msgspec.json.decode(b'{"number":[1]}', type=Requests)


async def test_recording_is_of_what_the_page_would_show(tmp_path: Path) -> None:
    path = tmp_path / "recorded.jsonl.gz"
    feed = SnapshotFeed(MadeUpCluster(2, 3, 4096, seconds=0.001))
    async with recording(feed, path):
        async with asyncio.timeout(60):
            while path.stat().st_size < 4000:
                await asyncio.sleep(0.001)
    assert feed.watchers == 0
    log = read_log(path)
    assert len(log.times) >= 2
    assert log.about == feed.about
    assert not log.is_cut
    assert path.stat().st_mode & 0o077 == 0, "others cannot read the names of requests"
    with pytest.raises(FileExistsError, match="delete it, or name another"):
        async with recording(feed, path):
            pass
