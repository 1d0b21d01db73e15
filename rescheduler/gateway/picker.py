"""The picker: everything that picks endpoints for a deployment, served by gRPC."""

import logging
import ssl
from pathlib import Path
from typing import Any

import grpc

from data_collection.files import warn_of_open_secret
from rescheduler.engines.deployment import Deployment, DeploymentError
from rescheduler.gateway.exchange import Exchange, RunningRequests
from rescheduler.gateway.messages import (
    HEALTH,
    PROCESSOR,
    Event,
    HealthCheckRequest,
    HealthCheckResponse,
    ProtocolError,
    read_event,
)
from rescheduler.placement.cluster import Cluster
from rescheduler.placement.live_request import LiveRequest

logger = logging.getLogger("headway.serve")


def _refuse_what_is_not_placing(deployment: Deployment) -> None:
    if deployment.prefill:
        raise DeploymentError(
            f"instances: {deployment.prefill[0].name} is a prefill instance: the picker places a "
            "request on one engine, which computes all of it; `headway serve` splits prefill from "
            "decode"
        )
    if deployment.migration is not None:
        raise DeploymentError(
            "migration: the picker places requests and does not move them; leave this section "
            "out, or use `headway serve`"
        )
    if deployment.coordinator is not None:
        raise DeploymentError(
            "coordinator: the picker decides by itself, and would place beside it; leave this "
            "section out, or use `headway serve`"
        )


def server_credentials(certificate: Path, key: Path) -> grpc.ServerCredentials:
    """Return what a gRPC server needs for TLS.

    gRPC does not say what is wrong with a PEM file, so that OpenSSL reads both first.

    Raises:
        DeploymentError: a file cannot be read, or is not what it should be.
    """
    pair = _read("--private-key", key), _read("--certificate", certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(certificate)
    except ssl.SSLError as error:
        raise DeploymentError(f"--certificate {certificate}: no PEM certificate") from error
    try:
        context.load_cert_chain(certificate, key, password=lambda: b"")  # else it asks for one
    except ssl.SSLError as error:
        if error.reason is None:
            why = "no PEM private key, or one with a password"
        elif error.reason in ("KEY_TYPE_MISMATCH", "KEY_VALUES_MISMATCH"):
            why = f"not the key of {certificate}"
        else:  # such as a certificate that is too weak
            raise DeploymentError(f"--certificate {certificate}: {error}") from error
        raise DeploymentError(f"--private-key {key}: {why}") from error
    warn_of_open_secret(key)
    return grpc.ssl_server_credentials([pair])


def _read(option: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DeploymentError(f"{option} {path}: {error.strerror}") from error


_SERVING, _NOT_SERVING = 1, 2
_ALIVE = "liveness"
_KNOWN = ("", _ALIVE, "readiness", PROCESSOR)
_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a port in use is an error
    # A gateway that vanishes must not leave its requests behind.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)


class Picker:
    """Picks the engine of each request for gateways; make, `start` and `close` it in one loop.

    Attributes:
        address: where it listens.
        cluster: the engines, and which requests are on which.
        bodies: the memory of all bodies that are being read.

    Raises:
        DeploymentError: the deployment needs more than placing, or its policy cannot be served.
    """

    def __init__(self, deployment: Deployment) -> None:
        _refuse_what_is_not_placing(deployment)
        # A whole body, and gRPC's usual 4 MiB beside it.
        largest = (deployment.proxy.largest_body_mb + 4) << 20
        self._server = grpc.aio.server(
            options=(*_OPTIONS, ("grpc.max_receive_message_length", min(largest, 2**31 - 1)))
        )
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    PROCESSOR, {"Process": grpc.stream_stream_rpc_method_handler(self._process)}
                ),
                grpc.method_handlers_generic_handler(
                    HEALTH,
                    {
                        "Check": grpc.unary_unary_rpc_method_handler(
                            self._check,
                            HealthCheckRequest.FromString,
                            HealthCheckResponse.SerializeToString,
                        )
                    },
                ),
            )
        )
        self.address = ""
        self._ending = False
        self.cluster = Cluster[LiveRequest](deployment)
        self._running = RunningRequests(self.cluster)
        self.bodies = self._running.bodies

    @property
    def ready(self) -> bool:
        """Whether new requests can be placed."""
        return bool(self.cluster.dispatcher.usable)

    async def start(
        self, host: str, port: int, certificate: Path | None = None, key: Path | None = None
    ) -> None:
        """Listen, ask every engine how it is, and answer from then on.

        Args:
            host: address to listen on; one of IPv6 may be in brackets.
            port: 0 takes a free one.
            certificate: PEM file of the server's certificate and its chain; None: no TLS.
            key: PEM file of its private key.

        Raises:
            DeploymentError: the address is in use or does not exist, or a file of TLS is wrong.
        """
        host = host.removeprefix("[").removesuffix("]")
        address = f"{f'[{host}]' if ':' in host else host}:{port}"
        credentials = None
        if certificate is not None and key is not None:
            credentials = server_credentials(certificate, key)
        try:
            if credentials is None:
                bound = self._server.add_insecure_port(address)
            else:
                bound = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise DeploymentError(f"cannot listen on {address}: {error}") from error
        self.address = f"{address.rpartition(':')[0]}:{bound}"
        await self.cluster.start()
        await self._server.start()

    async def stop(self, seconds: float) -> None:
        """Take no more requests, and give those that run some seconds to end."""
        self._ending = True
        await self._server.stop(seconds)

    async def close(self) -> None:
        """End what runs in the background, and close every connection."""
        await self.cluster.close()

    async def _process(
        self, requests: object, context: "grpc.aio.ServicerContext[bytes, bytes]"
    ) -> None:
        """Answer a gateway about one HTTP request, until either of them ends it."""
        del requests  # they are read from the context

        async def read() -> Event | None:
            raw: object = await context.read()
            return read_event(raw) if isinstance(raw, bytes) else None

        exchange = Exchange(read, context.write, self._running)
        try:
            await exchange.run()
        except ProtocolError as error:
            logger.warning("from %s: %s", context.peer(), error)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    async def _check(self, request: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> Any:
        """Return whether the picker lives, or can place requests."""
        if request.service not in _KNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r}")
        serves = request.service == _ALIVE or (self.ready and not self._ending)
        return HealthCheckResponse(status=_SERVING if serves else _NOT_SERVING)
