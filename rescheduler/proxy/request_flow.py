"""A request from its prefill to its last token, on however many instances."""

import asyncio
import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import aiohttp
import msgspec

from data_collection.capture.requests import LEASE_SECONDS
from rescheduler.openai.openai_request import EngineBodies, RequestRefusedError
from rescheduler.placement.cluster import Cluster
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import Kept, Landing, LiveRequest, Placed, Returned, Waiting
from rescheduler.placement.prober import OutlierDetection
from rescheduler.placement.quarantine import MOST_BREAKS, MOST_LOST, TRUSTED_TOKENS, Quarantine
from rescheduler.placement.stream_watch import LateError, StreamWatch
from rescheduler.placement.upstream import (
    EngineFullError,
    EngineRefusedError,
    ModelMissingError,
    UpstreamError,
)
from rescheduler.proxy.migrator import Migrator
from rescheduler.proxy.proxy_metrics import ProxyMetrics
from rescheduler.proxy.token_relay import Comment, EngineStream, SeesTokens, Send, TokenRelay
from rescheduler.tracing.span import Span
from rescheduler.transfer.control_client import ControlClient
from rescheduler.transfer.control_messages import MOST_RENEWED, ControlError

logger = logging.getLogger("headway.serve")

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


_PREFILL_ATTEMPTS = 2
_LONGEST_BACK_OFF = 5.0  # seconds


