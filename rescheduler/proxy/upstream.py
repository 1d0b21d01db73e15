"""HTTP to the engines: every call ends in an answer, or in an error that says what to do."""

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from rescheduler.engines.deployment import Instance, ProxyOptions
from rescheduler.openai.openai_request import COMPLETIONS

__all__ = ["EngineFullError", "EngineRefusedError", "Upstream", "UpstreamError"]

_NO_MODEL = "headway-discards-a-prefill"
_KEPT_SECONDS = 3.0  # vLLM closes idle connections after 5
_FULL = 429
_RETRIED = (408, 425)  # the engine's own trouble, not the request's


class UpstreamError(Exception):
    """Raised when an engine fails; the request can be tried again.

    Args:
        instance: that failed.
        reason: what happened.
        unsent: the request never reached it.
    """

    def __init__(self, instance: Instance, reason: str, unsent: bool = False) -> None:
        super().__init__(f"{instance.name}: {reason}")
        self.instance, self.unsent = instance.name, unsent


class EngineFullError(UpstreamError):
    """Raised when an engine has no room for a request; another one may have.

    Args:
        instance: that turned it away.
        seconds: after which it is worth another try there.
    """

    def __init__(self, instance: Instance, seconds: int) -> None:
        super().__init__(instance, f"has no room for a request for {seconds} s")
        self.seconds = seconds


class EngineRefusedError(Exception):
    """Raised when an engine refuses a request as invalid.

    Args:
        status: of its answer.
        body: of its answer, in OpenAI's shape.
    """

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"{status}: {body[:500].decode(errors='replace')}")
        self.status, self.body = status, body


class Upstream:
    """Connections to all engines; use it within one event loop.

    Args:
        options: the deadlines.
    """

    def __init__(self, options: ProxyOptions) -> None:
        self._options = options
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=options.connect_seconds),
            auto_decompress=False,
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()

    async def open(
        self, instance: Instance, path: str, body: bytes, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """Send a request; return its answer once the status is known to be 200.

        Raises:
            EngineFullError: it has too much to do.
            UpstreamError: no connection, or the engine's own trouble.
            EngineRefusedError: the request is wrong.
        """
        try:
            response = await self._post(instance, path, body, headers)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise UpstreamError(instance, f"cannot connect: {error}", unsent=True) from error
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamError(instance, f"{type(error).__name__}: {error}") from error
        if response.status == 200:
            return response
        try:
            answer = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamError(instance, f"{type(error).__name__}: {error}") from error
        finally:
            response.release()
        if response.status == _FULL:
            seconds = response.headers.get("Retry-After", "")
            raise EngineFullError(instance, int(seconds) if seconds.isdecimal() else 1)
        if response.status >= 500 or response.status in _RETRIED:
            raise UpstreamError(instance, f"HTTP {response.status}: {answer[:300]!r}")
        raise EngineRefusedError(response.status, answer)

    async def _post(
        self, instance: Instance, path: str, body: bytes, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        url = instance.url.rstrip("/") + path
        headers = {**headers, "Content-Type": "application/json"}
        try:
            return await self._session.post(url, data=body, headers=headers)
        except aiohttp.ServerDisconnectedError:
            # It closed a kept connection in the moment it was used again.
            return await self._session.post(url, data=body, headers=headers)

    async def prefill(
        self, instance: Instance, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[dict[str, Any], int]:
        """Prefill a request; return the parameters for its decode instance, and its length.

        Returns:
            ``kv_transfer_params``, and the number of prompt tokens.

        Raises:
            UpstreamError: no answer in time, or none that helps.
            EngineRefusedError: the request is wrong.
        """
        try:
            async with asyncio.timeout(self._options.prefill_seconds):
                response = await self.open(instance, path, body, headers)
                async with response:
                    answer = msgspec.json.decode(await response.read())
        except TimeoutError as error:
            seconds = self._options.prefill_seconds
            raise UpstreamError(instance, f"no prefill within {seconds:g} s") from error
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            raise UpstreamError(instance, f"{type(error).__name__}: {error}") from error
        params, usage = answer.get("kv_transfer_params"), answer.get("usage")
        if not isinstance(params, dict) or not isinstance(usage, dict):
            raise UpstreamError(
                instance, "its answer has no kv_transfer_params: does it run with a KV connector?"
            )
        return params, int(usage.get("prompt_tokens", 0))

    async def generate_one(self, instance: Instance, model: str) -> None:
        """Have an engine generate one token.

        Raises:
            UpstreamError: it did not, in time.
        """
        body = msgspec.json.encode({"model": model, "prompt": "1", "max_tokens": 1})
        try:
            async with asyncio.timeout(self._options.token_seconds):
                async with await self.open(instance, COMPLETIONS, body, {}) as response:
                    await response.read()
        except TimeoutError as error:
            raise UpstreamError(instance, "it generates no token") from error
        except (aiohttp.ClientError, OSError, EngineRefusedError) as error:
            raise UpstreamError(instance, f"{type(error).__name__}: {error}") from error

    async def get(self, instance: Instance, path: str, timeout: float) -> bytes:
        """Return what an engine answers to a GET.

        Raises:
            UpstreamError: no answer in time, or not 200.
        """
        try:
            async with (
                asyncio.timeout(timeout),
                self._session.get(instance.url.rstrip("/") + path) as response,
            ):
                answer = await response.read()
        except TimeoutError as error:
            raise UpstreamError(instance, f"{path}: no answer within {timeout:g} s") from error
        except aiohttp.ClientConnectorError as error:
            raise UpstreamError(instance, f"cannot connect: {error}", unsent=True) from error
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamError(instance, f"{path}: {error}") from error
        if response.status != 200:
            raise UpstreamError(instance, f"{path}: HTTP {response.status}")
        return answer

    async def discard(self, instance: Instance, params: dict[str, Any]) -> None:
        """Free what a prefill instance keeps for a request that will not be decoded.

        A decode instance is sent a request that it refuses for its model's name: stock vLLM
        then has the prefill instance free the blocks. If that fails too, their time to
        live ends.
        """
        body = {"model": _NO_MODEL, "prompt": [0], "max_tokens": 1, "kv_transfer_params": params}
        try:
            async with asyncio.timeout(self._options.control_seconds):
                response = await self.open(instance, COMPLETIONS, msgspec.json.encode(body), {})
                response.close()
        except (UpstreamError, EngineRefusedError, TimeoutError):
            return
