"""Forecasts from prompts beside the event loop, within a budget of time."""

import asyncio
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from math import inf
from queue import PriorityQueue
from threading import Thread
from typing import NamedTuple

from data_collection.models import name_of, resolve_model
from rescheduler.emulation.length_posterior import EmulatedPrompts
from rescheduler.engines.deployment import Deployment, DeploymentError
from rescheduler.openai.openai_request import ClientRequest, prompt_text, temperature

logger = logging.getLogger("headway.serve")

_PATIENCE = 0.1
"""Seconds that a request waits for its forecast."""
_SHARE, _BURST = 0.25, 1.0
"""Of a processor's time for all forecasts together, and seconds of it that may be saved up."""


class _Asked(NamedTuple):
    """A forecast that is asked for; without a client the thread ends.

    Attributes:
        turn: requests of the same account that were in line before it.
        number: of all that have been asked for.
    """

    turn: float
    number: int
    account: str
    client: ClientRequest | None
    forecast: "Future[int | None]"


class PromptForecasts:
    """Forecasts requests one after the other in a thread; over budget a request has no forecast.

    A prompt in rare letters takes ten times as long as another one, and a checkpoint's own
    tokenizer may take any time. No thread can be stopped: so there is one, and while it is held up
    all others go without. Accounts take turns. The last half of what is saved up is for accounts
    that have lately used no more than the mean.

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
        self._asked: PriorityQueue[_Asked] = PriorityQueue()
        self._number = 0
        self._in_line: Counter[str] = Counter()
        self._done: deque[tuple[str, float]] = deque()
        self._lately: defaultdict[str, float] = defaultdict(float)
        self._lately_since = self._left_at = clock()
        self._left = _BURST
        self._since: float | None = None
        self._failed = False
        Thread(target=self._work, name="prompt-forecasts", daemon=True).start()

    async def expected(self, client: ClientRequest, account: str = "") -> int | None:
        """Return the tokens that an answer is expected to have; None if nothing is known in time.

        The thread leaves out what nobody waits for any more.
        """
        if client.direct or self._is_spent(account):
            return None
        forecast: Future[int | None] = Future()
        self._number += 1
        self._asked.put(_Asked(self._in_line[account], self._number, account, client, forecast))
        self._in_line[account] += 1
        try:
            async with asyncio.timeout(_PATIENCE):
                return await asyncio.wrap_future(forecast)
        except TimeoutError:
            return None
        finally:
            self._in_line[account] -= 1
            if not self._in_line[account]:
                del self._in_line[account]

    def close(self) -> None:
        """End the thread, once it is not held up."""
        self._asked.put(_Asked(inf, self._number, "", None, Future()))

    def _is_spent(self, account: str) -> bool:
        """Return whether an account's budget is used up, or the thread held up."""
        now, since = self._clock(), self._since
        if now - self._lately_since > _BURST / _SHARE:
            self._lately.clear()
            self._lately_since = now
        self._left = min(self._left + _SHARE * (now - self._left_at), _BURST)
        self._left_at = now
        while self._done:
            name, seconds = self._done.popleft()
            self._lately[name] += seconds
            self._left -= seconds
        of_all = sum(self._lately.values())
        most = self._lately[account] * max(len(self._lately), 2) > of_all
        return self._left <= (_BURST / 2 if most else 0.0) or (
            since is not None and now - since > _PATIENCE
        )

    def _work(self) -> None:
        while (asked := self._asked.get()).client is not None:
            if not asked.forecast.set_running_or_notify_cancel():
                continue
            self._since, began, expected = self._clock(), time.thread_time(), None
            try:
                expected = self._of(asked.client)
            except BaseException:  # tokenizers panic by an exception of their own
                if not self._failed:
                    logger.exception("a prompt cannot be forecast; only the first one is shown")
                self._failed = True
            self._done.append((asked.account, time.thread_time() - began))
            self._since = None
            asked.forecast.set_result(expected)


class ExpectedLengths:
    """Forecasts requests from their prompts as they arrive.

    Args:
        checkpoint: of a predictor that reads prompts.
        model: that is served.

    Raises:
        DeploymentError: the checkpoint cannot be used.
    """

    def __init__(self, checkpoint: str, model: str) -> None:
        import torch  # which a proxy without a checkpoint does not load

        from predictor.prompts.prompt_predictor import PromptPredictor

        torch.set_num_threads(1)  # a forecast is too small to share
        try:
            self._predictor = PromptPredictor.load(checkpoint)
        except ValueError as error:
            raise DeploymentError(f"prompt_checkpoint: {error}") from error
        with suppress(ValueError):  # a folder of the engines' machines
            model = name_of(resolve_model(model))
        self._predictor.warn_of_other_model(model, logger)
        self._predictor.expected_tokens("Hello")  # so that no client waits for what is set up once

    def of(self, client: ClientRequest) -> int | None:
        """Return the tokens that an answer is expected to have; None if nothing is known."""
        prompt = prompt_text(client.body)
        if prompt is None:
            return None
        most, asked = client.max_tokens, temperature(client.body)
        return max(1, round(self._predictor.expected_tokens(prompt, most, asked)))


def expected_lengths(deployment: Deployment) -> Callable[[ClientRequest], int | None] | None:
    """Return what forecasts a deployment's requests as they arrive, if anything does.

    It returns the tokens that an answer is expected to have; None if nothing is known.

    Raises:
        DeploymentError: the prompt checkpoint cannot be used.
    """
    emulate = deployment.engine.emulate
    if emulate is not None and emulate.prompt_forecast is not None:
        prompts = EmulatedPrompts(emulate.lengths, emulate.prompt_forecast)
        return lambda client: prompts.expected_tokens(client.body, client.max_tokens)
    if deployment.prompt_checkpoint is not None:
        return ExpectedLengths(deployment.prompt_checkpoint, deployment.model).of
    return None
