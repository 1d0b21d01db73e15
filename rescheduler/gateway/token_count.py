"""How many tokens an engine's answer holds, read as it passes."""

import re

import msgspec

from rescheduler.gateway.event_stream import EventStream
from rescheduler.openai.openai_stream import DONE, Chunk, read_chunk

__all__ = ["TokenCount"]

# In JSON a quote inside a string is escaped, so that this finds keys only.
_COUNTED = re.compile(rb'"(?:completion|output)_tokens":\s*(\d{1,9})\b')
_MOST = 10**9
_TAIL = 4 << 10
"""Bytes at the end of a document, in which it says how many tokens it has."""


class TokenCount:
    """Counts the tokens of one answer.

    A stream's chunk is a token for each choice, unless it says more exactly; an event of another
    shape is a token. A document says at its end how many it has. What cannot be read is not
    counted, and never an error: the answer is the client's.

    Args:
        events: the answer is a stream of events, not a document.
        chunks: its events are chunks of completions or of a chat.

    Attributes:
        tokens: so far.
    """

    def __init__(self, events: bool, chunks: bool) -> None:
        self.tokens = 0
        self._chunks = chunks
        self._stream = EventStream() if events else None
        self._tail = b""

    def add(self, data: bytes) -> None:
        """Take the next bytes."""
        if self._stream is None:
            self._tail = (self._tail + data[-_TAIL:])[-_TAIL:]
            return
        for event in self._stream.feed(data):
            payload = event.removeprefix(b"data: ")
            if payload != event and payload != DONE:
                self._count(payload)

    def end(self) -> None:
        """Take what a document says of itself."""
        found = _COUNTED.findall(self._tail)
        if found:
            self.tokens = int(found[-1])

    def _count(self, payload: bytes) -> None:
        if not self._chunks:
            self.tokens += 1
            return
        try:
            chunk = read_chunk(payload)
        except msgspec.DecodeError:
            return
        self.tokens += _tokens(chunk)
        said = (chunk.usage or {}).get("completion_tokens")
        if isinstance(said, int) and self.tokens < said <= _MOST:
            self.tokens = said


def _tokens(chunk: Chunk) -> int:
    """Return the tokens of a chunk; that of a chat's role, which comes first, has none."""
    tokens = 0
    for choice in chunk.choices:
        delta = choice.delta
        if choice.token_ids is not None:
            tokens += len(choice.token_ids)
        elif delta is None or delta.role is None or delta.content or choice.finish_reason:
            tokens += 1
    return tokens
