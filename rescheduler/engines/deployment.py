"""A deployment of prefill and decode instances, as one YAML file describes it."""

import ipaddress
import socket
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints
from urllib.parse import SplitResult, urlsplit

import msgspec

from data_collection.files import read_yaml
from predictor.live.zmq_sockets import is_loopback
from rescheduler.batching.batching_config import read_batching_config
from rescheduler.emulation.emulate_options import EmulateOptions, Positive
from rescheduler.emulation.step_barrier import MOST_RANKS
from rescheduler.ordering.expected_rest import Victim
from rescheduler.ordering.service_order import read_engine_order


class TraceOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Traces of requests for an OpenTelemetry collector.

    Attributes:
        endpoint: of the collector: ``http://HOST:4317`` for OTLP over gRPC, and with a path,
            ``http://HOST:4318/v1/traces``, over HTTP; ``https`` encrypts.
        sample: share of the requests that are traced, drawn at random.
        trust_clients: a request whose client sends ``traceparent`` is traced if that says so, and
            not otherwise; else only its trace's id is taken over.
    """

    endpoint: str
    sample: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.01
    trust_clients: bool = False

    @property
    def protocol(self) -> str:
        """How the collector is spoken to, in the words of ``OTEL_EXPORTER_OTLP_PROTOCOL``."""
        has_path = urlsplit(self.endpoint).path not in ("", "/")
        return "http/protobuf" if has_path else "grpc"


Seconds = Annotated[float, msgspec.Meta(gt=0)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class DeploymentError(ValueError):
    """A deployment file that cannot be used; the message names the field."""


class Instance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A vLLM engine.

    Attributes:
        name: unique name; also its name in telemetry.
        role: ``prefill`` or ``decode``; without prefill instances, decode instances prefill too.
        url: of its HTTP server, without a path.
        control: ZMQ endpoint of its control socket. Without it requests are placed there but
            never moved away alive, and a prefill instance keeps the blocks of clients that have
            left until their lease ends.
        telemetry: ZMQ endpoint of its forecasts; None if it publishes none.
        devices: GPUs that `headway launch` gives it: their numbers among those that are visible to
            it, or their names, as in ``CUDA_VISIBLE_DEVICES``; None: all.
        data_parallel_rank: its rank in its data-parallel group, where each rank is an instance.
        arguments: further flags for its vLLM, after those of ``engine``.
    """

    name: str
    role: Literal["prefill", "decode"]
    url: str
    control: str | None = None
    telemetry: str | None = None
    devices: list[int | str] | None = None
    data_parallel_rank: Annotated[int, msgspec.Meta(ge=0)] | None = None
    arguments: list[str] = []

    @property
    def host(self) -> str:
        """Host of its HTTP server."""
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        """Port of its HTTP server."""
        return urlsplit(self.url).port or 80


class BackgroundOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What background requests (``service_tier: flex``) may use of what others leave.

    Attributes:
        slots: share of an instance's places up to which background requests are begun.
        kv: share of its KV cache up to which they are, by what its requests are expected to hold.
        prefill: share of its time for which prompts of background requests are computed there.
        pool: of them that wait, at most; beyond it clients get 429 with ``Retry-After``.
    """

    slots: Share = 0.5
    kv: Share = 0.75
    prefill: Share = 0.1
    pool: Positive = 1024


class AccountOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who a client is, and how much of what all share it may have where others wait.

    Attributes:
        header: that names the client, set by what stands before the proxy, which must let nobody
            else set it; None: a client is its address, or its API key.
        weights: of accounts by name, a header's value or an address; others have 1.
    """

    header: str | None = None
    weights: dict[str, Annotated[float, msgspec.Meta(ge=0.001, le=1000)]] = {}


class PastOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How much of the lengths of earlier requests is kept, to forecast the next ones.

    Attributes:
        keys: of prefixes, at most, 32 bytes each; 0: nothing is kept.
        file: that keeps them across restarts, as digests and figures; None: a restart forgets them.
    """

    keys: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)] = 1 << 20
    file: str | None = None


class ProxyOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the proxy listens, how long it waits, and how often it tries.

    Attributes:
        host: address it listens on; by default this machine only. ``::`` is every address, of IPv4
            and IPv6.
        port: 0 takes a free one.
        admin_port: of this machine, on which `headway drain` reaches the proxy; 0 takes a free one.
        pool: requests that wait for a prefill or a decode instance, at most; beyond it clients
            get 429 with ``Retry-After``.
        prefill_concurrency: requests sent to a prefill instance at a time.
        ahead: requests that are prefilled or wait for a decode instance after it, at most, so
            that they do not fill the prefill instances' memory.
        pool_seconds: longest wait for an instance, then 503.
        background: room of requests with ``service_tier: flex``, which wait behind all others for
            as long as their clients do: ``slots``, ``kv``, ``prefill`` and ``pool``.
        accounts: who a client is, ``header`` and ``weights``; see docs/order.md.
        past: what is kept of earlier requests' lengths, ``keys`` and ``file``, where ``order``
            goes by forecasts; see docs/order.md.
        connect_seconds: to open a connection to an engine.
        prefill_seconds: from sending a prompt to its prefill's answer, of an engine that is not
            slow. After half of that the proxy asks the engine whether it still has the request,
            and waits while it has. An engine that cannot be asked has this long, longer by the
            prompts ahead.
        first_token_seconds: from placing a request on a decode instance to its first token,
            likewise.
        token_seconds: between two tokens of a running request, likewise; and for which an engine
            that has requests may make no step.
        silent_seconds: for which an engine may be silent altogether; then it has failed, as one
            on whose port nothing listens has at once.
        freeze_seconds: from asking for a freeze to the kept blocks.
        control_seconds: any other exchange with a control socket.
        moved_token_seconds: to copy a running request to its target, and from handing it over to
            its first token there; then it stays, or is rolled back.
        attempts: placements of a request that fail in a row, until its client gets an error.
        backoff_seconds: before the second attempt; doubles with each up to 5 s, half of it random.
        breaker_failures: failures in a row that take an instance out of service.
        breaker_seconds: until it is probed again; doubles while probes fail, up to 16 times.
        probe_seconds: between two health probes of an instance in service.
        concurrent_migrations: moved at the same time, at most.
        shutdown_seconds: that running requests have to end after SIGTERM, or until a second one;
            then their streams end with an error event.
        connections: of clients, at most, half of them for one address; None: as many as the limit
            of open files allows.
        idle_seconds: for which a connection may be without a request, or a request's headers
            incomplete.
        body_seconds: for which a request's body may be incomplete.
        largest_body_mb: largest request body, in MiB.
        bodies_mb: of all requests that are being served, as far as they have arrived, at most, in
            MiB, half of it for one address; beyond it clients get 503 with ``Retry-After``.
        client_buffer_kb: of an answer, kept for a client that reads slowly, in KiB; then its
            request waits for it.
        client_write_seconds: for which a client may take none of its answer; then it is
            disconnected.
        keep_alive_seconds: after which a stream without a byte gets its headers and a comment, and
            again as often; 0: never. Until then an error has its HTTP status.
        promise_levels: probability with which a request must be expected to finish when it asks to,
            by its ``service_tier``; other tiers take that of ``default``.
        progress_seconds: between two comments of a stream that asks when it will finish.
        forward_priority: let engines see the ``priority`` that clients ask for.
        engine_key_file: holds the API key of the engines, for probes; None: the environment
            variable ``VLLM_API_KEY``, if it is set.
        allowed_origins: of web pages whose scripts may read answers, as ``https://chat.example``;
            ``*`` allows all.
        traces: where traces of requests are sent, as ``{endpoint: http://HOST:4317}``, and their
            ``sample``, the share of the requests that are traced (0.01); None: there are none.
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


class CoordinatorOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where `headway coordinator` listens, and for how long anyone may be silent.

    Attributes:
        endpoint: ZMQ endpoint that it binds and proxies connect to.
        host: address of its ``/health``, ``/ready`` and ``/metrics``; by default this machine only.
        port: of these; 0 takes a free one.
        silent_seconds: without a word from it for this long, proxies place requests themselves.
        lost_seconds: without a word from a proxy for this long, its requests are taken to be over.
        settle_seconds: that a new coordinator gives the proxies to report what runs.
    """

    endpoint: str
    host: str = "127.0.0.1"
    port: Port = 8002
    silent_seconds: Annotated[float, msgspec.Meta(ge=0.5)] = 1.5
    lost_seconds: Annotated[float, msgspec.Meta(ge=1.0)] = 10.0
    settle_seconds: Annotated[float, msgspec.Meta(ge=0.0)] = 1.0


class EngineOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How `headway launch` starts the engines; the proxy does not read it.

    Attributes:
        dtype: of the weights and the KV cache.
        max_model_len: longest context in tokens.
        max_num_seqs: requests an engine runs at a time.
        block_size: tokens of a KV block.
        kv_blocks: KV blocks of an engine; None: what ``kv_cache_gb`` holds.
        kv_cache_gb: memory of the KV cache on a CPU, GiB.
        enforce_eager: do not compile.
        checkpoint: survival model of the forecasts; None: no forecasts, no telemetry.
        k: engine steps between two forecasts.
        batching: how engines that prefill and decode form their batches, as in
            `rescheduler.batching.batching_config`; None: as vLLM does.
        order: of service of what waits in an engine itself, as ``order`` of the deployment, and
            with its own ``prompt_checkpoint``; None: as it came.
        victim: whom a decode instance suspends when its KV cache is full, as in
            `rescheduler.ordering.victims`.
        emulate: the GPU that engines emulate, in place of computing anything; None: they compute.
        threads: CPU threads of an engine.
        side_channel_port: of the first engine's NIXL side channel; the others' follow.
        drain_seconds: that an engine's requests have after SIGTERM to move away or to end there; 0
            stops it at once.
        arguments: further flags for vLLM.
        environment: further environment variables.
    """

    dtype: str = "auto"
    max_model_len: Positive | None = None
    max_num_seqs: Positive = 16
    block_size: Positive = 32
    kv_blocks: Positive | None = None
    kv_cache_gb: Positive = 1
    enforce_eager: bool = False
    checkpoint: str | None = None
    k: Positive = 20
    batching: dict[str, Any] | None = None
    order: dict[str, Any] | None = None
    victim: Victim = "newest"
    emulate: EmulateOptions | None = None
    threads: Positive = 1
    side_channel_port: Port = 5600
    drain_seconds: Annotated[float, msgspec.Meta(ge=0)] = 600.0
    arguments: list[str] = []
    environment: dict[str, str] = {}


class Deployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Instances, and how requests are placed on and moved between them.

    Attributes:
        model: an embedded model's name, a folder, or a Hugging Face id.
        served_model_name: what clients call it; empty: ``model``.
        instances: at least one decode instance; without prefill instances they prefill too.
        keys: folder created by `headway keys`, needed where an endpoint leaves the machine.
        routing: name and options of a routing policy.
        order: name and options of the order in which waiting requests are served.
        prompt_checkpoint: predictor that reads prompts, for requests that no engine has forecast
            yet; None: they are expected to be like those that ended lately.
        migration: name, ``interval_seconds`` and options of a migration policy; None: requests
            only move away from instances that drain or die.
        coordinator: what `headway coordinator` and the proxies that it serves need to know; None:
            `headway serve` places and moves by itself, and must be the only proxy.
        proxy: options of `headway serve`.
        engine: options of `headway launch`.
        ray: of a deployment that `headway ray launch` starts, with counts in place of addresses.
    """

    documented: ClassVar[str] = (
        "--config names a deployment file. Each of its keys is an option too, as in "
        "`--proxy.port 9000` or `--routing '{name: headroom}'`. docs/serve.md and docs/deploy.md "
        "describe the keys, and --print-config prints them all."
    )
    """What the help says instead of listing every key."""

    model: str
    instances: list[Instance] = []
    served_model_name: str = ""
    keys: str | None = None
    routing: dict[str, Any] = msgspec.field(default_factory=lambda: {"name": "jsq_load"})
    order: dict[str, Any] = msgspec.field(default_factory=lambda: {"name": "fcfs"})
    prompt_checkpoint: str | None = None
    migration: dict[str, Any] | None = None
    coordinator: CoordinatorOptions | None = None
    proxy: ProxyOptions = ProxyOptions()
    engine: EngineOptions = EngineOptions()
    ray: Any = None

    @classmethod
    def from_values(cls, values: Any) -> Self:
        """Return the deployment that a mapping describes; raises as `check` does."""
        try:
            deployment = msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            said = _with_path_first(str(error))
            where, _, wrong = said.partition(": Invalid enum value ")
            if wrong:
                said = f"{where}: {wrong} is not one of {', '.join(_choices_of(cls, where))}"
            raise DeploymentError(" ".join(said.split())) from error
        deployment.check()
        return deployment

    def check(self) -> None:
        """Refuse what the types allow and no deployment can mean.

        Raises:
            DeploymentError: names the field, and what it should be.
        """
        if self.ray is not None:
            raise DeploymentError(
                "ray: this deployment has counts, not addresses: `headway ray launch` starts its "
                "engines, proxies and coordinator"
            )
        _check_addresses(self)
        check_policies(self)

    @property
    def served_name(self) -> str:
        """What clients call the model."""
        return self.served_model_name or self.model

    @property
    def prefill(self) -> list[Instance]:
        """The prefill instances, in the file's order."""
        return [instance for instance in self.instances if instance.role == "prefill"]

    @property
    def decode(self) -> list[Instance]:
        """The decode instances, in the file's order."""
        return [instance for instance in self.instances if instance.role == "decode"]

    @property
    def schedules_by_priority(self) -> bool:
        """Whether every engine is started with ``--scheduling-policy priority``."""
        given = [[*self.engine.arguments, *one.arguments] for one in self.instances]
        return all(_last_value(words, "--scheduling-policy") == "priority" for words in given)

    @property
    def keys_folder(self) -> Path | None:
        """Folder of CURVE keys, if there is one."""
        return None if self.keys is None else Path(self.keys).expanduser()

    @property
    def admin_url(self) -> str:
        """Where the operator on this machine reaches the proxy."""
        return f"http://127.0.0.1:{self.proxy.admin_port}"

    @property
    def proxy_url(self) -> str:
        """Where clients on this machine reach the proxy."""
        host = "127.0.0.1" if self.proxy.host in ("0.0.0.0", "::") else self.proxy.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.proxy.port}"


