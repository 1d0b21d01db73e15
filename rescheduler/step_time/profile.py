"""What was measured of one model on one machine: how long its steps take."""

from math import inf
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import yaml

from data_collection.files import read_yaml, write_text_atomically
from data_collection.models import identify
from data_collection.versions import machine, vllm_version

__all__ = [
    "BatchTime",
    "EngineDescription",
    "FitQuality",
    "Gradients",
    "Profile",
    "describe_engine",
    "load_profile",
    "write_profile",
]


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


Seconds = Annotated[float, msgspec.Meta(ge=0)]


class BatchTime(NamedTuple):
    """Seconds of a step, a + b · new tokens + c · context tokens (Lyu et al. 2025, §3.2).

    Attributes:
        constant: a, seconds of every step.
        per_new: b, seconds per token computed.
        per_context: c, seconds per token of context that is read.
    """

    constant: float
    per_new: float
    per_context: float

    def seconds(self, new: float, context: float) -> float:
        """Return the seconds of a step with so many tokens computed and read."""
        return self.constant + self.per_new * new + self.per_context * context


class FitQuality(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How linear the machine is.

    Attributes:
        steps: that were fitted.
        error_p50: median of |estimate − measured| / measured.
        error_p95: its 95th percentile.
        new_only_error_p50: the same median for the best a + b · new tokens, without context.
        r2: share of the variance of the seconds that the fit explains.
    """

    steps: Count
    error_p50: float
    error_p95: float
    new_only_error_p50: float
    r2: float


class Gradients(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The slopes of Jain et al. 2025 (§4.1, their Figure 4): 3.2e-4 and 3.3e-5 on a V100.

    Attributes:
        prompt: grad1, seconds of a prefill step per prompt token.
        decode: grad2, seconds of a decode step per token of context in the batch.
    """

    prompt: Seconds
    decode: Seconds


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What simulator, scheduler and planner read of an engine.

    Attributes:
        engine: that was measured.
        batch: a, b and c.
        gradients: of the paper on mixed workloads.
        quality: of the fit.
    """

    engine: EngineDescription
    batch: BatchTime
    gradients: Gradients
    quality: FitQuality

    def check(self, engine: EngineDescription) -> None:
        """Refuse to describe another engine.

        Raises:
            ValueError: the profile is of another model, precision or machine.
        """
        for name in ("model", "revision", "dtype", "machine"):
            mine, other = getattr(self.engine, name), getattr(engine, name)
            if mine != other:
                raise ValueError(
                    f"the profile was measured with {name} {mine!r}, this engine has {other!r}: "
                    "measure it with `headway profile`"
                )


def load_profile(path: str | Path) -> Profile:
    """Read a profile.

    Raises:
        ValueError: the file cannot be read or is none; says where.
    """
    try:
        profile = msgspec.convert(read_yaml(Path(path)), Profile)
    except ValueError as error:  # msgspec's too
        reason = str(error).removeprefix(f"{path}: ")
        raise ValueError(f"{path}: no profile of an engine: {reason}") from error
    if not all(0 <= seconds < inf for seconds in profile.batch) or not any(profile.batch):
        raise ValueError(f"{path}: batch must be seconds from 0, not all 0: {profile.batch}")
    return profile


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile as YAML, whole or not at all."""
    write_text_atomically(path, yaml.safe_dump(msgspec.to_builtins(profile), sort_keys=False))
