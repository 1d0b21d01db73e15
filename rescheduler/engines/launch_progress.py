"""How far each server of a launch is, shown on standard error."""

import sys
import time
from pathlib import Path
from typing import NamedTuple, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rescheduler.engines.launch_process import Stage, end_of_log

_READ_AT_END = 2_000


class _Row(NamedTuple):
    stage: Stage
    since: float
    seconds: float


class LaunchProgress:
    """Shows on standard error the stage of each server, and the end of its log while it loads."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._rows: dict[str, _Row] = {}
        console = Console(stderr=True)
        self._live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(console=console, get_renderable=self._table, refresh_per_second=2)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.finish()

    def finish(self) -> None:
        """Stop updating the table; later stages are printed as lines."""
        if self._live:
            self._live.stop()
            self._live = None

    def report(self, name: str, stage: Stage) -> None:
        """Record that a server has reached a stage."""
        now = time.monotonic()
        took = now - self._rows[name].since if name in self._rows else 0.0
        self._rows[name] = _Row(stage, now, took)
        if self._live is None:
            after = f" after {took:.0f} s" if stage in ("ready", "stopped") else ""
            where = f", log {self._logs / name}.log" if stage == "starting" else ""
            print(f"{time.strftime('%H:%M:%S')} {name} {stage}{after}{where}", file=sys.stderr)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2, 0, 0), expand=True)
        for width in (max(map(len, self._rows), default=0), len("starting"), len("9999 s")):
            table.add_column(no_wrap=True, min_width=width)
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1, style="dim")
        for name, (stage, since, seconds) in self._rows.items():
            style, last = ("green" if stage == "ready" else ""), ""
            if stage == "starting":
                seconds, last = time.monotonic() - since, self._last_line(name)
            table.add_row(name, Text(stage, style=style), f"{seconds:.0f} s", Text(last))
        return table

    def _last_line(self, name: str) -> str:
        lines = end_of_log(self._logs / f"{name}.log", _READ_AT_END).split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        return "".join(letter for letter in last if letter.isprintable())