def read_deployment(path: Path | str) -> Deployment:
    """Return the deployment a YAML file describes.

    Raises:
        DeploymentError: names the file, the field and what it should be.
    """
    try:
        values = read_yaml(Path(path))
    except ValueError as error:
        raise DeploymentError(str(error)) from error
    try:
        return Deployment.from_values(values)
    except DeploymentError as error:
        raise DeploymentError(f"{path}: {error}") from error


def _last_value(words: list[str], flag: str) -> str | None:
    """Return the value that a command line gives a flag last; None if it does not."""
    value = None
    for word, following in pairwise([*words, ""]):
        name, equals, attached = word.partition("=")
        if name.replace("_", "-") == flag:
            value = attached if equals else following
    return value


def _check_addresses(deployment: Deployment) -> None:
    seen: dict[str, str] = {}
    for i, instance in enumerate(deployment.instances):
        where = f"instances[{i}]"
        if not instance.name or set(instance.name) & set("/?#%") or not instance.name.isprintable():
            raise DeploymentError(f"{where}.name: {instance.name!r} cannot be part of a URL")
        for field in ("name", "url", "control", "telemetry"):
            value, key = getattr(instance, field), f"{where}.{field}"
            if value is not None and seen.setdefault(value, key) != key:
                raise DeploymentError(f"{key}: {value} is also {seen[value]}")
        url = _parts(instance.url)
        if url is None or url.scheme not in ("http", "https") or url.port == 0 or _rest(url):
            raise DeploymentError(
                f"{where}.url: {instance.url!r} is not like http://127.0.0.1:8100"
            )
        _refuse_every_address(f"{where}.url", instance.url)
        for field in ("control", "telemetry"):
            endpoint = getattr(instance, field)
            if endpoint is not None:
                _check_endpoint(deployment, f"{where}.{field}", endpoint)
    if deployment.coordinator is not None:
        _check_coordinator(deployment, deployment.coordinator)
    if deployment.proxy.traces is not None:
        _check_traces(deployment, deployment.proxy.traces)
    if not deployment.decode:
        raise DeploymentError("instances: at least one must have the role decode")


