"""`headway serve`: the proxy as a command, and the sockets that it listens on."""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing
from pathlib import Path

from aiohttp import web
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from msgspec.structs import replace
from tokenizers import Tokenizer

from data_collection.models import resolve_model
from rescheduler.commands.event_loop import (
    BACKLOG,
    end_when_asked,
    inherited,
    log_serving,
    raise_open_files,
    run_server,
)
from rescheduler.engines.deployment import Deployment, DeploymentError
from rescheduler.engines.emulated_deployment import in_real_time
from rescheduler.page.live_snapshots import LiveSnapshots
from rescheduler.page.snapshot import SnapshotFeed, recording, refuse_log
from rescheduler.placement.live_request import LiveRequest
from rescheduler.proxy.proxy import Proxy
from rescheduler.proxy.proxy_metrics import watch_loop
from rescheduler.proxy.trace_writer import TraceWriter
from rescheduler.serving.admin_app import AdminListener
from rescheduler.serving.connection import (
    CLEANUP_SECONDS,
    cannot_listen,
    connections,
    listening_at,
    url_of,
)
from rescheduler.serving.http_app import CLIENTS_SHARE, http_app

logger = logging.getLogger("headway.serve")

_LINGER_SECONDS = 1.0
"""For which idle connections stay open after the last request has ended."""

_OTHER_FILES = 128
_FILES_PER_CLIENT = 2  # its connection, and one to an engine
_LONGEST_REASON = 300


class Listeners:
    """Answers clients, and the operator on this machine.

    Attributes:
        url: for clients.
        feed: what the page shows.
        admin: for the operator; None where the coordinator is operated instead.
    """

    def __init__(self, proxy: Proxy, admin_token: str = "") -> None:
        self.url = ""
        self.feed = SnapshotFeed(
            LiveSnapshots(
                proxy.cluster,
                reports=proxy.reports,
                scores=proxy.metrics.scores,
            )
        )
        self._proxy, self._options = proxy, proxy.deployment.proxy
        self._clients = web.AppRunner(
            http_app(proxy), handler_cancellation=True, shutdown_timeout=CLEANUP_SECONDS
        )
        self._servers: list[asyncio.Server] = []
        self.admin: AdminListener[LiveRequest] | None = None
        if proxy.drainer is not None:
            port = self._options.admin_port
            self.admin = AdminListener(proxy.drainer, port, admin_token, self.feed)

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self._clients.server.connections) if self._clients.server else 0

    async def start(self) -> None:
        """Listen.

        Raises:
            DeploymentError: an address is in use or does not exist, or there is no place for the
                operator's token.
        """
        files = raise_open_files() - _OTHER_FILES
        most = self._options.connections or files // _FILES_PER_CLIENT
        await self._clients.setup()
        served = self._clients.server
        assert served is not None
        accept = connections(served, most, self._options.idle_seconds, CLIENTS_SHARE)
        host, port = self._options.host, self._options.port
        loop = asyncio.get_running_loop()
        try:
            for one in inherited("clients"):
                server = await loop.create_server(accept, sock=one, backlog=BACKLOG)
                self._servers.append(server)
            if not self._servers:
                where = listening_at(host, port)
                server = await loop.create_server(accept, **where, backlog=BACKLOG)
                self._servers.append(server)
        except OSError as error:
            raise cannot_listen("proxy.port", host, port, error) from error
        self.url = url_of(host, self._servers[0].sockets[0].getsockname()[1])
        self._proxy.cluster.forever(watch_loop(self._proxy.metrics))  # nobody was delayed before
        if self.admin is not None:
            await self.admin.start()

    async def stop(self) -> None:
        """Take no more connections from clients; each that is open may bring one more request.

        A client that reuses a connection cannot know that it should not. Its answer says so.
        """
        self._proxy.ending = True
        for server in self._servers:
            server.close()
        if self.admin is not None:
            self.admin.give_up()

    async def close(self) -> None:
        """Close every connection."""
        await self.stop()
        await self._clients.cleanup()
        if self.admin is not None:
            await self.admin.close()


def serve(
    config: Deployment,
    port: int | None = None,
    record: Path | None = None,
    trace: Path | None = None,
    trace_mb: int = 256,
    verbose: bool = False,
) -> None:
    """Serve a deployment of prefill and decode instances behind one OpenAI-compatible address.

    The instances must be running: `headway launch` starts them. Ctrl-C or SIGTERM stops it, once
    running requests have finished or their time is up; a second one stops it at once. It prints the
    address of a page on this machine that shows requests, forecasts and moves live.

    One proxy serves a deployment. With a section `coordinator`, start as many as you like, and one
    `headway coordinator`, which decides for all of them and serves the page.

    Args:
        config: the deployment.
        port: Listen on this port instead of the deployment's `proxy.port`, for a second proxy on
            one machine.
        record: Log to this new file what the page shows, twice a second, for `headway demo
            --replay`.
        trace: Append when each request arrived and how long it was to this file, for `headway
            advise` and `headway rehearse`. It has no texts, tokens or keys.
        trace_mb: Largest size of that file, in MiB. Then no more is written.
        verbose: also log where requests go, why none is moved, and the messages of libraries.

    Raises:
        DeploymentError: the deployment cannot be served.
        OSError: the file to record to exists, or one cannot be written.
    """
    log_serving(verbose)
    if port is not None:
        if not 0 <= port <= 65_535:
            raise DeploymentError(f"--port {port}: a port is a number from 0 to 65535")
        config = replace(config, proxy=replace(config.proxy, port=port))
    if record is not None:
        refuse_log(record)
    if trace_mb < 1:
        raise DeploymentError(f"--trace-mb {trace_mb}: must be at least 1")
    with ExitStack() as stack:
        writer = None
        if trace is not None:
            writer = stack.enter_context(closing(TraceWriter(trace, trace_mb << 20)))
        tokenizer = load_tokenizer(config.model)
        run_server(_serve(in_real_time(config), tokenizer, record, writer))


