"""ZMQ sockets between machines: CURVE keys, who may connect, and peers that are gone."""

import hashlib
import ipaddress
import socket as sockets
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import zmq
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from zmq.auth import create_certificates, load_certificate
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from data_collection.files import warn_of_open_secret
from predictor.live.telemetry_messages import TelemetryError

Side = Literal["engine", "watcher"]

_OTHER: dict[Side, Side] = {"engine": "watcher", "watcher": "engine"}
_DOMAIN = "headway"
_IPV4_LOOPBACK = ipaddress.ip_network("127.0.0.0/8")
_IPV6_LOOPBACK = ipaddress.IPv6Address("::1")


def keys(folder: Path) -> None:
    """Create the keys that telemetry needs when it leaves the machine.

    Args:
        folder: new or empty folder for the keys of the engines and of the watcher.
    """
    create_keys(folder)
    print(
        f"wrote two pairs of keys to {folder}\n"
        "  machines with engines need:      engine.key_secret, watcher.key\n"
        "  the machine that watches needs:  watcher.key_secret, engine.key\n"
        "Copy them over a safe channel; whoever has a .key_secret file can act as that side."
    )


def create_keys(folder: Path) -> None:
    """Write ``engine.key``, ``watcher.key`` and their ``.key_secret`` to a folder of mode 0700.

    Raises:
        TelemetryError: the folder is not empty: keys in use are never overwritten.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise TelemetryError(f"{folder}: not empty; choose a new folder for the keys")
    folder.chmod(0o700)
    for side in _OTHER:
        _, secret = create_certificates(folder, side)
        Path(secret).chmod(0o600)


def is_loopback(endpoint: str) -> bool:
    """Return whether only this machine reaches a ZMQ endpoint.

    That is ``ipc://``, ``inproc://``, and TCP on 127.0.0.0/8, ``localhost`` or ``[::1]``.
    """
    scheme, _, address = endpoint.partition("://")
    if scheme in ("ipc", "inproc"):
        return True
    host = address.rpartition(":")[0]  # of `source;destination` neither parses
    if scheme != "tcp" or not host:
        return False
    if host == "localhost":
        return True
    with suppress(ValueError):
        if host.startswith("[") and host.endswith("]"):
            return ipaddress.IPv6Address(host[1:-1]) == _IPV6_LOOPBACK
        return ipaddress.IPv4Address(host) in _IPV4_LOOPBACK
    return False


def refuse_open_endpoint(endpoint: str, keys: Path | str | None) -> None:
    """Refuse to publish or receive telemetry off the loopback without keys.

    Raises:
        TelemetryError: names the endpoint and the remedy.
    """
    if keys is None and not is_loopback(endpoint):
        raise TelemetryError(
            f"{endpoint}: telemetry leaves the machine only with keys. Create them with "
            "`headway keys DIR` and give DIR as keys to both sides, or use an endpoint on "
            "127.0.0.1"
        )


def tcp_endpoint(host: str, port: int) -> str:
    """Return a TCP endpoint, an IPv6 address in brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def needs_ipv6(endpoint: str) -> bool:
    """Return whether a ZMQ socket reaches an endpoint by IPv6.

    A name with addresses of both kinds is reached by IPv4, since an engine binds that one. With
    IPv6 ZMQ also takes an IPv4 address that a name gets later: a name without any is for IPv6.
    """
    scheme, _, address = endpoint.partition("://")
    host = address.rpartition(":")[0]
    if scheme != "tcp" or not host or ";" in host:
        return False
    if host.startswith("["):
        return True
    try:
        sockets.getaddrinfo(host, None, sockets.AF_INET, sockets.SOCK_STREAM)
    except (OSError, UnicodeError):
        return True
    return False


def connect_socket(socket: zmq.Socket[Any], endpoint: str) -> None:
    """Connect a socket by IPv4 or IPv6; raises as `zmq.Socket.connect`."""
    socket.setsockopt(zmq.IPV6, int(needs_ipv6(endpoint)))
    socket.connect(endpoint)


