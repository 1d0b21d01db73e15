"""Foreign input, valid and damaged: how much of it a test tries, and of what kinds."""

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import msgspec
import yaml
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from msgspec import inspect

_INPUTS = 100


def fuzzed(batch: int = 1) -> settings:
    """Return the settings of a test whose examples are so many inputs each.

    100 inputs, 500 in the profile ``thorough`` and 100,000 in ``nightly``. A failing batch is not
    made smaller, which takes minutes: its test says which input it was.
    """
    inputs = max(_INPUTS, settings.default.max_examples)
    phases = [phase for phase in Phase if batch == 1 or phase is not Phase.shrink]
    return settings(
        max_examples=inputs // batch,
        deadline=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )


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

PACKABLE = (
    ODD_VALUES.filter(lambda value: not isinstance(value, int) or -(2**63) <= value < 2**64)
    | st.binary(max_size=10)
    | st.datetimes()
    | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=9))
)
"""Odd values that MessagePack can code, and those that only it has."""


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
def damaged_frames(
    draw: st.DrawFn,
    topic: bytes,
    messages: st.SearchStrategy[Any],
    odd: st.SearchStrategy[Any] = PACKABLE,
) -> list[bytes]:
    """The frames of a message, changed as a value or as bytes; or in disorder, or none at all."""
    whole = msgspec.msgpack.encode(draw(messages))
    value = msgspec.msgpack.decode(whole)
    payload = draw(
        changed(value, odd).map(msgspec.msgpack.encode)
        | damaged_bytes(whole)
        | st.binary(max_size=60)
    )
    frames = [topic, payload]
    return draw(
        st.sampled_from([frames, frames, frames, [payload, topic], [*frames, b""]])
        | st.just([topic + b"0", payload])
        | st.lists(st.binary(max_size=30), max_size=4)
    )


_ODD_JSON = ['"\\ud800"', "1" + "0" * 400, "1e999", "-", "01", "NaN", '"\ud800"', "{}", "'a'"]
_ODD_JSON += ["[" * 5_000, '{"a":' * 5_000, "[" * 200 + "]" * 200, "/**/", "\x00"]


@st.composite
def json_text(draw: st.DrawFn, value: Any) -> bytes:
    """JSON of a value, changed as a value, as text, or not at all."""
    how = draw(st.sampled_from(["value", "value", "value", "text", "bytes", "whole"]))
    if how == "value":
        value = draw(changed(value))
    text = json.dumps(value, ensure_ascii=draw(st.booleans()))
    if how == "text":  # a key twice, or something in it that is none
        at = draw(st.sampled_from([i for i, sign in enumerate(text) if sign in ':,{}[]"'] or [0]))
        odd = draw(st.sampled_from(_ODD_JSON))
        keys = [part for part in text.split('"') if part.isidentifier()] or ["a"]
        inserted = text[: at + 1] + odd + text[at + 1 :]
        doubled = f'{text[:-1]}, "{draw(st.sampled_from(keys))}": {odd}}}'
        text = inserted if draw(st.booleans()) else doubled
    raw = text.encode("utf-8", "surrogatepass")
    return draw(damaged_bytes(raw)) if how == "bytes" else raw


_ODD_YAML = ["2001-13-01", "0000-01-01", '!!int ""', "!!bool x", "!!timestamp x", "!!binary é"]
_ODD_YAML += ["!!python/name:os.system", "0x_", "0b_", ".inf", ".nan", "1e400", "1" + "0" * 5000]
_ODD_YAML += ['"\\ud800"', "&a [*a]", "*a", "{? [a] : b}", "{<<: 3}", "=", "[" * 2000, "[", "\t"]
_ODD_YAML += ["%", "@", "\x00", "---"]


@st.composite
def damaged_yaml(draw: st.DrawFn, text: str) -> bytes:
    """A YAML document, changed as a value, as text, or as bytes."""
    how = draw(st.sampled_from(["value", "value", "text", "bytes"]))
    if how == "value":
        value = draw(changed(yaml.safe_load(text), ODD_VALUES))
        return yaml.safe_dump(value, allow_unicode=draw(st.booleans())).encode()
    if how == "bytes":
        return draw(damaged_bytes(text.encode()))
    lines = text.splitlines()
    at = draw(st.integers(0, len(lines) - 1))
    key = lines[at].partition(":")[0]
    lines[at] = f"{key}: {draw(st.sampled_from(_ODD_YAML))}"
    return "\n".join(lines).encode()


def structs(kind: Any, **own: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Structs of a kind whose numbers are at the ends of their bounds.

    Args:
        kind: a `msgspec.Struct`.
        own: strategies of some fields, by their names here and in the structs within.
    """
    return _of_type(inspect.type_info(kind), own)


def _of_type(info: inspect.Type, own: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    match info:
        case inspect.StructType():
            fields = {
                one.name: own[one.name] if one.name in own else _of_type(one.type, own)
                for one in info.fields
            }
            return st.builds(info.cls, **fields)
        case inspect.IntType():
            least = -(2**63) if info.ge is None else info.ge
            most = info.le if info.le is not None else (info.lt or 2**63) - 1
            near = {least, 0, 1, 2, 33, 100, most - 1, most}
            return st.sampled_from(sorted(one for one in near if least <= one <= most))
        case inspect.FloatType():
            ends = [0.0 if info.ge is None else info.ge, 1e308 if info.le is None else info.le]
            return st.sampled_from([*ends, 5e-324, 1e-9, 0.05, 1.0])
        case inspect.ListType():
            return st.lists(
                _of_type(info.item_type, own), min_size=info.min_length or 0, max_size=4
            )
        case inspect.UnionType():
            return st.one_of([_of_type(one, own) for one in info.types])
        case inspect.LiteralType():
            return st.sampled_from(info.values)
        case inspect.BoolType():
            return st.booleans()
        case inspect.StrType():
            return st.sampled_from(["a", "b"])
        case inspect.BytesType():
            return st.just(b"")
        case inspect.NoneType():
            return st.none()
        case _:
            return st.just({})
