"""The command that starts an instance's vLLM engine: flags and environment."""

import errno
import importlib.util
import json
import os
import re
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any
from urllib.parse import urlsplit

from data_collection.capture.capture_config import SECTION
from data_collection.versions import (
    SUPPORTED_VLLM,
    installed_version,
    is_supported_vllm,
    supported_vllm,
    vllm_release,
    vllm_version,
)
from predictor.live.zmq_sockets import is_loopback, tcp_endpoint
from rescheduler.emulation.emulate_options import EMULATE_SECTION
from rescheduler.engines import emulated_deployment
from rescheduler.engines.deployment import Deployment, EngineOptions, Instance
from rescheduler.engines.emulated_deployment import (
    emulate_section,
    emulated_arguments,
    emulated_engine,
)

IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""The executor that runs a model in its engine's process, by its path.

vLLM's CPU platform replaces it where it is asked for as ``uni``, lest OpenMP start before its
environment is set; an engine that Headway starts has that environment from the beginning. An
engine with the multiprocessing executor spins on a core while its worker computes, see
docs/deploy.md.
"""

_WORKER = "predictor.live.vllm_worker.LiveHeadwayWorker"
_BARE_SCHEDULER = "data_collection.vllm_scheduler.HeadwayScheduler"
_SCHEDULER = "predictor.live.vllm_scheduler.LiveHeadwayScheduler"
_BATCHING_SCHEDULER = "rescheduler.batching.vllm_scheduler.FairBatchingScheduler"
_SCHEDULERS = {
    (True, False): "rescheduler.ordering.vllm_scheduler.OrderedHeadwayScheduler",
    (False, True): "rescheduler.ordering.vllm_scheduler.SuspendingHeadwayScheduler",
    (True, True): "rescheduler.ordering.vllm_scheduler.OrderedSuspendingHeadwayScheduler",
}
"""By whether an engine puts its queue in order, and whether it chooses whom it suspends."""
_MIDDLEWARE = "rescheduler.batching.admission.AdmissionMiddleware"
_RESUMES_CHATS = "rescheduler.transfer.vllm_server.ResumedChatsMiddleware"
_CONNECTOR = "rescheduler.transfer.vllm_connector"
_PROCESSES = (
    *("--distributed-executor-backend", "--tensor-parallel-size", "--pipeline-parallel-size"),
    *("--prefill-context-parallel-size", "--data-parallel-backend", "--nnodes", "--config"),
    *("-tp", "-pp", "-pcp", "-dpb", "-n"),
)
"""Flags that choose an executor, or may need one with several processes."""
_BIND = "VLLM_CPU_OMP_THREADS_BIND"
_SHOWN = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_ROCR = "ROCR_VISIBLE_DEVICES"
"""Hides devices below HIP, which counts those that are left."""
_DEVICE = re.compile(r"\d+|(GPU|MIG)-\S+")
_KEPT_SECONDS = 15.0
"""Seconds for which an engine keeps the blocks of a frozen request that is not fetched."""


@dataclass(frozen=True)
class EngineCommand:
    """A program and its arguments, and what is set beyond the caller's own environment."""

    arguments: list[str]
    environment: dict[str, str]

    def shell(self) -> str:
        """Return the command as a shell takes it, one flag a line."""
        lines = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        line: list[str] = []
        for argument in self.arguments:
            if argument.startswith("--"):
                lines.append(shlex.join(line))
                line = []
            line.append(argument)
        return " \\\n  ".join([*lines, shlex.join(line)])


