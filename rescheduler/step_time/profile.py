"""How long steps take: what was measured of one model on one machine, or is while it serves."""

import csv
import io
import math
from collections.abc import Iterator
from io import TextIOWrapper
from math import inf
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import yaml

from data_collection.files import read_text, read_yaml, text_lines, write_text_atomically
from data_collection.models import identify
from data_collection.versions import machine, vllm_version

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


FloatArray = npt.NDArray[np.float64]


def typical_steps(steps: FloatArray) -> FloatArray:
    """Return the median seconds of all steps with the same tokens, [m, 3].

    A pause of the system in one of them does not count then. Steps whose context alone differs by
    less than a twentieth count as the same: it grows by the batch with every token.

    Args:
        steps: [n, 3] new tokens, context tokens, seconds.
    """
    cell = np.column_stack([steps[:, 0], np.rint(20 * np.log(np.maximum(steps[:, 1], 1.0)))])
    _, group = np.unique(cell, axis=0, return_inverse=True)
    group = group.ravel()
    return np.array([np.median(steps[group == i], axis=0) for i in range(group.max() + 1)])


def fit_batch_time(steps: FloatArray) -> BatchTime:
    """Return a, b and c, none below 0, with the least squared relative error.

    Relative, because a long prefill would else decide alone, and the decode steps, which are a
    thousand times as many, would be off by half.

    Args:
        steps: [n, 3] new tokens, context tokens, seconds.

    Raises:
        ValueError: fewer than three steps, or they do not separate the parts.
    """
    if len(steps) < 3 or (np.ptp(steps[:, :2], axis=0) == 0).any():
        raise ValueError(
            f"{len(steps)} steps of {len(np.unique(steps[:, :2], axis=0))} kinds do not separate "
            "the cost of a token from that of its context"
        )
    return BatchTime(*_relative_nnls(steps[:, :2], steps[:, 2]))


def fit_quality(steps: FloatArray, batch: BatchTime) -> FitQuality:
    """Return how well a fit says the seconds of steps [n, 3]."""
    seconds = steps[:, 2]
    estimate = batch.constant + steps[:, 0] * batch.per_new + steps[:, 1] * batch.per_context
    a, b = _relative_nnls(steps[:, :1], seconds)
    without = np.abs(a + b * steps[:, 0] - seconds) / seconds
    error = np.abs(estimate - seconds) / seconds
    return FitQuality(
        steps=len(steps),
        error_p50=float(np.median(error)),
        error_p95=float(np.quantile(error, 0.95)),
        new_only_error_p50=float(np.median(without)),
        r2=float(1 - ((estimate - seconds) ** 2).sum() / ((seconds - seconds.mean()) ** 2).sum()),
    )


def fit_gradients(steps: FloatArray, most_decodes: int) -> Gradients:
    """Return the slopes of prefill and decode steps, which are distinguished by their tokens.

    A step whose tokens are all its context computes whole prompts; one with at most
    ``most_decodes`` tokens, and more context, decodes.

    Raises:
        ValueError: there are not two different steps of each.
    """
    new, context, seconds = steps.T
    prefill, decode = new == context, (new <= most_decodes) & (context > new)
    for kind, name in ((prefill, "prefill"), (decode, "decode")):
        if len(np.unique(context[kind])) < 2:
            raise ValueError(f"the steps hold no two different {name} steps")
    _, prompt = _relative_nnls(new[prefill, None], seconds[prefill])
    _, reading = _relative_nnls(context[decode, None], seconds[decode])
    return Gradients(prompt=prompt, decode=reading)


def _relative_nnls(columns: FloatArray, seconds: FloatArray) -> list[float]:
    """Return an offset and a slope of each column, none below 0."""
    from scipy.optimize import nnls  # not for engines, which only recalibrate

    scale = np.maximum(columns.max(axis=0), 1.0)
    design = np.column_stack([np.ones(len(columns)), columns / scale]) / seconds[:, None]
    found = nnls(design, np.ones(len(seconds)))[0] / np.concatenate([[1.0], scale])
    return [float(value) for value in found]


_FORGETS = 0.995  # a step's weight halves in 139 steps
_PRIOR_STEPS = 0.05
_FURTHEST_STEP = 3.0
_FURTHEST = 4.0
_SOLVED_EVERY = 16


