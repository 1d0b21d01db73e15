"""Choosing one of several dataclasses by name, with options from a configuration."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

__all__ = ["create_named"]

T = TypeVar("T")


def create_named(what: str, kinds: Mapping[str, type[T]], name: str, options: dict[str, Any]) -> T:
    """Return the dataclass of that name, made with the given options.

    Args:
        what: is chosen, for errors.
        kinds: name -> dataclass.
        name: of one of them.
        options: of its constructor.

    Raises:
        ValueError: no such name, no such option, one that is missing, or a value that the
            dataclass refuses.
    """
    if name not in kinds:
        raise ValueError(f"no {what} {name!r}; known: {', '.join(sorted(kinds))}")
    takes = {field.name: field for field in fields(kinds[name]) if field.init}  # type: ignore[arg-type]
    for option in options:
        if option not in takes:
            listed = ", ".join(takes) if takes else "none"
            raise ValueError(f"{name} has no option {option!r}; it takes: {listed}")
    for option, field in takes.items():
        required = field.default is MISSING and field.default_factory is MISSING
        if required and option not in options:
            raise ValueError(f"{name} needs the option {option!r}")
    return kinds[name](**options)
