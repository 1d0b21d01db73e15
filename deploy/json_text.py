"""JSON that is written by code, and read by people too."""

import json
from typing import Any

_WIDTH = 100


def json_text(value: Any) -> str:
    """Return a value as JSON, each part of it on one line where it has room there."""
    return _text(value) + "\n"


def _text(value: Any, indent: str = "", before: int = 0) -> str:
    """Return a part, of whose line so many characters are taken before it."""
    line = json.dumps(value)
    if not isinstance(value, dict | list) or before + len(line) < _WIDTH:
        return line
    inner = f"{indent}  "
    if isinstance(value, dict):
        named = [(f"{inner}{json.dumps(key)}: ", part) for key, part in value.items()]
    else:
        named = [(inner, part) for part in value]
    parts = [f"{start}{_text(part, inner, len(start))}" for start, part in named]
    return "\n".join([line[0], ",\n".join(parts), f"{indent}{line[-1]}"])
