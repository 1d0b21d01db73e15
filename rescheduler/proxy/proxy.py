"""The proxy: everything that serves a deployment, put together."""

import asyncio
import uuid
from contextlib import ExitStack
from typing import Any

from tokenizers import Tokenizer

from predictor.live.zmq_sockets import shared_secret
from rescheduler.coordination.coordinated_cluster import CoordinatedCluster
from rescheduler.engines.deployment import Deployment
from rescheduler.finish_times.load_ahead import compile_load_ahead
from rescheduler.openai.openai_request import ClientRequest, EngineBodies
from rescheduler.placement.account import Account
from rescheduler.placement.cluster import Cluster
from rescheduler.placement.guarded_policy import deployed_order, deployed_shadow_order
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.planner import Drainer, PlannerLoop
from rescheduler.proxy.finish_reports import FinishReports
from rescheduler.proxy.migrator import Migrator
from rescheduler.proxy.past_forecasts import PastForecasts, shared_salt
from rescheduler.proxy.prompt_forecasts import PromptForecasts, expected_lengths
from rescheduler.proxy.proxy_metrics import ProxyMetrics
from rescheduler.proxy.request_flow import PassThrough, RequestFlow
from rescheduler.proxy.trace_writer import TraceWriter
from rescheduler.tracing.span import NO_SPAN, create_tracer, end_request

_FREEING_SECONDS = 1.0
_CLIENT_DIGITS = 16
"""Of the salted digest that tells clients apart in a trace, and does not tell who they are."""


