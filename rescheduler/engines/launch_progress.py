"""Progress of a launch: a live table in a terminal, lines elsewhere."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rescheduler.engines.server_group import Stage

__all__ = ["LaunchProgress"]

_READ_AT_END = 2_000


@dataclass
class _Row:
    stage: Stage
    since: float
    seconds: float = 0.0


class LaunchProgress:
    """Shows the stage of each server on standard error.

    Args:
        logs: folder of the servers' logs; their last lines are shown while they load.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._rows: dict[str, _Row] = {}
        console = Console(stderr=True)
        self._live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(
                console=console, get_renderable=self._table, refresh_per_second=2, transient=False
            )

    def __enter__(self) -> "LaunchProgress":
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
        row = self._rows.get(name)
        now = time.monotonic()
        took = now - row.since if row else 0.0
        self._rows[name] = _Row(stage, now, took)
        if self._live is None:
            after = f" after {took:.0f} s" if stage in ("ready", "stopped") else ""
            where = f", log {self._logs / name}.log" if stage == "starting" else ""
            print(f"{time.strftime('%H:%M:%S')} {name} {stage}{after}{where}", file=sys.stderr)

    def _table(self) -> Table:
        table = Table(
            box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0), expand=True
        )
        for width in (max(map(len, self._rows), default=0), len("starting"), len("9999 s")):
            table.add_column(no_wrap=True, min_width=width)
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        for name, row in self._rows.items():
            loading = row.stage == "starting"
            seconds = time.monotonic() - row.since if loading else row.seconds
            last = Text(self._last_line(name), style="dim") if loading else Text()
            style = "green" if row.stage == "ready" else ""
            table.add_row(name, Text(row.stage, style=style), f"{seconds:.0f} s", last)
        return table

    def _last_line(self, name: str) -> str:
        try:
            with (self._logs / f"{name}.log").open("rb") as log:
                log.seek(max(0, log.seek(0, 2) - _READ_AT_END))
                lines = log.read().decode(errors="replace").split("\n")
        except OSError:
            return ""
        written = [line for line in lines if line.strip()]
        return "".join(letter for letter in written[-1] if letter.isprintable()) if written else ""
