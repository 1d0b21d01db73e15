"""An engine's messages in a file, so that a terminal shows the progress alone."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TextIO

_SHOWN_LINES = 15
_READ_AT_END = 64 << 10


class Terminal(NamedTuple):
    """Where a person reads, and the log in which the engine's messages go; None: here too."""

    out: TextIO
    err: TextIO
    log: Path | None = None


@contextmanager
def engine_output_to(log: Path | None) -> Iterator[Terminal]:
    """Append the standard output and error of this process and its children to a file.

    The file descriptors are redirected, not Python's streams alone: libraries in C and the
    engine's own processes write to the descriptors. Without a file nothing is redirected.
    """
    if log is None:
        yield Terminal(sys.stdout, sys.stderr)
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with os.fdopen(kept[0], "w", 1) as out, os.fdopen(kept[1], "w", 1) as err:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        try:
            yield Terminal(out, err, log)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(kept[0], 1)
            os.dup2(kept[1], 2)


def last_lines(log: Path | None) -> str:
    """Return the end of a log, each line on a line of its own; empty without a log."""
    if log is None or not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _READ_AT_END))
        lines = file.read().decode(errors="replace").splitlines()[-_SHOWN_LINES:]
    return "".join(f"\n  {line}" for line in [f"{log} ends:", *lines])
