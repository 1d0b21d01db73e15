"""`headway demo --replay`: what was recorded, on the page."""

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


def replay(paths: Sequence[Path], port: int) -> None:
    """Show recorded logs on a page with a time slider, beside each other, until Ctrl-C.

    They are shown at the same time after their beginnings.

    Raises:
        LogError: a file is no log, or a damaged one.
        ValueError: a port that cannot be used.
        OSError: a file cannot be read.
    """
    if not 0 <= port <= 65_535:
        raise ValueError(f"--port {port}: a port is a number from 0 to 65535")
    logs = [read_log(path) for path in paths]
    for log in logs:
        cut = ", and then is cut off" if log.is_cut else ""
        print(f"{log.path}: {len(log.times)} snapshots of {log.times[-1]:,.0f} s{cut}")
    run_server(_show(logs, port))


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
