"""Server-sent events of any answer, cut from its bytes as they pass."""

import re

__all__ = ["EventStream"]

_BLANK_LINE = re.compile(rb"\n\r?\n")
_LARGEST_EVENT = 256 << 10


class EventStream:
    """Cuts a byte stream into server-sent events, wherever its packets end.

    An event that is incomplete when it is too large is left out. Every byte is searched once, so
    that it does not matter how small the packets are.
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self._left_out = False

    def feed(self, data: bytes) -> list[bytes]:
        """Return the events that are complete by now, without the blank lines that end them."""
        rest, events, start = self._rest, [], 0
        unsearched = max(0, len(rest) - 2)  # a blank line may have begun there
        rest += data
        while (end := _BLANK_LINE.search(rest, unsearched)) is not None:
            if not self._left_out:
                events.append(bytes(rest[start : end.start()]))
            self._left_out = False
            start = unsearched = end.end()
        del rest[:start]
        if len(rest) > _LARGEST_EVENT:
            self._left_out = True
            del rest[:-2]
        return events
