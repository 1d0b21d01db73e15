"""Joins the chunks of a stream, so that one comes with every so many tokens."""

from typing import Any

import msgspec

__all__ = ["ChunkJoiner"]

_encode = msgspec.json.encode


class ChunkJoiner:
    """Gives a client the chunks that it asked for by ``stream_interval``.

    As of vLLM's engines, the first tokens come at once, then a chunk with every so many tokens, and
    the end at once. Engines themselves send each token as it comes: what is not yet sent would be
    lost with them, and nobody could tell a long interval from a stream that hangs.

    Args:
        interval: tokens between two chunks.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._sent = 0
        self._joined: dict[str, Any] | None = None

    def take(self, chunks: list[bytes], generated: int) -> list[bytes]:
        """Take chunks, as JSON; return those that are due.

        Args:
            chunks: of the engine, in order.
            generated: tokens of the request with these.
        """
        due: list[bytes] = []
        for data in chunks:
            chunk = msgspec.json.decode(data)
            if not chunk.get("choices"):
                due += self.rest()
                due.append(data)
            elif self._joined is None:
                self._joined = chunk
            else:
                _join(self._joined, chunk)
            if self._joined is not None and self._joined["choices"][0].get("finish_reason"):
                due += self.rest()
        if self._sent == 0 or generated - self._sent >= self._interval:
            due += self.rest()
            self._sent = generated
        return due

    def rest(self) -> list[bytes]:
        """Return what has not been sent."""
        joined, self._joined = self._joined, None
        return [] if joined is None else [_encode(joined)]


def _join(joined: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if key == "choices":
            _join_values(joined["choices"][0], value[0])
        elif value is not None:
            joined[key] = value


def _join_values(joined: dict[str, Any], more: dict[str, Any]) -> None:
    """Join the text, tokens and other lists of two chunks; of other values the newer one stays."""
    for key, value in more.items():
        before = joined.get(key)
        if key == "tool_calls" and isinstance(before, list) and isinstance(value, list):
            _join_calls(before, value)
        elif key in _JOINED and isinstance(before, str) and isinstance(value, str):
            joined[key] = before + value
        elif key in _JOINED and isinstance(before, list) and isinstance(value, list):
            before += value
        elif isinstance(before, dict) and isinstance(value, dict):
            _join_values(before, value)
        elif value is not None:
            joined[key] = value


_JOINED = (
    *("text", "content", "reasoning", "reasoning_content", "arguments", "token_ids"),
    *("tokens", "token_logprobs", "top_logprobs", "text_offset"),
)


def _join_calls(joined: list[dict[str, Any]], more: list[dict[str, Any]]) -> None:
    for call in more:
        if joined and joined[-1].get("index") == call.get("index"):
            _join_values(joined[-1], call)
        else:
            joined.append(call)
