"""What `headway watch` shows, in a terminal and in a pipe."""

import io
import os
import pty
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
from published_telemetry import Engine, frames, publisher
from rich.console import Console
from test_forecast_quality import finished_requests, quality_of

from rescheduler.monitoring.finished_log import read_finished_log
from rescheduler.monitoring.forecast_quality import ForecastQuality, ScoredRequest
from rescheduler.monitoring.watch import screen, summary_line, watch
from rescheduler.telemetry.telemetry_view import TelemetryView

ENDPOINTS = ["tcp://127.0.0.1:5557"]


def rendered(
    view: TelemetryView,
    quality: ForecastQuality,
    now: float = 0.0,
    recent: list[ScoredRequest] | None = None,
    height: int = 50,
) -> str:
    console = Console(record=True, width=140, file=io.StringIO())
    console.print(screen(view, quality, recent or [], ENDPOINTS, now, 140, height))
    return console.export_text()


def view_of(engine: Engine, requests: int) -> TelemetryView:
    view = TelemetryView()
    for _ in range(requests):
        view.receive(frames(engine.start()), 0.0)
        engine.decode(10)
    view.receive(frames(engine.snapshot()), 0.0)
    return view


def line_with(text: str, shown: str) -> str:
    return next(line for line in shown.splitlines() if text in line)


def test_before_the_first_message_it_says_what_it_waits_for() -> None:
    shown = rendered(TelemetryView(), ForecastQuality())
    assert "waiting for telemetry from tcp://127.0.0.1:5557" in shown
    line = summary_line(TelemetryView(), ForecastQuality(), ENDPOINTS, 0.0)
    assert "waiting for telemetry from tcp://127.0.0.1:5557" in line


def test_running_requests_are_shown_soonest_first() -> None:
    engine = Engine()
    shown = rendered(view_of(engine, 3), ForecastQuality(), now=0.4)
    instance = line_with("gpu0", shown).split()
    assert instance == ["gpu0", "0", "3", "2", "25%", "30", "0.4", "s", "ago"]
    rows = [line for line in shown.splitlines() if line.startswith("request-")]
    # The curves' means are 30 tokens and one for each generated.
    assert [row.split()[0] for row in rows] == ["request-3", "request-2", "request-1"]
    name, prompt, generated, median, ends, bar = rows[0].split()
    assert (name, prompt, generated) == ("request-3", "7", "10")
    # Of e^(-h/40) at the edges 20 and 100, linear between.
    assert (median, ends) == ("36", "79%")
    assert bar.strip("━") == "●"
    assert "STALE" not in shown
    assert "no request has finished yet" in shown


def test_engines_that_reckon_a_prefill_budget_show_it() -> None:
    engine, view = Engine(), TelemetryView()
    snapshot = engine.snapshot()
    assert "prefill budget" not in rendered(view_of(engine, 1), ForecastQuality())
    tight = msgspec.structs.replace(snapshot.gauges, prefill_budget=-1_234.5)
    view.receive(frames(msgspec.structs.replace(snapshot, gauges=tight)), 0.0)
    shown = rendered(view, ForecastQuality())
    assert "prefill budget" in shown
    assert line_with("gpu0", shown).split()[5] == "-1,234"


def test_bars_share_one_scale() -> None:
    shown = rendered(view_of(Engine(), 3), ForecastQuality())
    medians = [row.index("●") for row in shown.splitlines() if row.startswith("request-")]
    ends = [row.rindex("━") for row in shown.splitlines() if row.startswith("request-")]
    assert medians == sorted(medians)
    assert ends == sorted(ends)
    assert max(ends) > min(ends)


def test_more_requests_than_lines_are_counted() -> None:
    shown = rendered(view_of(Engine(max_tokens=4_000), 40), ForecastQuality(), height=30)
    assert sum(line.startswith("request-") for line in shown.splitlines()) == 10
    assert "and 30 more" in shown


def test_a_silent_engine_is_marked() -> None:
    view = view_of(Engine(), 1)
    assert "STALE, 7.0 s ago" in line_with("gpu0", rendered(view, ForecastQuality(), now=7.0))
    assert "1 instances (1 stale)" in summary_line(view, ForecastQuality(), ENDPOINTS, 7.0)


def test_an_idle_engine_is_shown() -> None:
    shown = rendered(view_of(Engine(), 0), ForecastQuality())
    assert "gpu0" in shown
    assert "no request runs" in shown


def test_finished_requests_show_their_error_and_a_shift_its_alarm() -> None:
    quality = ForecastQuality()
    scored = [quality.add(request) for request in finished_requests(60, wrong_by=5.0)]
    recent = [request for request in scored if request is not None][:2]
    view = view_of(Engine(), 1)
    shown = rendered(view, quality, recent=recent)
    row = line_with("request-0", shown).split()
    half = len(recent[0].generated) // 2
    assert row[1:4] == [
        f"{recent[0].generated[half]:.0f}",
        f"{recent[0].medians[half]:.0f}",
        f"{recent[0].remaining[half]:.0f}",
    ]
    assert "ALARM: the 80% intervals are too narrow" in shown
    assert "60 requests scored" in shown
    line = summary_line(view, quality, ENDPOINTS, 0.0)
    assert "ALARM: the 80% intervals are too narrow" in line
    assert "\n" not in line
    assert "ALARM" not in rendered(view, quality_of(finished_requests(60)))


