"""The keys of a msgspec struct as options of a command line."""

import typing
from argparse import SUPPRESS
from typing import Any

import msgspec
from docstring_parser import parse as parse_docstring
from jsonargparse import ArgumentParser, Namespace

__all__ = ["add_struct_arguments", "struct_of"]


def add_struct_arguments(
    parser: ArgumentParser, struct: Any, prefix: str = "", hidden: bool = False
) -> None:
    """Add an option for each key of a struct and of the structs in it.

    Required keys become options without a default: `struct_of` reports what is missing.

    Args:
        parser: to add to.
        struct: whose docstring describes its keys.
        prefix: of the options, as ``proxy.``.
        hidden: leave them out of the help.
    """
    hints = typing.get_type_hints(struct)
    described = {
        key.arg_name: key.description for key in parse_docstring(struct.__doc__ or "").params
    }
    for field in msgspec.structs.fields(struct):
        kind = hints[field.name]
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            add_struct_arguments(parser, kind, f"{prefix}{field.name}.", hidden)
            continue
        if any(
            issubclass(x, msgspec.Struct) for x in typing.get_args(kind) if type(x) is type(struct)
        ):
            one = dict[str, Any]
            kind = list[one] if typing.get_origin(kind) is list else one | None
        default: Any = None
        if field.default is not msgspec.NODEFAULT:
            default = field.default
        elif field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        else:
            kind = kind | None
        text = " ".join((described.get(field.name) or "").split())
        parser.add_argument(
            f"--{prefix}{field.name}", type=kind, default=default, help=SUPPRESS if hidden else text
        )


def struct_of(struct: Any, parser: ArgumentParser, given: Namespace, optional: bool) -> Any:
    """Return the struct that a parsed command line describes.

    Args:
        struct: with a class method ``from_values``, which takes a mapping and validates it.
        parser: that parsed it, to report that a required key is missing.
        given: what it parsed.
        optional: None stands for a struct whose required keys were not given.

    Raises:
        ValueError: names the file and the field, and what the field should be.
    """
    values = {field.name: given.get(field.name) for field in msgspec.structs.fields(struct)}
    required = [field.name for field in msgspec.structs.fields(struct) if field.required]
    missing = [name for name in required if values[name] is None]
    if len(missing) == len(required) and optional:
        return None
    if missing:
        parser.error(f"--config FILE.yaml is required, with {' and '.join(missing)}")
    plain = {
        name: value.as_dict() if isinstance(value, Namespace) else value
        for name, value in values.items()
    }
    try:
        return struct.from_values(plain)
    except ValueError as error:
        files = ", ".join(str(path) for path in given.get("config") or [])
        raise type(error)(f"{files}: {error}" if files else str(error)) from error
