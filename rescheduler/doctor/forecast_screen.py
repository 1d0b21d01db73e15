"""What the running requests of an engine are expected to do, on one screen."""

import math

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rescheduler.telemetry.telemetry_view import TelemetryView

_WITHIN = 80
_BESIDE_BARS = 57  # columns of the screen, at least
_OTHER_LINES = 7  # of the screen: headings, what is left out, the prompt of the shell


def forecast_screen(view: TelemetryView, width: int, height: int) -> RenderableType:
    """Return the whole screen.

    The bars take what the numbers leave of its width, and as many requests are shown as fit its
    height.
    """
    rows = max(3, height - _OTHER_LINES - len(view.instances))
    return Group(_instances(view), Text(), _requests(view, width, rows))


def _instances(view: TelemetryView) -> Table:
    gauges = {key: instance.gauges for key, instance in view.instances.items()}
    reckoned = any(one.prefill_budget is not None for one in gauges.values())
    columns = ["rank", "running", "waiting", "KV", *["prefill budget"] * reckoned, "step"]
    table = _table("instance", *columns)
    for key, one in gauges.items():
        budget = one.prefill_budget
        numbers = [str(key.rank), str(one.running), str(one.waiting), f"{one.kv_usage:.0%}"]
        numbers += ["" if budget is None else f"{budget:,.0f}"] * reckoned
        table.add_row(Text(_printable(key.name)), *numbers, f"{view.instances[key].step:,}")
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


def _short(request_id: str) -> str:
    """Return both ends of an id: what the client knows, and what makes it unique."""
    name = _printable(request_id)
    return name if len(name) <= 20 else f"{name[:11]}…{name[-8:]}"


def _printable(name: str) -> str:
    """Return a name from the wire without anything that steers a terminal."""
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in name)
