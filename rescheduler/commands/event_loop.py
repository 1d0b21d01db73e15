"""The event loop of a server."""

import asyncio
from collections.abc import Coroutine
from typing import Any

__all__ = ["run_server"]


def run_server(server: Coroutine[Any, Any, None]) -> None:
    """Run a server to its end, on uvloop where that is installed."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(server)
    else:
        uvloop.run(server)
