"""KV caches that requests need elsewhere: of one that is moved, and of a prefilled one that waits.

A running request is moved so: copy its KV cache, freeze it at the source, resume it elsewhere.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from data_collection.capture.requests import LEASE_SECONDS
from rescheduler.openai.openai_request import EngineBodies, RequestRefusedError
from rescheduler.placement.cluster import Cluster
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.placeable import MoveOutcome
from rescheduler.placement.request_states import Kept, Move
from rescheduler.placement.upstream import EngineRefusedError, UpstreamError
from rescheduler.proxy.proxy_metrics import ProxyMetrics
from rescheduler.tracing.span import Span
from rescheduler.transfer.control_client import ControlClient
from rescheduler.transfer.control_messages import MOST_RENEWED, ControlError, NotFrozenError

logger = logging.getLogger("headway.serve")

_NO_FAILURE = ("moved", "not_frozen", "ended", "gone")
"""Outcomes of a move with which nothing is wrong: what has not moved has ended."""
_REST_SECONDS = 5.0
_SPARE_BLOCKS = 2
_FEW_TOKENS = 2
"""In a block that is not full, when it is time for a copy."""


class Migrator:
    """Has targets copy what requests have computed, and sources freeze them.

    A request decodes while it is copied. Once it is frozen its own flow goes on at the target,
    which has all of its KV cache but the last tokens'.
    """

    def __init__(
        self, cluster: Cluster[LiveRequest], bodies: EngineBodies, metrics: ProxyMetrics
    ) -> None:
        self._cluster = cluster
        self._bodies = bodies
        self._metrics = metrics
        self._upstream, self._options = cluster.upstream, cluster.deployment.proxy
        self._at_a_time = asyncio.Semaphore(self._options.concurrent_migrations)

    async def move(self, request: LiveRequest, target: InstanceState, why: str) -> MoveOutcome:
        """Move a request; return when it runs at its target, or stays.

        Returns:
            How it ended: ``moved``, ``rolled_back``, ``not_copied``, ``not_frozen``, ``ended``,
            ``no_room``, ``unlike``, ``no_answer``, or ``gone``; and the pause.
        """
        source = request.instance
        if source is None or source is target or not request.can_move:
            return MoveOutcome("gone")
        with request.trace.span("move", source=source.name, target=target.name, reason=why) as span:
            ended = await self._tried(request, source, target, why, span)
            pause = ended.pause
            span.set(outcome=ended.outcome, pause_ms=None if pause is None else 1e3 * pause)
            if ended.outcome not in _NO_FAILURE:
                span.fail(ended.outcome)
        return ended

    def release(self, kept: Kept, id: str) -> None:
        """Free, in the background, what an instance keeps of a request in vain."""
        self._cluster.background(self._release(kept, id))

    async def _tried(
        self,
        request: LiveRequest,
        source: InstanceState,
        target: InstanceState,
        why: str,
        span: Span,
    ) -> MoveOutcome:
        move, loop = request.move_to(target), asyncio.get_running_loop()
        began = loop.time()
        try:
            ended = await self._moved(request, move, span)
        finally:
            if request.is_copying(move):
                request.not_copied()
        if ended.outcome != "moved":
            request.rest(loop.time() + _REST_SECONDS)
        self._metrics.migrations.labels(source.name, target.name, ended.outcome).inc()
        self._cluster.moves.ended(request, source, target, why, ended)
        logger.info(
            "request %s, %d tokens: %s to %s: %s after %.3f s (%s)",
            request.id,
            request.context_tokens,
            source.name,
            target.name,
            ended.outcome,
            loop.time() - began,
            why,
        )
        return ended

    async def _moved(self, request: LiveRequest, move: Move, span: Span) -> MoveOutcome:
        await self._filled_block(request, move)
        async with self._at_a_time:
            outcome = await self._copied(request, move, span)
            if outcome is None and (request.client_blocks or not request.is_copying(move)):
                outcome = "gone"
            if outcome is None:
                request.freeze()
                with span.span("freeze", instance=move.source.name):
                    outcome = await self._frozen(request, move)
            frozen_at = time.time_ns()
            if outcome is None:  # other moves need not wait for a client or an engine
                await asyncio.wait([move.landed], timeout=self._options.moved_token_seconds)
        if outcome is not None:
            return MoveOutcome(outcome)
        pause = await asyncio.shield(move.landed)
        span.over("resume", frozen_at, time.time_ns(), instance=move.target.name)
        return MoveOutcome("rolled_back" if pause is None else "moved", pause)

    async def _filled_block(self, request: LiveRequest, move: Move) -> None:
        """Wait until a request has just filled a block: copies are of full blocks.

        What is in a block that is not full has to be computed again at the target.
        """
        engine = move.target.engine
        if engine is None or not engine.prefix_caching:
            return
        block = engine.block_size
        full = request.context_tokens // block
        while (
            request.is_copying(move)
            and request.context_tokens % block > _FEW_TOKENS
            and request.context_tokens // block == full
        ):
            await request.next_token()

    async def _copied(self, request: LiveRequest, move: Move, span: Span) -> str | None:
        """Have the target copy what there is; return why the request stays, or None.

        A request that fills no block, and a target that shares none, need no copy.
        """
        control, target = move.source.control, move.target
        if not request.is_copying(move):
            return "gone"
        if not await self._has_room(request, target):
            return "no_room"
        if move.source.is_unlike(target) or not target.serves(request.model):
            return "unlike"
        if request.splicer.parsed and not target.parses_again:
            return "unlike"
        if control is None or target.engine is None or not target.engine.prefix_caching:
            return None
        began = asyncio.get_running_loop().time()
        try:
            await self._copy(request, move, control, span)
        except NotFrozenError as error:
            logger.debug("%s: no copy: %s", request.id, error)
            return None
        except (ControlError, EngineRefusedError, RequestRefusedError, UpstreamError) as error:
            logger.warning("%s: no copy: %s", request.id, error)
            return "not_copied"
        self._metrics.copying.observe(asyncio.get_running_loop().time() - began)
        return None

    async def _copy(
        self, request: LiveRequest, move: Move, control: ControlClient, span: Span
    ) -> None:
        """Have the target pull the full blocks that the source has."""
        snapshot = await control.snapshot(request.id, self._options.control_seconds)
        body = self._bodies.copy(
            request.client, request.id, move.hop, snapshot.token_ids, snapshot.params
        )
        # Its own name would make the copy look like the request to those who count them.
        headers = {k: v for k, v in request.headers.items() if k != "X-Request-Id"}
        seconds, target = self._options.moved_token_seconds, move.target
        with span.call("copy", instance=target.name) as call:
            await self._upstream.copy(target.instance, body, call.headers(headers), seconds)

    async def _frozen(self, request: LiveRequest, move: Move) -> str | None:
        """Have the source freeze a request; return why it has not, or None."""
        control, seconds = move.source.control, self._options.freeze_seconds
        assert control is not None
        try:
            frozen = await control.freeze(request.id, move.hop, seconds)
        except NotFrozenError as error:
            logger.debug("%s: not frozen: %s", request.id, error)
            if request.is_freezing(move):
                request.not_frozen()
            return "not_frozen"
        except ControlError as error:
            logger.warning("%s: %s", request.id, error)
            return await self._after_silence(request, move)
        if not request.is_freezing(move):
            self.release(Kept(move.source, move.hop), request.id)
            return "ended"
        request.frozen(frozen.output_token_ids, frozen.params)
        return None

    async def _after_silence(self, request: LiveRequest, move: Move) -> str:
        """After a freeze without an answer: take it back, or wait how the stream ends."""
        control, unfrozen = move.source.control, False
        assert control is not None
        try:
            unfrozen = await control.unfreeze(request.id, self._options.control_seconds)
        except ControlError as error:
            logger.warning("%s: %s", request.id, error)
        if request.is_freezing(move) and unfrozen:
            request.not_frozen()
        elif request.is_freezing(move):
            request.unanswered()
        elif not unfrozen:
            self.release(Kept(move.source, move.hop), request.id)  # frozen after all, perhaps
        return "no_answer"

    async def _has_room(self, request: LiveRequest, target: InstanceState) -> bool:
        """Ask the target whether it can run the request at once.

        Whoever waits there, perhaps for the next step only, is taken to need as many blocks.
        """
        if target.control is None:
            return True
        try:
            state = await target.control.state(self._options.control_seconds)
        except ControlError as error:
            logger.warning("%s: %s", target.name, error)
            return False
        target.engine = state
        blocks = -(-request.context_tokens // max(1, state.block_size)) + _SPARE_BLOCKS
        return (
            state.free_blocks >= blocks * (1 + state.waiting)
            and state.running + state.waiting < state.max_num_seqs
        )

    async def _release(self, kept: Kept, id: str) -> None:
        control = kept.instance.control
        if control is not None:
            try:
                await control.release(id, kept.hop, self._options.control_seconds)
            except ControlError as error:  # then its time to live ends
                logger.warning("%s: %s", kept.instance.name, error)


_STOCK_SECONDS, _LONGEST_SECONDS = 30.0, 86_400.0
"""The lease of a prefill in stock vLLM, and what none is longer than."""
_MARGIN_SECONDS = 5.0
"""Before a lease ends, for which no engine reads."""
_RENEW_SECONDS, _LOOK_SECONDS = 5.0, 1.0
_UNTIL = "remote_blocks_expiry_time"
"""Of ``kv_transfer_params``: when the lease ends, on the clock of the engine that gave it."""


class Leases:
    """Renews the leases of prefilled requests that wait, every 5 s, over the control sockets.

    Otherwise an overload would feed itself: a decode instance computes a prompt again whose lease
    has ended in the line, just when there is least room for that.
    """

    def __init__(self, cluster: Cluster[LiveRequest]) -> None:
        self._cluster, self._timeout = cluster, cluster.deployment.proxy.control_seconds
        self._asked: dict[LiveRequest, float] = {}  # when, for those that wait
        self._failed: set[InstanceState] = set()

    @contextmanager
    def kept(self, request: LiveRequest) -> Iterator[None]:
        """Renew the lease of a request while the body runs, if it has been prefilled."""
        if request.prefill is None:
            yield
            return
        now = asyncio.get_running_loop().time()
        if request.lease_until is None:
            said = request.prefill.params.pop(LEASE_SECONDS, None)
            known = isinstance(said, int | float) and 0 <= said <= _LONGEST_SECONDS
            request.lease_until = now + (said if known else _STOCK_SECONDS) - _MARGIN_SECONDS
        self._asked[request] = now
        try:
            yield
        finally:
            del self._asked[request]

    def has_ended(self, request: LiveRequest) -> bool:
        """Return whether nobody can read the blocks of a prefilled request any more."""
        until = request.lease_until
        return until is not None and asyncio.get_running_loop().time() > until

    async def run(self) -> None:
        """Renew leases forever."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                self._look()
            except Exception:  # the leases of all others are to be renewed, too
                logger.exception("looking for leases to renew failed")

    def _look(self) -> None:
        """Begin to renew what is due."""
        now, due = asyncio.get_running_loop().time(), dict[InstanceState, list[LiveRequest]]()
        for request, asked in self._asked.items():
            if now - asked >= _RENEW_SECONDS and request.prefill is not None:
                due.setdefault(request.prefill.kept.instance, []).append(request)
        for instance, requests in due.items():
            self._asked.update(dict.fromkeys(requests, now))
            if instance.control is not None:
                for i in range(0, len(requests), MOST_RENEWED):
                    some = requests[i : i + MOST_RENEWED]
                    self._cluster.background(self._renew(instance, instance.control, some))

    async def _renew(
        self, instance: InstanceState, control: ControlClient, requests: Sequence[LiveRequest]
    ) -> None:
        now = asyncio.get_running_loop().time()
        try:
            renewed = await control.renew([request.id for request in requests], self._timeout)
        except ControlError as error:  # of another version, perhaps: then its lease ends
            if instance not in self._failed:
                logger.warning("%s: no lease is renewed: %s", instance.name, error)
            self._failed.add(instance)
            return
        self._failed.discard(instance)
        kept = set(renewed.ids)
        for request in requests:
            prefill = request.prefill
            if request.id in kept and prefill is not None and prefill.kept.instance is instance:
                request.lease_until = now + renewed.seconds - _MARGIN_SECONDS
                if prefill.params.get(_UNTIL) is not None:
                    prefill.params[_UNTIL] = renewed.until
