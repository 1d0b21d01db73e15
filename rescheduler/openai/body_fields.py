"""The fields of a request's body, each as the bytes that came.

A body is read no further than the proxy has to: what is only handed on to an engine stays as the
bytes that came, so that no body keeps the event loop busy for long.
"""

import json
from collections.abc import Iterable

import msgspec
import numpy as np
from msgspec import Raw

from rescheduler.openai.openai_request import UNREADABLE, RequestRefusedError

_MOST_OTHER_BYTES = 256 << 10
_PLACEHOLDER = 4  # bytes of null

_LARGE = (
    "prompt",
    "messages",
    "input",
    "instructions",
    "system",
    "tokens",
    "text_1",
    "text_2",
    "query",
    "tools",
    "documents",
    "chat_template",
    "prompt_embeds",
    "suffix",
    "response_format",
    "structured_outputs",
    "logit_bias",
)
"""Fields of any size; all others together must be small."""

_large = msgspec.json.Decoder(
    msgspec.defstruct("_Large", [(name, Raw, Raw(b"null")) for name in _LARGE])
)
FIELDS = msgspec.json.Decoder(dict[str, Raw])
"""Reads an object's fields, each as its bytes."""


def fields_of(raw: bytes) -> dict[str, Raw]:
    """Return the fields of a body, each as its bytes.

    Millions of small fields would take seconds to read: so what is not in fields that may be
    large is weighed first. The large ones, for which all streams wait, are read only once.

    Raises:
        RequestRefusedError: 400, no JSON object, or small fields that are not small together.
    """
    try:
        encoding = json.detect_encoding(raw)
        if encoding != "utf-8":
            raw = raw.decode(encoding).encode()
        if len(raw) <= _MOST_OTHER_BYTES:
            return FIELDS.decode(raw)
        large = _large.decode(raw)
        found: dict[str, Raw] = msgspec.structs.asdict(large)
        given = {name: value for name, value in found.items() if len(value) > _PLACEHOLDER}
        others = len(raw) - sum(map(len, given.values()))
        if others > _MOST_OTHER_BYTES:
            raise RequestRefusedError(
                400,
                f"fields other than {', '.join(_LARGE)} take {others} bytes together, more "
                f"than {_MOST_OTHER_BYTES}",
            )
        return {**FIELDS.decode(_without(raw, given.values())), **given}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise unreadable(error) from error


def _without(raw: bytes, values: Iterable[Raw]) -> bytes:
    """Return a document with null in place of values that are parts of it."""
    start = _address(raw)
    cuts = sorted((_address(value) - start, len(value)) for value in values)
    parts, at = [], 0
    for offset, size in cuts:
        parts.append(raw[at:offset])
        at = offset + size
    return b"null".join([*parts, raw[at:]])


def _address(data: bytes | Raw) -> int:
    """Return where data is in memory: a value points into the document that it was read from."""
    return int(np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0])


def unreadable(error: Exception) -> RequestRefusedError:
    """Return what a client is told whose body cannot be read."""
    message = f"the body is not a valid JSON object: {error}"
    return RequestRefusedError(400, message, "body", kind=UNREADABLE)


def some_of(body: dict[str, Raw], kind: type[msgspec.Struct]) -> bytes:
    """Return a body with those of its fields only that a kind of struct has."""
    return msgspec.json.encode(
        {name: body[name] for name in kind.__struct_fields__ if name in body}
    )
