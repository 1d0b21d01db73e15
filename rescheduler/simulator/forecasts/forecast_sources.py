"""Forecasts of output lengths in a simulation: from none to the true lengths."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from predictor.forecasts.forecast_recording import ForecastRecording, read_recording
from predictor.forecasts.forecast_sensitivity import STAR_BINS, star_bins
from predictor.forecasts.kaplan_meier import KaplanMeierCurve
from rescheduler.cluster.registry import COUNT, NOT_NEGATIVE, Checked, Registry
from rescheduler.simulator.forecasts.forecast_arrays import (
    CURVE,
    MARGINAL,
    NONE,
    ONCE,
    POINT,
    ForecastArrays,
)
from rescheduler.simulator.forecasts.past_lengths import PastLearner, past_curves
from rescheduler.simulator.workloads.trace import ReplayTrace, Trace

IntArray = npt.NDArray[np.int64]


class ForecastSource(Checked, ABC):
    """Where the forecasts of a simulation come from."""

    name: ClassVar[str]
    needs_lengths: ClassVar[bool] = False
    """Whether it is fitted to a sample of output lengths."""

    @property
    def of_hidden_states(self) -> bool:
        """Whether it forecasts from hidden states, which come once a prompt is computed."""
        return False

    def before_prefill(self, forecast: ForecastArrays, lengths: IntArray | None) -> ForecastArrays:
        """Return what is known where prompts are computed among the decode steps."""
        del lengths
        return forecast

    def _section(self) -> str:
        return f"{self.name}: "

    @abstractmethod
    def arrays(self, lengths: IntArray | None, seed: int) -> ForecastArrays:
        """Return the forecasts as arrays.

        Args:
            lengths: output tokens of other requests of the same kind, such as a server has seen
                before; None without forecasts.
            seed: of noise.
        """

    def learner(self) -> PastLearner | None:
        """Return what learns from the requests of a run and gives each its template; None: none."""
        return None

    def refuse_other_trace(self, trace: Trace) -> None:
        """Refuse a trace whose requests it cannot forecast.

        Args:
            trace: of the requests, before it is a `TimedTrace`.

        Raises:
            ValueError: forecasts are recorded, and the trace does not replay that recording.
        """
        del trace


@dataclass(frozen=True)
class NoForecast(ForecastSource):
    """Nothing is forecast."""

    name: ClassVar[str] = "none"

    def arrays(self, lengths: IntArray | None, seed: int) -> ForecastArrays:
        """Return no forecasts."""
        return ForecastArrays(NONE)


@dataclass(frozen=True)
class Oracle(ForecastSource):
    """The remaining length itself, at any token."""

    name: ClassVar[str] = "oracle"

    def arrays(self, lengths: IntArray | None, seed: int) -> ForecastArrays:
        """Return the truth as point forecasts."""
        return ForecastArrays(POINT)


@dataclass(frozen=True)
class Noisy(ForecastSource, sigma=NOT_NEGATIVE, interval=COUNT):
    r"""The remaining length times a log-normal factor, drawn anew at each prediction.

    .. math:: \hat r = r\,e^{\sigma z}, \qquad z \sim N(0, 1)

    Attributes:
        sigma: 0.4 is what sampling temperature alone does to the length of one prompt's answers
            (Vicuna-7B); 1 is the spread across prompts.
        interval: tokens between two predictions of a request; in between they age.
    """

    name: ClassVar[str] = "noisy"

    sigma: float
    interval: int = 20

    def arrays(self, lengths: IntArray | None, seed: int) -> ForecastArrays:
        """Return noisy point forecasts."""
        return ForecastArrays(POINT, self.interval, self.sigma, seed)


@dataclass(frozen=True)
class Binned(ForecastSource, sigma=NOT_NEGATIVE, interval=COUNT):
    """Only the bin of the remaining length, for whose lengths its middle stands.

    Source: STAR (Wang et al. 2026), §6.5, Table 3.

    Attributes:
        bins: STAR's partition into 2, 4 or 6 bins; or
        edges: ascending tokens from 0; lengths past the last belong to the last bin.
        context: longest remaining length, in tokens, that STAR's bins partition.
        interval: tokens between two predictions of a request; in between they age.
        sigma: of noise before the binning, see `Noisy`.
    """

    name: ClassVar[str] = "binned"

    bins: int | None = None
    edges: tuple[int, ...] | None = None
    context: int = 32_768
    interval: int = 20
    sigma: float = 0.0

    def __post_init__(self) -> None:
        """Refuse an invalid partition."""
        super().__post_init__()
        if (self.bins is None) == (self.edges is None):
            raise ValueError(f"binned: give either bins ({_KNOWN_BINS}) or edges in tokens")
        if self.bins is not None and self.bins not in STAR_BINS:
            raise ValueError(f"binned: bins is {_KNOWN_BINS}, not {self.bins}")
        _refuse_edges(self.name, self._edges())

    def arrays(self, lengths: IntArray | None, seed: int) -> ForecastArrays:
        """Return point forecasts that are middles of bins."""
        edges = self._edges().astype(np.float64)
        middles = (edges[:-1] + edges[1:]) / 2
        return ForecastArrays(POINT, self.interval, self.sigma, seed, edges, stand_in=middles)

    def _edges(self) -> npt.NDArray[Any]:
        if self.bins is not None:
            return star_bins(self.bins, self.context)
        return np.asarray(self.edges)


_KNOWN_BINS = ", ".join(map(str, STAR_BINS))


@dataclass(frozen=True)
class Classified(ForecastSource, accuracy="[0, 1]"):
    """The bucket of the whole output, as a classifier of the prompt names it, once.

    The mean length of a bucket's requests, among other requests of the kind, stands for them; a
    request that outlives it is about to end at any time. Where the classifier errs, it takes the
    other buckets as often as they are common.

    Source: Performance Aware LLM Load Balancer (Jain et al. 2025), §4.1: 79.15% are right; the
    buckets are those that its router reads (C.10).

    Attributes:
        edges: tokens from which buckets begin, ascending from 0; the last has no end.
        accuracy: share of the requests whose bucket is named rightly.
    """

    name: ClassVar[str] = "classified"
    needs_lengths: ClassVar[bool] = True

    edges: tuple[int, ...] = (0, 256, 2048)
    accuracy: float = 0.7915

    def __post_init__(self) -> None:
        """Refuse an invalid partition or share."""
        super().__post_init__()
        _refuse_edges(self.name, np.asarray(self.edges))

    def arrays(self, lengths: IntArray | None, seed: int) -> ForecastArrays:
        """Return buckets whose means and frequencies are those of a sample of lengths."""
        if lengths is None or len(lengths) == 0:
            raise ValueError("classified: needs output lengths of other requests, there are none")
        edges = np.asarray(self.edges)
        bucket = np.searchsorted(edges, lengths, "right") - 1
        common = np.bincount(bucket, minlength=len(edges))
        total = np.bincount(bucket, weights=lengths, minlength=len(edges))
        stand_in = np.where(common > 0, total / np.maximum(common, 1), np.maximum(edges, 1))
        return ForecastArrays(
            POINT,
            interval=ONCE,
            seed=seed,
            bins=np.append(edges.astype(np.float64), np.inf),
            stand_in=stand_in.astype(np.float64),
            accuracy=float(self.accuracy),
            common=common.astype(np.float64),
        )


@dataclass(frozen=True)
class Interval(ForecastSource, k=COUNT):
    """The remaining length, predicted only every few tokens; in between it ages.

    Of an exact oracle nothing is lost by that: it shows that ageing is right. What staleness
    costs shows with `Noisy`, `Binned` or `Replay`, which take an interval too.

    Attributes:
        k: tokens between two predictions of a request; STAR §6.5, Table 4, tries 1, 20 and 100.
    """

    name: ClassVar[str] = "interval"

    k: int

    def arrays(self, lengths: IntArray | None, seed: int) -> ForecastArrays:
        """Return the truth as point forecasts that age."""
        return ForecastArrays(POINT, self.k)


@dataclass(frozen=True)
class KaplanMeier(ForecastSource):
    """One curve for all requests, from the output lengths of others, conditional on their age.

    What can be said without looking at a request: P(o > n + h | o > n).
    """

    name: ClassVar[str] = "kaplan_meier"
    needs_lengths: ClassVar[bool] = True

    def arrays(self, lengths: IntArray | None, seed: int) -> ForecastArrays:
        """Return the curve of a sample of lengths, none of which is taken to be cut."""
        if lengths is None or len(lengths) == 0:
            raise ValueError("kaplan_meier: needs output lengths of other requests, there are none")
        curve = KaplanMeierCurve.estimate(lengths, np.zeros(len(lengths), dtype=np.bool_))
        survival = curve.at(np.arange(int(lengths.max()) + 1)).astype(np.float64)
        tail = np.append(np.cumsum(survival[::-1])[::-1], 0.0)
        return ForecastArrays(MARGINAL, table=survival, tail=tail)


@dataclass(frozen=True)
class Past(ForecastSource):
    """What the same client's, and the same prefix's, earlier requests let expect, before prefill.

    A request is learnt from when it has ended, and forecast when one shortly before it arrives:
    nothing is known from the future. See `predictor.past.length_memory`.
    """

    name: ClassVar[str] = "past"

    def arrays(self, lengths: IntArray | None, seed: int) -> ForecastArrays:
        """Return the curves of all lengths that can be forecast."""
        return past_curves()

    def learner(self) -> PastLearner:
        """Return what gives the requests of one run their forecasts."""
        return PastLearner()


@dataclass(frozen=True)
class Replay(ForecastSource, interval=COUNT):
    """What a real predictor forecast of the very requests of a `ReplayTrace`, as they ran.

    With chunked prefill a request is forecast by its first token, and before that known by its
    prompt, if the recording has forecasts of prompts, and else by the lengths of others.

    Attributes:
        recording: path of the recording that the trace replays.
        interval: tokens between two forecasts of a request, a multiple of the recording's own
            interval; all recorded ones when None.
        reads: ``hidden_states``, ``prompts`` (then what is forecast of a prompt ages), or None:
            all that was recorded.

    Raises:
        ValueError: the file is not a recording, or has no forecasts at that interval.
    """

    name: ClassVar[str] = "replay"

    recording: str | Path
    interval: int | None = None
    reads: Literal["hidden_states", "prompts"] | None = None
    _recorded: ForecastRecording = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Read the recording."""
        recorded = read_recording(Path(self.recording))
        object.__setattr__(self, "_recorded", recorded)
        super().__post_init__()
        if self.interval is not None and self.interval % recorded.interval:
            raise ValueError(
                f"replay: {self.recording} has a forecast every {recorded.interval} tokens, "
                f"so that interval must be a multiple of that, not {self.interval}"
            )
        if self.reads == "prompts" and recorded.prompt_curves is None:
            raise ValueError(
                f"replay: {self.recording} has no forecasts of prompts; record it again with "
                "`headway evaluate --forecasts FILE --prompt-checkpoint`"
            )

    @property
    def of_hidden_states(self) -> bool:
        """Whether it forecasts from hidden states, which come once a prompt is computed."""
        return self.reads != "prompts"

    def refuse_other_trace(self, trace: Trace) -> None:
        """Refuse a trace that does not replay the same recording."""
        outputs = trace.recorded.output if isinstance(trace, ReplayTrace) else None
        if outputs is None or not np.array_equal(outputs, self._recorded.output):
            raise ValueError(
                f"replay: forecasts recorded in {self.recording} are of its own requests, not of "
                f"{trace.name}'s; the trace must be {{name: replay, recording: {self.recording}}}"
            )

    def arrays(self, lengths: IntArray | None, seed: int) -> ForecastArrays:
        """Return the recorded curves, a template each recorded request."""
        recorded = self._recorded
        if self.reads == "prompts":
            assert recorded.prompt_curves is not None, "checked when it was read"
            interval, curves = ONCE, recorded.prompt_curves
            first_row = np.arange(len(recorded))
            n_rows = np.ones(len(recorded), dtype=np.int64)
        else:
            interval = self.interval or recorded.interval
            every = interval // recorded.interval
            n_rows = -(-recorded.n_rows // every)
            first_row = np.cumsum(n_rows) - n_rows
            step = np.arange(n_rows.sum()) - np.repeat(first_row, n_rows)
            curves = recorded.curves[np.repeat(recorded.first_row, n_rows) + every * step]
        return ForecastArrays(
            CURVE,
            interval,
            edges=recorded.edges,
            curves=curves,
            first_row=first_row,
            n_rows=n_rows,
            cap=recorded.max_tokens,
        )

    def before_prefill(self, forecast: ForecastArrays, lengths: IntArray | None) -> ForecastArrays:
        """Return recorded forecasts where prompts are computed among the decode steps.

        Those of hidden states come with the first token: until then a request is known by its
        prompt, if that was forecast, and else by the lengths of others.

        Args:
            forecast: of `arrays`.
            lengths: of others.

        Raises:
            ValueError: neither is known.
        """
        of_prompts = self._recorded.prompt_curves
        if of_prompts is not None and self.reads is None:
            rows = len(forecast.curves) + np.arange(len(of_prompts))
            curves = np.concatenate([forecast.curves, of_prompts])
            return forecast._replace(curves=curves, prompt_row=rows)
        known = KaplanMeier().arrays(lengths, seed=0)
        return forecast._replace(table=known.table, tail=known.tail)


SOURCES = Registry[ForecastSource](
    "forecast",
    {
        source.name: source
        for source in (
            *(NoForecast, Oracle, Noisy, Binned, Classified, Interval, KaplanMeier),
            *(Past, Replay),
        )
    },
)
"""Name in a configuration -> source."""


def create_forecast(name: str, **options: Any) -> ForecastSource:
    """Return the source of forecasts that a configuration names."""
    return SOURCES.create(name, options)


def _refuse_edges(name: str, edges: npt.NDArray[Any]) -> None:
    if len(edges) < 2 or edges[0] != 0 or (np.diff(edges) <= 0).any():
        raise ValueError(f"{name}: edges must ascend from 0, not {edges.tolist()}")
