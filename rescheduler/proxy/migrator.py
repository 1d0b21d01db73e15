"""Moving a running request: freeze it at the source, resume it at the target."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from rescheduler.engines.deployment import ProxyOptions
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest, Move
from rescheduler.proxy.proxy_metrics import ProxyMetrics
from rescheduler.transfer.control_messages import ControlError, Frozen, NotFrozenError

__all__ = ["Migrator"]

logger = logging.getLogger("headway.serve")

_REST_SECONDS = 5.0
_SPARE_BLOCKS = 2


class Migrator:
    """Asks sources to freeze requests; the request's own flow then goes on at the target.

    Args:
        options: deadlines, and how many moves at a time.
        metrics: counts the moves.
        background: runs what must not wait for its caller.
    """

    def __init__(
        self,
        options: ProxyOptions,
        metrics: ProxyMetrics,
        background: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._options, self._metrics, self._background = options, metrics, background
        self._at_a_time = asyncio.Semaphore(options.concurrent_migrations)

    async def move(self, request: LiveRequest, target: InstanceState, why: str) -> str:
        """Move a request; return when it runs at its target, or stays.

        Returns:
            How it ended: ``moved``, ``rolled_back``, ``not_frozen``, ``ended``, ``no_room``,
            ``no_answer``, or ``gone``.
        """
        async with self._at_a_time:
            source = request.instance
            if source is None or source is target or not request.can_move:
                return "gone"
            outcome = await self._move(request, source, target)
        if outcome != "moved":
            request.rests_until = asyncio.get_running_loop().time() + _REST_SECONDS
        self._metrics.migrations.labels(source.name, target.name, outcome).inc()
        logger.info(
            "request %s, %d tokens: %s to %s: %s (%s)",
            request.id,
            request.prompt_tokens + request.generated_tokens,
            source.name,
            target.name,
            outcome,
            why,
        )
        return outcome

    def release(self, source: InstanceState, id: str) -> None:
        """Free, in the background, what a source keeps of a request that nobody will ask for."""
        self._background(self._release(source, id))

    def abandon(self, request: LiveRequest) -> None:
        """Give a move up: its request has ended, or its stream has broken."""
        move, request.move = request.move, None
        if move is None:
            return
        if not move.landed.done():
            move.landed.set_result(False)
        if move.verdict.done() and move.verdict.exception() is None and move.verdict.result():
            self.release(move.source, request.id)

    async def _move(
        self, request: LiveRequest, source: InstanceState, target: InstanceState
    ) -> str:
        if not await self._has_room(request, target):
            return "no_room"
        if request.instance is not source or not request.can_move:
            return "gone"
        assert source.control is not None
        loop = asyncio.get_running_loop()
        move = Move(source, target, loop.time(), loop.create_future(), loop.create_future())
        request.move = move
        hop = request.hop - 1
        try:
            frozen = await source.control.freeze(request.id, hop, self._options.freeze_seconds)
        except NotFrozenError as error:
            logger.debug("%s: not frozen: %s", request.id, error)
            self._settle(request, move, None)
            return "not_frozen"
        except ControlError as error:
            logger.warning("%s: %s", request.id, error)
            return await self._after_silence(request, source, move)
        if not self._settle(request, move, frozen):
            return "ended"
        return "moved" if await move.landed else "rolled_back"

    async def _after_silence(self, request: LiveRequest, source: InstanceState, move: Move) -> str:
        """After a freeze without an answer: take it back, or let the stream tell what it did."""
        assert source.control is not None
        try:
            if await source.control.unfreeze(request.id, self._options.control_seconds):
                self._settle(request, move, None)
                return "no_answer"
        except ControlError as error:
            logger.warning("%s: %s", request.id, error)
        if request.move is move:
            move.verdict.set_exception(ControlError("no answer to the freeze"))
            move.verdict.exception()  # it is looked at only if the stream ends early
        return "no_answer"

    def _settle(self, request: LiveRequest, move: Move, frozen: Frozen | None) -> bool:
        """Tell the request's flow; return whether it waits for that."""
        if request.move is not move:
            if frozen is not None:
                self.release(move.source, request.id)
            return False
        move.verdict.set_result(frozen)
        return True

    async def _has_room(self, request: LiveRequest, target: InstanceState) -> bool:
        """Ask the target whether it can run the request at once."""
        if target.control is None:
            return True
        try:
            state = await target.control.state(self._options.control_seconds)
        except ControlError as error:
            logger.warning("%s: %s", target.name, error)
            return False
        target.engine = state
        tokens = request.prompt_tokens + request.generated_tokens
        blocks = -(-tokens // max(1, state.block_size)) + _SPARE_BLOCKS
        return (
            state.free_blocks >= blocks
            and state.waiting == 0
            and state.running < state.max_num_seqs
        )

    async def _release(self, source: InstanceState, id: str) -> None:
        if source.control is not None:
            try:
                await source.control.release(id, self._options.control_seconds)
            except ControlError as error:  # then its time to live ends
                logger.warning("%s: %s", source.name, error)
