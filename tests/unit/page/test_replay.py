"""The logs that the page replays: whole, cut off, damaged, or none at all."""

import asyncio
import gzip
import json
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import yaml
from checked_commands import exit_status
from fuzzing import structs
from hypothesis import given
from hypothesis import strategies as st
from made_up_cluster import MadeUpCluster

from rescheduler.page.snapshot import (
    About,
    Accuracy,
    Log,
    LogError,
    LogWriter,
    Phase,
    Requests,
    Snapshot,
    SnapshotFeed,
    read_log,
    recording,
)

ABOUT = About(source="proxy", title="m", routing="jsq_load", migration="", seconds=0.5)


@st.composite
def requests(draw: st.DrawFn) -> Requests:
    n = draw(st.integers(0, 3))
    kinds: dict[Any, st.SearchStrategy[Any]] = {int: st.integers(-1, 2**40), str: st.text()}
    of = {field.name: get_args(field.type)[0] for field in msgspec.structs.fields(Requests)}
    return Requests(
        **{name: draw(st.lists(kinds[kind], min_size=n, max_size=n)) for name, kind in of.items()}
    )


SNAPSHOTS = structs(
    Snapshot,
    time=st.floats(0, 1e9),
    requests=requests(),
    accuracy=st.none() | structs(Accuracy),
    **dict.fromkeys(("name", "reason"), st.text(max_size=8)),
)


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


@given(written=st.lists(SNAPSHOTS, min_size=1, max_size=3))
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
    for name in ("accuracy", "joules", "finishes", "outlook", "length_errors"):
        del line[name]
    for instance in line["instances"]:
        del instance["step_seconds"]
    path.unlink(missing_ok=True)
    with LogWriter(path, ABOUT) as log:
        log.write(msgspec.json.encode(line))
    (read,) = content(read_log(path))
    assert read.accuracy is read.joules is read.finishes is read.outlook is None
    assert read.length_errors == []
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


SMALL = {
    "cluster": {"instances": 2, "slots": 4, "kv_capacity": 2000},
    "trace": {"name": "geometric", "requests": 80, "mean_prompt": 50, "mean_output": 40.0},
    "arrivals": {"kind": "poisson", "rate": 20.0},
    "clock": "independent",
    "forecast": {"name": "kaplan_meier"},
    "policies": ["round_robin"],
    "migration": {"planners": ["none", "survival"]},
    "seeds": 2,
}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return MadeUpCluster(2, 3, 4096).record(tmp_path / "a.jsonl.gz")


def get(url: str, token: str = "") -> tuple[int, bytes]:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@contextmanager
def replaying(command: list[str], log: Path, beside: Path) -> Iterator[tuple[str, str]]:
    """Run the command; yield the address, and the token."""
    process = subprocess.Popen(
        [*command, "demo", "--replay", str(log), str(beside), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        said = [process.stdout.readline() for _ in range(3)]
        assert said[-1].startswith("see it: http://127.0.0.1:"), said
        url, _, token = said[-1].split()[-1].partition("/ui#token=")
        yield url, token
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
        assert (process.returncode, errors) == (0, "")
    finally:
        process.kill()
        process.wait()


def test_two_logs_are_served_to_who_has_the_token(headway_command: list[str], log: Path) -> None:
    with replaying(headway_command, log, log) as (url, token):
        with urllib.request.urlopen(f"{url}/ui") as response:
            assert "default-src 'none'" in response.headers["Content-Security-Policy"]
        assert get(f"{url}/admin/page")[0] == 401
        assert get(f"{url}/admin/snapshots/0/0")[0] == 401
        page = json.loads(get(f"{url}/admin/page", token)[1])
        assert page["shows"] == "replay"
        assert [shown["times"] for shown in page["logs"]] == [[0.0, 0.5, 1.0]] * 2
        status, packed = get(f"{url}/admin/snapshots/1/2", token)
        assert status == 200
        assert msgspec.json.decode(gzip.decompress(packed), type=Snapshot).time == 1.5
        for path in ("2/0", "0/3", "0/99999999"):
            assert get(f"{url}/admin/snapshots/{path}", token)[0] == 404


def test_mistakes_are_said_in_a_line(
    tmp_path: Path, log: Path, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, other = tmp_path / "empty", tmp_path / "other.csv"
    empty.touch()
    other.write_text("a,b\n1,2\n")
    for arguments, says in (
        ([empty], "is empty: was it recorded with --record?"),
        ([other], "is not a log of `headway serve` or `headway simulate --record`"),
        ([tmp_path / "none"], "none does not exist"),
        ([log, empty], "is empty: was it recorded with --record?"),
        ([log, "--port", "70000"], "a port is a number from 0 to 65535"),
        ([log, log, log], "--replay shows one log or two, not 3"),
        (
            ["--config", small, "--record", tmp_path / "a.gz", "--record-every", "0"],
            "--record-every must be above 0 seconds",
        ),
    ):
        verb = ["simulate"] if small in arguments else ["demo", "--replay"]
        assert exit_status(*verb, *arguments) == 1
        errors = capsys.readouterr().err
        assert says in errors
        assert errors.count("\n") == 1


def test_simulations_are_recorded_as_they_are_without(
    tmp_path: Path, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def simulated(*more: str | Path) -> dict[str, Any]:
        written = tmp_path / "figures.json"
        assert exit_status("simulate", "--config", small, "--json", written, *more) == 0
        figures: dict[str, Any] = json.loads(written.read_text())
        return {name: value for name, value in figures.items() if name != "_about"}

    record = tmp_path / "logs" / "run.jsonl.gz"
    recorded = simulated("--record", record, "--record-every", "0.02")
    printed = capsys.readouterr().out
    assert recorded == simulated()
    paths = sorted(record.parent.iterdir())
    assert len(paths) == len(recorded) == 2
    for path in paths:
        assert f"wrote {path}" in printed
        log = read_log(path)
        assert log.about.source == "simulation"
        assert log.times[:3] == [0.0, 0.02, 0.04]
        seen = [log.snapshot(i) for i in range(len(log.times))]
        numbers = {number for snapshot in seen for number in snapshot.requests.number}
        assert numbers <= set(range(80))
        assert len(numbers) > 40
        assert all(one.finishes is one.outlook is None for one in seen), "nobody forecasts them"
        for snapshot in seen:
            columns = snapshot.requests
            for g, instance in enumerate(snapshot.instances):
                held = sum(
                    prompt + generated
                    for at, prompt, generated in zip(
                        columns.instance, columns.prompt, columns.generated, strict=True
                    )
                    if at == g
                )
                assert instance.kv_tokens == held
                assert len(instance.ahead) == len(snapshot.points) > 0
            waits = [phase == Phase.WAITING for phase in columns.phase]
            assert waits == [at < 0 for at in columns.instance]
        steps = [one.step_seconds for snapshot in seen for one in snapshot.instances]
        assert any(steps)
        assert all(step is None or step > 0 for step in steps)
        joules = [snapshot.joules for snapshot in seen]
        assert joules == sorted(joules)
        figure = recorded[log.about.title]["energy"]
        assert 0.8 * figure < joules[-1] < 1.2 * figure  # of both seeds, the log is of the first
        moves = {(move.number, move.time) for snapshot in seen for move in snapshot.moves}
        assert bool(moves) == (log.about.migration == "survival")
