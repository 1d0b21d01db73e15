"""`headway replay`: what was recorded, on the page."""

import asyncio
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path

from rescheduler.commands.event_loop import end_when_asked, run_server
from rescheduler.page.log_reader import Log, read_log
from rescheduler.serving.connection import operators_server
from rescheduler.serving.replay_app import replay_app

__all__ = ["replay"]

_HOST = "127.0.0.1"


def replay(log: Path, beside: Path | None = None, port: int = 8002) -> None:
    """Show a recorded log on a page with a time slider, or two beside each other.

    Logs are recorded by `headway serve --record FILE` and `headway simulate --record FILE`. Two
    are shown at the same time after their beginnings, as those of two policies. Ctrl-C ends it.

    Args:
        log: file to show.
        beside: another one, to compare it with.
        port: of this machine, on which the page is; 0 takes a free one.

    Raises:
        LogError: a file is no log, or a damaged one.
        ValueError: a port that cannot be used.
        OSError: a file cannot be read.
    """
    if not 0 <= port <= 65_535:
        raise ValueError(f"--port {port}: a port is a number from 0 to 65535")
    read = [read_log(path) for path in (log, beside) if path is not None]
    for one in read:
        cut = ", and then is cut off" if one.is_cut else ""
        print(f"{one.path}: {len(one.times)} snapshots of {one.times[-1]:,.0f} s{cut}")
    run_server(_show(read, port))


async def _show(logs: Sequence[Log], port: int) -> None:
    try:
        listening = socket.create_server((_HOST, port))
    except OSError as error:
        raise ValueError(
            f"--port: cannot listen on {_HOST}:{port}: {error.strerror or error}; give another"
        ) from error
    ended = asyncio.Event()
    end_when_asked(ended)
    token = secrets.token_urlsafe(32)
    async with operators_server(replay_app(logs, token), sock=listening):
        port = listening.getsockname()[1]
        print(f"see it: http://{_HOST}:{port}/ui#token={token}", flush=True)
        await ended.wait()
