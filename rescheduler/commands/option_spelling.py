"""Options as people type them, in the one form that jsonargparse reads."""

import json
import re
from collections.abc import Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

__all__ = ["normalised"]

_BOOLEANS = {"true", "false", "yes", "no"}
_KEY_VALUE = re.compile(r"[\w.-]+=")


def normalised(parser: Any, arguments: Sequence[str]) -> list[str]:
    """Return a command line as jsonargparse reads it.

    - ``--kv-capacity 3`` becomes ``--kv_capacity 3``: parameters have underscores.
    - ``--overwrite`` becomes ``--overwrite=true`` where the option is a boolean.
    - ``--only a b`` becomes ``--only=["a", "b"]`` where it is a sequence of strings.
    - ``--vary KEY=VALUE`` becomes ``--vary.KEY VALUE`` where it is a mapping.

    Args:
        parser: that will parse it; what it does not know is left as it is.
        arguments: of the command line.
    """
    subcommands = parser._subcommands_action
    result: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if subcommands and word in subcommands.choices:
            return [*result, word, *normalised(subcommands.choices[word], rest)]
        if word == "--":
            return [*result, word, *rest]
        if not word.startswith("--"):
            result.append(word)
            continue
        typed, equals, value = word.partition("=")
        option, kind = _resolved(parser, typed)
        following = rest[0] if rest and not rest[0].startswith("-") else None
        if equals:
            result.append(f"{option}={value}")
        elif kind is bool and str(following).lower() not in _BOOLEANS:
            result.append(f"{option}=true")
        elif _is_words(kind) and following is not None and not following.startswith("["):
            values = []
            while rest and not rest[0].startswith("-"):
                values.append(rest.pop(0))
            result.append(f"{option}={json.dumps(values)}")
        elif _is_mapping(kind) and following is not None and _KEY_VALUE.match(following):
            key, _, value = rest.pop(0).partition("=")
            result += [f"{option}.{key}", value]
        elif _has_labels(kind) and following is not None and not following.startswith(("{", "[")):
            parser.error(f"{typed} {following}: expected KEY=VALUE")
        else:
            result.append(option)
    return result


def _resolved(parser: Any, typed: str) -> tuple[str, Any]:
    """Return an option as the parser spells it, and the type of its value, if it is known.

    Below an option, as in ``--migration.interval-seconds``, are names of options too, unless
    it maps labels of the user's own to something.
    """
    known = parser._option_string_actions
    parts = typed.removeprefix("--").split(".")
    for length in range(len(parts), 0, -1):
        head = ".".join(parts[:length])
        for spelling in (f"--{head}", f"--{head.replace('-', '_')}"):
            if spelling not in known:
                continue
            kind = getattr(known[spelling], "_typehint", None)
            if length == len(parts):
                return spelling, kind
            below = ".".join(parts[length:])
            if not _has_labels(kind):
                below = below.replace("-", "_")
            return f"{spelling}.{below}", None
    return typed, None


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _is_words(kind: Any) -> bool:
    """Return whether a value is a sequence of words."""
    return any(
        get_origin(member) in (list, Sequence)
        and all(item is str or get_origin(item) is Literal for item in get_args(member))
        for member in _members(kind)
    )


def _is_mapping(kind: Any) -> bool:
    return any(get_origin(member) is dict for member in _members(kind))


def _has_labels(kind: Any) -> bool:
    """Return whether keys are labels that the user chose, in place of names of options."""
    mappings = [member for member in _members(kind) if get_origin(member) is dict]
    return any(get_args(mapping)[1] is not Any for mapping in mappings)