def engine_command(
    deployment: Deployment, instance: Instance, model: str, python: str | None
) -> EngineCommand:
    """Return the command of an instance.

    Args:
        deployment: that the instance belongs to.
        instance: that is started.
        model: what vLLM loads, see `emulated_deployment.model_to_load`.
        python: interpreter whose vLLM is the CPU build; None: vLLM runs on GPUs, where its own
            command starts it. (The CPU build's does not find its version.)

    Raises:
        LaunchError: one of its devices is not visible here.
    """
    options, victim = deployment.engine, deployment.victim
    emulate = options.emulate
    if emulate is not None:
        options = emulated_engine(options)
    arguments = _flags(options, model, deployment.served_name, instance.host, instance.port, python)
    if emulate is not None:
        most = emulate.resolved().max_num_batched_tokens
        arguments += ["--max-num-batched-tokens", str(most)] if most is not None else []
    elif python is not None and options.max_model_len is not None and options.batching is None:
        # Never a part of a prompt: vLLM's CPU runner cannot sample with a seed after one.
        most = options.max_num_seqs * options.max_model_len
        arguments += ["--max-num-batched-tokens", str(most)]
    if instance.data_parallel_rank is not None:
        arguments += ["--data-parallel-rank", str(instance.data_parallel_rank)]
    arguments += ["--kv-transfer-config", json.dumps(_transfer(deployment, instance))]
    section: dict[str, Any] = {}
    if options.checkpoint is not None:
        section = _forecasts(deployment, instance, options.checkpoint)
        arguments += ["--worker-cls", _WORKER]
    elif emulate is not None:
        section = {"k": options.k}
        arguments += ["--worker-cls", emulated_deployment.WORKER]
    if options.batching is not None:
        section["batching"] = options.batching
        arguments += ["--scheduler-cls", _BATCHING_SCHEDULER, "--middleware", _MIDDLEWARE]
    elif instance.role == "decode" and (options.order is not None or victim != "newest"):
        order, suspends = options.order, victim != "newest"
        if order is not None:
            section["order"] = _order_of(instance, order)
        if suspends:
            section["victim"] = victim
        scheduler = _SCHEDULERS[order is not None, suspends]
        arguments += ["--scheduler-cls", scheduler]
    elif section:
        arguments += ["--scheduler-cls", _SCHEDULER]
    elif instance.control is not None and (0, 0) < vllm_release() < (0, 30):
        arguments += ["--scheduler-cls", _BARE_SCHEDULER]  # hands over the KV cache
    if instance.control is not None:
        arguments += ["--middleware", _RESUMES_CHATS]
    if section:
        additional = {SECTION: section}
        if emulate is not None:
            additional[EMULATE_SECTION] = emulate_section(deployment, instance)
        arguments += ["--additional-config", json.dumps(additional)]
    if deployment.proxy.traces is not None:
        arguments += ["--otlp-traces-endpoint", deployment.proxy.traces.endpoint]
    further = [*options.arguments, *instance.arguments]
    if emulate is not None:
        further = emulated_arguments(further)
    arguments += [*_executor(options, further, python), *further]
    return EngineCommand(arguments, _environment(deployment, instance, on_cpu=python is not None))


def lone_engine_command(
    options: EngineOptions, model: str, served_name: str, url: str, python: str | None
) -> EngineCommand:
    """Return the command of an engine without a deployment; the rest is as of `engine_command`."""
    where = urlsplit(url)
    arguments = _flags(options, model, served_name, where.hostname or "", where.port or 80, python)
    environment = _cpu_environment(options) if python is not None else {}
    arguments += [*_executor(options, options.arguments, python), *options.arguments]
    return EngineCommand(arguments, environment | options.environment)


def side_channel_port(deployment: Deployment, instance: Instance) -> int:
    """Return the port on which an engine's NIXL exchanges its metadata with the others."""
    return deployment.engine.side_channel_port + deployment.instances.index(instance)


def _flags(
    options: EngineOptions, model: str, served_name: str, host: str, port: int, python: str | None
) -> list[str]:
    """Return the program, and the flags that every engine has."""
    if python is None:
        arguments = ["vllm", "serve", model]
    else:
        arguments = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    arguments += ["--served-model-name", served_name, "--host", host, "--port", str(port)]
    arguments += ["--dtype", options.dtype]
    if options.max_model_len is not None:
        arguments += ["--max-model-len", str(options.max_model_len)]
    arguments += ["--max-num-seqs", str(options.max_num_seqs)]
    arguments += ["--block-size", str(options.block_size)]
    if options.kv_blocks is not None:
        arguments += ["--num-gpu-blocks-override", str(options.kv_blocks)]
    if options.enforce_eager:
        arguments.append("--enforce-eager")
    return arguments


def _executor(options: EngineOptions, further: Sequence[str], python: str | None) -> list[str]:
    """Return the flag that keeps a CPU engine and its model in one process, unless one objects.

    vLLM takes a flag's beginning for the flag, and binds threads of worker processes only.
    """
    named = [flag.partition("=")[0].replace("_", "-") for flag in further if flag.startswith("-")]
    chosen = any(full.startswith(flag) for full in _PROCESSES for flag in named)
    bound = options.environment.get(_BIND, "nobind") != "nobind"
    if python is None or chosen or bound:
        return []
    return ["--distributed-executor-backend", IN_PROCESS]


