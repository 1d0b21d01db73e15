"""What an honest client of chaos makes of a proxy that is not there."""

import asyncio
import random
import socket

from benchmarks.chaos.clients import HonestClients
from benchmarks.chaos.ledger import Ledger


async def test_no_proxy_is_a_refused_connection_and_not_a_cut_request() -> None:
    ledger, ending = Ledger(), asyncio.Event()
    with socket.socket() as silent, ledger.outage("proxy"):
        silent.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        clients = HonestClients(url, "m", 1, ledger)
        clients._expected = [[1]]
        asking = asyncio.create_task(clients.run(1, ending, random.Random(0)))
        async with asyncio.timeout(60):
            while not ledger.counts["refused_at_proxy_restart"] and not asking.done():
                await asyncio.sleep(0.01)
            ending.set()
            await asking
    await clients.close()
    assert ledger.counts["refused_at_proxy_restart"] == 1
    assert ledger.counts["requests"] == ledger.counts["cut_by_proxy_restart"] == 0
