"""A fleet in virtual time, whose requests' finish times are forecast as the proxy forecasts them.

Instances step as long as a linear model says; what waits starts in order of arrival, on the
instance with the least context tokens that has room. Every 20 tokens an engine forecasts what
remains, as well as `ForecastQuality` says. Nothing waits for a clock: an hour takes seconds.
"""

import heapq
from collections import deque
from collections.abc import Callable
from math import log
from typing import NamedTuple

import numpy as np
from live_requests import instance_state

from benchmarks.support.engine_states import engine_state
from rescheduler.emulation.emulate_options import AnswerLengths, ForecastQuality, StepSeconds
from rescheduler.emulation.length_posterior import forecast_edges, posterior_survival
from rescheduler.finish_times.finish_times import FinishTimes, Observed
from rescheduler.finish_times.fleet_load import FleetLoad
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.placeable import Placeable, Placements
from rescheduler.telemetry.telemetry_view import SURVIVAL_SCALE, ForecastBatch

_K = 20


class Fleet(NamedTuple):
    """Instances, each with so many slots and so much memory, in tokens."""

    instances: int
    slots: int
    kv_tokens: int
    step: StepSeconds
    budget: int = 2_048
    law: AnswerLengths = AnswerLengths(median=300.0, sigma=1.0, longest=4_000)
    quality: ForecastQuality = ForecastQuality(sigma=1.0, correlation=0.5)


class VirtualRequest(Placeable):
    """A request of a virtual fleet, whose length nobody knows beforehand."""

    __slots__ = ("left_to_prefill", "length")

    def __init__(self, name: str, prompt: int, length: int, most: int, arrived: float) -> None:
        super().__init__(
            external_id=name, prompt_tokens=prompt, max_tokens=most, id=name, arrived=arrived
        )
        self.length, self.left_to_prefill = length, prompt
        self.prompt_is_known = True


class _Telemetry:
    """Hands over what virtual engines publish."""

    def __init__(self) -> None:
        self.batches: list[ForecastBatch] = []

    def take_forecasts(self) -> list[ForecastBatch]:
        taken, self.batches = self.batches, []
        return taken


