"""What an engine has left to do before it may be stopped, and how long that is waited for."""

import re
import threading
import time
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from typing import NamedTuple
from urllib.parse import urlsplit

__all__ = ["Drain", "Load", "load_of", "wait_until_idle"]

_LOOK_SECONDS = 0.25
_ANSWER_SECONDS = 5.0
_LARGEST_ANSWER = 8 << 20
_GAUGES = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)(?:\{.*\})? (\S+)$",
    re.MULTILINE,
)


class Drain(NamedTuple):
    """How an engine is drained before it is stopped.

    Attributes:
        seconds: for which its requests may go on.
        idle_seconds: for which nothing may have run there: by then every proxy knows.
        kept_seconds: the same where it keeps blocks for other engines, by when they expire.
        url: of its HTTP server.
        file: that exists while it drains; its control socket tells the proxies so.
        tell: the command that tells the deployment's proxy, where there is no such socket; the
            option ``--undo`` takes that back.
    """

    seconds: float
    idle_seconds: float
    kept_seconds: float
    url: str
    file: str
    tell: list[str]


class Load(NamedTuple):
    """Requests of an engine that run or wait, and whether its KV cache holds blocks for any."""

    requests: int
    holds: bool


def load_of(url: str) -> Load | None:
    """Return what an engine has left to do, by its metrics; None if it does not say.

    Raises:
        ConnectionRefusedError: nothing listens there.
    """
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname or "", parts.port or 80, timeout=_ANSWER_SECONDS)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read(_LARGEST_ANSWER).decode(errors="replace")
        found: dict[str, float] = {}
        for name, value in _GAUGES.findall(text):
            found[name] = found.get(name, 0.0) + float(value)
        running, waiting = found["num_requests_running"], found["num_requests_waiting"]
        return Load(int(running + waiting), found.get("kv_cache_usage_perc", 0.0) > 0)
    except ConnectionRefusedError:
        raise
    except (OSError, HTTPException, KeyError, ValueError, OverflowError):
        return None
    finally:
        connection.close()


def wait_until_idle(
    drain: Drain, hurry: threading.Event, look: Callable[[str], Load | None] = load_of
) -> Load | None:
    """Wait until an engine has nothing left to do, its time is over, or somebody is in a hurry.

    Returns:
        What it had left when it was last seen; None if that is not known.
    """
    deadline = time.monotonic() + drain.seconds
    idle_since: float | None = None
    while True:
        try:
            load = look(drain.url)
        except ConnectionRefusedError:  # it has not begun to serve, or has ended
            return Load(0, False)
        now = time.monotonic()
        if load is None or load.requests:
            idle_since = None
        else:
            idle_since = now if idle_since is None else idle_since
            if now - idle_since >= (drain.kept_seconds if load.holds else drain.idle_seconds):
                return load
        if now >= deadline or hurry.wait(_LOOK_SECONDS):
            return load
