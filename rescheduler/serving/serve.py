"""`headway serve`: the proxy as a command."""

import asyncio
import gc
import logging
from pathlib import Path

from huggingface_hub import hf_hub_download
from msgspec.structs import replace
from tokenizers import Tokenizer

from data_collection.models import resolve_model
from rescheduler.commands.event_loop import end_when_asked, run_server
from rescheduler.commands.log_format import log_serving
from rescheduler.engines.deployment import Deployment, DeploymentError
from rescheduler.page.snapshot_log import recording, refuse_log
from rescheduler.proxy.proxy import Proxy
from rescheduler.serving.listeners import Listeners

__all__ = ["load_tokenizer", "serve"]

logger = logging.getLogger("headway.serve")


def serve(
    config: Deployment,
    port: int | None = None,
    record: Path | None = None,
    verbose: bool = False,
) -> None:
    """Serve a deployment of prefill and decode instances behind one OpenAI-compatible address.

    The instances must be running: `headway launch` starts them. Ctrl-C or SIGTERM stops it, once
    running requests have finished or their time is up. It prints the address of a page on this
    machine that shows requests, forecasts and moves live.

    One proxy serves a deployment, unless it has a section `coordinator`: then start as many as you
    like, and one `headway coordinator`, which decides for all of them and serves the page.

    Args:
        config: the deployment.
        port: in place of the deployment's `proxy.port`, for a second proxy on one machine.
        record: log twice a second what the page shows to this file, for `headway replay`; it must
            not exist.
        verbose: also log where requests go, why none is moved, and the messages of libraries.

    Raises:
        DeploymentError: the deployment cannot be served.
        OSError: the file to record to exists, or cannot be written.
    """
    log_serving(verbose)
    if port is not None:
        if not 0 <= port <= 65_535:
            raise DeploymentError(f"--port {port}: a port is a number from 0 to 65535")
        config = replace(config, proxy=replace(config.proxy, port=port))
    if record is not None:
        refuse_log(record)
    tokenizer = load_tokenizer(config.model)
    run_server(_serve(config, tokenizer, record))


def load_tokenizer(model: str) -> Tokenizer:
    """Return the tokenizer of a model, in the form that decodes token by token.

    Raises:
        DeploymentError: the model has no ``tokenizer.json``.
    """
    folder = Path(resolve_model(model))
    try:
        file = folder / "tokenizer.json"
        if not folder.is_dir():
            file = Path(hf_hub_download(model, "tokenizer.json"))
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers and the hub raise many kinds
        raise DeploymentError(
            f"model: {model}: the proxy needs its tokenizer.json, to go on with a text after a "
            f"move: {error}"
        ) from error


async def _serve(deployment: Deployment, tokenizer: Tokenizer, record: Path | None) -> None:
    proxy = Proxy(deployment, tokenizer)
    ended = asyncio.Event()
    end_when_asked(ended)
    listeners = Listeners(proxy)
    try:
        await proxy.start()
        await listeners.start()
        gc.collect()
        gc.freeze()  # else whatever has been imported is looked through now and then: 0.1 s
        print(f"serving on {listeners.url}", flush=True)
        if listeners.admin is not None:
            print(listeners.admin.where_to_see, flush=True)
        async with recording(listeners.feed, record):
            await ended.wait()
            await _finish(proxy, listeners)
    finally:
        await listeners.close()
        await proxy.close()


async def _finish(proxy: Proxy, listeners: Listeners) -> None:
    """Take no more requests, and wait for those that run."""
    seconds = proxy.deployment.proxy.shutdown_seconds
    logger.info("ending: %d requests run, %g s to finish", proxy.running, seconds)
    await listeners.stop()
    deadline = asyncio.get_running_loop().time() + seconds
    while proxy.running and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.05)
    if proxy.running:
        logger.warning("%d requests are cut", proxy.running)
        await proxy.cut()
