"""`headway picker`: the endpoint picker as a command."""

import asyncio
import gc
import logging
from pathlib import Path

from rescheduler.commands.event_loop import end_when_asked, log_serving, run_server
from rescheduler.engines.deployment import Deployment, DeploymentError
from rescheduler.engines.emulated_deployment import in_real_time

logger = logging.getLogger("headway.serve")


def picker(
    config: Deployment,
    host: str = "127.0.0.1",
    port: int = 9002,
    certificate: Path | None = None,
    private_key: Path | None = None,
    verbose: bool = False,
) -> None:
    """Pick the engine of each request that an Envoy gateway forwards, by a routing policy.

    An endpoint picker of the Gateway API Inference Extension: Envoy's ext_proc filter, with bodies
    FULL_DUPLEX_STREAMED, asks it where each request goes, and shows it the answer as it passes.
    The engines must be running, each able to prefill and decode; what prefills for others, or
    moves, needs `headway serve` instead of a gateway.

    The deployment file is the same as for `headway serve`. Of its section `proxy`, the picker uses
    the limits on waiting requests and on bodies, and the health probes. Ctrl-C or SIGTERM stops it,
    once the requests that run have ended or `proxy.shutdown_seconds` are over; docs/gateway.md has
    a configuration of Envoy.

    Args:
        config: the deployment.
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        certificate: PEM file of a TLS certificate, for gateways that connect with TLS.
        private_key: PEM file of its private key.
        verbose: also log where requests go, and the messages of libraries.

    Raises:
        DeploymentError: the picker cannot serve this deployment, or not at this address.
    """
    log_serving(verbose)
    if not 0 <= port <= 65_535:
        raise DeploymentError(f"--port {port}: a port is a number from 0 to 65535")
    if (certificate is None) != (private_key is None):
        raise DeploymentError("--certificate and --private-key belong together")
    try:
        import grpc  # noqa: F401
    except ImportError as error:
        raise DeploymentError("the picker needs gRPC: pip install -e '.[gateway]'") from error
    run_server(_pick(in_real_time(config), host, port, certificate, private_key))


async def _pick(
    deployment: Deployment, host: str, port: int, certificate: Path | None, key: Path | None
) -> None:
    from rescheduler.gateway.picker import Picker

    ended = asyncio.Event()
    end_when_asked(ended)
    picker = Picker(deployment)
    try:
        await picker.start(host, port, certificate, key)
        gc.collect()
        gc.freeze()  # else whatever has been imported is looked through now and then: 0.1 s
        print(f"picking on {picker.address}", flush=True)
        await ended.wait()
        seconds = deployment.proxy.shutdown_seconds
        said = "ending: running requests have %g s to finish; a second signal ends them at once"
        logger.info(said, seconds)
        ended.clear()
        stopping = asyncio.create_task(picker.stop(seconds))
        again = asyncio.create_task(ended.wait())
        await asyncio.wait({stopping, again}, return_when=asyncio.FIRST_COMPLETED)
        if again.done():
            await picker.stop(0)
        again.cancel()
        await stopping
    finally:
        await picker.close()
