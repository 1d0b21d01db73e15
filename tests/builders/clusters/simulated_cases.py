"""Small clusters and traces, drawn at random, for the engine and for the reference alike."""

from dataclasses import dataclass
from math import inf
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from reference_simulator import NO_LIMIT, ReferenceConfig, ReferenceResult

from rescheduler.cluster.cluster_view import Assignment, ClusterView
from rescheduler.routing import Needs, RoutingPolicy
from rescheduler.routing.heuristics import jsq_tokens
from rescheduler.simulator.config.simulation_config import (
    AdmissionConfig,
    ArrivalsConfig,
    ClusterConfig,
    PoolConfig,
    PrefillConfig,
    SimulationConfig,
    SLOConfig,
)
from rescheduler.simulator.forecasts.forecast_sources import ForecastSource, Oracle
from rescheduler.simulator.results.metrics import RunResult
from rescheduler.simulator.simulation import RunSetup
from rescheduler.simulator.workloads.trace import TraceBlock
from rescheduler.step_time.step_time import StepTime

Requests = list[tuple[float | None, int, int]]
"""Arrival in seconds (None: as the pool empties), prompt tokens, output tokens."""


class ListedTrace:
    """Requests as given, a few at a time."""

    name = "listed"

    def __init__(
        self, requests: Requests, block: int = 5, clients: list[int] | None = None
    ) -> None:
        self.requests, self.block = requests, block
        self.clients = clients or [0] * len(requests)

    @property
    def has_arrivals(self) -> bool:
        return any(arrival is not None for arrival, _, _ in self.requests)

    def blocks(self, generator: np.random.Generator) -> Any:
        for start in range(0, len(self.requests), self.block):
            part = self.requests[start : start + self.block]
            yield TraceBlock(
                arrival=np.array([np.nan if a is None else a for a, _, _ in part]),
                prompt=np.array([prompt for _, prompt, _ in part], dtype=np.int64),
                output=np.array([output for _, _, output in part], dtype=np.int64),
                template=np.full(len(part), -1, dtype=np.int64),
                client=np.array(self.clients[start : start + self.block], dtype=np.int64),
            )


def engine_setup(
    reference: ReferenceConfig,
    requests: Requests,
    forecast: ForecastSource | None = None,
    tpot: Literal["mean", "worst", "deadline"] = "mean",
) -> RunSetup:
    """Return the engine's set-up of the same cluster."""
    revelation = requests[0][0] is None
    limit = min(reference.pool_limit, 1000)
    config = SimulationConfig(
        cluster=ClusterConfig(
            reference.instances,
            reference.slots,
            None if reference.capacity == NO_LIMIT else reference.capacity,
        ),
        clock=reference.clock,
        dispatch=reference.dispatch,
        pool=PoolConfig(None if revelation else limit),
        prefill=PrefillConfig(
            reference.prefill,
            reference.n_prefill,
            reference.max_batched_tokens,
            reference.formation,  # type: ignore[arg-type]
            reference.token_budget,
        ),
        admission=AdmissionConfig(reference.turns_away, reference.whole_steps),
        slo=None
        if reference.ttft == inf
        else SLOConfig(
            reference.ttft,
            reference.tpot,
            tpot,
            "first_token" if reference.from_first else "arrival",
        ),
        batching=reference.batching,
        drift=list(reference.drift),
        arrivals=ArrivalsConfig("revelation", limit) if revelation else ArrivalsConfig("trace"),
    )
    none = np.empty(0)
    step_time = StepTime(
        reference.a, reference.b, reference.c, reference.mean_context, none, none, np.empty((0, 0))
    )
    return RunSetup(config, ListedTrace(requests), forecast or Oracle(), step_time)


def ordered(result: RunResult, field: str) -> list[Any]:
    """Return a column of the requests, by their numbers."""
    column: list[Any] = getattr(result.requests, field)[np.argsort(result.requests.number)].tolist()
    return column


