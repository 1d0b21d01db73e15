"""How a move ended."""

from typing import NamedTuple

__all__ = ["MoveOutcome"]


class MoveOutcome(NamedTuple):
    """How a move ended, well or not.

    Attributes:
        outcome: ``moved``, or why the request stays; `docs/serve.md` lists them.
        pause: seconds from the last token at the source to the first at the target; None if it
            did not move.
    """

    outcome: str
    pause: float | None = None
