"""The proxy inside this process, to look into while it serves."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from aiohttp import web

from rescheduler.engines.deployment import Deployment, DeploymentError
from rescheduler.proxy.http_app import http_app
from rescheduler.proxy.proxy import Proxy
from rescheduler.proxy.serve import load_tokenizer

__all__ = ["proxy_running"]

_SHUTDOWN_SECONDS = 2.0


@asynccontextmanager
async def proxy_running(deployment: Deployment) -> AsyncIterator[Proxy]:
    """Serve a deployment whose engines run, as `headway serve` does, while the body runs.

    Raises:
        DeploymentError: a policy that does not exist, or a port that is in use.
    """
    options = deployment.proxy
    async with AsyncExitStack() as stack:
        proxy = Proxy(deployment, load_tokenizer(deployment.model))
        stack.push_async_callback(proxy.close)
        runner = web.AppRunner(
            http_app(proxy),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=_SHUTDOWN_SECONDS,
        )
        await proxy.start()
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        try:
            await web.TCPSite(runner, options.host, options.port).start()
        except OSError as error:
            raise DeploymentError(
                f"proxy.port: cannot listen on {options.host}:{options.port}: {error.strerror}"
            ) from error
        yield proxy