def check_policies(deployment: Deployment) -> None:
    """Refuse policies and batches that no deployment can have; raises as `Deployment.check`."""
    _check_batches(deployment)
    if deployment.engine.emulate is not None:
        _check_emulate(deployment, deployment.engine.emulate)
    for field in ("routing", "order", "migration"):
        section = getattr(deployment, field)
        if section is not None and not isinstance(section.get("name"), str):
            raise DeploymentError(f"{field}.name: the policy's name is required")
    interval = (deployment.migration or {}).get("interval_seconds", 1.0)
    if isinstance(interval, bool) or not isinstance(interval, int | float) or interval <= 0:
        raise DeploymentError(
            f"migration.interval_seconds: must be a positive number, not {interval!r}"
        )


def _check_endpoint(deployment: Deployment, where: str, endpoint: str) -> None:
    _refuse_every_address(where, endpoint)
    is_tcp, parts = endpoint.startswith("tcp://"), _parts(endpoint)
    if "://" not in endpoint or (is_tcp and (parts is None or not parts.port)):
        raise DeploymentError(
            f"{where}: {endpoint!r} is not a ZMQ endpoint such as tcp://127.0.0.1:5557"
        )
    if deployment.keys is None and not is_loopback(endpoint):
        raise DeploymentError(
            f"{where}: {endpoint} leaves the machine: create keys with `headway keys DIR` and give "
            "DIR as keys"
        )


def _check_coordinator(deployment: Deployment, coordinator: CoordinatorOptions) -> None:
    where, parts = "coordinator.endpoint", _parts(coordinator.endpoint)
    _refuse_every_address(where, coordinator.endpoint)
    if parts is None or parts.scheme != "tcp" or not parts.port or parts.path or _rest(parts):
        raise DeploymentError(f"{where}: {coordinator.endpoint!r} is not like tcp://127.0.0.1:5700")
    _check_endpoint(deployment, where, coordinator.endpoint)


def _check_traces(deployment: Deployment, traces: TraceOptions) -> None:
    where, parts = "proxy.traces.endpoint", _parts(traces.endpoint)
    usable = parts is not None and parts.scheme in ("http", "https") and parts.port
    if parts is None or not usable or not traces.endpoint.isprintable():
        raise DeploymentError(
            f"{where}: {traces.endpoint!r} is not like http://127.0.0.1:4317, or "
            "http://127.0.0.1:4318/v1/traces for OTLP over HTTP"
        )
    _refuse_every_address(where, traces.endpoint)
    if parts.username is not None:
        raise DeploymentError(
            f"{where}: must not hold a name or a password, which logs and process lists would "
            "show: give OTEL_EXPORTER_OTLP_HEADERS to the proxy and the engines"
        )
    engine = deployment.engine.arguments
    if any("--disable-log-stats" in [*engine, *one.arguments] for one in deployment.instances):
        raise DeploymentError(
            "proxy.traces: vLLM traces requests by its statistics: remove --disable-log-stats"
        )


def _check_batches(deployment: Deployment) -> None:
    engine = deployment.engine
    if engine.batching is not None and deployment.prefill:
        raise DeploymentError(
            "engine.batching: requires engines that both prefill and decode, but "
            f"{deployment.prefill[0].name} is a prefill instance"
        )
    if engine.batching is not None and engine.order is not None:
        raise DeploymentError(
            "engine.order: engine.batching already decides who goes first; drop one"
        )
    try:
        if engine.batching is not None:
            section = {"batching": engine.batching, "forecast": engine.checkpoint}
            read_batching_config({"headway": section})
        if engine.order is not None:
            read_engine_order({"headway": {"order": engine.order}})
    except ValueError as error:
        where = str(error).removeprefix("--additional-config, headway.")
        raise DeploymentError(f"engine.{where}") from error


