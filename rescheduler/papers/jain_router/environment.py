r"""Routing as a Gymnasium environment: a decision every Δt on simulated clusters.

.. math:: r_t = -\sum_{j} \frac{1}{\hat T_j} (1 - f_{jt}) + \sum_i r_w w_{it}, \qquad
   f_{jt} = \frac{o_{jt}}{\hat d_{jt}}, \qquad \hat T_j = p_j t_p + \hat d_{jt} t_d \tag{3}

over all requests j in the system, in the queue or on an instance; :math:`w_{it}` is 1 for those
completed since the last step. With :math:`o` tokens so far and :math:`\hat R` expected yet,
:math:`\hat d = o + \hat R`. Jain et al. 2025, §4.3.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numba.typed import List

from predictor.compilation import compiled, compiled_core, compiled_inline
from rescheduler.commands.event_loop import held_interrupts
from rescheduler.papers.jain_router.workload_impact import (
    V100_GRADIENTS,
    ImpactRules,
    guidance,
    mixing,
)
from rescheduler.routing import Needs, RoutingPolicy
from rescheduler.routing.learned.rl import StateScales, router_state, state_bounds
from rescheduler.routing.policy import NO_KERNEL, Kernel
from rescheduler.simulator.engine.engine import EngineParts, advance, apply_target
from rescheduler.simulator.engine.engine_state import NONE, Arrivals, Cluster, Wanted
from rescheduler.simulator.engine.ordered_pool import expected_left
from rescheduler.simulator.engine.routing_inputs import fill_routing_inputs, gather_placed
from rescheduler.simulator.forecasts.forecast_arrays import ForecastArrays
from rescheduler.simulator.simulation import RunSetup, Simulation
from rescheduler.step_time.profile import load_profile

_POSITIVE = (
    *("interval", "long_prompt", "prompt_seconds", "token_seconds"),
    *("tolerance_s", "guidance_tolerance_s", "max_seconds"),
)
_MANY_REQUESTS = 32.0
"""A count of requests that the state shows as 1."""
_LONG_WAIT_S = 2.0
"""Seconds until the first request ends that the state shows as 1."""
_MUCH_CAPACITY = 0.2
"""Free share of a KV cache that the state shows as 1."""


@dataclass(frozen=True)
class RouterConfig:
    r"""The task that a router learns.

    Attributes:
        interval: Δt, seconds between two decisions.
        edges: output tokens from which the buckets of the state begin, ascending from 0.
        long_prompt: tokens of a prompt that the state shows as 1.
        prompt_seconds: of a prompt token, when a request is alone.
        token_seconds: of a decoded token, when a request is alone; an average decode batch.
        completion_reward: r_w of equation 3.
        profile: file of `headway profile` whose gradients replace the paper's, and the three times.
        balance: α of the impact.
        tolerance_s: ε of equation 1, in r_mixing.
        guidance_tolerance_s: ε in h. Above it the impact on a prompt counts in units of ε, so that
            this is how much h weighs beside the rewards.
        max_seconds: of the simulation, at which an episode is cut.
    """

    interval: float = 0.02
    edges: tuple[int, ...] = (0, 256, 2048)
    long_prompt: int = 200
    prompt_seconds: float = V100_GRADIENTS[0]
    token_seconds: float = 0.02
    completion_reward: float = 60.0
    profile: Path | None = None
    balance: float = 0.5
    tolerance_s: float = 2.0
    guidance_tolerance_s: float = 0.05
    max_seconds: float = 1000.0

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ValueError(f"router.{name} must be above 0, not {getattr(self, name)}")
        if not 0 <= self.balance <= 1:
            raise ValueError(f"router.balance must be in [0, 1], not {self.balance}")
        ascending = all(low < high for low, high in pairwise(self.edges))
        if not self.edges or self.edges[0] != 0 or not ascending:
            raise ValueError(f"router.edges must ascend from 0, not {list(self.edges)}")

    def impact(self) -> ImpactRules:
        """Return the constants of the workload impact, as r_mixing takes them.

        The gradients are the paper's, or the least-squares slopes of the profile (§3).

        Raises:
            ValueError: ``profile`` is not a profile; so `guide`, `alone` and `scales`.
        """
        gradients = V100_GRADIENTS
        if self.profile is not None:
            found = load_profile(self.profile).gradients
            gradients = found.prompt, found.decode
        return ImpactRules(*gradients, float(self.balance), float(self.tolerance_s))

    def guide(self) -> ImpactRules:
        """Return the constants of the workload impact, as h takes them."""
        return self.impact()._replace(tolerance=float(self.guidance_tolerance_s))

    def alone(self) -> tuple[float, float]:
        """Return the seconds of a prompt token and of a decoded token of a lone request."""
        if self.profile is None:
            return float(self.prompt_seconds), float(self.token_seconds)
        profile = load_profile(self.profile)
        return profile.gradients.prompt, profile.batch.seconds(1, 0)

    def scales(self, slots: int) -> StateScales:
        """Return what the state's numbers are measured in, of instances with so many slots."""
        return StateScales(
            slots=float(slots),
            requests=_MANY_REQUESTS,
            prompt_tokens=float(self.long_prompt),
            seconds_per_token=self.alone()[1],
            seconds=_LONG_WAIT_S,
            capacity=_MUCH_CAPACITY,
        )


FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Shaping:
    """What is added to equation 3's first two sums.

    Attributes:
        mixing: times r_mixing of the action taken.
        guidance: times h of the action taken.
    """

    mixing: float = 0.0
    guidance: float = 0.0


@dataclass(frozen=True)
class _Agent(RoutingPolicy):
    """Stands for what decides outside; the simulator returns for its decisions."""

    name: ClassVar[str] = "a router that learns"
    needs = Needs.LENGTHS

    config: RouterConfig

    def length_edges(self) -> npt.NDArray[np.int64]:
        """Return the buckets of the state."""
        return np.array(self.config.edges, dtype=np.int64)

    def decide_every(self) -> float:
        """Return Δt."""
        return self.config.interval


class RouterVectorEnvironment(VectorEnv[FloatArray, npt.NDArray[np.int64], FloatArray]):
    """Several simulated clusters of G instances, each with a queue whose first request is routed.

    Every Δt of the simulations one action each: the first request of the queue goes to the m-th
    instance by KV load, as the state shows them, or waits if m = G; without a request the action
    means nothing. The observation is
    `router_state`, the reward equation 3's first two sums, as of the next decision, plus what
    `shaping` says. An episode ends when all requests of its trace are served, or is cut at
    ``max_seconds``. One that has ended stays as it is, rewarded with 0, until ``reset`` with
    ``options={"reset_mask": ...}`` or of all.

    ``info`` has ``routable`` [B] (a request waits, so that the action will mean something),
    ``mixing`` and ``guidance`` [B] (r_mixing and h of the action just taken, 0 where none was), and
    ``work`` [B, 4] (see `StepArrays`).

    Args:
        setups: cluster, requests and forecasts of the first simulations, whose turn comes again
            with the next ones; with dispatch instant, so that an instance queues what it has no
            place for.
        config: of the task.
        num_envs: B, simulations at once.

    Attributes:
        shaping: of the reward, none at first; may be changed between two steps.

    Raises:
        ValueError: there are no forecasts, a simulation is of a kind that is not routed at
            intervals, the clusters differ in instances or slots, or some setup has no simulation.
    """

    def __init__(self, setups: Sequence[RunSetup], config: RouterConfig, num_envs: int = 1) -> None:
        least = max(len(setups), 1)
        if num_envs < least:
            raise ValueError(f"at least {least} simulations at once, not {num_envs}")
        self.config, self.shaping = config, Shaping()
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED}
        self.n_instances, slots = _cluster_of(setups)
        self._setups = [setups[b % len(setups)] for b in range(num_envs)]
        self._scales = config.scales(slots)
        low, high = state_bounds(self.n_instances, len(config.edges), self._scales)
        self.single_observation_space = gym.spaces.Box(low, high, dtype=np.float64)
        self.single_action_space = gym.spaces.Discrete(self.n_instances + 1)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._policy = _Agent(config)
        prompt_seconds, token_seconds = config.alone()
        self._rewards = RewardRules(
            float(config.completion_reward),
            prompt_seconds,
            token_seconds,
            config.impact(),
            config.guide(),
        )
        self._simulations = [
            Simulation(setup, self._policy, seed) for seed, setup in enumerate(self._setups)
        ]
        self._engines = engine_list(self._simulations[0].engine)
        for b in range(1, num_envs):
            put_engine(self._engines, b, self._simulations[b].engine)
        self._decision = np.zeros(num_envs, dtype=np.int64)
        self._cut = np.zeros(num_envs, dtype=np.bool_)
        self._last = StepArrays(
            going=np.zeros(num_envs, dtype=np.bool_),
            wanted=np.full(num_envs, Wanted.DONE, dtype=np.int64),
            completed=np.zeros(num_envs, dtype=np.int64),
            order=np.zeros((num_envs, self.n_instances), dtype=np.int64),
            state=np.zeros((num_envs, len(low))),
            work=np.zeros((num_envs, WORK)),
            terms=np.zeros((num_envs, TERMS)),
        )

    @property
    def simulations(self) -> Sequence[Simulation]:
        """The simulations as they are, [B]; their results are those of an episode."""
        return self._simulations

    def reset(
        self, *, seed: int | Sequence[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        """Begin new episodes.

        Args:
            seed: of the requests of each, [B]; of one number the next ones are the others'. Drawn
                when None.
            options: ``reset_mask``: [B] which to begin anew; all without it.

        Raises:
            ValueError: another number of seeds.
        """
        super().reset(seed=seed if isinstance(seed, int) else None)
        mask = np.ones(self.num_envs, dtype=np.bool_)
        if options and "reset_mask" in options:
            mask = np.asarray(options["reset_mask"], dtype=np.bool_)
        for b, own in enumerate(self._seeds(seed)):
            if mask[b]:
                self._simulations[b] = Simulation(self._setups[b], self._policy, own)
                put_engine(self._engines, b, self._simulations[b].engine)
        self._decision[mask] = 0
        self._last.wanted[mask] = Wanted.PAUSED
        self._last.completed[mask] = 0
        self._cut[mask] = False
        self._last.going[:] = mask
        self._advance(np.full(self.num_envs, NONE, dtype=np.int64))
        self._last.terms[mask] = 0.0
        return self._last.state.copy(), self._info()

    def step(
        self, actions: npt.NDArray[np.int64]
    ) -> tuple[FloatArray, FloatArray, npt.NDArray[Any], npt.NDArray[Any], dict[str, Any]]:
        """Act in every running simulation; return states, rewards, ended, cut, info.

        Args:
            actions: [B] in 0 .. G.

        Raises:
            ValueError: another number of actions, or an unknown one.
        """
        targets = np.array(actions, dtype=np.int64)
        if targets.shape != (self.num_envs,):
            raise ValueError(f"actions of shape {targets.shape} for {self.num_envs} simulations")
        if targets.min() < 0 or targets.max() > self.n_instances:
            raise ValueError(f"an action is in 0 .. {self.n_instances}, not {targets.tolist()}")
        last = self._last
        last.going[:] = (last.wanted != Wanted.DONE) & ~self._cut
        self._decision += last.going
        last.terms[~last.going] = 0.0
        last.work[~last.going] = 0.0
        targets[targets == self.n_instances] = NONE
        self._advance(targets)
        ended = last.wanted == Wanted.DONE
        self._cut |= ~ended & (self._decision * self.config.interval >= self.config.max_seconds)
        reward = (
            last.terms[:, BASE]
            + self.shaping.mixing * last.terms[:, MIXING]
            + self.shaping.guidance * last.terms[:, GUIDANCE]
        )
        return last.state.copy(), reward, ended, self._cut.copy(), self._info()

    def _advance(self, targets: npt.NDArray[np.int64]) -> None:
        """Simulate all running ones to their next decisions."""
        interval, last = self.config.interval, self._last
        until = self._decision.astype(np.float64) * interval
        rules = self._rewards, self._scales, NO_KERNEL
        with held_interrupts():
            while not step_engines(self._engines, *rules, until, interval, targets, last):
                for b in np.flatnonzero(last.going):
                    self._simulations[b].provide(int(last.wanted[b]))
                    put_engine(self._engines, b, self._simulations[b].engine)

    def _seeds(self, seed: int | Sequence[int] | None) -> list[int]:
        if seed is None:
            return [int(s) for s in self.np_random.integers(0, 2**31, self.num_envs)]
        seeds = [seed + b for b in range(self.num_envs)] if isinstance(seed, int) else list(seed)
        if len(seeds) != self.num_envs:
            raise ValueError(f"{len(seeds)} seeds for {self.num_envs} simulations")
        return seeds

    def _info(self) -> dict[str, Any]:
        return {
            "routable": self._last.wanted == Wanted.ASK,
            "mixing": self._last.terms[:, MIXING].copy(),
            "guidance": self._last.terms[:, GUIDANCE].copy(),
            "work": self._last.work.copy(),
        }


class RouterEnvironment(gym.Env[FloatArray, np.int64]):
    """One simulated cluster; see `RouterVectorEnvironment`, of which this is one."""

    def __init__(self, setup: RunSetup, config: RouterConfig) -> None:
        self.vector = RouterVectorEnvironment([setup], config)
        self.observation_space = self.vector.single_observation_space
        self.action_space = self.vector.single_action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        """Begin an episode whose requests are drawn with a seed."""
        super().reset(seed=seed)
        own = int(self.np_random.integers(0, 2**31)) if seed is None else seed
        observation, info = self.vector.reset(seed=[own])
        return observation[0], _first(info)

    def step(self, action: np.int64) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        """Act and simulate to the next decision."""
        observation, reward, ended, cut, info = self.vector.step(np.array([action]))
        return observation[0], float(reward[0]), bool(ended[0]), bool(cut[0]), _first(info)


def _cluster_of(setups: Sequence[RunSetup]) -> tuple[int, int]:
    """Return the instances and slots that all setups have."""
    found = {(setup.config.cluster.instances, setup.config.cluster.slots) for setup in setups}
    if len(found) != 1:
        raise ValueError(
            f"one router for clusters of {sorted(found)} instances and slots; they must be alike"
        )
    return found.pop()


def _first(info: dict[str, Any]) -> dict[str, Any]:
    return {name: values[0].tolist() for name, values in info.items()}


IntArray = npt.NDArray[np.int64]

BASE, MIXING, GUIDANCE = range(3)
"""Terms of a reward: equation 3's sums, r_mixing, and h."""

TERMS = 3
WORK = 4
"""Sums of `_work_left`."""


class RewardRules(NamedTuple):
    """The constants of the reward.

    Attributes:
        completion: r_w, of a completed request.
        prompt_seconds: t_p, of a prompt token when a request is alone.
        token_seconds: t_d, of a decoded token when a request is alone.
        impact: of mixing requests, in r_mixing.
        guide: the same in h.
    """

    completion: float
    prompt_seconds: float
    token_seconds: float
    impact: ImpactRules
    guide: ImpactRules


class StepArrays(NamedTuple):
    r"""What is written of B simulations.

    Attributes:
        going: [B] which to simulate: those that are not at their next decision.
        wanted: [B] why each returned: `Wanted.ASK` where it can act, `PAUSED` where no request
            waits; others go on where they were.
        completed: [B] requests completed.
        order: [B, G] instances as the states show them.
        state: [B, D] of `router_state`, at the next decision.
        work: [B, 4] :math:`\sum_j (1 - f_j) / \hat T_j`, the first sum of equation 3 without its
            sign, and :math:`\sum_j (1 - f_j)`, of the requests in the system; then both of those
            alone that came since the last decision.
        terms: [B, 3] of the reward.
    """

    going: npt.NDArray[np.bool_]
    wanted: IntArray
    completed: IntArray
    order: IntArray
    state: FloatArray
    work: FloatArray
    terms: FloatArray


@compiled
def engine_list(engine: EngineParts) -> Any:
    """Return a list with one simulation, that compiled code reads without unpacking it."""
    engines = List()
    engines.append(engine)
    return engines


@compiled
def put_engine(engines: Any, at: int, engine: EngineParts) -> None:
    """Put a simulation into the list, at its end or in place of another."""
    if at == len(engines):
        engines.append(engine)
    else:
        engines[at] = engine


@compiled
def step_engines(
    engines: Any,
    rewards: RewardRules,
    scales: StateScales,
    kernel: Kernel,
    until: FloatArray,
    interval: float,
    action: IntArray,
    written: StepArrays,
) -> bool:
    """Act on each of B simulations and simulate to its next decision; return whether all are there.

    Args:
        engines: [B] of `engine_list`.
        rewards: constants of the reward.
        scales: of the states.
        kernel: is never called; the engine takes one.
        until: [B] seconds of the next decision.
        interval: seconds between two decisions.
        action: [B] place in ``order`` of the instance for the first request of the queue, or `NONE`
            to let it wait.
        written: what is written of each.
    """
    there = True
    for b in range(len(engines)):
        if written.going[b]:
            _step(engines[b], rewards, scales, kernel, until[b], interval, action[b], written, b)
            there = there and not written.going[b]
    return there


@compiled_core
def _step(
    engine: EngineParts,
    rewards: RewardRules,
    scales: StateScales,
    kernel: Kernel,
    until: float,
    interval: float,
    action: int,
    written: StepArrays,
    b: int,
) -> None:
    rules, cluster, arrivals = engine.rules, engine.cluster, engine.arrivals
    policy_state = engine.policy_state
    terms, order = written.terms[b], written.order[b]
    if written.wanted[b] == Wanted.ASK:
        _act(engine, rewards, NONE if action == NONE else order[action], terms)
    elif written.wanted[b] == Wanted.PAUSED:
        terms[MIXING] = 0.0
        terms[GUIDANCE] = 0.0
    wanted = advance(engine, kernel, until)
    written.wanted[b] = wanted
    written.going[b] = wanted not in (Wanted.ASK, Wanted.PAUSED, Wanted.DONE)
    if written.going[b]:
        return
    inputs = fill_routing_inputs(rules, policy_state, cluster, arrivals, cluster.scalars[0].waiting)
    router_state(inputs, scales, order, written.state[b])
    work = written.work[b]
    _work_left(rewards, policy_state.forecast, cluster, arrivals, until - interval, work)
    ended = cluster.scalars[0].revealed - cluster.scalars[0].in_system
    terms[BASE] = rewards.completion * (ended - written.completed[b]) - work[0]
    written.completed[b] = ended


@compiled_core
def _act(engine: EngineParts, rewards: RewardRules, g: int, terms: FloatArray) -> None:
    """Send the first request of the queue to instance g, or let it wait."""
    arrivals = engine.arrivals
    shown = engine.policy_state.inputs  # as it was filled for the last state
    terms[MIXING] = 0.0
    arrivals.target[: engine.cluster.scalars[0].waiting] = NONE
    prompt, output = shown.size[0], shown.remaining[0]
    terms[GUIDANCE] = guidance(rewards.guide, shown.load, prompt, output, g)
    if g != NONE:
        terms[MIXING] = mixing(rewards.impact, shown.load[g], prompt, output)
        arrivals.target[0] = g
    apply_target(engine.rules, engine.cluster, arrivals)


@compiled_core
def _work_left(
    rules: RewardRules,
    forecast: ForecastArrays,
    cluster: Cluster,
    arrivals: Arrivals,
    since: float,
    work: FloatArray,
) -> None:
    """Add up what is left of the requests in the system; those that came after since are new."""
    work[:] = 0.0
    for i in range(gather_placed(cluster)):
        placed = cluster.placed[i]
        _add_left(rules, forecast, cluster, placed.row, placed.generated, since, work)
    for i in range(cluster.scalars[0].waiting):
        row = arrivals.pool[i]
        _add_left(rules, forecast, cluster, row, cluster.requests[row].generated, since, work)


@compiled_inline
def _add_left(
    rules: RewardRules,
    forecast: ForecastArrays,
    cluster: Cluster,
    row: int,
    generated: int,
    since: float,
    work: FloatArray,
) -> None:
    request = cluster.requests[row]
    left = expected_left(forecast, cluster, row, generated)
    whole = generated + left
    alone = request.prompt * rules.prompt_seconds + whole * rules.token_seconds
    unfinished = left / whole / alone
    to_come = 1.0 - generated / request.output
    work[0] += unfinished
    work[1] += to_come
    if request.arrival > since:
        work[2] += unfinished
        work[3] += to_come
