"""The proxy inside this process, to look into while it serves."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from rescheduler.engines.deployment import Deployment
from rescheduler.proxy.proxy import Proxy
from rescheduler.serving.listeners import Listeners
from rescheduler.serving.serve import load_tokenizer

__all__ = ["proxy_running"]


@asynccontextmanager
async def proxy_running(deployment: Deployment, admin_token: str = "") -> AsyncIterator[Proxy]:
    """Serve a deployment whose engines run, as `headway serve` does, while the body runs.

    Args:
        deployment: that is served.
        admin_token: of its admin listener; empty: a new one.

    Raises:
        DeploymentError: a policy that does not exist, or a port that is in use.
    """
    async with AsyncExitStack() as stack:
        proxy = Proxy(deployment, load_tokenizer(deployment.model))
        stack.push_async_callback(proxy.close)
        await proxy.start()
        listeners = Listeners(proxy, admin_token)
        stack.push_async_callback(listeners.close)
        await listeners.start()
        yield proxy
