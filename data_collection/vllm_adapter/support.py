"""The versions of vLLM and the engines that Headway knows, and a refusal of all others."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Literal

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput

from data_collection.models import NORM_WITH_LOGITS
from data_collection.versions import is_supported_vllm, supported_vllm, vllm_release, vllm_version

BINDS_CACHE_MANAGER = hasattr(KVConnectorBase_V1, "bind_kv_cache_manager")
"""Whether vLLM hands a connector the cache manager: since 0.30. Else our scheduler does."""

REPORTS_FAILED_READS = "failed_recving" in {one.name for one in fields(KVConnectorOutput)}
"""Whether vLLM hears which requests could not be read, whatever their blocks: since 0.30."""

TELLS_CUT_CALLS = vllm_release() >= (0, 31)
"""Whether the end of a stream with tool calls tells that it was cut; before it says tool_calls."""

Part = Literal["capture", "batching", "moves"]

_REFUSED: dict[Part, str] = {
    "capture": "Headway cannot capture hidden states: {}",
    "batching": "Headway cannot form this engine's batches: {}",
    "moves": "requests of this engine cannot move: {}; or remove `control` to serve it without "
    "migration",
}
_REPORTING = ("HeadwayScheduler", "FairBatchingScheduler")
"""Names of the schedulers that report how requests end, or how their names end."""


def refuse_other_version() -> None:
    """Refuse to read the internals of another vLLM.

    Raises:
        ValueError: it is another.
    """
    found = vllm_version() or "unknown"
    if not is_supported_vllm(found):
        raise ValueError(
            f"Headway reads the internals of vLLM {supported_vllm()}, this is {found}: install one "
            "of those, or run this engine without Headway's classes"
        )


def refuse_unsupported(part: Part, vllm_config: Any, kv_cache_groups: Sequence[Any] = ()) -> None:
    """Refuse an engine in which a part of Headway would be wrong; its cache groups may be unknown.

    Raises:
        ValueError: the message names all that is in the way, and what to do about it.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    scheduling = vllm_config.scheduler_config
    scheduler = scheduling.scheduler_cls
    reports = getattr(scheduler, "__name__", str(scheduler)).endswith(_REPORTING)
    specs = [group.kv_cache_spec for group in kv_cache_groups]
    has_states = any(isinstance(layer, MambaSpec) for spec in specs for layer in _layers(spec))
    everywhere = ("capture", "batching", "moves")
    checks = (
        (
            everywhere,
            vllm_config.speculative_config is not None,
            "speculative decoding is on, and which of a step's tokens count is not known in time; "
            "drop --speculative-config",
        ),
        (
            everywhere,
            model.runner_type == "pooling",
            "this is a pooling model, which generates no tokens; serve a generative one",
        ),
        (
            everywhere,
            model.is_diffusion,
            "this is a diffusion model, which does not generate a token a step; serve an "
            "autoregressive one",
        ),
        (
            ("capture",),
            current_platform.is_xpu() and vllm_config.use_v2_model_runner,
            "XPUs have a V2 model runner of their own, which Headway does not know; set "
            "VLLM_USE_V2_MODEL_RUNNER=0",
        ),
        (
            ("capture",),
            not reports,
            "the scheduler does not report how requests end; add --scheduler-cls "
            "data_collection.vllm_scheduler.HeadwayScheduler",
        ),
        (
            ("capture",),
            vllm_config.lora_config is not None
            and any(name in NORM_WITH_LOGITS for name in model.architectures),
            "this model's final norm comes after what can be captured; serve it without forecasts",
        ),
        (
            ("moves",),
            not reports and not BINDS_CACHE_MANAGER,
            "up to vLLM 0.29 the scheduler has to hand over the KV cache; add --scheduler-cls "
            "data_collection.vllm_scheduler.HeadwayScheduler",
        ),
        (
            ("capture", "moves"),
            parallel.prefill_context_parallel_size > 1,
            "prefill context parallelism is on, and no rank holds a whole prompt; drop "
            "--prefill-context-parallel-size",
        ),
        (
            ("batching", "moves"),
            parallel.pipeline_parallel_size > 1,
            "pipeline parallelism is on, and several batches run at a time; use "
            "--tensor-parallel-size",
        ),
        (
            ("batching",),
            not scheduling.enable_chunked_prefill,
            "prefills are computed whole; drop --no-enable-chunked-prefill, if the model allows",
        ),
        (
            ("batching",),
            scheduling.policy != "fcfs",
            "requests are scheduled by priority; drop --scheduling-policy, and give urgent "
            "requests an objective of their own",
        ),
        (
            ("batching",),
            vllm_config.cache_config.mamba_cache_mode == "align",
            "this model's prefill must stop where its state is cached; give "
            "--no-enable-prefix-caching",
        ),
        (
            ("moves",),
            has_states,
            "it has layers whose state is not a KV cache (Mamba), which no other engine can read; "
            "serve a model of attention layers",
        ),
        (
            ("moves",),
            not has_states and _unreadable(specs, vllm_config.cache_config.block_size),
            "blocks of its windows or chunks of attention cannot be matched with another engine's; "
            "give --disable-hybrid-kv-cache-manager",
        ),
    )
    found = [problem for parts, is_there, problem in checks if is_there and part in parts]
    if found:
        raise ValueError(_REFUSED[part].format("; ".join(found)))


def _unreadable(specs: Sequence[Any], block_size: int) -> bool:
    """Return whether another engine cannot tell which blocks of these groups it needs.

    Nor may it where there are windows and vLLM takes a read that failed for one that did not.
    """
    known = (FullAttentionSpec, SlidingWindowSpec)
    windows = any(isinstance(spec, SlidingWindowSpec) for spec in specs)
    return (
        not all(isinstance(layer, known) for spec in specs for layer in _layers(spec))
        or (len(specs) > 1 and any(spec.block_size != block_size for spec in specs))
        or (windows and not REPORTS_FAILED_READS)
    )


def _layers(spec: Any) -> list[Any]:
    """Return a group's specification, or those of its layers where they differ."""
    return list(getattr(spec, "kv_cache_specs", {"": spec}).values())


def runner_and_platform() -> tuple[str, str]:
    """Return the model runner that an engine has here, ``V1`` or ``V2``, and what it runs on."""
    from vllm import envs
    from vllm.triton_utils import HAS_TRITON

    wants_v2 = envs.VLLM_USE_V2_MODEL_RUNNER
    v2 = HAS_TRITON if wants_v2 is None else wants_v2
    return "V2" if v2 else "V1", current_platform.device_name


def uses_v2_runner(model_runner: Any) -> bool:
    """Whether this is `v1/worker/gpu/model_runner.py`, the default on GPUs."""
    return type(model_runner).__module__.startswith(("vllm.v1.worker.gpu.", "vllm.v1.worker.cpu."))
