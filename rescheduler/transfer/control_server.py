"""The engine's end of the control socket: a thread beside vLLM's scheduler."""

import contextlib
import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import NamedTuple

import zmq

from predictor.live.zmq_sockets import apply_curve, bind_socket, refuse_open_endpoint
from rescheduler.transfer.control_messages import (
    LARGEST_COMMAND,
    LONGEST_REASON,
    Command,
    ControlError,
    Refused,
    Reply,
    decode_command,
    encode,
)

logger = logging.getLogger(__name__)

_CLOSE = b""
"""What the scheduler's end sends instead of a reply, so that the thread looks up at once."""


class Asked(NamedTuple):
    """A command, and who waits for its reply."""

    peer: bytes
    command: Command


class ControlServer:
    """Receives commands in a thread of its own and hands them to the scheduler's.

    An engine without requests blocks until one arrives, and would not look at commands:
    what needs no scheduler is answered by this thread itself.

    Args:
        endpoint: bound for a proxy.
        keys: folder made by ``headway keys``, needed off the loopback.
        answer: called in this thread; returns a reply, or None for a command that the
            scheduler has to carry out.

    Raises:
        TelemetryError: an open endpoint without keys, or keys that cannot be used.
        ControlError: the endpoint cannot be bound.
    """

    def __init__(
        self, endpoint: str, keys: str | None, answer: Callable[[Command], Reply | None]
    ) -> None:
        refuse_open_endpoint(endpoint, keys)
        self._answer = answer
        self._commands: SimpleQueue[Asked] = SimpleQueue()
        self._closing = threading.Event()
        self._authenticator = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._replies = self._context.socket(zmq.PULL)
        self._scheduler_end = self._context.socket(zmq.PUSH)
        try:
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_COMMAND)
            if keys is not None:
                self._authenticator = apply_curve(self._socket, keys, "engine", serves=True)
            self._replies.bind("inproc://replies")
            self._scheduler_end.connect("inproc://replies")
            try:
                bind_socket(self._socket, endpoint)
            except zmq.ZMQError as error:
                raise ControlError(
                    f"control socket {endpoint}: {error.strerror}; is the port in use?"
                ) from error
        except BaseException:
            self._close_sockets()
            raise
        self._thread = threading.Thread(target=self._serve, name="headway-control", daemon=True)
        self._thread.start()

    def take(self) -> list[Asked]:
        """Return the commands that have arrived since the last call, in the scheduler's thread."""
        taken = []
        with contextlib.suppress(Empty):
            while True:
                taken.append(self._commands.get_nowait())
        return taken

    def reply(self, peer: bytes, reply: Reply) -> None:
        """Answer a command, in the scheduler's thread."""
        self._scheduler_end.send_multipart([peer, *encode(reply)])

    def close(self) -> None:
        """Stop the thread and close its sockets."""
        if not self._closing.is_set():
            self._closing.set()
            self._scheduler_end.send(_CLOSE)
            self._thread.join()
            self._close_sockets()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._replies, zmq.POLLIN)
        while not self._closing.is_set():
            ready = dict(poller.poll())
            if self._replies in ready and (reply := self._replies.recv_multipart()) != [_CLOSE]:
                self._socket.send_multipart(reply)
            if self._socket in ready:
                self._receive(self._socket.recv_multipart())

    def _receive(self, frames: list[bytes]) -> None:
        peer, *message = frames
        number = 0
        try:
            command = decode_command(message)
            number = command.number
            answer = self._answer(command)
        except ControlError as error:
            logger.warning("control socket: refused a message: %s", error)
            answer = Refused(number=number, reason=str(error)[:LONGEST_REASON])
        except Exception:  # no message may end the thread
            logger.exception("control socket: a command failed")
            answer = Refused(number=number, reason="it failed; see the engine's log")
        if answer is None:
            self._commands.put(Asked(peer, command))
        else:
            self._socket.send_multipart([peer, *encode(answer)])

    def _close_sockets(self) -> None:
        for socket in (self._socket, self._replies, self._scheduler_end):
            socket.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
