"""A part of a request's time, as the code that spends it knows it."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

__all__ = ["NO_SPAN", "Attribute", "Span"]

Attribute = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float] | None
"""What is said about a span; None says nothing."""


class Span:
    """A span that nobody records; `rescheduler.tracing.recorded_span` has those that are.

    It ends with its ``with`` block, and has failed if an exception leaves that.
    """

    __slots__ = ()

    recorded: bool = False
    """Whether what it is told is kept: if not, do not compute anything for it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end(error)

    def span(self, name: str, **attributes: Attribute) -> "Span":
        """Begin a span within this one."""
        del name, attributes
        return self

    def call(self, name: str, **attributes: Attribute) -> "Span":
        """Begin the span of a request to an engine, whose own spans come under it."""
        del name, attributes
        return self

    def over(self, name: str, began: int, ended: int, **attributes: Attribute) -> None:
        """Note a span within this one that is over: from when to when, ns since 1970."""

    def set(self, **attributes: Attribute) -> None:
        """Set attributes."""

    def event(self, name: str) -> None:
        """Note that something happens now."""

    def fail(self, kind: str) -> None:
        """Note that it has failed, and how: in a word, since others may read it."""

    def end(self, error: BaseException | None = None) -> None:
        """End it now; what an error says is not kept, since it may quote a prompt."""

    def headers(self, headers: dict[str, str]) -> dict[str, str]:
        """Return the headers of a request that is sent within it."""
        return headers


NO_SPAN = Span()
"""In place of every span of a request that is not traced."""