class Recalibration:
    r"""Least squares of the steps served, exponentially forgotten, held near the profile.

    With :math:`\theta_j = m_j\,\theta^0_j`, multiples of the profile's a, b and c,

    .. math:: \min_m \sum_n \lambda^{N - n} \Big(t_n - \sum_j m_j z_{nj}\Big)^2 +
              \kappa\,\overline{t^2} \sum_j (m_j - 1)^2, \qquad
              z_n = (\theta^0_1,\ \theta^0_2 \cdot \text{new}_n,\ \theta^0_3 \cdot \text{context}_n)

    with λ = 0.995 and κ = 0.05 steps, which keep what the steps do not determine where it was. One
    slow step cannot poison it: a step counts as at most 3 times, at least a third of, what is
    estimated of it, and no multiple leaves [1/4, 4].

    Source: the paper calibrates 'continuously' and says no more (Lyu et al. 2025, §3.2).

    Args:
        batch: the profile's.
    """

    def __init__(self, batch: BatchTime) -> None:
        self._profile = np.array(batch, dtype=np.float64)
        self._now = batch
        self._products = np.zeros((3, 3))
        self._seconds = np.zeros(3)
        self._squares = self._weight = 0.0
        self._since = 0

    @property
    def batch(self) -> BatchTime:
        """What is estimated now."""
        return self._now

    def update(self, new: int, context: int, seconds: float) -> None:
        """Learn from a step; durations that are not positive and finite are ignored."""
        if not 0 < seconds < np.inf or new <= 0:
            return
        expected = self._now.seconds(new, context)
        if expected > 0:
            seconds = min(max(seconds, expected / _FURTHEST_STEP), expected * _FURTHEST_STEP)
        parts = self._profile * np.array([1.0, new, context])
        self._products = _FORGETS * self._products + np.outer(parts, parts)
        self._seconds = _FORGETS * self._seconds + seconds * parts
        self._squares = _FORGETS * self._squares + seconds * seconds
        self._weight = _FORGETS * self._weight + 1.0
        self._since += 1
        if self._since == _SOLVED_EVERY:
            self._since = 0
            self._solve()

    def _solve(self) -> None:
        prior = _PRIOR_STEPS * self._squares / self._weight
        multiples = np.linalg.solve(self._products + prior * np.eye(3), self._seconds + prior)
        multiples = np.clip(multiples, 1 / _FURTHEST, _FURTHEST)
        self._now = BatchTime(*(float(value) for value in multiples * self._profile))


_FIRST_STEP_SECONDS = 0.05
_STEP_WEIGHT = 0.01
_PAUSE_STEPS = 4.0
_LEAST_STEP_SECONDS = 1e-3


class MeanStepTime:
    """How long a decode step takes: the mean time between two tokens of a request.

    Attributes:
        seconds: pauses left out.
        known: whether a step has been seen.
    """

    def __init__(self) -> None:
        self.seconds = _FIRST_STEP_SECONDS
        self.known = False

    def took(self, seconds: float) -> None:
        """Note the time between two tokens of a request.

        What is far longer is a pause, no step; what is shorter than any step came in one packet.
        """
        seconds = max(_LEAST_STEP_SECONDS, min(seconds, _PAUSE_STEPS * self.seconds))
        self.seconds += _STEP_WEIGHT * (seconds - self.seconds)
        self.known = True


COLUMNS = ("new_tokens", "context_tokens", "seconds")
_ENGINE = ".engine.json"


class StepLog:
    """Writes a line for every step, which reaches the file at once.

    Args:
        path: CSV file, written anew.
        engine: whose steps they are.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, engine: EngineDescription) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(_engine_file(path), msgspec.json.encode(engine).decode() + "\n")
        self._file: TextIOWrapper = path.open("w", encoding="utf-8", newline="", buffering=1)
        self._writer = csv.writer(self._file)
        self._writer.writerow(COLUMNS)

    def add(self, new: int, context: int, seconds: float) -> None:
        """Write a step."""
        self._writer.writerow((new, context, f"{seconds:.6f}"))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_engine(path: Path) -> EngineDescription:
    """Return which engine a log of steps is of.

    Raises:
        ValueError: the file beside it is missing or damaged.
    """
    beside = _engine_file(path)
    try:
        return msgspec.json.decode(read_text(beside), type=EngineDescription)
    except ValueError as error:  # msgspec's too
        raise ValueError(
            f"{beside}: does not say whose steps {path.name} holds: {error}"
        ) from error


def read_steps(path: Path, start: int | None = None) -> FloatArray:
    """Return the steps of a log, [n, 3]: new tokens, context tokens, seconds.

    Args:
        path: CSV file, plain or gzipped; columns other than `COLUMNS` are ignored. The unit of
            the times is their column's name.
        start: byte from which on a log is read that is being written; its last line is left out
            until it is whole. The whole file when None.

    Raises:
        ValueError: the file cannot be read, has no such columns, or has a line that is not a
            step, with its number.
    """
    try:
        lines = text_lines(path) if start is None else _lines_from(path, start)
        reader = csv.DictReader(lines, COLUMNS if start else None)
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"no column {missing[0]!r}; needs {', '.join(COLUMNS)}")
        steps = [_step(reader.line_num, row) for row in reader]
    except (OSError, ValueError, csv.Error) as error:
        reason = str(error).removeprefix(f"{path}:").strip()
        raise ValueError(f"{path}: not a log of an engine's steps: {reason}") from error
    return np.array(steps, dtype=np.float64).reshape(len(steps), len(COLUMNS))


def _lines_from(path: Path, start: int) -> Iterator[str]:
    with path.open("rb") as file:
        file.seek(start)
        text = file.read().decode()
    yield from io.StringIO(text[: text.rfind("\n") + 1], newline="")


def _step(line: int, row: dict[str, str]) -> tuple[float, ...]:
    try:
        step = tuple(float(row[name]) for name in COLUMNS)
    except (TypeError, ValueError):
        raise ValueError(f"line {line}: {', '.join(COLUMNS)} must be numbers") from None
    if not all(0 <= value < math.inf for value in step) or step[2] == 0:
        raise ValueError(f"line {line}: tokens below 0, or seconds not above 0")
    return step


def _engine_file(path: Path) -> Path:
    return path.with_name(path.name + _ENGINE)
