"""Valid values and bytes, damaged: what every reader of foreign input is tried with."""

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from hypothesis import strategies as st

__all__ = ["ODD_VALUES", "changed", "damaged_bytes", "json_text"]

_NUMBERS = [0, -1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**30, 0.5, -0.0, 1e308]
_STRINGS = ["", "a", "\x00", "é", "\U0001f600", "\ufeff", "\r\n", "null", "1", "a" * 300, "[DONE]"]
_NOT_NUMBERS = [float("nan"), float("inf"), float("-inf")]
_CONTAINERS: list[Any] = [[], {}, [[]], [None], {"": None}, {"a": {"b": [1]}}]

ODD_VALUES = st.one_of(
    st.sampled_from([None, True, False, *_NUMBERS, *_STRINGS, *_NOT_NUMBERS, *_CONTAINERS]),
    st.integers(),
    st.text(max_size=5),
)
"""Values of other types than were expected, and at the ends of what a type holds."""


@st.composite
def changed(draw: st.DrawFn, value: Any, odd: st.SearchStrategy[Any] = ODD_VALUES) -> Any:
    """A tree of lists and dicts in which something is missing, added or another value."""
    root = [deepcopy(value)]
    for _ in range(draw(st.integers(1, 3))):
        container, key = draw(st.sampled_from(list(_places(root))))
        how = draw(st.sampled_from(["replace", "replace", "nest", "remove", "add"]))
        if how == "replace":
            container[key] = deepcopy(draw(odd))
        elif how == "nest":
            container[key] = [container[key]]
        elif container is root:
            continue
        elif how == "remove":
            del container[key]
        elif isinstance(container, dict):
            container[draw(st.text(max_size=5))] = deepcopy(draw(odd))
        else:
            container.insert(key, deepcopy(draw(odd)))
    return root[0]


def _places(container: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container of a tree with each of its keys."""
    keys = list(container) if isinstance(container, dict) else range(len(container))
    for key in keys:
        yield container, key
        if isinstance(container[key], list | dict):
            yield from _places(container[key])


@st.composite
def damaged_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes of which some are others, twice there, missing, or cut off."""
    damaged = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(damaged)))
        how = draw(st.sampled_from(["set", "insert", "remove", "double", "cut"]))
        size = draw(st.integers(1, 8))
        if how == "set":
            damaged[at : at + size] = draw(st.binary(min_size=1, max_size=size))
        elif how == "insert":
            damaged[at:at] = draw(st.binary(min_size=1, max_size=size))
        elif how == "remove":
            del damaged[at : at + size]
        elif how == "double":
            damaged[at:at] = damaged[at : at + 8 * size]
        else:
            del damaged[at:]
    return bytes(damaged)


@st.composite
def json_text(draw: st.DrawFn, value: Any) -> bytes:
    """JSON of a value, changed as a value, as text, or not at all."""
    how = draw(st.sampled_from(["value", "value", "value", "text", "bytes", "whole"]))
    if how == "value":
        value = draw(changed(value))
    text = json.dumps(value, ensure_ascii=draw(st.booleans()))
    if how == "text":
        text = draw(_changed_text(text))
    raw = text.encode("utf-8", "surrogatepass")
    return draw(damaged_bytes(raw)) if how == "bytes" else raw


_ODD_TEXT = [
    '"\\ud800"',
    "1" + "0" * 400,
    "1e999",
    "-",
    "01",
    "NaN",
    "[" * 5_000,
    '{"a":' * 5_000,
    "[" * 200 + "]" * 200,
    '"\ud800"',
    "{}",
    "'a'",
    "/**/",
    "\x00",
]


@st.composite
def _changed_text(draw: st.DrawFn, text: str) -> str:
    """JSON with a key twice, or with something in it that is none."""
    at = draw(st.sampled_from([i for i, sign in enumerate(text) if sign in ':,{}[]"'] or [0]))
    if draw(st.booleans()):
        return text[: at + 1] + draw(st.sampled_from(_ODD_TEXT)) + text[at + 1 :]
    key = draw(st.sampled_from([part for part in text.split('"') if part.isidentifier()] or ["a"]))
    return f'{text[:-1]}, "{key}": {draw(st.sampled_from(_ODD_TEXT))}}}'