class VirtualRun:
    """One run; `run` it to its end.

    ``observed`` is told what came of each forecast, and ``ended`` of each request that has ended.
    ``admit`` is asked whether a request is taken when it arrives; it may give it a promise.
    """

    def __init__(
        self,
        fleet: Fleet,
        seed: int,
        observed: Callable[[Observed], None] | None = None,
        admit: Callable[["VirtualRun", VirtualRequest], bool] | None = None,
        ended: Callable[["VirtualRun", VirtualRequest], None] | None = None,
    ) -> None:
        self.now, self.fleet = 0.0, fleet
        self._random = np.random.default_rng(seed)
        self._telemetry = _Telemetry()
        self._forecasts = LiveForecasts(self._telemetry)  # type: ignore[arg-type]
        self.placements: Placements[VirtualRequest] = Placements()
        self.instances = [self._instance(g) for g in range(fleet.instances)]
        self._line: deque[VirtualRequest] = deque()
        self._admit, self._ended = admit, ended
        load = FleetLoad(
            self.instances,
            lambda: self.instances,
            [],
            self.placements,
            lambda: list(self._line),
            self._forecasts,
            lambda: self.now,
        )
        self.finish_times = FinishTimes(load, self._forecasts, lambda: self.now, observed)
        self.finished: dict[str, float] = {}  # when each request had its last token
        self._errors: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._edges = forecast_edges(fleet.law)

    def _instance(self, g: int) -> InstanceState:
        one = instance_state(f"decode-{g}")
        slots, blocks = self.fleet.slots, self.fleet.kv_tokens // 16
        one.engine = engine_state(max_num_seqs=slots, num_blocks=blocks, free_blocks=0, running=0)
        return one

    def run(self, arrivals: list[VirtualRequest]) -> None:
        """Serve requests, in order of arrival, until all have ended."""
        events: list[tuple[float, int]] = [(0.0, g) for g in range(len(self.instances))]
        heapq.heapify(events)
        coming, sample = deque(arrivals), 1.0
        while coming or self._line or any(self.placements.on(one) for one in self.instances):
            when, g = heapq.heappop(events)
            while coming and coming[0].arrived <= when:
                self.now = max(self.now, coming[0].arrived)
                self._arrive(coming.popleft())
            self.now = max(self.now, when)
            if self.now >= sample:
                self.finish_times.sample()  # as the proxy does regularly
                sample = self.now + 1.0
            seconds = self._step(self.instances[g])
            idle = coming[0].arrived if coming and not self._line else self.now + 0.01
            heapq.heappush(events, (self.now + seconds if seconds else max(idle, self.now), g))

    def _arrive(self, request: VirtualRequest) -> None:
        self._forecasts.began(request)
        if self._admit is not None and not self._admit(self, request):
            self._forecasts.ended(request, by_itself=False)
            return
        self.finish_times.arrived(request)
        self._line.append(request)
        self._start_what_fits()

    def _start_what_fits(self) -> None:
        while self._line:
            request, best = self._line[0], None
            for one in self.instances:
                here = self.placements.on(one)
                held = sum(each.context_tokens for each in here)
                fits = held + request.prompt_tokens <= self.fleet.kv_tokens
                if fits and len(here) < self.fleet.slots and (best is None or held < best[0]):
                    best = held, one
            if best is None:
                return
            self._line.popleft()
            request.instance = request.destination = best[1]
            self.placements.put(request, best[1])

    def _step(self, instance: InstanceState) -> float:
        """Run a step that ends now; return how long the next one takes, 0 if there is none."""
        ended = []
        for request in list(self.placements.on(instance)):
            if request.left_to_prefill > 0:
                continue
            self._token(request, instance)
            if request.generated_tokens >= request.length:
                ended.append(request)
        for request in ended:
            self.placements.put(request, None)
            self.finish_times.ended(request, by_itself=True)
            self._forecasts.ended(request, by_itself=True)
            self.finished[request.id] = self.now
            if self._ended is not None:
                self._ended(self, request)
        self._start_what_fits()
        here = self.placements.on(instance)
        if not here:
            return 0.0
        new, budget = 0, self.fleet.budget
        for request in here:
            if request.left_to_prefill > 0:
                part = min(budget, request.left_to_prefill)
                request.left_to_prefill -= part
                budget -= part
                new += part
            else:
                new += 1
        return self.fleet.step.of(new, sum(one.context_tokens for one in here))

    def _token(self, request: VirtualRequest, instance: InstanceState) -> None:
        request._generated += 1
        if request.generated_tokens == 1:
            request.generating = True
            self._publish(request, instance)
            self.finish_times.first_token(request)
        else:
            waited = self.now - self._last[request.id]
            self.finish_times.load.pace.took(instance, 1, waited, self.now)
            if request.generated_tokens % _K == 0:
                self._publish(request, instance)
        self._last[request.id] = self.now

    def _publish(self, request: VirtualRequest, instance: InstanceState) -> None:
        """Forecast what remains of a request, with the errors of its quality."""
        quality, left = self.fleet.quality, request.length - request.generated_tokens
        if left < 1:
            return
        own = self._errors.setdefault(request.id, float(self._random.normal()))
        rho = quality.correlation
        z = rho**0.5 * own + (1 - rho) ** 0.5 * float(self._random.normal())
        sigma = max(quality.sigma, 1e-6)
        curve = posterior_survival(
            self.fleet.law, sigma, [request.generated_tokens], [log(left) + sigma * z], self._edges
        )
        coded = np.minimum.accumulate(np.rint(curve * SURVIVAL_SCALE).astype(np.uint16), axis=1)
        self._telemetry.batches.append(
            ForecastBatch(
                instance=instance.name,
                edges=tuple(int(edge) for edge in self._edges),
                names=(request.external_id,),
                prompt_tokens=np.array([request.prompt_tokens]),
                context=np.array([request.context_tokens]),
                tokens_left=np.array([(request.max_tokens or 0) - request.generated_tokens]),
                survival=coded,
            )
        )