class RequestFlow:
    """Takes requests through the instances, and tokens back to the clients.

    Attributes:
        leases: of the blocks of requests that wait.
    """

    def __init__(
        self,
        cluster: Cluster[LiveRequest],
        bodies: EngineBodies,
        outliers: OutlierDetection,
        watch: StreamWatch,
        migrator: Migrator,
        metrics: ProxyMetrics,
        seen: SeesTokens | None = None,
    ) -> None:
        self._upstream, self._dispatcher = cluster.upstream, cluster.dispatcher
        self._bodies = bodies
        self._outliers = outliers
        self._watch = watch
        self._prober, self._keys = cluster.prober, cluster.accounts.keys
        self._quarantine = Quarantine(cluster.dispatcher.usable_for, cluster.decodes)
        self._migrator = migrator
        self._metrics = metrics
        self._options = cluster.deployment.proxy
        self._relay = TokenRelay(cluster, outliers, migrator, metrics, seen)
        self._random = random.Random()
        self.leases = Leases(cluster)

    async def run(self, request: LiveRequest, send: Send, comment: Comment | None = None) -> None:
        """Generate a request to its end; cancel it when the client leaves.

        Raises:
            EngineRefusedError: an engine refuses the request as invalid.
            RequestRefusedError: no instance had room in time, or all turned it away; or two
                engines were lost while they had just begun with it.
            UpstreamError: too many attempts failed.
        """
        try:
            await self.prefill(request)
            await self._decode(request, send, comment)
        finally:
            self.leave(request)

    async def prefill(self, request: LiveRequest) -> None:
        """Prefill a request, unless its decode instance has to do it.

        That also does it for an instance that answers with an error, or where two fail.
        """
        if request.client.direct:
            return
        for attempt in range(_PREFILL_ATTEMPTS):
            if attempt:
                await self.back_off(attempt)
            with request.trace.span("wait", stage="prefill"):
                instance = await self._dispatcher.take_prefill(request)
            if instance is None:
                return
            body = self._bodies.prefill(request.client, request.id, request.prefill_hop)
            path, patience = request.client.path, self._options.prefill_seconds
            try:
                with request.trace.call("prefill", instance=instance.name) as span:
                    async with self._watch.over(request, instance, patience):
                        params, tokens = await self._upstream.prefill(
                            instance.instance, path, body, span.headers(request.headers)
                        )
            except ModelMissingError:
                instance.lacks(request.model)
                request.prefill_failed()
                return
            except UpstreamError as error:
                await self.note_failure(request, instance, error)
                self.free(request, request.prefill_failed())
                if error.answered or request.engines_lost:
                    return
            except EngineRefusedError:
                request.prefill_failed()
                raise
            else:
                request.prefilled(params, tokens)
                self._keys.served(request.headers)
                self._dispatcher.began(request, instance)
                self._outliers.succeeded(request, instance)
                return
            finally:
                self._dispatcher.wake()

    async def place(self, request: LiveRequest) -> InstanceState:
        """Wait for a place on a decode instance, or refuse the request in time."""
        avoid = request.avoid
        if request.engines_lost:
            seconds = None if request.background else self._options.pool_seconds
            await self._quarantine.enter(request, seconds)
        with request.trace.span("wait", stage="decode"), self.leases.kept(request):
            instance = await self._dispatcher.place(request)
        if request.engines_lost:
            request.avoid = avoid  # if it is turned away, others may have room
            self._quarantine.placed(request, instance)
        if request.hop == 0:
            self._metrics.placed(request)
        self._check_prefill(request, instance)
        return instance

    def _check_prefill(self, request: LiveRequest, instance: InstanceState) -> None:
        """Have an instance compute the prompt itself that cannot read the prefill's KV cache.

        It is unlike the prefill's instance, or the lease has ended.
        """
        if not isinstance(request.state, Placed) or request.state.prefill is None:
            return
        prefill = request.state.prefill.kept.instance
        if prefill.is_unlike(instance, moves=False):
            self._metrics.unlike_prefills.labels(prefill.name, instance.name).inc()
        elif self.leases.has_ended(request):
            self._metrics.lost_prefills.labels(prefill.name).inc()
        else:
            return
        self.free(request, request.computes_prompt())

    def leave(self, request: LiveRequest) -> None:
        """End a request, and free everything that anyone keeps for it."""
        self._quarantine.leave(request)
        self.free(request, request.finish())
        self._dispatcher.wake()

    def free(self, request: LiveRequest, kept: Kept | None) -> None:
        """Free, in the background, what an instance keeps in vain."""
        if kept is not None:
            self._migrator.release(kept, request.id)

    async def note_failure(
        self, request: LiveRequest, instance: InstanceState, error: UpstreamError
    ) -> None:
        """Note that a request failed on an instance, and whether the engine was lost by that.

        The second one counts only if the request was kept apart from other suspects there.

        Raises:
            RequestRefusedError: 422, two engines were lost while they had just begun with it.
        """
        begun = request.generated_here <= TRUSTED_TOKENS
        self._outliers.failed(request, instance, error)
        apart = self._quarantine.leave(request) is instance
        late, evidence = isinstance(error, LateError), instance.evidence
        hangs = late and bool(evidence.why) and evidence.hangs
        if error.unsent or (late and not hangs):
            return
        request.breaks += not begun
        if not begun and request.breaks <= MOST_BREAKS:
            return
        died = hangs or await self._prober.has_died(instance, request.incarnation)
        if died and (apart or not begun or not request.engines_lost):
            request.engines_lost.append(instance.name)
        if len(request.engines_lost) >= MOST_LOST:
            names = " and ".join(request.engines_lost)
            logger.error(
                "request %s (%s), %d tokens: refused: %s were lost while they had just begun with "
                "it",
                request.id,
                request.name,
                request.context_tokens,
                names,
            )
            raise RequestRefusedError(
                422, "the engines ended while they served this request; it is not tried again"
            )

    def gives_up(self, request: LiveRequest, failures: int) -> bool:
        """Return whether a request that has failed so often in a row is not tried again.

        One that instances answer with an error is tried twice: it may be the cause. One that has
        all of its tokens, but not its end, has nothing left to be asked for.
        """
        most = request.client.max_tokens
        return (
            failures >= self._options.attempts
            or len(request.failed_by) > 1
            or (most is not None and 0 < most <= request.generated_tokens)
        )

    def turned_away(
        self, request: LiveRequest, instance: InstanceState, error: EngineFullError
    ) -> None:
        """Have a request that an instance is too full for placed on another one, or refuse it.

        So is one whose model the instance does not have.
        """
        self._metrics.turned_away.labels(instance.name).inc()
        request.turned_away()
        self._dispatcher.wake()
        if isinstance(error, ModelMissingError):
            instance.lacks(request.model)
            if not self._dispatcher.has_model_elsewhere(request):
                raise error.refusal
            return
        if not self._dispatcher.has_another(request):
            message = "no engine would give the first token in time; try again later"
            raise RequestRefusedError(429, message, retry_after=error.seconds)

    async def back_off(self, failures: int) -> None:
        """Wait before another attempt: exponentially longer, half of it at random."""
        seconds = min(self._options.backoff_seconds * 2 ** (failures - 1), _LONGEST_BACK_OFF)
        await asyncio.sleep(seconds * self._random.uniform(0.5, 1.0))

    async def _decode(self, request: LiveRequest, send: Send, comment: Comment | None) -> None:
        failures, ended = 0, False
        while not ended:
            if isinstance(request.state, Waiting):
                await self.place(request)
            instance, before = request.instance, request.generated_tokens
            assert instance is not None
            try:
                async with request.may_give_way():
                    ended = await self._traced_segment(request, instance, send, comment)
            except TimeoutError:
                self._give_way(request, instance)
            except UpstreamError as error:
                if isinstance(error, EngineFullError) and not request.generated_tokens:
                    self.turned_away(request, instance, error)
                    continue
                await self.note_failure(request, instance, error)
                goes_on = request.generated_tokens > before + TRUSTED_TOKENS
                failures = 1 if goes_on else failures + 1
                if self.gives_up(request, failures):
                    raise
                await self._after_failure(request, error, failures)

    def _give_way(self, request: LiveRequest, instance: InstanceState) -> None:
        """Have a background request wait again; what it has generated is kept."""
        self._metrics.gave_way.labels(instance.name).inc()
        self.free(request, request.gave_way())
        if request.generated_tokens:
            request.splicer.cut()
        self._dispatcher.wake()

    async def _after_failure(
        self, request: LiveRequest, error: UpstreamError, failures: int
    ) -> None:
        """Have a request go on after an instance failed: at the source of its move, or anywhere."""
        self._metrics.recomputed.labels(error.instance).inc()
        self.free(request, request.fail(error.unsent, error.answered))
        if isinstance(request.state, Returned):
            return
        if request.generated_tokens:
            request.splicer.cut()
        self._dispatcher.wake()
        await self.back_off(failures)

    async def _traced_segment(
        self,
        request: LiveRequest,
        instance: InstanceState,
        send: Send,
        comment: Comment | None,
    ) -> bool:
        with request.trace.call("decode", instance=instance.name, hop=request.hop) as span:
            return await self._segment(request, instance, send, comment, span)

    async def _segment(
        self,
        request: LiveRequest,
        instance: InstanceState,
        send: Send,
        comment: Comment | None,
        span: Span,
    ) -> bool:
        """Decode on one instance; return whether the request has ended, or else it goes on.

        Raises:
            UpstreamError: the instance failed, or has the request no more.
            TimeoutError: the instance serves all others before a background request.
            EngineRefusedError: the instance refuses the request as invalid.
        """
        options, body = self._options, self._body(request)
        lands = isinstance(request.state, Landing)
        patience = options.moved_token_seconds if lands else options.first_token_seconds
        stream: EngineStream | None = None
        try:
            async with self._watch.over(request, instance, patience, lands) as wait:
                response = await self._upstream.open(
                    instance.instance, request.client.path, body, span.headers(request.headers)
                )
                request.accepted()
                self._keys.served(request.headers)
                try:
                    stream = EngineStream(request, instance, wait, response, span)
                    return await self._relay.relay(stream, send, comment)
                finally:
                    response.close()
        except EngineRefusedError as error:
            if not request.generated_tokens:
                raise
            reason = f"refuses to go on: {error}"
            raise UpstreamError(instance.instance, reason, answered=True) from error
        except LateError:
            if stream is not None and stream.finished:
                return True
            raise
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            if stream is not None and stream.finished:
                return True  # only the end of the events is missing
            reason = f"its stream broke: {type(error).__name__}: {error}"
            raise UpstreamError(instance.instance, reason) from error

    def _body(self, request: LiveRequest) -> bytes:
        splicer, params = request.splicer, request.transfer_params
        if not splicer.output_token_ids:
            return self._bodies.decode(request.client, request.id, request.hop, params)
        instance = request.instance
        if splicer.parsed and instance is not None and not instance.parses_again:
            reason = "cannot go on with an answer whose text is parsed"
            raise UpstreamError(instance.instance, reason, answered=True)
        return self._bodies.resumed(
            request.client,
            request.id,
            request.hop,
            splicer.prompt_token_ids,
            splicer.output_token_ids,
            params,
            splicer.answer_so_far,
        )
