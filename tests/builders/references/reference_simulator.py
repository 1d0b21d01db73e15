"""A cluster of decode instances in plain Python: slow, and plain enough to check others by."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from reference_batches import Formation, Held, Waiting, plain_batch, plain_budget

from predictor.forecasts.forecast import Forecast, PointForecast
from rescheduler.cluster.cluster_view import UNLIMITED, ClusterView
from rescheduler.routing.policy import RoutingPolicy

NO_LIMIT = int(UNLIMITED)


@dataclass(frozen=True)
class ReferenceConfig:
    """A cluster. Its step time is t(new, L) = a + b·new + c·L seconds.

    A barrier step takes max_g t(new_g, L_g) + mean_context · mean_g L_g, an instance's own step
    t(new_g, L_g) + mean_context · L_g. With a formation other than Sarathi's, decodes may sit a
    step out, and L_g is the context of those that take part.
    """

    instances: int
    slots: int
    capacity: int = NO_LIMIT
    clock: Literal["barrier", "independent"] = "barrier"
    dispatch: Literal["pool", "instant"] = "pool"
    pool_limit: int = NO_LIMIT
    prefill: Literal["none", "stage", "chunked"] = "none"
    n_prefill: int = 1
    max_batched_tokens: int = 2048
    batching: Literal["fcfs", "bin_packing", "least_work_left"] = "fcfs"
    drift: tuple[int, ...] = (1,)
    a: float = 1.0
    b: float = 0.0
    c: float = 0.0
    mean_context: float = 0.0
    formation: str = "sarathi"
    token_budget: int | None = None
    ttft: float = math.inf
    tpot: float = math.inf
    turns_away: bool = False
    whole_steps: bool = True
    from_first: bool = False

    @property
    def rules(self) -> Formation:
        most = self.max_batched_tokens
        return Formation(
            self.formation, self.a, self.b, self.c, most, min(self.token_budget or most, most)
        )

    def step_time(self, new: int, load: int) -> float:
        return self.a + self.b * new + self.c * load


@dataclass(eq=False)
class Request:
    """A request on its way, and what became of it; times in seconds.

    One that ended with its prefill was never placed: instance -1, placed and start NaN. One that
    an instance turned away has an arrival and nothing else.
    """

    number: int
    arrival: float
    prompt: int
    output: int
    context: int
    visible: float  # from when on the decode side can see it
    instance: int = -1
    placed: float = math.nan
    start: float = math.nan
    first_token: float = math.nan
    end: float = math.nan
    preemptions: int = 0
    generated: int = 0
    entered: int = 0  # steps completed when it was revealed
    to_fill: int = 0  # tokens that chunked prefill still has to read; it decodes at 0
    worst: float = math.nan  # running mean of its time per output token, from the first token on
    worst_since_due: float = math.nan  # from when the first token was due


@dataclass(frozen=True)
class StepRecord:
    """A step at its start: of the whole cluster (barrier), or of one instance (independent)."""

    time: float
    seconds: float
    loads: list[int]  # [G] of all instances
    running: list[int]  # [G] requests decoding or being filled


@dataclass(frozen=True)
class ReferenceResult:
    """A whole run; means over the steps, 0 if there was none."""

    requests: list[Request]  # by number
    steps: list[StepRecord]
    tokens: int
    preemptions: int
    imbalance: float
    max_minus_min: float
    idle_share: float


@dataclass(eq=False)
class Instance:
    """A decode instance."""

    admitted: list[Request] = field(default_factory=list)  # decoding or filling, as admitted
    queue: list[Request] = field(default_factory=list)
    step_end: float | None = None
    steps: int = 0  # completed; in a barrier an idle instance completes them too
    places: list[Request] = field(default_factory=list)  # decoding, by slot, if some may sit out
    sitting_out: list[Request] = field(default_factory=list)
    budget: float = 0.0

    def load(self) -> int:
        return sum(request.context for request in self.admitted)

    def requests(self) -> list[Request]:
        return self.admitted + self.queue


def oracle(requests: Sequence[Request]) -> Forecast:
    """Return the true remaining tokens."""
    return PointForecast.new([request.output - request.generated for request in requests])


def reference_run(
    config: ReferenceConfig,
    requests: Sequence[tuple[float | None, int, int]],
    policy: RoutingPolicy,
) -> ReferenceResult:
    """Serve requests (arrival, prompt, output), in order of arrival.

    Without arrivals (None, for all of them) the pool is filled up to its limit as it empties.
    """
    trace = [
        Request(number, arrival or 0.0, prompt, output, prompt, arrival or 0.0)
        for number, (arrival, prompt, output) in enumerate(requests)
    ]
    return _Simulation(config, policy, requests[0][0] is None, trace).run()


@dataclass
class _Simulation:
    config: ReferenceConfig
    policy: RoutingPolicy
    revelation: bool
    coming: list[Request]  # what the decode side has not been shown yet, in that order
    pool: list[Request] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    tokens: int = 0
    dispatched: int = 0
    now: float = 0.0

    def run(self) -> ReferenceResult:
        self.instances = [Instance() for _ in range(self.config.instances)]
        for each in self.instances:
            each.budget = self.budget(each)
        if self.config.prefill == "stage":
            self.run_prefill_stage()
        times = [request.visible for request in self.coming[:1]]
        while times:
            self.now = min(times)
            self.end_steps()
            self.reveal()
            self.decide()
            self.start_steps()
            times = self.next_times()
        if self.pool or self.coming:
            raise RuntimeError(f"{self.policy.name} leaves requests waiting in an idle cluster")
        return self.result()

    def next_times(self) -> list[float]:
        times = [each.step_end for each in self.instances if each.step_end is not None]
        always = self.config.clock == "independent" or self.config.dispatch == "instant"
        if always or not times:
            # What a full pool has kept out is looked at again with the next event, not at once.
            times += [request.visible for request in self.coming[:1] if request.visible > self.now]
        return times

    def run_prefill_stage(self) -> None:
        """Nothing behind the stage holds it up, so all of it can be known beforehand."""
        free = [0.0] * self.config.n_prefill
        for request in self.coming:
            server = free.index(min(free))
            seconds = self.config.step_time(request.prompt, 0)
            free[server] = max(free[server], request.arrival) + seconds
            request.visible = request.first_token = free[server]
            request.generated, request.context = 1, request.prompt + 1
            self.tokens += 1
            if request.output == 1:
                request.end = request.visible
                self.finished.append(request)
        decoding = [request for request in self.coming if request.output > 1]
        self.coming = sorted(decoding, key=lambda request: request.visible)  # ties: as they came

    def end_steps(self) -> None:
        for each in [one for one in self.instances if one.step_end == self.now]:
            each.step_end = None
            growth = self.config.drift[each.steps % len(self.config.drift)]
            each.steps += 1
            given = [one for one in each.admitted if one.to_fill == 0]
            for request in [one for one in given if one not in each.sitting_out]:
                request.generated += 1
                self.tokens += 1
                if request.generated == 1:
                    request.first_token = self.now
                else:
                    after, due = request.generated - 1, request.arrival + self.config.ttft
                    mean, since_due = (self.now - request.first_token) / after, self.now - due
                    request.worst = max(mean, _number(request.worst, mean))
                    mean = since_due / after
                    request.worst_since_due = max(mean, _number(request.worst_since_due, mean))
                if request.generated == request.output:
                    each.admitted.remove(request)
                    request.end = self.now
                    self.finished.append(request)
                else:
                    request.context += growth
            self.vacate(each, lambda request: request.generated == request.output)
            while each.load() > self.config.capacity:
                request = each.admitted.pop()
                self.vacate(each, lambda one, gone=request: one is gone)  # type: ignore[misc]
                request.preemptions += 1
                each.queue.insert(0, request)

    def vacate(self, each: Instance, gone: Callable[[Request], bool]) -> None:
        """Free slots; the last one taken fills each gap."""
        slot = 0
        while slot < len(each.places):
            if gone(each.places[slot]):
                each.places[slot] = each.places[-1]
                each.places.pop()
            else:
                slot += 1

    def reveal(self) -> None:
        instant = self.config.dispatch == "instant"
        limit = NO_LIMIT if instant else self.config.pool_limit
        while self.coming and self.coming[0].visible <= self.now and len(self.pool) < limit:
            request = self.coming.pop(0)
            request.entered = self.instances[0].steps
            if self.revelation:
                request.arrival = self.now
            if not instant:
                self.pool.append(request)
            elif self.route([request]):
                raise RuntimeError(f"{self.policy.name} does not place at once")

    def decide(self) -> None:
        # With a barrier the pool is looked at only when no step is in progress: see next_times.
        if self.pool and any(len(each.requests()) < self.config.slots for each in self.instances):
            self.pool = self.route(self.pool)

    def route(self, waiting: list[Request]) -> list[Request]:
        """Ask the policy, queue what it places, and return the others."""
        target = self.policy.assign(self.view(waiting)).instance
        for request, g in zip(waiting, target, strict=True):
            if g >= 0:
                each, request.instance = self.instances[g], int(g)
                self.dispatched += 1
                if self.config.turns_away and each.requests() and each.budget < request.prompt:
                    self.finished.append(request)
                    continue
                request.placed = self.now
                each.queue.append(request)
                each.budget -= request.prompt
        return [request for request, g in zip(waiting, target, strict=True) if g < 0]

    def view(self, waiting: list[Request]) -> ClusterView:
        there = [(g, one) for g, each in enumerate(self.instances) for one in each.requests()]
        return ClusterView(
            slots=_array([self.config.slots] * self.config.instances),
            kv_capacity=_array([self.config.capacity] * self.config.instances),
            queued=_array([len(each.queue) for each in self.instances]),
            instance=_array([g for g, _ in there]),
            prompt_tokens=_array([one.prompt for _, one in there]),
            generated_tokens=_array([one.context - one.prompt for _, one in there]),
            forecast=oracle([one for _, one in there]),
            waiting_prompt_tokens=_array([one.prompt for one in waiting]),
            waiting_generated_tokens=_array([one.context - one.prompt for one in waiting]),
            waiting_forecast=oracle(waiting),
            waited_steps=_array([self.instances[0].steps - one.entered for one in waiting]),
            dispatched=self.dispatched,
            instant=self.config.dispatch == "instant",
            prefill_budget=np.array([each.budget for each in self.instances]),
        )

    def start_steps(self) -> None:
        ready = [g for g, each in enumerate(self.instances) if each.step_end is None]
        barrier = self.config.clock == "barrier"
        if barrier and len(ready) < len(self.instances):
            return
        for g in ready:
            self.instances[g].budget = self.budget(self.instances[g])
        new, read = {}, {}
        for g in ready:
            new[g], read[g] = self.admit(self.instances[g])
        loads = [each.load() for each in self.instances]
        running = [len(each.admitted) for each in self.instances]
        own = {g: self.config.step_time(new[g], read[g]) for g in ready}
        slope, steps = self.config.mean_context, []
        if not barrier:
            steps = [([g], own[g] + slope * read[g]) for g in ready if running[g]]
        elif any(running):
            steps = [(ready, max(own.values()) + slope * (sum(loads) / len(loads)))]
        for taking_part, seconds in steps:
            for g in taking_part:
                self.instances[g].step_end = self.now + seconds
            self.steps.append(StepRecord(self.now, seconds, loads, running))

    def admit(self, each: Instance) -> tuple[int, int]:
        """Let queued requests decode or be filled from now on; return the step's tokens.

        Those computed, and those of context that are read.
        """
        if self.config.formation != "sarathi":
            return self.form(each)
        if self.config.prefill == "chunked":
            new = self.fill(each)
            return new, each.load()
        recomputed = 0
        while (request := self.next_admitted(each)) is not None:
            recomputed += request.context - 1 if request.preemptions else 0
        return len(each.admitted) + recomputed, each.load()

    def form(self, each: Instance) -> tuple[int, int]:
        filling = [one for one in each.admitted if one.to_fill > 0]
        room, prompts = self.config.capacity - each.load(), list(filling)
        for request in each.queue:
            places = self.config.slots - len(each.places) - len(prompts)
            if places == 0 or request.context > room:
                break
            prompts.append(request)
            room -= request.context
        could = [(one, 1) for one in each.places]
        could += [(one, one.context if one in each.queue else one.to_fill) for one in prompts]
        taken = plain_batch(
            self.config.rules,
            [
                Waiting(self.slack(one), self.config.tpot, one in each.places, most, one.context)
                for one, most in could
            ],
        )
        each.sitting_out = [
            one for (one, _), n in zip(could, taken, strict=True) if one in each.places and n == 0
        ]
        reading = sum(one.context for (one, _), n in zip(could, taken, strict=True) if n > 0)
        for (request, most), n in zip(could, taken, strict=True):
            if n == 0 or request in each.places:
                continue
            if request in each.queue:
                each.queue.remove(request)
                each.admitted.append(request)
                if math.isnan(request.start):
                    request.start = self.now
            request.to_fill = most - n
            if request.to_fill == 0:
                each.places.append(request)
        return sum(taken), reading

    def slack(self, request: Request) -> float:
        first = request.arrival + self.config.ttft
        if self.config.from_first and request.generated:
            first = request.first_token
        return first + request.generated * self.config.tpot - self.now

    def budget(self, each: Instance) -> float:
        """Return the prompt tokens that an instance could take on now."""
        if self.config.ttft == math.inf or self.config.b + self.config.c == 0:
            return 0.0
        held = []
        for one in each.requests():
            left = one.context if one in each.queue else one.to_fill
            held.append(Held(self.slack(one), one.context, left))
        config = self.config
        return plain_budget(config.rules, config.ttft, config.tpot, held, config.whole_steps)

    def fill(self, each: Instance) -> int:
        filling = [request for request in each.admitted if request.to_fill > 0]
        most = self.config.rules.token_budget
        left = most - (len(each.admitted) - len(filling))
        while left > 0:
            request = filling.pop(0) if filling else self.next_admitted(each)
            if request is None:
                break
            chunk = min(request.to_fill, left)
            request.to_fill -= chunk
            left -= chunk
        return most - left

    def next_admitted(self, each: Instance) -> Request | None:
        """Move one request out of the queue, if there is a place for the one whose turn it is."""
        if not each.queue or len(each.admitted) == self.config.slots:
            return None
        room = self.config.capacity - each.load()
        head = chosen = each.queue[0]  # if any there was preempted, then the head
        if self.config.batching == "bin_packing" and not head.preemptions:
            fitting = [one for one in each.queue if one.context <= room]
            chosen = max(fitting, key=lambda one: one.context, default=head)
        if self.config.batching == "least_work_left" and not head.preemptions:
            chosen = min(each.queue, key=lambda one: one.output - one.generated)
        if chosen.context > room:
            return None
        each.queue.remove(chosen)
        each.admitted.append(chosen)
        chosen.to_fill = chosen.context if self.config.prefill == "chunked" else 0
        if math.isnan(chosen.start):
            chosen.start = self.now
        return chosen

    def result(self) -> ReferenceResult:
        n, loads = self.config.instances, [step.loads for step in self.steps]
        return ReferenceResult(
            requests=sorted(self.finished, key=lambda request: request.number),
            steps=self.steps,
            tokens=self.tokens,
            preemptions=sum(request.preemptions for request in self.finished),
            imbalance=_mean([n * max(each) - sum(each) for each in loads]),
            max_minus_min=_mean([max(each) - min(each) for each in loads]),
            idle_share=_mean([1 - sum(each) / n / max(each) for each in loads]),
        )


def _array(values: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def _number(value: float, otherwise: float) -> float:
    return otherwise if math.isnan(value) else value


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
