"""`headway serve --trace`: what it writes, `headway advise` reads; whatever happens to the file."""

import asyncio
import os
import resource
import signal
from contextlib import closing
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from chosen_ports import free_port
from hypothesis import given
from hypothesis import strategies as st
from running_command import next_line, running
from scripted_cluster import PROMPT, Cluster, until

from data_collection.workload.arrivals import LONGEST
from rescheduler.engines.deployment import DeploymentError
from rescheduler.placement.placeable import Placeable
from rescheduler.proxy import trace_writer
from rescheduler.proxy.trace_writer import HEADER, TraceWriter
from rescheduler.simulator.workloads.trace_files import TraceFile

Rows = list[tuple[float, int, int]]

MB = 1 << 20


def rows_of(path: Path) -> Rows:
    """Requests of a file, as simulations read them: arrival after the first, lengths."""
    trace = TraceFile(path)
    blocks = list(trace.blocks(np.random.default_rng(0)))
    return [
        (float(arrival), int(prompt), int(output))
        for block in blocks
        for arrival, prompt, output in zip(block.arrival, block.prompt, block.output, strict=True)
    ]


def request_of(prompt: int, output: int) -> Placeable:
    request = Placeable("")
    request.was_counted(prompt, output)
    return request


def write(writer: TraceWriter, *lengths: tuple[int, int]) -> None:
    """Write requests that have arrived and ended, one after the other."""
    for prompt, output in lengths:
        request = request_of(prompt, output)
        writer.began(request)
        writer.ended(request, "ok", "c")
    writer.flush()


lengths = st.tuples(st.integers(1, 5000), st.integers(1, 5000))


@given(st.lists(lengths, min_size=1, max_size=20), st.data())
def test_requests_are_written_in_the_order_of_arrival_whenever_they_end(
    tmp_path_factory: pytest.TempPathFactory, given: list[tuple[int, int]], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.csv"
    now = 1_700_000_000.0
    requests = [request_of(*one) for one in given]
    with closing(TraceWriter(path, MB, lambda: now)) as writer:
        waiting = list(requests)
        running: list[Placeable] = []
        while waiting or running:
            if waiting and (not running or data.draw(st.booleans())):
                running.append(waiting.pop(0))
                writer.began(running[-1])
                now += 0.25
            else:
                ended = running.pop(data.draw(st.integers(0, len(running) - 1)))
                writer.ended(ended, "ok", "client")
                writer.flush()
    assert rows_of(path) == [(0.25 * i, *one) for i, one in enumerate(given)]


@pytest.mark.parametrize("seconds", [3600.0, 0.0005])
def test_a_quiet_proxy_and_a_busy_one_leave_no_doubt_of_the_unit_of_time(
    tmp_path: Path, seconds: float
) -> None:
    path, times = tmp_path / "trace.csv", count(1_800_000_000.0, seconds)
    with closing(TraceWriter(path, MB, lambda: next(times))) as writer:
        write(writer, *[(1, 2)] * 20)
    assert rows_of(path)[-1][0] == pytest.approx(19 * seconds, abs=1e-5)


def test_lengths_that_readers_refuse_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    with closing(TraceWriter(path, MB)) as writer:
        write(writer, (1, 0), (0, 1), (LONGEST + 1, 1), (1, LONGEST + 1), (LONGEST, LONGEST))
        for outcome, request in (
            ("failed", request_of(5, 5)),
            ("cut", request_of(5, 5)),
            ("ok", Placeable("", prompt_tokens=5, _generated=5)),  # its prompt is a guess
            ("ok", Placeable("", prompt_tokens=5, _generated=5, several=True)),
        ):
            writer.began(request)
            writer.ended(request, outcome, "c")
        writer.flush()
    assert rows_of(path) == [(0.0, LONGEST, LONGEST)]


def test_a_file_is_continued_behind_what_a_crash_has_left_and_a_clock_that_was_set_back(
    tmp_path: Path,
) -> None:
    path = tmp_path / "trace.csv"
    with closing(TraceWriter(path, MB, lambda: 1000.5)) as writer:
        write(writer, (3, 4))
    with path.open("a") as file:
        file.write("1001.5,12,3")  # its end is missing
    with closing(TraceWriter(path, MB, lambda: 900.0)) as writer:
        write(writer, (5, 6))
    assert rows_of(path) == [(0.0, 3, 4), (0.0, 5, 6)]
    path.write_text(HEADER[:7])
    with closing(TraceWriter(path, MB)) as writer:
        write(writer, (7, 8))
    assert rows_of(path) == [(0.0, 7, 8)]


def test_a_tail_without_a_line_is_removed_however_long_it_is(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    for tail in (b"\0" * 100, b"\0" * 5000, b"\0" * 200_000):
        with closing(TraceWriter(path, MB, lambda: 1000.5)) as writer:
            write(writer, (3, 4))
        whole = path.read_bytes()
        path.write_bytes(whole + tail)
        with closing(TraceWriter(path, MB, lambda: 1001.5)) as writer:
            assert path.read_bytes() == whole
            write(writer, (5, 6))
        assert rows_of(path) == [(0.0, 3, 4), (1.0, 5, 6)]
        path.unlink()


@pytest.mark.parametrize("arrival", ["nan", "inf", "1e300", "99999999999.000000", "-1.000000", ""])
def test_a_last_line_that_is_no_request_of_the_past_is_refused(
    arrival: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace.csv"
    text = f"{HEADER}1000.000000,3,4,c\n{arrival},3,4,c\n"
    path.write_text(text)
    with pytest.raises(
        DeploymentError, match=r"last line of .* is no request, or none of the past"
    ):
        TraceWriter(path, MB, lambda: 2000.0)
    assert path.read_text() == text


def test_one_that_runs_for_minutes_holds_back_no_other(tmp_path: Path) -> None:
    path, now = tmp_path / "trace.csv", 1000.0
    long = request_of(9, 9)
    with closing(TraceWriter(path, MB, lambda: now)) as writer:
        writer.began(long)
        write(writer, (1, 1))
        assert path.read_text() == HEADER
        now = 1301.0
        write(writer, (2, 2))
        assert rows_of(path) == [(0.0, 1, 1), (301.0, 2, 2)]
        writer.ended(long, "ok", "c")
        writer.flush()
    assert rows_of(path)[-1] == (301.0, 9, 9)


def test_a_second_writer_and_a_file_of_another_kind_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    with closing(TraceWriter(path, MB)) as writer:
        with pytest.raises(DeploymentError, match="is written by another proxy"):
            TraceWriter(path, MB)
        write(writer, (1, 2))
    assert path.stat().st_mode & 0o077 == 0, "who came when concerns nobody else"
    other = tmp_path / "notes.txt"
    other.write_text("notes\n" * 20)
    with pytest.raises(DeploymentError, match="is not a trace"):
        TraceWriter(other, MB)
    assert other.read_text() == "notes\n" * 20
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DeploymentError, match="no file that could be continued"):
        TraceWriter(tmp_path / "pipe", MB)


def test_it_stops_at_its_size_with_whole_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, most = tmp_path / "trace.csv", 1000
    with closing(TraceWriter(path, most)) as writer:
        write(writer, *[(1, 2)] * 100)
        write(writer, (1, 2))
    assert most - 50 < path.stat().st_size <= most
    assert {row[1:] for row in rows_of(path)} == {(1, 2)}
    assert caplog.text.count("as large as --trace-mb allows") == 1


def test_a_full_disk_leaves_whole_lines_and_ends_only_the_writing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.csv"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with closing(TraceWriter(path, MB)) as writer:
            write(writer, (1, 2))
            size = path.stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, before[1]))
            write(writer, (3, 4), (5, 6))  # the first of them would be cut in two
            write(writer, (7, 8))
            assert path.stat().st_size == size
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert rows_of(path) == [(0.0, 1, 2)]
    assert caplog.text.count("is written no further") == 1


