"""A picker asked without Envoy, so that it can be asked what no Envoy would."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc
from scripted_cluster import scripted, until
from tokenizers import Tokenizer

from rescheduler.gateway.messages import PROCESSOR, ProcessingRequest, ProcessingResponse
from rescheduler.gateway.picker import Picker


def request_head(path: str = "/v1/completions", ends: bool = False, **more: str) -> Any:
    """Return the headers of a POST."""
    message = ProcessingRequest()
    for key, value in {":method": "POST", ":path": path, **more}.items():
        message.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    message.request_headers.end_of_stream = ends
    return message


def said(**fields: Any) -> Any:
    """Return a message about a body, or the headers of an answer."""
    return ProcessingRequest(**fields)


@dataclass
class Asked:
    """A picker, and a connection to it."""

    picker: Picker
    channel: grpc.aio.Channel

    def call(self) -> Any:
        """Begin an exchange."""
        return self.channel.stream_stream(f"/{PROCESSOR}/Process")()

    async def exchange(
        self, messages: Sequence[bytes], leaves: bool = False
    ) -> tuple[list[Any], grpc.StatusCode]:
        """Say all of this at once, and end the exchange, or break it off as one who leaves does.

        Return what is answered, and how the exchange ends.
        """
        call, answers = self.call(), []
        with suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            for message in messages:
                await call.write(message)
            if leaves:
                call.cancel()
            await call.done_writing()
        with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            while (raw := await call.read()) is not grpc.aio.EOF:
                answers.append(ProcessingResponse.FromString(raw))
        return answers, await call.code()

    async def idle(self) -> None:
        """Nothing runs and nothing waits."""
        await until(
            lambda: (
                not any(map(self.picker.cluster.placements.on, self.picker.cluster.all))
                and not self.picker.cluster.dispatcher.waiting
            )
        )


@asynccontextmanager
async def asked_picker(
    tokenizer: Tokenizer, engines: int = 1, **options: Any
) -> AsyncIterator[Asked]:
    """Run a picker for scripted engines, and connect to it; the options are of `scripted`."""
    made, deployment = await scripted(tokenizer, [f"decode-{i}" for i in range(engines)], **options)
    picker = Picker(deployment)
    await picker.start("127.0.0.1", 0)
    try:
        async with grpc.aio.insecure_channel(picker.address) as channel:
            yield Asked(picker, channel)
    finally:
        await picker.stop(0)
        await picker.close()
        for engine in made.values():
            await engine.stop()
