"""The options of the proxy in a deployment: how it listens, how long it waits, what it keeps."""

from typing import Annotated
from urllib.parse import urlsplit

import msgspec

from rescheduler.emulation.emulate_options import Positive

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class TraceOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Traces of requests for an OpenTelemetry collector.

    Attributes:
        endpoint: Address of the collector: ``http://HOST:4317`` for OTLP over gRPC, and with a
            path, ``http://HOST:4318/v1/traces``, over HTTP. ``https`` encrypts.
        sample: share of the requests that are traced, drawn at random.
        trust_clients: Let a client's ``traceparent`` decide whether its request is traced. If not
            set, the proxy takes over only the id of the client's trace.
    """

    endpoint: str
    sample: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.01
    trust_clients: bool = False

    @property
    def protocol(self) -> str:
        """How the collector is spoken to, in the words of ``OTEL_EXPORTER_OTLP_PROTOCOL``."""
        has_path = urlsplit(self.endpoint).path not in ("", "/")
        return "http/protobuf" if has_path else "grpc"


class BackgroundOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What background requests (``service_tier: flex``) may use of what others leave.

    Attributes:
        slots: share of an instance's places up to which background requests start there.
        kv: share of its KV cache up to which they start, by what its requests are expected to hold.
        prefill: share of its time that prompts of background requests may take there.
        pool: Most background requests that wait. Beyond it clients get 429 with ``Retry-After``.
    """

    slots: Share = 0.5
    kv: Share = 0.75
    prefill: Share = 0.1
    pool: Positive = 1024


class AccountOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who a client is, and how much of what all share it may have where others wait.

    Attributes:
        header: Header that names the client. A gateway in front of the proxy sets it, and must let
            nobody else set it. None: a client is its address, or its API key.
        weights: Weights of accounts by name, a header's value or an address. Others have 1.
    """

    header: str | None = None
    weights: dict[str, Annotated[float, msgspec.Meta(ge=0.001, le=1000)]] = {}


class PastOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How much of the lengths of earlier requests is kept, to forecast the next ones.

    Attributes:
        keys: most prefixes that are kept, 32 bytes each; 0: nothing is kept.
        file: File that keeps them across restarts, as digests and figures. None: a restart forgets
            them.
    """

    keys: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)] = 1 << 20
    file: str | None = None


class ProxyOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the proxy listens, how long it waits, and how often it tries.

    Attributes:
        host: Address that the proxy listens on; by default this machine only. ``::`` is every
            address, of IPv4 and IPv6.
        port: Port for clients. 0 takes a free one.
        admin_port: Port of this machine, on which `headway drain` reaches the proxy. 0 takes a free
            one.
        pool: Most requests that wait for a prefill or a decode instance. Beyond it clients get 429
            with ``Retry-After``.
        prefill_concurrency: requests sent to a prefill instance at a time.
        ahead: Most requests that are prefilled, or wait for a decode instance after it. More of
            them would fill the prefill instances' memory.
        pool_seconds: longest wait for an instance, then 503.
        background: Room of requests with ``service_tier: flex``: ``slots``, ``kv``, ``prefill`` and
            ``pool``. They wait behind all others for as long as their clients do.
        accounts: who a client is, ``header`` and ``weights``; see docs/order.md.
        past: How much of earlier requests' lengths is kept, ``keys`` and ``file``, if ``order``
            goes by forecasts; see docs/order.md.
        connect_seconds: longest time to open a connection to an engine.
        prefill_seconds: Longest time from sending a prompt to its prefill's answer, of an engine
            that is not slow. After half of it the proxy asks the engine whether it still has the
            request, and waits while it has. An engine that cannot be asked has this long, longer by
            the prompts ahead.
        first_token_seconds: The same from placing a request on a decode instance to its first
            token.
        token_seconds: The same between two tokens of a running request. Also the longest time
            without a step of an engine that has requests.
        silent_seconds: Longest time for which an engine may be silent altogether. Then it has
            failed. An engine on whose port nothing listens has failed at once.
        freeze_seconds: longest time from asking for a freeze to the kept blocks.
        control_seconds: longest time of any other exchange with a control socket.
        moved_token_seconds: Longest time to copy a running request to its target, and from handing
            it over to its first token there. Then it stays, or is rolled back.
        attempts: placements of a request that fail in a row, until its client gets an error.
        backoff_seconds: Delay before the second attempt. It doubles with each attempt up to 5 s,
            half of it random.
        breaker_failures: failures in a row that take an instance out of service.
        breaker_seconds: Time until a failed instance is probed again. It doubles while probes fail,
            up to 16 times.
        probe_seconds: time between two health probes of an instance in service.
        concurrent_migrations: most requests that move at the same time.
        shutdown_seconds: Time after SIGTERM in which running requests may end. Then, or at a second
            SIGTERM, their streams end with an error event.
        connections: Most connections of clients, half of them for one address. None: as many as the
            limit of open files allows.
        idle_seconds: Longest time for which a connection may be without a request, or a request's
            headers incomplete.
        body_seconds: longest time for which a request's body may be incomplete.
        largest_body_mb: largest request body, in MiB.
        bodies_mb: Most MiB of the bodies of all requests that are being served, as far as they have
            arrived, half of it for one address. Beyond it clients get 503 with ``Retry-After``.
        client_buffer_kb: KiB of an answer that are kept for a client that reads slowly. Then its
            request waits for it.
        client_write_seconds: Longest time for which a client may take none of its answer. Then it
            is disconnected.
        keep_alive_seconds: Time after which a stream without a byte gets its headers and a comment,
            and again as often; 0: never. Until then an error has its HTTP status.
        promise_levels: Probability with which a request must be expected to finish when it asks to,
            by its ``service_tier``. Other tiers take the level of ``default``.
        progress_seconds: time between two comments of a stream that asks when it will finish.
        forward_priority: let engines see the ``priority`` that clients ask for.
        engine_key_file: File with the API key of the engines, for probes. None: the environment
            variable ``VLLM_API_KEY``, if it is set.
        allowed_origins: Web pages whose scripts may read answers, as ``https://chat.example``.
            ``*`` allows all.
        traces: Where traces of requests are sent, as ``{endpoint: http://HOST:4317}``, and their
            ``sample``, the share of the requests that are traced (0.01). None: there are none.
    """

    host: str = "127.0.0.1"
    port: Port = 8000
    admin_port: Port = 8001
    pool: Positive = 256
    prefill_concurrency: Positive = 4
    ahead: Positive = 32
    pool_seconds: Seconds = 120.0
    background: BackgroundOptions = BackgroundOptions()
    accounts: AccountOptions = AccountOptions()
    past: PastOptions = PastOptions()
    connect_seconds: Seconds = 2.0
    prefill_seconds: Seconds = 120.0
    first_token_seconds: Seconds = 60.0
    token_seconds: Seconds = 30.0
    silent_seconds: Seconds = 60.0
    freeze_seconds: Seconds = 5.0
    control_seconds: Seconds = 5.0
    moved_token_seconds: Seconds = 10.0
    attempts: Positive = 8
    backoff_seconds: Seconds = 0.1
    breaker_failures: Positive = 3
    breaker_seconds: Seconds = 1.0
    probe_seconds: Seconds = 2.0
    concurrent_migrations: Positive = 4
    shutdown_seconds: Seconds = 600.0
    connections: Positive | None = None
    idle_seconds: Seconds = 75.0
    body_seconds: Seconds = 30.0
    largest_body_mb: Positive = 8
    bodies_mb: Positive = 512
    client_buffer_kb: Positive = 256
    client_write_seconds: Seconds = 60.0
    keep_alive_seconds: Annotated[float, msgspec.Meta(ge=0)] = 10.0
    promise_levels: dict[str, Annotated[float, msgspec.Meta(gt=0, le=0.999)]] = msgspec.field(
        default_factory=lambda: {"default": 0.95}
    )
    progress_seconds: Annotated[float, msgspec.Meta(ge=0.1)] = 2.0
    forward_priority: bool = False
    engine_key_file: str | None = None
    allowed_origins: list[str] = []
    traces: TraceOptions | None = None
