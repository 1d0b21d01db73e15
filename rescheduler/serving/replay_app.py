"""The endpoints that the page reads logs from."""

from collections.abc import Sequence

import msgspec
from aiohttp import web

from rescheduler.openai.openai_request import RequestRefusedError
from rescheduler.page.log_reader import Log
from rescheduler.page.page_files import PageFiles
from rescheduler.serving.http_errors import answer_errors
from rescheduler.serving.token_check import token_check

__all__ = ["replay_app"]


def replay_app(logs: Sequence[Log], token: str) -> web.Application:
    """Return the application.

    Args:
        logs: that are shown beside each other.
        token: as of `admin_app`.
    """
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
        """Return what the page is to show."""
        del http
        logs = [
            {"name": log.path.name, "about": log.about, "times": log.times} for log in self._logs
        ]
        shown = msgspec.json.encode({"shows": "replay", "logs": logs})
        return web.Response(body=shown, content_type="application/json")

    async def snapshot(self, http: web.Request) -> web.Response:
        """Return a snapshot of a log, as the log has it."""
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
