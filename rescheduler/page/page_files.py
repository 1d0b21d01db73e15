"""The files of the page, and the headers that keep anything else out of it."""

from importlib.resources import files

from aiohttp import web

__all__ = ["PageFiles"]

_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


class PageFiles:
    """Answers with the files of the page, which hold no secret and need no token.

    The page fetches nothing but from where it came from, runs no script but its files, and is
    shown in no frame.
    """

    def __init__(self) -> None:
        folder = files("rescheduler.page").joinpath("static")
        self._files = {
            file.name: (file.read_bytes(), _TYPES["." + file.name.rpartition(".")[2]])
            for file in folder.iterdir()
            if "." + file.name.rpartition(".")[2] in _TYPES
        }

    @property
    def routes(self) -> list[web.RouteDef]:
        """The routes of the page."""
        return [web.get("/ui", self.answer), web.get("/ui/{file}", self.answer)]

    async def answer(self, http: web.Request) -> web.Response:
        """Return a file.

        Raises:
            HTTPNotFound: there is none of this name.
        """
        name = http.match_info.get("file", "index.html")
        if name not in self._files:
            raise web.HTTPNotFound
        body, kind = self._files[name]
        return web.Response(body=body, headers=_HEADERS, content_type=kind, charset="utf-8")