def assert_served_alike(result: RunResult, expected: ReferenceResult, rtol: float = 0.0) -> None:
    """The engine's requests went the way of the reference's, at the same times."""
    assert ordered(result, "number") == list(range(len(expected.requests)))
    for field in ("arrival", "placed", "start", "first_token", "end"):
        times = [getattr(one, field) for one in expected.requests]
        np.testing.assert_allclose(ordered(result, field), times, rtol, rtol, err_msg=field)
    for field in ("instance", "prompt", "output", "preemptions"):
        assert ordered(result, field) == [getattr(one, field) for one in expected.requests], field
    assert result.tokens == expected.tokens
    assert result.preemptions == expected.preemptions
    assert result.steps == len(expected.steps)


@st.composite
def reference_cases(draw: st.DrawFn, /, **fixed: Any) -> tuple[ReferenceConfig, Requests]:
    """Draw a cluster with the given fields, and requests that it can serve."""
    lengths = draw(
        st.lists(st.tuples(st.integers(1, 12), st.integers(1, 8)), min_size=1, max_size=14)
    )
    arrivals = sorted(draw(st.lists(st.integers(0, 12), min_size=14, max_size=14)))
    chosen: dict[str, Any] = {
        "instances": draw(st.integers(1, 3)),
        "slots": draw(st.integers(1, 4)),
        "clock": draw(st.sampled_from(["barrier", "independent"])),
        "dispatch": draw(st.sampled_from(["pool", "instant"])),
        "pool_limit": draw(st.sampled_from([1, 3, NO_LIMIT])),
        "prefill": draw(st.sampled_from(["none", "chunked", "stage"])),
        "n_prefill": draw(st.integers(1, 2)),
        "max_batched_tokens": draw(st.integers(1, 16)),
        "batching": draw(st.sampled_from(["fcfs", "bin_packing", "least_work_left"])),
        "drift": tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))),
        "a": draw(st.sampled_from([0.25, 1.0])),
        "b": draw(st.sampled_from([0.0, 0.125])),
        "c": draw(st.sampled_from([0.0, 0.0625])),
        "mean_context": draw(st.sampled_from([0.0, 0.25])),
    } | fixed
    can_reveal = chosen["dispatch"] == "pool" and chosen["prefill"] != "stage"
    revealed = can_reveal and draw(st.booleans())
    needed = max([p + max(1, o * max(chosen["drift"])) for p, o in lengths])
    capacity = draw(st.sampled_from([needed, needed + 7, 2 * needed, NO_LIMIT]))
    times = [None if revealed else 0.5 * arrival for arrival in arrivals]
    requests = [(time, p, o) for time, (p, o) in zip(times, lengths, strict=False)]
    return ReferenceConfig(capacity=capacity, **chosen), requests


@dataclass(frozen=True)
class InPython(RoutingPolicy):
    """A compiled policy that the engine has to ask from Python."""

    policy: RoutingPolicy

    name = "in_python"

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs", self.policy.needs)

    def points(self) -> npt.NDArray[np.int64]:
        return self.policy.points()

    def assign(self, view: ClusterView) -> Assignment:
        return self.policy.assign(view)


def assert_decided_alike(one: RunResult, other: RunResult) -> None:
    for field in ("number", "instance", "placed", "end"):
        np.testing.assert_array_equal(
            getattr(one.requests, field), getattr(other.requests, field), err_msg=field
        )


@dataclass(frozen=True)
class ByLength(RoutingPolicy):
    """Reads everything that is shown of lengths; decides as `JSQTokens` does."""

    name = "by_length"
    needs = Needs.LENGTHS
    kernel = jsq_tokens

    def length_edges(self) -> npt.NDArray[np.int64]:
        return np.array([0, 4, 7])


class ByChance(RoutingPolicy):
    """Reads everything that is shown of loads ahead; decides as `JSQTokens` does."""

    name = "by_chance"
    needs = Needs.FORECASTS
    kernel = jsq_tokens

    def points(self) -> npt.NDArray[np.int64]:
        return np.array([0, 1, 3, 8])

    def with_excess(self) -> bool:
        return True
