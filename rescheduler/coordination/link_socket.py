"""The socket of a conversation between a proxy and the coordinator, and its rhythm."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import zmq
import zmq.asyncio

from predictor.live.zmq_sockets import apply_curve, connect_socket, refuse_open_endpoint
from rescheduler.coordination.link import Link
from rescheduler.coordination.messages import (
    LARGEST_MESSAGE,
    MOST_UNREAD,
    CoordinationError,
    Notice,
    RefusedMessages,
    decode,
    encode,
)

logger = logging.getLogger("headway.serve")

BEAT_SECONDS = 0.25
"""Between two reports or views when nothing happens."""

_SEND_SECONDS = 1.0


async def beats(due: asyncio.Event) -> AsyncIterator[bool]:
    """Yield when something is due, and every `BEAT_SECONDS` in any case: whether it is a beat."""
    loop, beat = asyncio.get_running_loop(), -math.inf
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout_at(max(beat, loop.time())):
                await due.wait()
        due.clear()
        is_beat = loop.time() >= beat
        if is_beat:
            beat = loop.time() + BEAT_SECONDS
        yield is_beat


def message_socket(context: zmq.asyncio.Context, kind: int) -> zmq.asyncio.Socket:
    """Return a socket that keeps so many messages, and none when it is closed."""
    made = context.socket(kind)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.MAXMSGSIZE, LARGEST_MESSAGE)
    made.setsockopt(zmq.SNDHWM, MOST_UNREAD)
    made.setsockopt(zmq.RCVHWM, MOST_UNREAD)
    return made


class LinkSocket:
    """Sends what the link has to say and hands it what the coordinator says, in one event loop.

    Raises:
        TelemetryError: an open endpoint without keys, or keys that cannot be used.
    """

    def __init__(
        self, endpoint: str, keys: Path | None, link: Link, refused: RefusedMessages
    ) -> None:
        refuse_open_endpoint(endpoint, keys)
        self._link = link
        self._refused = refused
        self._due = asyncio.Event()
        self._context = zmq.asyncio.Context()
        self._dealer = message_socket(self._context, zmq.DEALER)
        try:
            # Nothing is kept for a coordinator that is away: reports say how things are.
            self._dealer.setsockopt(zmq.IMMEDIATE, 1)
            self._dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            self._dealer.setsockopt(zmq.HEARTBEAT_IVL, 2000)
            self._dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, 4000)
            self._dealer.setsockopt(zmq.CONNECT_TIMEOUT, 5000)
            if keys is not None:
                apply_curve(self._dealer, keys, "watcher", serves=False, peer="watcher")
            connect_socket(self._dealer, endpoint)
        except BaseException:
            self.close()
            raise

    def wake(self) -> None:
        """Send soon what there is to say."""
        self._due.set()

    async def run(self) -> None:
        """Send and receive forever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._send())
            tasks.create_task(self._receive())

    def close(self) -> None:
        """Close the socket."""
        self._dealer.close(linger=0)
        self._context.term()

    async def _send(self) -> None:
        async for is_beat in beats(self._due):
            if is_beat:
                self._link.give_up()
            try:
                report = self._link.report(is_beat)
                frames = encode(report) if report is not None else None
            except Exception:  # no request may end the conversation about all others
                logger.exception("nothing was reported to the coordinator")
                continue
            if frames is not None:
                with suppress(TimeoutError):  # it is lost then, and its number will be missed
                    async with asyncio.timeout(_SEND_SECONDS):
                        await self._dealer.send_multipart(frames)

    async def _receive(self) -> None:
        while True:
            frames = await self._dealer.recv_multipart()
            try:
                self._link.receive(decode(frames, Notice))
            except CoordinationError as error:
                if self._refused.count("coordinator", error.reason):
                    logger.warning("the coordinator: %s", error)
            except Exception:  # no notice may end the conversation
                logger.exception("a notice of the coordinator cannot be followed")