class Proxy:
    """Serves one deployment; make it, `start` it and `close` it in one event loop.

    Attributes:
        cluster: the instances, and who decides.
        flow: of requests that may move.
        pass_through: of those that stay.
        reports: when requests will finish; None where the coordinator decides.
        drainer: empties instances; None where the coordinator does.
        running: requests that have arrived and not ended.
        ending: no new ones are taken.
        cutting: those that run are being ended.
        trace_writer: writes arrivals and lengths to a file; None: nobody does.

    Raises:
        DeploymentError: unknown policy, one whose forecasts no instance publishes, or a prompt
            checkpoint that cannot be used.
    """

    def __init__(self, deployment: Deployment, tokenizer: Tokenizer | None) -> None:
        options, keys = deployment.proxy, deployment.keys_folder
        self.deployment, self._tokenizer = deployment, tokenizer
        self.running = 0
        self.ending = self.cutting = False
        self.trace_writer: TraceWriter | None = None
        self._handlers: set[asyncio.Task[Any]] = set()
        kind = Cluster[LiveRequest] if deployment.coordinator is None else CoordinatedCluster
        self.cluster = cluster = kind(deployment)
        expected = expected_lengths(deployment)
        self._forecasts = PromptForecasts(expected) if expected is not None else None
        orders = (deployed_order(deployment), deployed_shadow_order(deployment))
        by_lengths = any(order is not None and order.needs_lengths for order in orders)
        learns = options.past.keys > 0 and by_lengths
        self._past = None
        if learns:
            self._past = PastForecasts(options.past, shared_salt(deployment))
            if isinstance(cluster, CoordinatedCluster):
                self._past.tell = cluster.link.lengths.append
                cluster.link.taught = self._past.take
        self._tracer = create_tracer(options.traces)
        bodies = EngineBodies(shared_secret(keys, "watcher") if keys is not None else None)
        others = [cluster.refused] if isinstance(cluster, CoordinatedCluster) else []
        self.metrics = ProxyMetrics(cluster, others)
        self.migrator = Migrator(cluster, bodies, self.metrics)
        self.reports: FinishReports | None = None
        if not isinstance(cluster, CoordinatedCluster):
            self.reports = FinishReports(cluster, self.metrics)
        seen = None if self.reports is None else self.reports.token
        self.flow = RequestFlow(cluster, bodies, self.migrator, self.metrics, seen)
        self.pass_through = PassThrough(self.flow)
        self.drainer: Drainer[LiveRequest] | None = None
        if isinstance(cluster, CoordinatedCluster):
            cluster.mover = self.migrator.move
        if self.reports is not None:
            self.drainer = Drainer(cluster, self.migrator.move, self.reports.drain_seconds)

    @property
    def ready(self) -> bool:
        """Whether new requests are served."""
        return not self.ending and bool(self.cluster.dispatcher.usable)

    async def start(self) -> None:
        """Ask every instance how it is, and begin to watch, plan and drain."""
        await self.cluster.start()
        if self.metrics.scores is not None:
            self.cluster.forever(self.metrics.scores.run())
        self.cluster.forever(self.flow.watch.run())
        self.cluster.forever(self.flow.leases.run())
        if self._past is not None:
            self.cluster.forever(self._past.run())
        if self.reports is not None:
            await asyncio.to_thread(compile_load_ahead)
            self.cluster.forever(self.reports.run())
        if self.drainer is not None:
            self.cluster.forever(self.drainer.run())
        if self.cluster.planner is not None:
            planned = self.metrics.planning.observe
            self.cluster.forever(PlannerLoop(self.cluster, self.migrator.move, planned).run())

    async def close(self) -> None:
        """End what runs in the background, and close every connection."""
        if self._forecasts is not None:
            self._forecasts.close()
        if self._past is not None:
            self._past.close()
        await self.cluster.close(patience=_FREEING_SECONDS)  # what is being freed on the engines
        if self._tracer is not None:
            await self._tracer.close()

    def new_request(
        self,
        client: ClientRequest,
        name: str | None,
        headers: dict[str, str],
        account: Account | None = None,
    ) -> LiveRequest:
        """Return a request that has just arrived, for an account; None: for one of its own.

        Without a tokenizer it is handed through: nobody could go on with its text. So is one with
        tools where the state of a parser would be lost.
        """
        if self._tokenizer is None:
            client = client.pinned_by("tokenizer")
        elif client.tools and not self.cluster.parses_again:
            client = client.pinned_by("tools")
        id = uuid.uuid4().hex
        name = name or id
        headers, trace = {**headers, "X-Request-Id": name}, NO_SPAN
        if self._tracer is not None:
            trace, headers = self._tracer.begin(client, name, headers)
        now = asyncio.get_running_loop().time()
        self.running += 1
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        task.add_done_callback(self._handlers.discard)
        request = LiveRequest(
            id, name, client, headers, now, self._tokenizer, self.cluster.placements
        )
        request.trace, request.background = trace, client.background
        if account is not None:
            request.account = account
        self.cluster.began(request)
        if self.trace_writer is not None:
            self.trace_writer.began(request)
        return request

    async def forecast(self, request: LiveRequest) -> None:
        """Note what a request's prompt and its client's past let expect.

        Raises:
            RequestRefusedError: there is no room for it any more.
        """
        found = request.length_forecasts
        if self._past is not None:
            request.expected_tokens = self._past.expected(request)
        if request.expected_tokens is not None:
            found["past"] = request.expected_tokens
        if self._forecasts is not None:
            account = request.account.name
            by_prompt = await self._forecasts.expected(request.client, account)
            if by_prompt is not None:  # else as of the past, which may have been told anew
                found["prompt"] = request.expected_tokens = by_prompt
                if self._past is not None:
                    request.expected_tokens = self._past.with_prompt(request, by_prompt)
                if len(found) == 2:
                    found["both"] = request.expected_tokens
            self.cluster.dispatcher.admit(request.account)  # others may have come meanwhile
            if request.background:
                self.cluster.dispatcher.admit_background(request.account)
        self.metrics.length_forecasts.labels(next(reversed(found), "none")).inc()

    def request_ended(self, request: LiveRequest, outcome: str) -> None:
        """Count a request's end, and learn from its length."""
        self.running -= 1
        self.metrics.requests.labels(request.client.path, outcome).inc()
        if outcome == "ok":
            self.metrics.lengths_were(self.cluster.length_factors.ended(request))
        with ExitStack() as ends:  # each of them, though another fails
            ends.callback(self.cluster.ended, request, outcome == "ok")
            if self.reports is not None:
                ends.callback(self.reports.ended, request, outcome == "ok")
            if self._past is not None:
                ends.callback(self._past.ended, request, outcome == "ok")
        if self.trace_writer is not None:
            client = self.cluster.accounts.keys.digest(request.account.name)
            self.trace_writer.ended(request, outcome, client[:_CLIENT_DIGITS])
        if request.trace.recorded:
            splicer = request.splicer
            given = len(splicer.output_token_ids)
            end_request(request.trace, outcome, len(splicer.prompt_token_ids), given)

    async def cut(self) -> None:
        """End all requests that still run, each with an error that its client sees."""
        self.cutting = True
        handlers = list(self._handlers)
        for task in handlers:
            task.cancel()
        if handlers:
            await asyncio.wait(handlers, timeout=_FREEING_SECONDS)