def _transfer(deployment: Deployment, instance: Instance) -> dict[str, Any]:
    """Return ``--kv-transfer-config``.

    vLLM looks for the connector's name in several places, so that ours has that of the one it
    extends. Decode instances give caches away too, to each other, which vLLM lets a consumer do.
    """
    emulate = deployment.engine.emulate
    connector = _CONNECTOR if emulate is None else emulated_deployment.CONNECTOR
    kept = _KEPT_SECONDS if emulate is None else max(1.0, emulate.dilation) * _KEPT_SECONDS
    headway: dict[str, Any] = {"keys": deployment.keys, "time_to_live": kept}
    if instance.control is not None:
        headway["control"] = _without_rank(instance.control, instance)
        headway["parses_again"] = True
    return {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": connector,
        "kv_role": "kv_producer" if instance.role == "prefill" else "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"headway": headway},
    }


def _forecasts(deployment: Deployment, instance: Instance, checkpoint: str) -> dict[str, Any]:
    """Return the section of ``--additional-config``.

    Prefill instances forecast as well, so that a request has a forecast when it is placed.
    """
    telemetry = instance.telemetry and {
        "bind": _without_rank(instance.telemetry, instance),
        "instance": instance.name,
        "keys": deployment.keys,
    }
    return {
        "k": deployment.engine.k,
        "forecast": {"checkpoint": checkpoint, "telemetry": telemetry},
    }


def _order_of(instance: Instance, order: dict[str, Any]) -> dict[str, Any]:
    """Return an engine's order; each engine of a deployment keeps a past of its own."""
    file = order.get("past_file")
    return order if file is None else {**order, "past_file": f"{file}-{instance.name}"}


def _environment(deployment: Deployment, instance: Instance, on_cpu: bool) -> dict[str, str]:
    options = deployment.engine
    port = side_channel_port(deployment, instance) - (instance.data_parallel_rank or 0)
    environment = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": instance.host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),  # vLLM adds the rank
    }
    if on_cpu:
        environment |= _cpu_environment(options)
        if all(is_loopback(tcp_endpoint(other.host, 1)) for other in deployment.instances):
            environment |= {"UCX_TLS": "tcp,shm,self,cma", "UCX_NET_DEVICES": "lo"}
    if deployment.proxy.traces is not None:
        environment |= {
            "OTEL_SERVICE_NAME": instance.name,
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": deployment.proxy.traces.protocol,
            # What the proxy records: no probe, and nothing that came past the proxy.
            "OTEL_TRACES_SAMPLER": "parentbased_always_off",
        }
    environment |= options.environment
    if instance.devices is not None and not on_cpu:
        environment |= _visible_devices(instance.name, instance.devices, os.environ | environment)
    return environment


