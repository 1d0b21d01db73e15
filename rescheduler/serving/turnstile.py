"""A burst of requests, let in a few at a time."""

import asyncio
from collections import OrderedDict, deque

_AT_ONCE = 16


class Turnstile:
    """Lets sixteen in with each turn of the event loop, so that a burst does not hold it for long.

    Whatever the others of the loop have to do, such as relaying tokens, comes between them. Those
    of one client go in the order of their arrival, and clients take turns.
    """

    def __init__(self) -> None:
        self._let_in = 0
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def enter(self, client: str) -> None:
        """Wait for one's turn."""
        loop = asyncio.get_running_loop()
        if self._let_in == 0:
            loop.call_soon(self._turn)
        if self._let_in < _AT_ONCE and not self._waiting:
            self._let_in += 1
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        await turn

    def _turn(self) -> None:
        self._let_in = 0
        while self._waiting and self._let_in < _AT_ONCE:
            client, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[client] = turns
            if not turn.done():  # its client has not left
                turn.set_result(None)
                self._let_in += 1
        if self._let_in:
            asyncio.get_running_loop().call_soon(self._turn)
