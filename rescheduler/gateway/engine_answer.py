"""An engine's answer to one request, as far as it has come."""

from rescheduler.gateway.events import Head
from rescheduler.gateway.token_count import TokenCount
from rescheduler.openai.openai_request import CHAT, COMPLETIONS

__all__ = ["EngineAnswer"]


class EngineAnswer:
    """What the headers of an answer say, and how many tokens its body has brought.

    Args:
        head: of the answer.
        path: of the request.

    Attributes:
        ok: the request is served.
        failed: a server's error, of the engine or of the gateway that does not reach it.
    """

    def __init__(self, head: Head, path: str) -> None:
        status = head.headers.get(":status", "")
        self.ok, self.failed = status == "200", status.startswith("5")
        kind = head.headers.get("content-type", "")
        events = kind.lower().startswith("text/event-stream")
        self._count = TokenCount(events, chunks=path in (COMPLETIONS, CHAT)) if self.ok else None

    def add(self, data: bytes, ends: bool) -> int:
        """Take the next bytes; return how many tokens the answer has by now."""
        if self._count is None:
            return 0
        self._count.add(data)
        if ends:
            self._count.end()
        return self._count.tokens
