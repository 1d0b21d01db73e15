"""Noticing engines that are gone without having closed their connections."""

from typing import Any

import zmq

__all__ = ["notice_lost_peers"]

_SILENT_SECONDS = 30.0


def notice_lost_peers(socket: zmq.Socket[Any]) -> None:
    """Let a socket that connects give up a connection whose peer has been silent for 30 s.

    A machine that loses its power or its network closes nothing. A socket that only receives would
    wait for it forever, and one that sends until TCP gives up, for a quarter of an hour. This one
    pings its peer (ZMTP 3.1), whose I/O thread answers also while the engine computes. Then it
    connects again, to whatever address the name has by then, and does not wait longer for that
    address either. What was on its way is lost then, also if the peer was only suspended.

    Call it before the socket connects.
    """
    socket.setsockopt(zmq.HEARTBEAT_IVL, round(_SILENT_SECONDS * 500))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(_SILENT_SECONDS * 500))
    socket.setsockopt(zmq.CONNECT_TIMEOUT, round(_SILENT_SECONDS * 1000))
