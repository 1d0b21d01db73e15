"""Which engine a measurement is of."""

from typing import Annotated, Any

import msgspec

from data_collection.models import identify
from data_collection.versions import machine, vllm_version

__all__ = ["EngineDescription", "describe_engine"]

Count = Annotated[int, msgspec.Meta(ge=1)]


class EngineDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model on a machine, and the limits of a step.

    Attributes:
        model: that it serves, by name.
        revision: of its weights.
        dtype: of the weights, such as ``float32``.
        machine: in words.
        engine_version: vLLM's.
        max_num_seqs: requests that it runs at a time.
        max_num_batched_tokens: tokens of a step, at most.
        max_model_len: longest context, tokens.
    """

    model: str
    revision: str
    dtype: str
    machine: str
    engine_version: str
    max_num_seqs: Count
    max_num_batched_tokens: Count
    max_model_len: Count


def describe_engine(vllm_config: Any) -> EngineDescription:
    """Describe the engine with this configuration of vLLM, in the process that runs it."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    identity = identify(model.model)
    return EngineDescription(
        model=identity.name,
        revision=identity.revision or "",
        dtype=str(model.dtype).removeprefix("torch."),
        machine=machine(),
        engine_version=vllm_version() or "",
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=model.max_model_len,
    )