def test_wrong_messages_are_counted() -> None:
    view = view_of(Engine(epoch=2), 1)
    view.receive([b"junk"], 0.0)
    view.receive(frames(Engine(epoch=1).snapshot()), 0.0)
    shown = line_with("messages:", rendered(view, ForecastQuality()))
    assert "1 malformed" in shown
    assert "1 outdated" in shown


def test_names_from_the_wire_cannot_steer_the_terminal() -> None:
    engine, wild = Engine(), "[red]\x1b[2J\n[/x]"
    engine.start()
    engine.running[wild] = msgspec.structs.replace(engine.running["request-1"], request_id=wild)
    engine.generated[wild] = 0
    shown = rendered(view_of(engine, 0), ForecastQuality())
    assert "\x1b" not in shown
    assert "[red]\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}[/x]" in shown


@contextmanager
def publishing_engine() -> Iterator[str]:
    """An engine that starts and ends requests all the time; yields its endpoint."""
    engine, done = Engine(), threading.Event()
    with publisher(bind=True) as sender:
        endpoint = sender.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)

        def publish() -> None:
            while not done.is_set():
                for message in (engine.start(), engine.start(), engine.snapshot()):
                    engine.decode(2)
                    sender.send_multipart(frames(message))
                sender.send_multipart(frames(engine.finish()))
                if len(engine.running) > 20:
                    sender.send_multipart(frames(engine.finish()))
                time.sleep(0.02)

        thread = threading.Thread(target=publish)
        thread.start()
        try:
            yield endpoint.rstrip(b"\0").decode()
        finally:
            done.set()
            thread.join()


@contextmanager
def signal_when(
    condition: Callable[[], bool], number: signal.Signals = signal.SIGINT
) -> Iterator[None]:
    """Send this process a signal once the condition holds."""
    # As in a terminal: where the tests run in the background, Ctrl-C is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    over = threading.Event()

    def wait() -> None:
        while not over.wait(0.02):
            if condition():
                os.kill(os.getpid(), number)
                return

    waiter = threading.Thread(target=wait)
    waiter.start()
    try:
        yield
    finally:
        over.set()
        waiter.join()
        signal.signal(signal.SIGINT, before)


def test_a_pipe_gets_lines_and_the_log_every_finished_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "finished.jsonl"
    monkeypatch.setattr("rescheduler.monitoring.watch._LINE_SECONDS", 0.1)
    shown: list[str] = []

    def enough() -> bool:
        shown.append(capsys.readouterr().out)
        return "1 instances, running" in shown[-1] and len(list(read_finished_log(log))) > 5

    with publishing_engine() as endpoint, signal_when(enough):
        watch(endpoint, log=log, prometheus_port=0, refresh_seconds=0.1)
    logged = list(read_finished_log(log))
    assert len(logged) > 5
    assert len({request.request_id for request in logged}) == len(logged)


def test_a_terminal_gets_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    shown = bytearray()

    def read() -> None:
        try:
            while chunk := os.read(ours, 65_536):
                shown.extend(chunk)
        except OSError:  # the other end was closed
            return

    reader = threading.Thread(target=read)
    reader.start()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(theirs, "w") as terminal, publishing_engine() as endpoint:
        monkeypatch.setattr(sys, "stdout", terminal)
        with signal_when(lambda: b"request-" in shown):
            watch(endpoint, refresh_seconds=0.1)
        monkeypatch.undo()
    reader.join()
    os.close(ours)
    text = shown.decode()
    assert "gpu0" in text
    assert "request-" in text
    assert text.index("\x1b[?1049h") < text.index("\x1b[?1049l")  # the screen it found is back


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_quietly_and_so_does_a_service_manager(
    capsys: pytest.CaptureFixture[str], sent: signal.Signals
) -> None:
    shown: list[str] = []

    def begun() -> bool:
        shown.append(capsys.readouterr().out)
        return "\n" in shown[-1]

    with signal_when(begun, sent):
        watch("tcp://127.0.0.1:1", refresh_seconds=0.1)
    captured = capsys.readouterr()
    assert captured.err == ""
    (line,) = "".join([*shown, captured.out]).splitlines()
    assert line.endswith("waiting for telemetry from tcp://127.0.0.1:1")


def test_mistakes_are_reported_before_anything_is_shown(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not both"):
        watch("tcp://127.0.0.1:1", bind="tcp://127.0.0.1:2")
    with pytest.raises(ValueError, match="refresh_seconds"):
        watch(refresh_seconds=0.0)
    with pytest.raises(ValueError, match="headway keys"):
        watch("tcp://10.0.0.1:5557")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match="the port is in use"):
            watch(prometheus_port=taken.getsockname()[1], for_seconds=0.0)
    diary = tmp_path / "diary.txt"
    diary.write_text("a diary\n")
    with pytest.raises(ValueError, match="no log of finished requests"):
        watch(log=diary)
