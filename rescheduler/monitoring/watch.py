"""`headway watch`: what the running requests are expected to do, in a terminal."""

import math
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rescheduler.monitoring.finished_log import FinishedLog
from rescheduler.monitoring.forecast_quality import ForecastQuality, ScoredRequest
from rescheduler.monitoring.quality_exporter import QualityExporter
from rescheduler.telemetry.subscriber import TelemetrySubscriber
from rescheduler.telemetry.telemetry_view import TelemetryView

__all__ = ["screen", "summary_line", "watch"]

_ENDPOINT = "tcp://127.0.0.1:5557"
_WITHIN = 80
_RECENT = 6
_BESIDE_BARS = 57  # columns of the screen, at least
_LINE_SECONDS = 5.0
_OTHER_LINES = 13  # of the screen: headings, margins, the figures at the bottom


def watch(
    connect: str | list[str] = _ENDPOINT,
    bind: str | None = None,
    keys: Path | None = None,
    log: Path | None = None,
    prometheus_port: int | None = None,
    prometheus_host: str = "127.0.0.1",
    headless: bool = False,
    refresh_seconds: float = 0.5,
    for_seconds: float | None = None,
) -> None:
    """Show the forecasts of all running requests, and how accurate past ones were.

    In a terminal a live screen; into a pipe or a file a line every few seconds. Ctrl-C ends it,
    and so does SIGTERM.

    Args:
        connect: ZMQ endpoint of an engine's telemetry, or a list of several.
        bind: endpoint to bind instead, which engines connect to.
        keys: folder of keys created by `headway keys`, needed off the loopback.
        log: append every finished request and its forecasts to this file, for
            `headway evaluate recalibrate`.
        prometheus_port: also serve metrics for Prometheus on this port.
        prometheus_host: address the metrics are served on.
        headless: print lines also in a terminal.
        refresh_seconds: time between two updates of the screen.
        for_seconds: stop after this many seconds; run until Ctrl-C when not given.
    """
    if bind is not None and connect != _ENDPOINT:
        raise ValueError("give either endpoints to connect to or one to bind, not both")
    if not refresh_seconds > 0:
        raise ValueError(f"refresh_seconds must be above 0, not {refresh_seconds}")
    console = Console()
    quality, recent = ForecastQuality(), deque[ScoredRequest](maxlen=_RECENT)
    with ExitStack() as stack, suppress(KeyboardInterrupt):
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGTERM, signal.default_int_handler)
            stack.callback(signal.signal, signal.SIGTERM, before)
        finished_log = stack.enter_context(closing(FinishedLog(log))) if log else None
        subscriber = stack.enter_context(TelemetrySubscriber(connect, bind, keys))
        view, endpoints = subscriber.view, subscriber.endpoints
        if prometheus_port is not None:
            exporter = QualityExporter(view, quality, subscriber.lock)
            stack.enter_context(exporter.served(prometheus_port, prometheus_host))
        live = None
        if sys.stdout.isatty() and not console.is_dumb_terminal and not headless:
            live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))

        end = time.monotonic() + (math.inf if for_seconds is None else for_seconds)
        next_line = -math.inf
        while True:
            for scored in _newly_scored(subscriber, quality):
                recent.appendleft(scored)
                if finished_log:
                    finished_log.append(scored)
            now = time.monotonic()
            ending = now >= end
            if live:
                with subscriber.lock:  # but not while writing, which may block
                    shown = screen(view, quality, recent, endpoints, now, *console.size)
                live.update(shown, refresh=True)
            elif now >= next_line or ending:
                with subscriber.lock:
                    line = summary_line(view, quality, endpoints, now)
                print(line, flush=True)
                next_line = now + _LINE_SECONDS
            if ending:
                return
            time.sleep(max(0.0, min(refresh_seconds, end - now)))


