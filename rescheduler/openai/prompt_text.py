"""What a client's prompt says, for a forecast of its answer's length."""

from collections.abc import Mapping
from math import isfinite, nan

import msgspec
from msgspec import Raw

__all__ = ["prompt_text", "temperature"]

_MOST_BYTES, _MOST_ITEMS, _MOST_ID = 1 << 20, 4096, 1 << 31


class _Part(msgspec.Struct):
    text: str | None = None


class _Message(msgspec.Struct):
    content: str | list[_Part] | None = None


_messages = msgspec.json.Decoder(list[_Message])
_prompt = msgspec.json.Decoder(str | list[str | int])
_number = msgspec.json.Decoder(float | None)


def prompt_text(body: Mapping[str, Raw]) -> str | list[int] | None:
    """Return the text of a prompt or of its messages, or token ids.

    None if there is none that is read here: more than 1 MiB, 4,096 messages or token ids, several
    prompts, or no text. A longer list would hold up every stream.
    """
    given = body.get("messages", body.get("prompt"))
    if given is None or len(given) > _MOST_BYTES or _items(given) > _MOST_ITEMS:
        return None
    try:
        if "messages" in body:
            return "\n".join(filter(None, map(_text, _messages.decode(given)))) or None
        prompt = _prompt.decode(given)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if isinstance(prompt, str):
        return prompt or None
    if len(prompt) == 1 and isinstance(prompt[0], str):
        return prompt[0] or None
    ids = [token for token in prompt if isinstance(token, int) and 0 <= token < _MOST_ID]
    return ids if ids and len(ids) == len(prompt) else None


def _items(given: Raw) -> int:
    """Return how many messages or token ids a list has at most; 0 if it is none."""
    whole = bytes(given)
    if whole[:1] != b"[":
        return 0
    return whole.count(b"{") or whole.count(b",")


def _text(message: _Message) -> str:
    if isinstance(message.content, list):
        return "\n".join(filter(None, (part.text for part in message.content)))
    return message.content or ""


def temperature(body: Mapping[str, Raw]) -> float:
    """Return the temperature that a client asks for; nan: what the model's authors chose."""
    given = body.get("temperature")
    if given is None:
        return nan
    try:
        value = _number.decode(given)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return nan
    return value if value is not None and isfinite(value) else nan
