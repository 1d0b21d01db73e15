"""What was measured of one model on one machine: how long its steps take."""

from math import inf
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import yaml

from data_collection.atomic_file import write_text_atomically
from data_collection.yaml_file import read_yaml
from rescheduler.step_time.engine_description import EngineDescription

__all__ = ["BatchTime", "FitQuality", "Gradients", "Profile", "load_profile", "write_profile"]

Seconds = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


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
