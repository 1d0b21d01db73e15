"""A request from its prefill to its last token: on however many instances, or handed through."""

import asyncio
import logging
import random
from math import inf

import aiohttp
import msgspec
from aiohttp import web

from rescheduler.openai.openai_request import ALWAYS_STREAM, EngineBodies, RequestRefusedError
from rescheduler.openai.openai_response import read_usage
from rescheduler.openai.openai_stream import EventReader, event, read_signs
from rescheduler.placement.cluster import Cluster
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.prober import OutlierDetection
from rescheduler.placement.quarantine import MOST_BREAKS, MOST_LOST, TRUSTED_TOKENS, Quarantine
from rescheduler.placement.request_states import Kept, Landing, Placed, Returned, Waiting
from rescheduler.placement.stream_watch import LateError, StreamWatch
from rescheduler.placement.upstream import (
    EngineFullError,
    EngineRefusedError,
    ModelMissingError,
    UpstreamError,
    reported_error,
)
from rescheduler.proxy.migrator import Leases, Migrator
from rescheduler.proxy.proxy_metrics import ProxyMetrics
from rescheduler.proxy.token_relay import (
    ClientAnswer,
    ClientGoneError,
    EngineStream,
    SeesTokens,
    TokenRelay,
)
from rescheduler.tracing.span import Span

logger = logging.getLogger("headway.serve")

_PREFILL_ATTEMPTS = 2
_LONGEST_BACK_OFF = 5.0  # seconds