def screen(
    view: TelemetryView,
    quality: ForecastQuality,
    recent: Iterable[ScoredRequest],
    endpoints: Sequence[str],
    now: float,
    width: int = 110,
    height: int = 50,
) -> RenderableType:
    """Return the whole screen.

    The bars take what the numbers leave of its width, and as many requests are shown as fit its
    height; those that ended last come newest first. ``now`` is on the view's clock.
    """
    parts: list[RenderableType] = []
    if view.instances:
        rows = max(3, height - _OTHER_LINES - _RECENT - len(view.instances))
        tables = _instances(view, now), _requests(view, width, rows), _recent(recent)
        parts += [part for table in tables for part in (table, Text())]
    else:
        parts.append(Text(_waiting(endpoints)))
    below = (
        (_figures(quality), ""),
        (_wrong_messages(view), "yellow"),
        (_alarm(quality), "bold red"),
    )
    return Group(*parts, *(Text(line, style=style) for line, style in below if line))


def summary_line(
    view: TelemetryView, quality: ForecastQuality, endpoints: Sequence[str], now: float
) -> str:
    """Return one line that says the same in short."""
    if view.instances:
        stale = sum(view.is_stale(key, now) for key in view.instances)
        gauges = [instance.gauges for instance in view.instances.values()]
        expected = sum(view.forecast(key)[1].mean().sum() for key in view.instances)
        said = (
            f"{len(gauges)} instances{f' ({stale} stale)' if stale else ''}, "
            f"running {sum(g.running for g in gauges)}, waiting {sum(g.waiting for g in gauges)}, "
            f"{expected:,.0f} tokens expected to come; {_figures(quality)}"
        )
    else:
        said = _waiting(endpoints)
    parts = [said, _wrong_messages(view), _alarm(quality)]
    return f"{time.strftime('%H:%M:%S')} " + "; ".join(part for part in parts if part)


def _newly_scored(subscriber: TelemetrySubscriber, quality: ForecastQuality) -> list[ScoredRequest]:
    finished = subscriber.take_finished()
    with subscriber.lock:  # the exporter reads the quality under it
        scored = [quality.add(request) for request in finished]
    return [request for request in scored if request is not None]


def _instances(view: TelemetryView, now: float) -> Table:
    gauges = {key: instance.gauges for key, instance in view.instances.items()}
    reckoned = any(one.prefill_budget is not None for one in gauges.values())
    columns = ["rank", "running", "waiting", "KV", *["prefill budget"] * reckoned, "step"]
    table = _table("instance", *columns, "last message")
    for key, one in gauges.items():
        instance, stale, budget = view.instances[key], view.is_stale(key, now), one.prefill_budget
        numbers = [str(key.rank), str(one.running), str(one.waiting), f"{one.kv_usage:.0%}"]
        numbers += ["" if budget is None else f"{budget:,.0f}"] * reckoned
        heard = f"{'STALE, ' if stale else ''}{now - instance.received:.1f} s ago"
        name, style = Text(_printable(key.name)), "yellow" if stale else ""
        table.add_row(name, *numbers, f"{instance.step:,}", heard, style=style)
    return table


def _requests(view: TelemetryView, width: int, rows: int) -> RenderableType:
    """Return the running requests, those expected to end first on top."""
    entries = []
    for key, instance in view.instances.items():
        names, forecast = view.forecast(key)
        low, median, high = forecast.quantile([0.1, 0.5, 0.9]).T
        ends = 1 - forecast.at(float(_WITHIN))
        numbers = np.stack([forecast.mean(), low, median, high, ends], axis=1).tolist()
        entries += [
            (mean, instance.requests[name].latest, interval)
            for name, (mean, *interval) in zip(names, numbers, strict=True)
        ]
    entries.sort(key=lambda entry: entry[0])
    shown = entries[:rows]
    if not shown:
        return Text("no request runs", style="dim")
    scale = _Scale(max(interval[2] for _, _, interval in shown), width - _BESIDE_BARS)
    table = _table("request", "prompt", "generated", "median", f"P(≤{_WITHIN})")
    table.add_column(f"80% interval, tokens\n{scale.ticks()}", no_wrap=True)
    for _, request, (low, median, high, ends) in shown:
        table.add_row(
            Text(_short(request.request_id)),
            f"{request.prompt_tokens:,}",
            f"{request.generated_tokens:,}",
            f"{median:,.0f}",
            f"{ends:.0%}",
            scale.bar(low, median, high),
        )
    more = len(entries) - len(shown)
    return Group(table, Text(f"and {more} more", style="dim")) if more else table