def _visible_devices(
    name: str, devices: Sequence[int | str], given: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that show an engine its devices, of those that are visible here.

    A number counts the visible ones, as in an engine: whoever set the variable for the launcher,
    such as SLURM, gave it no others. On ROCm vLLM requires that both variables say the same.

    Raises:
        LaunchError: a device is not visible here.
    """
    source = next((variable for variable in (*_SHOWN, _ROCR) if variable in given), None)
    visible = [] if source is None else [one.strip() for one in given[source].split(",")]
    # The driver heeds nothing that comes after an entry that is no device.
    visible = list(takewhile(_DEVICE.fullmatch, visible))
    chosen = []
    for device in map(str, devices):
        is_number = device.isdecimal()
        if source is None:
            chosen.append(device)
        elif is_number and int(device) < len(visible):
            chosen.append(device if source == _ROCR else visible[int(device)])
        elif device.startswith(("GPU-", "MIG-")) and any(_may_be(device, one) for one in visible):
            chosen.append(device)
        else:
            shows = f"shows {len(visible)} ({given[source]})" if visible else "shows none"
            raise LaunchError(
                f"{name}'s devices: no device {device} is visible: {source} {shows}. Devices are "
                "counted among the visible ones, from 0: change the variable or the devices"
            )
    others = [variable for variable in _SHOWN[1:] if given.get(variable)]
    return dict.fromkeys([_SHOWN[0], *others], ",".join(chosen))


def _may_be(name: str, visible: str) -> bool:
    """Return whether a device may be a visible one: names may be cut, and numbers do not say."""
    return visible.isdecimal() or visible.startswith(name) or name.startswith(visible)


def _cpu_environment(options: EngineOptions) -> dict[str, str]:
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": str(options.kv_cache_gb),
        _BIND: "nobind",  # else every engine takes the same cores
        "OMP_NUM_THREADS": str(options.threads),
    }
    if options.enforce_eager:
        environment["VLLM_CPU_CI_ENV"] = "1"  # no warm-up: there is nothing to compile
    return environment


def _without_rank(endpoint: str, instance: Instance) -> str:
    """Return an endpoint with its port lowered by the rank, which the engine adds again."""
    host, _, port = endpoint.rpartition(":")
    if not instance.data_parallel_rank or not port.isdecimal():
        return endpoint
    return f"{host}:{int(port) - instance.data_parallel_rank}"


_LAST_PORT = 65_535


class LaunchError(RuntimeError):
    """Engines that cannot be started, or that ended; the message names it and the remedy."""


def cpu_interpreter() -> str | None:
    """Return this interpreter where vLLM's CPU build is installed, else None."""
    return sys.executable if installed_version("vllm-cpu") else None


def check_versions(moves: bool = True) -> None:
    """Refuse a vLLM that Headway does not know, and if KV caches move, a missing NIXL.

    Raises:
        LaunchError: names what to install.
    """
    found = vllm_version()
    if found is None:
        raise LaunchError(
            "vLLM is not installed. On GPUs: pip install -e '.[vllm,nixl]'; on a CPU: "
            "make install. `headway launch --print` shows the commands for another machine"
        )
    if not is_supported_vllm(found):
        raise LaunchError(
            f"vLLM {found} is installed; Headway supports {supported_vllm()}: "
            f"pip install 'vllm=={SUPPORTED_VLLM[-1]}.0'"
        )
    if moves and not any(map(importlib.util.find_spec, ("nixl", "nixl_cu12"))):
        raise LaunchError("NIXL, which moves the KV caches, is not installed: pip install nixl")


def check_emulation(deployment: Deployment) -> None:
    """Refuse to emulate engines where vLLM is not its CPU build; raises as `check_versions`."""
    if deployment.engine.emulate is not None and cpu_interpreter() is None:
        raise LaunchError(
            "engines are emulated by vLLM's CPU build, and another one is installed: see "
            "`make install`, or remove engine.emulate"
        )


def check_ports(deployment: Deployment, instances: Sequence[Instance], serve: bool) -> None:
    """Refuse ports that something else listens on, of instances and perhaps of the proxy.

    Raises:
        LaunchError: names every port that is unavailable, and whose it would be.
    """
    if serve and deployment.proxy.port == 0:
        raise LaunchError("proxy.port must be a fixed port, not 0, to start the proxy here")
    secured = [instance.name for instance in instances if instance.url.startswith("https:")]
    if secured:
        raise LaunchError(f"{secured[0]}'s url must be http: engines are started without TLS")
    taken = []
    for whose, host, port in _ports(deployment, instances, serve):
        problem = why_port_is_not_free(host, port)
        if problem:
            taken.append(f"{whose}: {host}:{port} {problem}")
    if taken:
        raise LaunchError("\n  ".join(["these addresses are unavailable:", *taken]))


def _ports(
    deployment: Deployment, instances: Sequence[Instance], serve: bool
) -> Iterator[tuple[str, str, int]]:
    for instance in instances:
        yield f"{instance.name}'s url", instance.host, instance.port
        for field in ("control", "telemetry"):
            parts = urlsplit(getattr(instance, field) or "")
            if parts.scheme == "tcp" and parts.hostname and parts.port:
                yield f"{instance.name}'s {field}", parts.hostname, parts.port
        side_channel = side_channel_port(deployment, instance)
        yield f"{instance.name}'s side channel", instance.host, side_channel
    if serve:
        yield "the proxy", deployment.proxy.host, deployment.proxy.port


def why_port_is_not_free(host: str, port: int) -> str:
    """Return why an address cannot be listened on; empty if it can."""
    if port > _LAST_PORT:
        return f"is no address: ports end at {_LAST_PORT}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
    except socket.gaierror:
        return "is an unknown host"
    with socket.socket(family, kind, protocol) as probe:
        # Connections in TIME_WAIT do not stop a server from listening either.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"is in use; `ss -ltnp 'sport = :{port}'` shows by what"
            if error.errno == errno.EADDRNOTAVAIL:
                return "is another machine's; start this machine's instances with --only NAME"
            return (error.strerror or str(error)).lower()
    return ""