def _check_emulate(deployment: Deployment, emulate: EmulateOptions) -> None:
    if deployment.engine.batching is not None:
        raise DeploymentError(
            "engine.emulate: not with engine.batching, which reads a profile of a real engine"
        )
    ranked = [one.name for one in deployment.instances if one.data_parallel_rank is not None]
    if ranked:
        raise DeploymentError(
            f"engine.emulate: {ranked[0]} is a rank of a data-parallel group: remove "
            "data_parallel_rank, and set engine.emulate.barrier: true so that the engines step "
            "together"
        )
    arguments = [*deployment.engine.arguments]
    for one in deployment.instances:
        arguments += one.arguments
    for argument in arguments:
        if argument.replace("_", "-").startswith(("--data-p", "-dp")):
            raise DeploymentError(
                f"engine.emulate: an emulated engine is one rank: remove {argument}, and set "
                "engine.emulate.barrier: true so that the decode engines step together"
            )
    if emulate.barrier and len(deployment.decode) > MOST_RANKS:
        raise DeploymentError(
            f"engine.emulate.barrier: of {MOST_RANKS} decode instances at most, not "
            f"{len(deployment.decode)}"
        )
    hosts = sorted({one.host for one in deployment.decode})
    if emulate.barrier and len(hosts) > 1:
        raise DeploymentError(
            f"engine.emulate.barrier: of engines on one machine, not of {' and '.join(hosts[:2])}"
        )
    if emulate.profile is None and emulate.step_time is None:
        return  # `headway launch --emulate` gives one
    try:
        resolved = emulate.resolved()
    except ValueError as error:
        raise DeploymentError(f"engine.emulate: {error}") from error
    if resolved.kv_tokens is None and deployment.engine.kv_blocks is None:
        raise DeploymentError(
            "engine.emulate: nothing says how many tokens the KV cache holds: set "
            "engine.emulate.kv_tokens (vLLM logs it as the size of its KV cache)"
        )


def _parts(url: str) -> SplitResult | None:
    """Return the parts of a URL, or None if it has no host or no number as its port."""
    try:
        parts = urlsplit(url)
        return parts if parts.hostname and parts.port != -1 else None
    except ValueError:  # its port is no number
        return None


def _refuse_every_address(where: str, endpoint: str) -> None:
    """Refuse what a server may bind and nobody can connect to: the deployment is for both."""
    try:
        parts = urlsplit(endpoint)
    except ValueError:  # no address, which others say better
        return
    host = parts.hostname if parts.scheme in ("http", "https", "tcp") else None
    if host is not None and (host == "*" or _is_unspecified(host)):
        raise DeploymentError(
            f"{where}: {endpoint}: others connect there, and {host} is no machine's address: "
            "write the address or the name by which they reach it, such as 127.0.0.1 if all are "
            "on one machine"
        )


def _is_unspecified(host: str) -> bool:
    if ":" not in host:
        try:
            return not any(socket.inet_aton(host))  # 0, too
        except OSError:
            return False
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return (address.ipv4_mapped or address).is_unspecified


def _rest(url: SplitResult) -> str:
    return ("" if url.path == "/" else url.path) or url.query or url.fragment


def _choices_of(struct: Any, path: str) -> list[str]:
    """Return the values that the key at a path may have, such as ``instances[0].role``."""
    kind = struct
    for name in path.split("."):
        hints = get_type_hints(kind)
        kind = hints.get(name.partition("[")[0])
        while (inner := get_args(kind)) and get_origin(kind) is not Literal:
            kind = next((one for one in inner if one is not type(None)), None)
    return [str(choice) for choice in get_args(kind)]


def _with_path_first(message: str) -> str:
    """Turn msgspec's "... - at `$.proxy.port`" into "proxy.port: ..."."""
    text, found, at = message.rpartition(" - at `$")
    return f"{at.rstrip('`').lstrip('.')}: {text}" if found and at != "`" else message