def _recent(recent: Iterable[ScoredRequest]) -> RenderableType:
    """Return how the forecasts of the last requests turned out, half-way through each."""
    table = _table("finished", "generated", "forecast", "came", "error", "ended by")
    for scored in recent:
        half = len(scored.generated) // 2
        forecast, came = scored.medians[half], scored.remaining[half]
        event = scored.finished.event
        table.add_row(
            Text(_short(event.request_id)),
            f"{scored.generated[half]:,.0f}",
            f"{forecast:,.0f}",
            f"{came:,.0f}",
            f"{forecast - came:+,.0f}",
            "max_tokens" if scored.cut else "itself",
        )
    return table if table.row_count else Text("no request has finished yet", style="dim")


class _Scale:
    """A logarithmic scale of tokens, the same for all bars."""

    def __init__(self, top: float, cells: int) -> None:
        self._top, self._cells = max(top, 10.0), min(max(cells, 8), 60)

    def ticks(self) -> str:
        """Return 0, 10, 100 ... where they are on the bars."""
        line = "0"
        for value in (10**power for power in range(1, 1 + int(math.log10(self._top)))):
            at = self._cell(value)
            if len(line) < at <= self._cells - len(str(value)):
                line = f"{line:<{at}}{value}"
        return line

    def bar(self, low: float, median: float, high: float) -> Text:
        """Return the interval as a line, with the median on it."""
        left, middle, right = (self._cell(tokens) for tokens in (low, median, high))
        line = f"{' ' * left}{'━' * (middle - left)}●{'━' * (right - middle)}"
        return Text(line, style="cyan")

    def _cell(self, tokens: float) -> int:
        share = math.log1p(min(tokens, self._top)) / math.log1p(self._top)
        return round(share * (self._cells - 1))


def _table(name: str, *numbers: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(name, no_wrap=True)
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=True)
    return table


def _figures(quality: ForecastQuality) -> str:
    figures = quality.figures()
    if figures is None:
        return "no forecast scored yet"
    held = ", ".join(f"{level}% held {share:.0%}" for level, share in figures.coverage().items())
    return (
        f"{quality.scored:,} requests scored; last {figures.requests}: median off by "
        f"{figures.mae():,.1f} tokens; intervals: {held}"
    )


def _alarm(quality: ForecastQuality) -> str:
    alarm = quality.alarm()
    return f"ALARM: {alarm}" if alarm else ""


def _wrong_messages(view: TelemetryView) -> str:
    counts = {
        "lost": view.lost,
        "malformed": view.malformed,
        "duplicated": view.duplicated,
        "outdated": view.outdated,
        "foreign (two engines of one name?)": view.foreign,
    }
    wrong = ", ".join(f"{count:,} {kind}" for kind, count in counts.items() if count)
    return f"messages: {wrong}" if wrong else ""


def _waiting(endpoints: Sequence[str]) -> str:
    return f"waiting for telemetry from {', '.join(endpoints)}"


def _short(request_id: str) -> str:
    """Return both ends of an id: what the client knows, and what makes it unique."""
    name = _printable(request_id)
    return name if len(name) <= 20 else f"{name[:11]}…{name[-8:]}"


def _printable(name: str) -> str:
    """Return a name from the wire without anything that steers a terminal."""
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in name)
