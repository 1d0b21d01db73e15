"""A deployment whose engines are emulated: what it loads, its flags, and its times."""

import json
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec.structs import fields, replace

from data_collection.models import resolve_model
from rescheduler.emulation.emulate_options import (
    MACHINE_FIELDS,
    MOST_TOKENS,
    BarrierGroup,
    EmulateConfig,
    EmulateOptions,
    emulated_model,
    read_machine,
)
from rescheduler.engines.deployment import Deployment, DeploymentError, EngineOptions, Instance

logger = logging.getLogger("headway.launch")

Options = TypeVar("Options", bound=msgspec.Struct)

WORKER = "rescheduler.emulation.vllm_worker.EmulatedWorker"
CONNECTOR = "rescheduler.emulation.vllm_connector"
_REFUSES = "rescheduler.emulation.vllm_refusals:RefusedRequests"
_SECONDS = "_seconds"
_PATIENCE_SECONDS = 0.05
"""That engines behind a barrier wait for one whose requests have all ended."""
_BLOCK_OF = 32
"""Tokens of which vLLM's blocks are a multiple on a CPU."""
_OF_HARDWARE = {
    "--attention-backend": 1,
    "--compilation-config": 1,
    "--cpu-offload-gb": 1,
    "--decode-context-parallel-size": 1,
    "--distributed-executor-backend": 1,
    "--dtype": 1,
    "--enable-eplb": 0,
    "--enable-expert-parallel": 0,
    "--gpu-memory-utilization": 1,
    "--kv-cache-dtype": 1,
    "--kv-cache-memory-bytes": 1,
    "--load-format": 1,
    "--logits-processors": 1,
    "--pipeline-parallel-size": 1,
    "--prefill-context-parallel-size": 1,
    "--quantization": 1,
    "--tensor-parallel-size": 1,
    "--worker-cls": 1,
    "-O": 1,
    "-dcp": 1,
    "-ep": 0,
    "-pcp": 1,
    "-pp": 1,
    "-q": 1,
    "-tp": 1,
}
"""Flags that say how a GPU computes, and the values that follow them."""


def emulated(deployment: Deployment, profile: str) -> Deployment:
    """Return a deployment whose engines emulate a shipped machine, or that of a file.

    What its own ``engine.emulate`` says beside the machine stays, and what the machine leaves open.

    Raises:
        DeploymentError: there is no such machine, or the deployment cannot be emulated.
    """
    before = deployment.engine.emulate or EmulateOptions()
    try:
        machine = read_machine(profile)
    except ValueError as error:
        raise DeploymentError(f"engine.emulate: {error}") from error
    said = [name for name in MACHINE_FIELDS if getattr(machine, name) is not None]
    emulate = replace(before, profile=profile, **dict.fromkeys(said))
    changed = replace(deployment, engine=replace(deployment.engine, emulate=emulate))
    changed.check()
    return changed


def in_real_time(deployment: Deployment) -> Deployment:
    """Return a deployment whose waits, leases and intervals are dilated as its engines' steps are.

    They are given in the emulated engines' time, as those of any deployment. Whoever starts a part
    of a deployment calls this, once; files keep what was given.
    """
    emulate = deployment.engine.emulate
    if emulate is None or emulate.dilation == 1:
        return deployment
    factor, migration = emulate.dilation, deployment.migration
    if migration is not None:
        interval = migration.get("interval_seconds", 1.0)
        migration = {**migration, "interval_seconds": interval * factor}
    coordinator = deployment.coordinator
    return replace(
        deployment,
        order=_slowed(deployment.order, factor),
        migration=migration,
        proxy=_dilated(deployment.proxy, factor),
        engine=_dilated(deployment.engine, factor),
        coordinator=None if coordinator is None else _dilated(coordinator, factor),
    )


def _slowed(order: dict[str, Any], factor: float) -> dict[str, Any]:
    """Return an order of service whose rate, per second, is given in the emulated time."""
    rate, shadow = order.get("gamma"), order.get("shadow")
    if isinstance(shadow, dict):
        order = {**order, "shadow": _slowed(shadow, factor)}
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        return order
    return {**order, "gamma": rate / factor}


def _dilated(options: Options, factor: float) -> Options:
    names = [field.name for field in fields(options) if field.name.endswith(_SECONDS)]
    return replace(options, **{name: getattr(options, name) * factor for name in names})


