"""What an honest client of chaos makes of a proxy that is not there."""

import asyncio
import random
import socket

from benchmarks.chaos.honest import HonestClients
from benchmarks.chaos.ledger import Ledger


async def test_no_proxy_is_a_refused_connection_and_not_a_cut_request() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    ledger = Ledger()
    clients = HonestClients(url, "m", 1, ledger)
    clients._expected = [[1]]
    ending = asyncio.Event()
    with ledger.outage("proxy"):
        asking = asyncio.create_task(clients.run(1, ending, random.Random(0)))
        while not ledger.counts["refused_at_proxy_restart"]:
            await asyncio.sleep(0.01)
        ending.set()
        await asking
    await clients.close()
    assert ledger.counts["requests"] == ledger.counts["cut_by_proxy_restart"] == 0
