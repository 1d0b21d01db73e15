"""Clients of a proxy, each with an address of its own."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from scripted_cluster import PROMPT, Cluster

BODY = {"model": "m", "prompt": PROMPT, "max_tokens": 5}


@asynccontextmanager
async def client(it: Cluster, address: str) -> AsyncIterator[aiohttp.ClientSession]:
    """A session that connects from an address of the loopback."""
    connector = aiohttp.TCPConnector(limit=0, local_addr=(address, 0))
    async with aiohttp.ClientSession(it.url, connector=connector) as session:
        yield session


async def ask(
    session: aiohttp.ClientSession, headers: dict[str, str] | None = None, **fields: Any
) -> int:
    """Return the status of a completion."""
    body = {**BODY, **fields}
    async with session.post("/v1/completions", json=body, headers=headers) as response:
        await response.read()
        return response.status