class RequestFlow:
    """Takes requests through the instances, and tokens back to the clients.

    Attributes:
        leases: of the blocks of requests that wait.
        watch: over all that engines are awaited for.
    """

    def __init__(
        self,
        cluster: Cluster[LiveRequest],
        bodies: EngineBodies,
        migrator: Migrator,
        metrics: ProxyMetrics,
        seen: SeesTokens | None,
    ) -> None:
        self.upstream = cluster.upstream
        self.dispatcher = cluster.dispatcher
        self.bodies = bodies
        refused = cluster.prober.refused
        self.outliers = OutlierDetection(cluster.failed, refused, metrics.failures)
        self.watch = StreamWatch(cluster)
        self.accounts, self.step = cluster.accounts, cluster.step
        self._prober = cluster.prober
        self._quarantine = Quarantine(cluster.dispatcher.usable_for, cluster.decodes)
        self._migrator = migrator
        self._metrics = metrics
        self.options = cluster.deployment.proxy
        self.seen = seen
        self._relay = TokenRelay(cluster, self.outliers, migrator, metrics, seen)
        self._random = random.Random()
        self.leases = Leases(cluster)

    async def run(self, request: LiveRequest, answer: ClientAnswer) -> None:
        """Generate a request to its end; cancel it when the client leaves.

        Raises:
            EngineRefusedError: an engine refuses the request as invalid.
            RequestRefusedError: no instance had room in time, or all turned it away; or two
                engines were lost while they had just begun with it.
            UpstreamError: too many attempts failed.
        """
        try:
            await self.prefill(request)
            await self._decode(request, answer)
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
                instance = await self.dispatcher.take_prefill(request)
            if instance is None:
                return
            body = self.bodies.prefill(request.client, request.id, request.prefill_hop)
            path, patience = request.client.path, self.options.prefill_seconds
            try:
                with request.trace.call("prefill", instance=instance.name) as span:
                    async with self.watch.over(request, instance, patience):
                        params, tokens = await self.upstream.prefill(
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
                self.accounts.keys.served(request.headers)
                self.dispatcher.began(request, instance)
                self.outliers.succeeded(request, instance)
                return
            finally:
                self.dispatcher.wake()

    async def place(self, request: LiveRequest) -> InstanceState:
        """Wait for a place on a decode instance, or refuse the request in time."""
        avoid = request.avoid
        if request.engines_lost:
            seconds = None if request.background else self.options.pool_seconds
            await self._quarantine.enter(request, seconds)
        with request.trace.span("wait", stage="decode"), self.leases.kept(request):
            instance = await self.dispatcher.place(request)
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
        self.dispatcher.wake()

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
        self.outliers.failed(request, instance, error)
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
            failures >= self.options.attempts
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
        self.dispatcher.wake()
        if isinstance(error, ModelMissingError):
            instance.lacks(request.model)
            if not self.dispatcher.has_model_elsewhere(request):
                raise error.refusal
            return
        if not self.dispatcher.has_another(request):
            message = "no engine would give the first token in time; try again later"
            raise RequestRefusedError(429, message, retry_after=error.seconds)

    async def back_off(self, failures: int) -> None:
        """Wait before another attempt: exponentially longer, half of it at random."""
        seconds = min(self.options.backoff_seconds * 2 ** (failures - 1), _LONGEST_BACK_OFF)
        await asyncio.sleep(seconds * self._random.uniform(0.5, 1.0))

    async def _decode(self, request: LiveRequest, answer: ClientAnswer) -> None:
        failures, ended = 0, False
        while not ended:
            if isinstance(request.state, Waiting):
                await self.place(request)
            instance, before = request.instance, request.generated_tokens
            assert instance is not None
            try:
                async with request.may_give_way():
                    called = request.trace.call("decode", instance=instance.name, hop=request.hop)
                    with called as span:
                        ended = await self._segment(request, instance, answer, span)
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
        self.dispatcher.wake()

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
        self.dispatcher.wake()
        await self.back_off(failures)

    async def _segment(
        self, request: LiveRequest, instance: InstanceState, answer: ClientAnswer, span: Span
    ) -> bool:
        """Decode on one instance; return whether the request has ended, or else it goes on.

        Raises:
            UpstreamError: the instance failed, or has the request no more.
            TimeoutError: the instance serves all others before a background request.
            EngineRefusedError: the instance refuses the request as invalid.
        """
        options, body = self.options, self._body(request)
        lands = isinstance(request.state, Landing)
        patience = options.moved_token_seconds if lands else options.first_token_seconds
        stream: EngineStream | None = None
        try:
            async with self.watch.over(request, instance, patience, lands) as wait:
                response = await self.upstream.open(
                    instance.instance, request.client.path, body, span.headers(request.headers)
                )
                request.accepted()
                self.accounts.keys.served(request.headers)
                try:
                    stream = EngineStream(request, instance, wait, response, span)
                    return await self._relay.relay(stream, answer)
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
        suspended = self.dispatcher.suspended(request)
        if not splicer.output_token_ids:
            return self.bodies.decode(request.client, request.id, request.hop, params, suspended)
        instance = request.instance
        if splicer.parsed and instance is not None and not instance.parses_again:
            reason = "cannot go on with an answer whose text is parsed"
            raise UpstreamError(instance.instance, reason, answered=True)
        return self.bodies.resumed(
            request.client,
            request.id,
            request.hop,
            splicer.prompt_token_ids,
            splicer.output_token_ids,
            params,
            splicer.answer_so_far,
            suspended,
        )


_KEYED = "/v1/"
"""Paths for which engines ask for a key; others they answer to anybody."""

_EVENTS = "text/event-stream"
_DESCRIBES = "metadata"
"""Header in which an engine describes embeddings of ``encoding_format: bytes``."""
_LONG_ANSWER = 4_096  # tokens, where the client gives no limit
_HELD_BYTES = 8 << 20
"""Of an answer, until its client gets it: what fails before can start again elsewhere."""


class PassThrough:
    """Takes a request to one decode instance, and its answer back byte for byte.

    If the instance fails before the client has got anything, the request starts again elsewhere;
    afterwards its client gets the error, since nobody knows where it stood. The client gets
    comments at most before the first event, which tells whether a request is served: the status of
    a stream does not.
    """

    def __init__(self, flow: RequestFlow) -> None:
        self._flow = flow

    async def run(self, request: LiveRequest, answer: ClientAnswer) -> web.StreamResponse:
        """Generate a request to its end; cancel it when the client leaves.

        Raises:
            ClientGoneError: the client has left.
            EngineRefusedError: an engine refuses the request as invalid.
            RequestRefusedError: no instance had room in time, or all turned it away.
            UpstreamError: too many attempts failed, or one after the client has got something.
        """
        try:
            await self._flow.prefill(request)
            failures = 0
            while True:
                instance = await self._flow.place(request)
                try:
                    with request.trace.call("decode", instance=instance.name) as span:
                        return await self._hand_through(request, instance, answer, span)
                except EngineFullError as error:
                    self._flow.turned_away(request, instance, error)
                except UpstreamError as error:
                    await self._flow.note_failure(request, instance, error)
                    failures += 1
                    if answer.has_content or self._flow.gives_up(request, failures):
                        raise
                    self._flow.free(request, request.fail(error.unsent, error.answered))
                    self._flow.dispatcher.wake()
                    await self._flow.back_off(failures)
        finally:
            self._flow.leave(request)

    async def _hand_through(
        self, request: LiveRequest, instance: InstanceState, answer: ClientAnswer, span: Span
    ) -> web.StreamResponse:
        flow, streams = self._flow, request.client.stream
        patience = flow.options.first_token_seconds
        document: web.StreamResponse | None = None
        failed, untold = False, streams
        request.counted, request.counted_tokens = None, 0
        clock = asyncio.get_running_loop().time
        began = inf if streams else clock()  # a stream: once its engine has begun with it
        try:
            # What comes as a whole comes as late as it likes while its engine has it.
            async with (
                flow.watch.over(request, instance, patience, streams=streams) as wait,
                await self._open(request, instance, span) as response,
            ):
                stream = EngineStream(request, instance, wait, response, span)
                if streams and response.content_type == _EVENTS:
                    try:
                        failed = await self._relay(stream, answer)
                    finally:
                        began = stream.heard_at
                        self._take_counts(stream)
                else:
                    document = await self._document(stream, answer)
                    untold = request.counted is None and answer.has_content
            ended = await answer.end() if document is None else document
        except TimeoutError as error:
            raise UpstreamError(instance.instance, "no end to its answer in time") from error
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UpstreamError(instance.instance, reason) from error
        except (asyncio.CancelledError, ClientGoneError):
            self._count(request, clock() - began)
            raise
        if untold:
            self._count(request, clock() - began)
        if failed:
            raise UpstreamError(instance.instance, "its stream ends with an error", answered=True)
        flow.outliers.succeeded(request, instance)
        return ended

    def _take_counts(self, stream: EngineStream) -> None:
        """Take what a stream says of its tokens: the output as well only once it is complete."""
        request, counts = stream.request, read_usage(*stream.counts)
        if counts is not None and stream.finished:
            request.was_counted(*counts)
        elif counts is not None:
            request.prompt_tokens, request.prompt_is_known = counts[0], True

    def _count(self, request: LiveRequest, seconds: float) -> None:
        """Charge for the tokens that an engine may have generated in that time, if it did not say.

        It does not for chunks of several tokens, for reasoning that is not shown, for a client that
        leaves before the whole answer, and for one that is too large to be kept.
        """
        client, read = request.client, float(request.generated_tokens)
        steps = seconds / self._flow.step.seconds
        generated = read * client.stream_interval
        if generated < steps / 2:
            generated = steps * client.answers
        most = (client.max_tokens or _LONG_ANSWER) * client.answers
        more = min(generated, most) - read
        if more > 0 and request.counted is None:
            request.counted = self._flow.accounts.service(request, more)
            request.counted_tokens = round(read + more)

    async def _open(
        self, request: LiveRequest, instance: InstanceState, span: Span
    ) -> aiohttp.ClientResponse:
        flow, path, params = self._flow, request.client.path, request.transfer_params
        body = flow.bodies.decode(request.client, request.id, request.hop, params)
        headers = span.headers(request.headers)
        response = await flow.upstream.open(instance.instance, path, body, headers)
        request.accepted()
        if path.startswith(_KEYED):
            flow.accounts.keys.served(request.headers)
        return response

    async def _relay(self, stream: EngineStream, answer: ClientAnswer) -> bool:
        """Write a stream to the client as it comes, and nothing but comments before an event.

        Returns:
            Whether it reports an error later.

        Raises:
            EngineRefusedError: its first event refuses the request as invalid.
            UpstreamError: its first event reports another error, none comes, or the stream ends
                without its end.
        """
        loop, reader = asyncio.get_running_loop(), EventReader()
        request, instance, wait = stream.request, stream.instance.instance, stream.wait
        held, failed = bytearray(), False
        async for data in stream.response.content.iter_any():
            signs = [read_signs(event) for event in reader.feed(data)]
            if not stream.heard:
                held += data
                if len(held) > _HELD_BYTES:
                    raise UpstreamError(instance, "no event within its first bytes")
                if signs and signs[0].error is not None:
                    request.declined()
                    raise reported_error(instance, signs[0].error)
                if not signs and reader.comments:
                    with wait.writing():
                        await answer.comment(b"".join(reader.comments))
                    held = bytearray(reader.rest)
                stream.heard, data = bool(signs), bytes(held)
                if signs:
                    stream.heard_at = loop.time()
            tokens = sum(sign.output for sign in signs)
            if tokens:
                now = loop.time()
                arrival = request.untracked_tokens(tokens, now)
                if self._flow.seen is not None:
                    self._flow.seen(request, arrival, tokens, now)
                wait.progressed(now, self._flow.options.token_seconds)
            stream.counts += [sign.counts for sign in signs if sign.counts is not None]
            del stream.counts[1:-1]
            failed = failed or any(sign.error is not None for sign in signs)
            ends = any(sign.last or (sign.ends and not request.several) for sign in signs)
            stream.finished = stream.finished or ends
            if stream.heard:
                with wait.writing():
                    await answer.write(data)
        if not stream.heard:
            raise UpstreamError(instance, "its stream ended before its first event")
        if not stream.finished and not failed and request.client.path in ALWAYS_STREAM:
            raise UpstreamError(instance, "its stream ended before the request")
        return failed

    async def _document(self, stream: EngineStream, answer: ClientAnswer) -> web.StreamResponse:
        """Hand on a document: as a whole if it is not too large to be kept until then.

        Once begun, it must end in time, however many bytes still arrive.
        """
        response, wait = stream.response, stream.wait
        kind = response.headers.get("Content-Type", "application/json")
        described = response.headers.get(_DESCRIBES)
        if described is not None:
            answer.headers[_DESCRIBES] = described
        held, reading = bytearray(), response.content.iter_any()
        loop, left = asyncio.get_running_loop(), self._flow.options.first_token_seconds
        while True:
            began = loop.time()
            async with asyncio.timeout(left):
                part = await anext(reading, None)
            left -= loop.time() - began  # a slow client is not the engine's fault
            wait.progressed(loop.time(), self._flow.options.token_seconds)
            if part is None:
                break
            held += part
            if len(held) > _HELD_BYTES or answer.has_content:
                with wait.writing():
                    await answer.write_part(bytes(held), kind)
                held.clear()
        with wait.writing():
            if answer.has_content:
                return await answer.end()
            usage = read_usage(held if described is None else described)
            if usage is not None:
                stream.request.was_counted(*usage)
            if answer.begun:  # comments have begun a stream, which the engine did not give
                await answer.write(event(bytes(held)))
                return await answer.end()
            return await answer.document(200, bytes(held), kind)
