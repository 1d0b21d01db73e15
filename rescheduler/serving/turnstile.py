"""A burst of requests, let in a few at a time."""

import asyncio
from collections import OrderedDict, deque

_LONGEST_TURN = 0.005
"""Seconds from which on a turn lets nobody else in."""
_AT_ONCE = 16


class Turnstile:
    """Lets sixteen in with each turn of the event loop, or fewer once these take 5 ms.

    So a burst does not hold the loop for long: whatever its others have to do, such as relaying
    tokens, comes between them. Those of one client go in the order of their arrival, and clients
    take turns. What one that is let in does counts until it waits for something else.
    """

    def __init__(self) -> None:
        self._let_in = 0
        self._put_back = 0  # of those too late, in this turn: before whoever was not woken
        self._began = 0.0
        self._woken = False
        self._too_late: deque[asyncio.Future[None]] = deque()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def enter(self, client: str) -> None:
        """Wait for one's turn."""
        if not (self._waiting or self._too_late or self._woken) and self._lets_in():
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        await turn
        while not self._lets_in():
            turn = asyncio.get_running_loop().create_future()
            self._too_late.insert(self._put_back, turn)
            self._put_back += 1
            await turn

    def _lets_in(self) -> bool:
        """Return whether this turn lets one more in; the first one begins it."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._let_in == 0:
            self._began = now
            if not self._woken:
                loop.call_soon(self._turn)
        if self._let_in == _AT_ONCE or now - self._began > _LONGEST_TURN:
            return False
        self._let_in += 1
        return True

    def _turn(self) -> None:
        """Let in anew, in their order: those that wait take their turn before any other comes.

        At most twice as many as in the last turn: few are too late, and go before who comes next.
        """
        most = min(_AT_ONCE, 2 * self._let_in + 1)
        woken = self._let_in = self._put_back = 0
        while woken < most and (turn := self._next()) is not None:
            if not turn.done():  # its client has not left
                turn.set_result(None)
                woken += 1
        self._woken = woken > 0
        if self._woken:
            asyncio.get_running_loop().call_soon(self._turn)

    def _next(self) -> "asyncio.Future[None] | None":
        if self._too_late:
            return self._too_late.popleft()
        if not self._waiting:
            return None
        client, turns = self._waiting.popitem(last=False)
        turn = turns.popleft()
        if turns:
            self._waiting[client] = turns
        return turn
