"""A burst of requests, let in a few at a time."""

import asyncio
from collections import deque

_AT_ONCE = 16


class Turnstile:
    """Lets sixteen in with each turn of the event loop, so that a burst does not hold it for long.

    Whatever the others of the loop have to do, such as relaying tokens, comes between them.
    """

    def __init__(self) -> None:
        self._let_in = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Wait for one's turn, in the order of arrival."""
        if self._let_in == 0:
            asyncio.get_running_loop().call_soon(self._turn)
        if self._let_in < _AT_ONCE and not self._waiting:
            self._let_in += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _turn(self) -> None:
        self._let_in = 0
        while self._waiting and self._let_in < _AT_ONCE:
            turn = self._waiting.popleft()
            if not turn.done():  # its client has not left
                turn.set_result(None)
                self._let_in += 1
        if self._let_in:
            asyncio.get_running_loop().call_soon(self._turn)
