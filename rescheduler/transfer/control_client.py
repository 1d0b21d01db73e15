"""The proxy's end of an engine's control socket."""

import asyncio
from itertools import count
from pathlib import Path
from typing import TypeVar

import zmq
import zmq.asyncio

from predictor.live.zmq_sockets import (
    apply_curve,
    connect_socket,
    notice_lost_peers,
    refuse_open_endpoint,
)
from rescheduler.transfer.control_messages import (
    LARGEST_REPLY,
    Command,
    ControlError,
    EngineState,
    Find,
    Found,
    Freeze,
    Frozen,
    GetState,
    NotFrozen,
    NotFrozenError,
    Refused,
    Release,
    Released,
    Renew,
    Renewed,
    Reply,
    Snapshot,
    TakeSnapshot,
    Unfreeze,
    Unfrozen,
    decode_reply,
    encode,
    number_of_reply,
)

Expected = TypeVar("Expected", bound=Reply)

_KEPT_REPLIES = 16
_UNASKED_SECONDS = 0.005
_UNASKED_BYTES_A_SECOND = 100e6


class ControlClient:
    """Asks one engine to freeze, release and keep requests; calls may overlap.

    Use it within one running event loop. Every call raises `ControlError` if no valid answer comes
    in time.

    Args:
        endpoint: that the engine's connector binds, such as ``tcp://127.0.0.1:8111``.
        keys: folder made by ``headway keys``, needed off the loopback.

    Raises:
        TelemetryError: an open endpoint without keys, or keys that cannot be used.
    """

    def __init__(self, endpoint: str, keys: Path | str | None = None) -> None:
        refuse_open_endpoint(endpoint, keys)
        self.endpoint = endpoint
        self._numbers = count(1)
        self._asked: dict[int, asyncio.Future[Reply]] = {}
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._reader: asyncio.Task[None] | None = None
        try:
            # A command is never kept for an engine that starts later.
            self._socket.setsockopt(zmq.IMMEDIATE, 1)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_REPLY)
            self._socket.setsockopt(zmq.RCVHWM, _KEPT_REPLIES)
            self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            notice_lost_peers(self._socket)
            if keys is not None:
                apply_curve(self._socket, keys, "watcher", serves=False)
            connect_socket(self._socket, endpoint)
        except BaseException:
            self.close()
            raise

    async def freeze(self, id: str, hop: int, timeout: float) -> Frozen:
        """End a request after its next token and keep its KV cache for another engine.

        Without an answer in time it may freeze later nevertheless.

        Raises:
            NotFrozenError: it had ended by itself, is unknown, or cannot be moved.
        """
        command = Freeze(number=next(self._numbers), id=id, hop=hop)
        return await self._ask(command, Frozen, timeout)

    async def unfreeze(self, id: str, timeout: float) -> bool:
        """Return whether a request goes on as if no freeze had been asked."""
        command = Unfreeze(number=next(self._numbers), id=id)
        return (await self._ask(command, Unfrozen, timeout)).done

    async def release(self, id: str, hop: int, timeout: float) -> bool:
        """Free what is kept of a request, now and later; return whether there was anything.

        The placement ``hop`` is over, and so are those before it.
        """
        command = Release(number=next(self._numbers), id=id, hop=hop)
        return (await self._ask(command, Released, timeout)).done

    async def renew(self, ids: list[str], timeout: float) -> Renewed:
        """Keep the KV cache of prefilled requests for another lease; return of which it does."""
        return await self._ask(Renew(number=next(self._numbers), ids=ids), Renewed, timeout)

    async def snapshot(self, id: str, timeout: float) -> Snapshot:
        """Keep the full blocks of a running request for another engine while it goes on.

        Raises:
            NotFrozenError: it does not run, or fills no block.
        """
        return await self._ask(TakeSnapshot(number=next(self._numbers), id=id), Snapshot, timeout)

    async def state(self, timeout: float) -> EngineState:
        """Return how full the engine is."""
        return await self._ask(GetState(number=next(self._numbers)), EngineState, timeout)

    async def find(self, ids: list[str], timeout: float) -> Found:
        """Return which of some requests the engine still has, in their order."""
        found = await self._ask(Find(number=next(self._numbers), ids=ids), Found, timeout)
        if len(found.statuses) != len(ids):
            raise ControlError(
                f"{self.endpoint}: tells of {len(found.statuses)} requests, not of {len(ids)}"
            )
        return found

    def close(self) -> None:
        """Close the socket; calls under way raise ControlError."""
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(ControlError(f"{self.endpoint}: the client was closed"))
        self._asked.clear()
        self._socket.close(linger=0)
        self._context.term()

    async def _ask(self, command: Command, kind: type[Expected], timeout: float) -> Expected:
        if self._reader is None or self._reader.done():
            self._reader = asyncio.get_running_loop().create_task(self._read())
        asked: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._asked[command.number] = asked
        try:
            async with asyncio.timeout(timeout):
                await self._socket.send_multipart(encode(command))
                reply = await asked
        except TimeoutError as error:
            raise ControlError(
                f"{self.endpoint}: no answer within {timeout:g} s; does the engine run with the "
                "connector of rescheduler.transfer, and do its keys match?"
            ) from error
        finally:
            self._asked.pop(command.number, None)
        if isinstance(reply, kind):
            return reply
        if isinstance(reply, NotFrozen) and kind in (Frozen, Snapshot):
            raise NotFrozenError(f"{self.endpoint}: {reply.reason}")
        if isinstance(reply, Refused):
            raise ControlError(f"{self.endpoint}: refused: {reply.reason}")
        raise ControlError(f"{self.endpoint}: answered {type(reply).__name__}")

    async def _read(self) -> None:
        """Hand out replies for as long as any is due; what nobody asked for costs little time."""
        while self._asked:
            frames = await self._socket.recv_multipart()
            asked = self._asked.get(number_of_reply(frames) or 0)
            if asked is None or asked.done():
                size = sum(map(len, frames))
                await asyncio.sleep(_UNASKED_SECONDS + size / _UNASKED_BYTES_A_SECOND)
                continue
            try:
                asked.set_result(decode_reply(frames))
            except ControlError as error:
                asked.set_exception(ControlError(f"{self.endpoint}: {error}"))
