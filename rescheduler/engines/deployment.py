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
from rescheduler.engines.proxy_options import Port, ProxyOptions, TraceOptions
from rescheduler.ordering.expected_rest import Victim
from rescheduler.ordering.service_order import read_engine_order


class DeploymentError(ValueError):
    """A deployment file that cannot be used; the message names the field."""


class Instance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A vLLM engine.

    Attributes:
        name: unique name; also its name in telemetry.
        role: ``prefill`` or ``decode``; without prefill instances, decode instances prefill too.
        url: address of its HTTP server, without a path.
        control: ZMQ endpoint of its control socket. Without it requests are placed there but
            never moved away alive, and a prefill instance keeps the blocks of clients that have
            left until their lease ends.
        telemetry: ZMQ endpoint of its forecasts; None if it publishes none.
        devices: GPUs that `headway launch` gives it: their numbers among those that are visible to
            it, or their names, as in ``CUDA_VISIBLE_DEVICES``; None: all.
        data_parallel_rank: its rank in its data-parallel group, where each rank is an instance.
        arguments: further flags for its vLLM, after the flags of ``engine``.
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


class CoordinatorOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where `headway coordinator` listens, and for how long anyone may be silent.

    Attributes:
        endpoint: ZMQ endpoint that it binds and proxies connect to.
        host: address of its ``/health``, ``/ready`` and ``/metrics``; by default this machine only.
        port: Port of these. 0 takes a free one.
        silent_seconds: without a word from it for this long, proxies place requests themselves.
        lost_seconds: without a word from a proxy for this long, its requests are taken to be over.
        settle_seconds: time that a new coordinator gives the proxies to report what runs.
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
        dtype: type of the weights and the KV cache.
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
        order: Scheduling order of the requests that wait in an engine itself, as ``order`` of the
            deployment, and with its own ``prompt_checkpoint``. None: in order of arrival.
        victim: which request a decode instance suspends when its KV cache is full, as in
            `rescheduler.ordering.victims`. None: `age` where requests move,
            and vLLM's choice elsewhere.
        emulate: the GPU that engines emulate, instead of computing anything; None: they compute.
        threads: CPU threads of an engine.
        side_channel_port: port of the first engine's NIXL side channel; the others use the next.
        drain_seconds: Time after SIGTERM in which an engine's requests may move away or end there.
            0 stops the engine at once.
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
    victim: Victim | None = None
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
        order: name and options of the scheduling order: which waiting request goes first.
        prompt_checkpoint: predictor that reads prompts, for requests that no engine has forecast
            yet; None: they are expected to be like those that ended lately.
        migration: name, ``interval_seconds`` and options of a migration policy; None: requests
            only move away from instances that drain or die.
        coordinator: What `headway coordinator` and the proxies that it serves need to know. None:
            `headway serve` places and moves on its own, and must be the only proxy.
        proxy: options of `headway serve`.
        engine: options of `headway launch`.
        ray: section of a deployment that `headway ray launch` starts: counts instead of addresses.
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
    def victim(self) -> Victim:
        """Whom decode instances suspend.

        Moves fill all instances alike, so that these run out of memory together.
        """
        moves = self.migration is not None and not self.migration.get("shadow", False)
        return self.engine.victim or ("age" if moves else "newest")

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
