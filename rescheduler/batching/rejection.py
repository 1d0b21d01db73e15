"""How an engine informs its API server of a rejection, and when to retry."""

from math import ceil

__all__ = ["REASON", "read_rejection", "rejection_reason", "retry_seconds"]

REASON = "headway: prefill budget"
"""How the `stop_reason` of a rejected request begins."""

_BEFORE, _AFTER = f"{REASON}, retry in ", " s"
_LONGEST = 60


def retry_seconds(excess: float, token_seconds: float) -> int:
    """Return after how many whole seconds a rejected request is worth another try.

    Until then the engine, if nothing else arrives, has computed what is too much.

    Args:
        excess: tokens by which the prompt exceeds the budget.
        token_seconds: of a prompt's token, b + c.
    """
    return ceil(min(max(excess * token_seconds, 1.0), _LONGEST))


def rejection_reason(seconds: int) -> str:
    """Return the ``stop_reason`` of a rejected request."""
    return f"{_BEFORE}{seconds}{_AFTER}"


def read_rejection(finish_reason: object, stop_reason: object) -> int | None:
    """Return the seconds of a rejection, or None if this is none.

    A client's own stop string may read the same, but ends a request with another finish reason.
    """
    if finish_reason != "abort" or not isinstance(stop_reason, str):
        return None
    seconds = stop_reason.removeprefix(_BEFORE).removesuffix(_AFTER)
    return int(seconds) if seconds.isdecimal() and stop_reason.startswith(_BEFORE) else None
