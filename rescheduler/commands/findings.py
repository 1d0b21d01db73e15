"""What a check of `headway doctor` found."""

from typing import Literal, NamedTuple

__all__ = ["Finding"]


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        what: its name.
        state: ``ok``; ``note`` where only a part of Headway is missing; ``problem`` where what
            is there does not work.
        found: what was found.
        remedy: what to do about it; empty when ``ok``.
    """

    what: str
    state: Literal["ok", "note", "problem"]
    found: str
    remedy: str = ""
