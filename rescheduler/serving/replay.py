"""`headway replay`: what was recorded, on the page."""

import asyncio
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec
from aiohttp import web

from rescheduler.commands.event_loop import end_when_asked, run_server
from rescheduler.openai.openai_request import RequestRefusedError
from rescheduler.page.page_files import PageFiles
from rescheduler.page.snapshot import Log, read_log
from rescheduler.serving.connection import answer_errors, operators_server, token_check


def replay_app(logs: Sequence[Log], token: str) -> web.Application:
    """Return the application that shows logs to whoever has the token."""
    endpoints, page = _Endpoints(logs), PageFiles()
    app = web.Application(middlewares=[answer_errors, token_check(token, page.answer)])
    app.add_routes(
        [
            *page.routes,
            web.get("/admin/page", endpoints.page),
            web.get(r"/admin/snapshots/{log:\d{1,9}}/{number:\d{1,9}}", endpoints.snapshot),
        ]
    )
    return app


class _Endpoints:
    def __init__(self, logs: Sequence[Log]) -> None:
        self._logs = logs

    async def page(self, http: web.Request) -> web.Response:
        del http
        logs = [
            {"name": log.path.name, "about": log.about, "times": log.times} for log in self._logs
        ]
        shown = msgspec.json.encode({"shows": "replay", "logs": logs})
        return web.Response(body=shown, content_type="application/json")

    async def snapshot(self, http: web.Request) -> web.Response:
        try:
            log = self._logs[int(http.match_info["log"])]
            packed = log.packed(int(http.match_info["number"]))
        except IndexError as error:
            raise RequestRefusedError(404, "no such snapshot") from error
        return web.Response(
            body=packed,
            headers={"Content-Encoding": "gzip", "Cache-Control": "no-store"},
            content_type="application/json",
        )


_HOST = "127.0.0.1"


def replay(log: Path, beside: Path | None = None, port: int = 8002) -> None:
    """Show a recorded log on a page with a time slider, or two beside each other.

    Logs are recorded by `headway serve --record FILE` and `headway simulate --record FILE`. Two
    are shown at the same time after their beginnings, as those of two policies. Ctrl-C ends it.

    Args:
        log: Log to show.
        beside: A second log, to compare with.
        port: Serve the page on this port of this machine. 0 takes a free one.

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