def bind_socket(socket: zmq.Socket[Any], endpoint: str) -> None:
    """Bind a socket to an IPv4 or IPv6 address; raises as `zmq.Socket.bind`."""
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))  # no name: ZMQ binds none
    socket.bind(endpoint)


def apply_curve(
    socket: zmq.Socket[Any],
    folder: Path | str,
    side: Side,
    serves: bool,
    peer: Side | None = None,
) -> ThreadAuthenticator | None:
    """Encrypt a socket with CURVE and let it communicate with one side only.

    Call it before the socket binds or connects. Whoever connects knows the server by its
    public key. Whoever binds asks ZAP, ZeroMQ's handler of admissions, to admit the peer's
    public key and nothing else. A context has one such handler: give every socket
    that binds with keys a context of its own. Without a running handler, every peer is refused.

    Args:
        socket: not yet bound or connected.
        folder: created by `create_keys`; ``SIDE.key_secret`` and the other side's ``.key`` are
            read.
        side: whose socket it is.
        serves: whether it binds; all sockets that connect to it must then not serve.
        peer: side that it communicates with; None: the other one. Processes of one side share
            its keys, by which they know each other.

    Returns:
        The running handler, where it serves: stop it after the socket is closed and before
        its context is terminated.

    Raises:
        TelemetryError: a key file is missing or damaged, or the context has a handler.
    """
    public, secret, other = _pair(folder, side, peer or _OTHER[side])
    try:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        if not serves:
            socket.setsockopt(zmq.CURVE_SERVERKEY, other)
            return None
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a handler nobody is admitted
    except zmq.ZMQError as error:
        raise TelemetryError(f"{folder}: invalid keys of the {side}: {error}") from error
    authenticator = ThreadAuthenticator(socket.context)
    authenticator.configure_curve_callback(_DOMAIN, _OneKey(other))
    try:
        authenticator.start()
    except zmq.ZMQError as error:
        raise TelemetryError(
            "another socket of this ZMQ context binds with keys: give each a context of its own"
        ) from error
    return authenticator


def shared_secret(folder: Path | str, side: Side) -> bytes:
    """Return 32 bytes that only the two sides of a pair of keys can compute.

    They are a hash of X25519(own secret key, the other's public key), which both sides agree on
    (RFC 7748, section 6.1).

    Raises:
        TelemetryError: a key file is missing or damaged.
    """
    _, secret, other = _pair(folder, side, _OTHER[side])
    try:
        own = X25519PrivateKey.from_private_bytes(z85.decode(secret))
        agreed = own.exchange(X25519PublicKey.from_public_bytes(z85.decode(other)))
    except ValueError as error:
        raise TelemetryError(f"{folder}: invalid keys of the {side}: {error}") from error
    return hashlib.blake2b(agreed, digest_size=32, person=_DOMAIN.encode()).digest()


class _OneKey:
    """Admits one public key, as `ThreadAuthenticator` asks for it."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a peer with this public key may connect."""
        return key == self._key


def _pair(folder: Path | str, side: Side, peer: Side) -> tuple[bytes, bytes, bytes]:
    """Return the public and the secret key of a side, and its peer's public key."""
    own = Path(folder) / f"{side}.key_secret"
    public, secret = _load(own)
    warn_of_open_secret(own)
    if secret is None:
        raise TelemetryError(f"{folder}/{side}.key_secret: holds no secret key")
    return public, secret, public if peer == side else _load(Path(folder) / f"{peer}.key")[0]


def _load(path: Path) -> tuple[bytes, bytes | None]:
    if not path.is_file():
        raise TelemetryError(
            f"{path}: no such key; create a folder of keys with `headway keys DIR`, and copy the "
            "files it names to the other machine"
        )
    try:
        return load_certificate(path)
    except ValueError as error:
        raise TelemetryError(f"{path}: invalid key: {error}") from error


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


def raised_port(endpoint: str, rank: int) -> str:
    """Return a TCP endpoint with its port raised by the rank; port 0 and others stay."""
    if not endpoint.startswith("tcp://") or rank == 0:
        return endpoint
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}" if port.isdigit() and port != "0" else endpoint
