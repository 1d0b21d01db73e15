"""The settings that start an engine and drive it: options, sampling, what is recorded."""

from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

ID_PREFIX = "prompt-"
"""What a driven request's id starts with; the prompt's own id follows."""

LARGEST = (1 << 31) - 1
"""Count that a dataset's tables can hold."""


@dataclass(frozen=True)
class EngineOptions:
    """The engine that is started.

    Attributes:
        dtype: type the model computes in; float32 is the fastest on many CPUs.
        max_model_len: longest prompt plus answer; the model's own limit when not given.
        enforce_eager: skip compilation, which takes minutes and pays on long runs.
        extra: further arguments of vLLM's `AsyncEngineArgs`, by name.
    """

    dtype: str = "auto"
    max_model_len: int | None = None
    enforce_eager: bool = True
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled.

    Attributes:
        temperature: 0 is greedy.
        top_p: nucleus.
        max_tokens: cap of the answer; requests that reach it are censored.
        n: answers to each prompt.
        seed: of request i is seed + i; None leaves sampling to the engine's own generator
            (vLLM 0.32 has no seeded requests on a CPU).
    """

    temperature: float = 0.8
    top_p: float = 1.0
    max_tokens: int = 1024
    n: int = 1
    seed: int | None = None

    def __post_init__(self) -> None:
        """Refuse what no engine can sample with."""
        for name, value, wrong, expected in (
            ("temperature", self.temperature, not 0 <= self.temperature < inf, "0 or more"),
            ("top_p", self.top_p, not 0 < self.top_p <= 1, "above 0, at most 1"),
            ("max_tokens", self.max_tokens, not 1 <= self.max_tokens <= LARGEST, f"1 to {LARGEST}"),
            ("n", self.n, self.n < 1, "1 or more"),
        ):
            if wrong:
                raise ValueError(f"{name}: {value} is invalid; expected {expected}")


@dataclass(frozen=True)
class RecordOptions:
    """What is recorded.

    Attributes:
        k: tokens between two rows of a request.
        dtype: type the vectors are stored in.
        flush_seconds: longest time finished rows wait to be written.
    """

    k: int = 20
    dtype: Literal["float16", "float32"] = "float16"
    flush_seconds: float = 10.0


def engine_arguments(model: str, capture: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a vLLM engine that captures; ``extra`` ones take precedence."""
    return {
        "model": model,
        "worker_cls": "data_collection.vllm_worker.HeadwayWorker",
        "scheduler_cls": "data_collection.vllm_scheduler.HeadwayScheduler",
        "additional_config": capture,
        "disable_log_stats": True,
        **extra,
    }
