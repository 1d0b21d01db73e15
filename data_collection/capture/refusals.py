"""Refusing, by name, an engine that something of Headway's cannot run in."""

from collections.abc import Mapping

__all__ = ["refuse"]


def refuse(what: str, problems: Mapping[str, bool], otherwise: str = "") -> None:
    """Refuse where at least one problem is there, and name all that are.

    Args:
        what: cannot be done.
        problems: each with what to do about it, and whether it is there.
        otherwise: what else can be done, whatever the problems.

    Raises:
        ValueError: one is.
    """
    found = [problem for problem, is_there in problems.items() if is_there]
    if found:
        raise ValueError(f"{what}: {'; '.join(found)}{otherwise and '; '}{otherwise}")