def load_tokenizer(model: str) -> Tokenizer | None:
    """Return the tokenizer of a model, in the form that decodes token by token, as vLLM does.

    A log line says why there is none: requests are placed then, and never moved or resumed.

    Raises:
        DeploymentError: there is no such model, or its tokenizer cannot be read.
        ValueError: the model is unknown, see `data_collection.models.resolve_model`.
    """
    folder = Path(resolve_model(model))
    try:
        file = _tokenizer_file(folder, model, "tokenizer.json")
        if file is not None:
            return Tokenizer.from_file(str(file))
        is_mistral = _tokenizer_file(folder, model, "tekken.json") is not None
    except Exception as error:  # tokenizers and the hub raise many kinds
        raise DeploymentError(
            f"model: {model}: the proxy needs its tokenizer.json, to go on with a text after a "
            f"move: {error}"
        ) from error
    why = "vLLM decodes with Mistral's own tokenizer"
    if not is_mistral:
        try:
            return _converted_tokenizer(str(folder))
        except Exception as error:  # transformers raises many kinds
            why = " ".join(str(error).partition(". ")[0].split())[:_LONGEST_REASON]
    logger.warning(
        "model: %s has no tokenizer.json, and none can be made of its files (%s): requests are "
        "placed, but none is moved to another engine, or resumed when its engine dies",
        model,
        why,
    )
    return None


def _tokenizer_file(folder: Path, model: str, name: str) -> Path | None:
    """Return a file of a model, from the hub where there is no folder; None: it has no such file.

    Raises:
        Exception: of many kinds, as the hub raises: it cannot be asked, or knows no such model.
    """
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    try:
        return Path(hf_hub_download(model, name))
    except LocalEntryNotFoundError:  # the hub cannot be reached
        raise
    except EntryNotFoundError:
        return None


def _converted_tokenizer(model: str) -> Tokenizer:
    """Return the tokenizer that transformers makes of other files, for vLLM too.

    Raises:
        Exception: of many kinds, as transformers raises: none is made of them.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    made = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    # With --trust-remote-code vLLM would decode with the model's own code.
    if not isinstance(made, PreTrainedTokenizerFast) or "auto_map" in made.init_kwargs:
        raise ValueError("vLLM decodes with code of the model's own")
    return made.backend_tokenizer


@asynccontextmanager
async def proxy_running(
    deployment: Deployment, admin_token: str = "", record: Path | None = None
) -> AsyncIterator[Proxy]:
    """Serve a deployment whose engines run, as `headway serve` does, while the body runs.

    Raises:
        DeploymentError: a policy that does not exist, or a port that is in use.
        OSError: the file to record to exists, or cannot be written.
    """
    async with AsyncExitStack() as stack:
        proxy = Proxy(deployment, load_tokenizer(deployment.model))
        stack.push_async_callback(proxy.close)
        await proxy.start()
        listeners = Listeners(proxy, admin_token)
        stack.push_async_callback(listeners.close)
        await listeners.start()
        await stack.enter_async_context(recording(listeners.feed, record))
        yield proxy


async def _serve(
    deployment: Deployment,
    tokenizer: Tokenizer | None,
    record: Path | None,
    trace_writer: TraceWriter | None,
) -> None:
    proxy = Proxy(deployment, tokenizer)
    proxy.trace_writer = trace_writer
    ended = asyncio.Event()
    end_when_asked(ended)
    listeners = Listeners(proxy)
    try:
        await proxy.start()
        gc.collect()
        gc.freeze()  # else whatever has been imported is looked through now and then: 0.1 s
        await listeners.start()
        print(f"serving on {listeners.url}", flush=True)
        if listeners.admin is not None:
            print(listeners.admin.where_to_see, flush=True)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(recording(listeners.feed, record))
            if trace_writer is not None:
                await stack.enter_async_context(trace_writer.writing())
            await ended.wait()
            await _finish(proxy, listeners, ended)
    finally:
        await listeners.close()
        await proxy.close()


async def _finish(proxy: Proxy, listeners: Listeners, again: asyncio.Event) -> None:
    """Take no more connections, and wait for the requests that run, or to be asked again to end.

    A client whose answer has just ended may have sent another request on its connection already:
    those that are still open have a moment to bring it.
    """
    seconds = proxy.deployment.proxy.shutdown_seconds
    said = "ending: %d requests run, %g s to finish; a second signal ends them at once"
    logger.info(said, proxy.running, seconds)
    again.clear()
    await listeners.stop()
    clock = asyncio.get_running_loop().time
    deadline, quiet_at = clock() + seconds, clock() + _LINGER_SECONDS
    while not again.is_set() and clock() < deadline:
        if proxy.running:
            quiet_at = clock() + _LINGER_SECONDS
        elif clock() >= quiet_at or not listeners.connections:
            break
        await asyncio.sleep(0.05)
    if proxy.running:
        logger.warning("%d requests are cut", proxy.running)
        await proxy.cut()
