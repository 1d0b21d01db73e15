"""The engine that a collection starts: options, sampling, what is recorded, and its log."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

ID_PREFIX = "prompt-"
"""What a driven request's id starts with; the prompt's own id follows."""

LARGEST = (1 << 31) - 1
"""Count that a dataset's tables can hold."""


@dataclass(frozen=True)
class EngineOptions:
    """The engine that is started.

    Attributes:
        dtype: type the model computes in; float32 is the fastest on many CPUs.
        max_model_len: longest prompt plus answer; the model's own limit if not set.
        enforce_eager: neither compile nor record CUDA graphs. If not set, only on a CPU, where it
            takes minutes.
        extra: further arguments of vLLM's `AsyncEngineArgs`, by name.
    """

    dtype: str = "auto"
    max_model_len: int | None = None
    enforce_eager: bool | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled.

    Attributes:
        temperature: Temperature of the sampling. 0 is greedy.
        top_p: Probability mass that nucleus sampling keeps.
        max_tokens: cap of the answer; requests that reach it are censored.
        n: Answers to each prompt.
        seed: Request i gets seed + i. If not set, the engine draws (vLLM 0.32 has no seeded
            requests on a CPU).
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
        layer: states after so many of the model's layers; 0: after all and the final norm.
        state_half_life: tokens after which a state counts half in the average over an answer that
            is recorded; 0: the last token's state alone.
        flush_seconds: longest time finished rows wait to be written.
    """

    k: int = 20
    dtype: Literal["float16", "float32"] = "float16"
    layer: int = 0
    state_half_life: float = 0.0
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


_SHOWN_LINES = 15
_READ_AT_END = 64 << 10


class Terminal(NamedTuple):
    """Where a person reads, and the log in which the engine's messages go; None: here too."""

    out: TextIO
    err: TextIO
    log: Path | None = None


@contextmanager
def engine_output_to(log: Path | None) -> Iterator[Terminal]:
    """Append the standard output and error of this process and its children to a file.

    The file descriptors are redirected, not Python's streams alone: libraries in C and the
    engine's own processes write to the descriptors. Without a file nothing is redirected.
    """
    if log is None:
        yield Terminal(sys.stdout, sys.stderr)
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with os.fdopen(kept[0], "w", 1) as out, os.fdopen(kept[1], "w", 1) as err:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        try:
            yield Terminal(out, err, log)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(kept[0], 1)
            os.dup2(kept[1], 2)


def last_lines(log: Path | None) -> str:
    """Return the end of a log, each line on a line of its own; empty without a log."""
    if log is None or not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _READ_AT_END))
        lines = file.read().decode(errors="replace").splitlines()[-_SHOWN_LINES:]
    return "".join(f"\n  {line}" for line in [f"{log} ends:", *lines])