def test_a_request_that_runs_for_very_long_holds_back_a_bounded_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_writer, "_MOST_HELD", 3)
    path, times = tmp_path / "trace.csv", count(10.0, 1.0)
    long = request_of(9, 9)
    with closing(TraceWriter(path, MB, lambda: next(times))) as writer:
        writer.began(long)
        write(writer, (1, 1), (2, 2), (3, 3))
        assert len(rows_of(path)) == 3
        writer.ended(long, "ok", "c")
        writer.flush()
    assert rows_of(path) == [(0.0, 1, 1), (1.0, 2, 2), (2.0, 3, 3), (2.0, 9, 9)]


async def test_a_proxy_writes_lengths_and_nothing_that_clients_said(
    it: Cluster, tmp_path: Path
) -> None:
    path = tmp_path / "trace.csv"
    with closing(TraceWriter(path, MB)) as writer:
        it.proxy.trace_writer = writer
        async with writer.writing():
            slow = asyncio.create_task(it.answered(60))
            await until(lambda: bool(it.requests()))
            await it.answered(20, prompt="One two three")
            assert (await it.read({"model": "nobody", "prompt": "a"}))[0] == 404
            await slow
            await it.idle()
    longer, shorter = (len(it.tokenizer.encode(text).ids) for text in (PROMPT, "One two three"))
    assert [row[1:] for row in rows_of(path)] == [(longer, 60), (shorter, 20)]
    first, second = path.read_text().splitlines()[1:]
    (client,) = {line.split(",")[3] for line in (first, second)}
    assert len(client) == 16
    assert "127.0.0.1" not in path.read_text()


@pytest.mark.usefixtures("smollm2")
def test_the_command_refuses_a_file_that_another_proxy_writes(
    headway_command: list[str], tmp_path: Path
) -> None:
    config, path = tmp_path / "deployment.yaml", tmp_path / "traces" / "trace.csv"
    config.write_text(
        "model: smollm2\ninstances: [{name: d, role: decode, url: 'http://127.0.0.1:"
        f"{free_port()}'}}]\nproxy: {{port: 0, admin_port: 0}}\n"
    )
    with running(headway_command, "serve", config, "--trace", str(path)) as process:
        assert next_line(process).startswith("serving on ")
        with running(headway_command, "serve", config, "--trace", str(path)) as second:
            _, said = second.communicate()
            assert second.returncode == 1
            assert said == (
                f"headway serve: --trace: {path} is written by another proxy; name another file\n"
            )
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert f"{path}: 0 requests" in said
    assert path.read_text() == HEADER