def model_to_load(deployment: Deployment) -> str:
    """Return the model that the engines of a deployment load.

    Raises:
        ValueError: it is unknown, or cannot stand for itself where engines are emulated.
    """
    model = resolve_model(deployment.model)
    return model if deployment.engine.emulate is None else str(emulated_model(model))


def emulated_engine(options: EngineOptions) -> EngineOptions:
    """Return the options of the engine that emulates one with these; raises `DeploymentError`."""
    emulate = _resolved(options)
    block = -(-options.block_size // _BLOCK_OF) * _BLOCK_OF
    tokens = emulate.kv_tokens
    if options.kv_blocks is not None:
        tokens = (options.kv_blocks - 1) * options.block_size  # vLLM keeps one empty
    assert tokens is not None  # checked
    blocks = max(tokens // block, 1) + 1
    most = min(MOST_TOKENS, (blocks - 1) * block)
    return replace(
        options,
        dtype="float32",
        max_model_len=options.max_model_len or most,
        block_size=block,
        kv_blocks=blocks,
        order=None if options.order is None else _slowed(options.order, emulate.dilation),
        enforce_eager=True,
        checkpoint=None,
    )


def emulate_section(deployment: Deployment, instance: Instance) -> dict[str, Any]:
    """Return the section of ``--additional-config`` that says what is emulated.

    Raises:
        DeploymentError: nothing says what is emulated.
    """
    emulate = _resolved(deployment.engine)
    assert emulate.step_time is not None
    telemetry = None
    if instance.telemetry is not None and emulate.forecast is not None:
        telemetry = {
            "bind": instance.telemetry,
            "instance": instance.name,
            "keys": deployment.keys,
            "snapshot_seconds": emulate.dilation,
        }
    log = None if emulate.logs is None else str(Path(emulate.logs) / f"{instance.name}.csv")
    config = EmulateConfig(
        step_time=emulate.step_time,
        dilation=emulate.dilation,
        lengths=emulate.lengths,
        forecast=emulate.forecast,
        transfer=emulate.transfer,
        log=log,
        barrier=_barrier(deployment, instance, emulate),
    )
    section: dict[str, Any] = msgspec.to_builtins(config)
    return section | {"telemetry": telemetry}


def _barrier(
    deployment: Deployment, instance: Instance, emulate: EmulateOptions
) -> BarrierGroup | None:
    if not emulate.barrier or instance.role != "decode":
        return None
    ranks = [(one.name, one.port) for one in deployment.decode]
    digest = sha256(json.dumps(ranks).encode()).hexdigest()[:12]
    return BarrierGroup(
        file=str(Path(tempfile.gettempdir()) / f"headway-barrier-{os.getuid()}-{digest}"),
        rank=ranks.index((instance.name, instance.port)),
        patience_s=_PATIENCE_SECONDS * emulate.dilation,
    )


def _resolved(options: EngineOptions) -> EmulateOptions:
    assert options.emulate is not None
    try:
        return options.emulate.resolved()
    except ValueError as error:
        raise DeploymentError(f"engine.emulate: {error}") from error


def emulated_arguments(arguments: Sequence[str]) -> list[str]:
    """Return further flags without those that say how a GPU computes, with those of emulation."""
    kept = list(_without_hardware(iter(arguments)))
    return [*kept, "--load-format", "dummy", "--logits-processors", _REFUSES]


def _without_hardware(arguments: Iterator[str]) -> Iterator[str]:
    for argument in arguments:
        given, joined, _ = argument.partition("=")
        given = given.replace("_", "-")
        # vLLM takes a flag's beginning for the flag.
        of_hardware = [flag for flag in _OF_HARDWARE if _is_meant(flag, given)]
        if not of_hardware:
            yield argument
            continue
        logger.warning("emulated engines are started without %s", argument)
        is_level = given.startswith("-O") and given != "-O"  # such as -O3
        if _OF_HARDWARE[of_hardware[0]] and not joined and not is_level:
            next(arguments, None)


def _is_meant(flag: str, given: str) -> bool:
    if not given.startswith("--"):
        return given == flag or (flag == "-O" and given.startswith("-O"))
    return len(given) > len("--x") and flag.startswith(given)
