"""Forecasts from prompts beside the event loop, within a budget of time."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread

from rescheduler.openai.openai_request import ClientRequest

__all__ = ["PromptForecasts"]

logger = logging.getLogger("headway.serve")

_PATIENCE = 0.1
"""Seconds that a request waits for its forecast."""
_SHARE, _BURST = 0.25, 1.0
"""Of a processor's time for all forecasts together, and seconds of it that may be saved up."""


class PromptForecasts:
    """Forecasts requests one after the other in a thread; over budget a request has no forecast.

    A prompt in rare letters takes ten times as long as another one, and a checkpoint's own
    tokenizer may take any time. No thread can be stopped: so there is one, and while it is held up
    all others go without.

    Args:
        of: returns the tokens that an answer is expected to have; None if nothing is known.
        clock: seconds.
    """

    def __init__(
        self,
        of: Callable[[ClientRequest], int | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._of, self._clock = of, clock
        self._asked: SimpleQueue[tuple[ClientRequest, Future[int | None]] | None] = SimpleQueue()
        self._left, self._left_at = _BURST, clock()
        self._used = self._counted = 0.0
        self._since: float | None = None
        self._failed = False
        Thread(target=self._work, name="prompt-forecasts", daemon=True).start()

    async def expected(self, client: ClientRequest) -> int | None:
        """Return the tokens that an answer is expected to have; None if nothing is known in time.

        The thread leaves out what nobody waits for any more.
        """
        if client.direct or self._is_spent():
            return None
        forecast: Future[int | None] = Future()
        self._asked.put((client, forecast))
        try:
            async with asyncio.timeout(_PATIENCE):
                return await asyncio.wrap_future(forecast)
        except TimeoutError:
            return None

    def close(self) -> None:
        """End the thread, once it is not held up."""
        self._asked.put(None)

    def _is_spent(self) -> bool:
        """Return whether the budget is used up, or the thread held up."""
        now, used, since = self._clock(), self._used, self._since
        self._left = min(self._left + _SHARE * (now - self._left_at), _BURST)
        self._left -= used - self._counted
        self._left_at, self._counted = now, used
        return self._left <= 0.0 or (since is not None and now - since > _PATIENCE)

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            client, forecast = asked
            if not forecast.set_running_or_notify_cancel():
                continue
            self._since, began, expected = self._clock(), time.thread_time(), None
            try:
                expected = self._of(client)
            except BaseException:  # tokenizers panic by an exception of their own
                if not self._failed:
                    logger.exception("a prompt cannot be forecast; only the first one is shown")
                self._failed = True
            self._used += time.thread_time() - began
            self._since = None
            forecast.set_result(expected)
