"""An engine's answer to one request, as far as it has come."""

import re

import msgspec

from rescheduler.gateway.messages import Head
from rescheduler.openai.openai_request import CHAT, COMPLETIONS, MOST_TOKENS
from rescheduler.openai.openai_stream import DONE, Chunk, read_chunk

__all__ = ["EngineAnswer", "EventStream", "TokenCount"]


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


# In JSON a quote inside a string is escaped, so that this finds keys only.
_COUNTED = re.compile(rb'"(?:completion|output)_tokens":\s*(\d{1,9})\b')
_TAIL = 4 << 10
"""Bytes at the end of an answer, in which it says how many tokens it has."""


class TokenCount:
    """Counts the tokens of one answer.

    A stream's chunk is a token for each choice, unless it says more exactly. An event of another
    shape is a token, unless its name says that it adds nothing; such a stream says in its last
    events how many it has, as a document does at its end. What cannot be read is not counted, and
    never an error: the answer is the client's.

    Args:
        events: the answer is a stream of events, not a document.
        chunks: its events are chunks of completions or of a chat.
    """

    def __init__(self, events: bool, chunks: bool) -> None:
        self.tokens = 0
        self._chunks = chunks
        self._stream = EventStream() if events else None
        self._tail = b""

    def add(self, data: bytes) -> None:
        """Take the next bytes."""
        if self._stream is None or not self._chunks:
            self._tail = (self._tail + data[-_TAIL:])[-_TAIL:]
        if self._stream is not None:
            for event in self._stream.feed(data):
                self._count(event)

    def end(self) -> None:
        """Take what an answer says of itself at its end."""
        found = _COUNTED.findall(self._tail)
        if found:
            self.tokens = max(self.tokens, min(int(found[-1]), MOST_TOKENS))

    def _count(self, event: bytes) -> None:
        name, payload = _fields(event)
        if not payload or payload == DONE:
            return
        if not self._chunks:
            self.tokens += _adds_text(name)
            return
        try:
            chunk = read_chunk(payload)
        except msgspec.DecodeError:
            return
        self.tokens += _tokens(chunk)
        said = (chunk.usage or {}).get("completion_tokens")
        if isinstance(said, int) and self.tokens < said <= MOST_TOKENS:
            self.tokens = said


def _fields(event: bytes) -> tuple[bytes, bytes]:
    """Return the name of an event, empty if it has none, and its data."""
    name, payload = b"", []
    for line in event.splitlines():
        field, _, value = line.partition(b":")
        if field == b"data":
            payload.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.strip()
    return name, b"\n".join(payload)


def _adds_text(name: bytes) -> bool:
    """Whether an event carries text: ``content_block_delta``, ``response.output_text.delta``."""
    return not name or (name.endswith(b"delta") and name != b"message_delta")


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


class EngineAnswer:
    """What the headers of an answer say, and how many tokens its body has brought.

    Attributes:
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
