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
from numba.typed import List

from predictor.compilation import compiled, compiled_core, compiled_inline
from rescheduler.cluster.registry import POSITIVE, Checked
from rescheduler.commands.event_loop import held_interrupts
from rescheduler.papers.jain_router.workload_impact import (
    V100_GRADIENTS,
    ImpactRules,
    guidance,
    mixing,
)
from rescheduler.routing import Needs, RoutingPolicy
from rescheduler.routing.learned.rl import StateScales, router_state, state_bounds, state_size
from rescheduler.routing.policy import NO_KERNEL, Kernel
from rescheduler.simulator.engine.engine import EngineParts, advance, apply_target
from rescheduler.simulator.engine.engine_state import NONE, Wanted
from rescheduler.simulator.engine.ordered_pool import expected_left
from rescheduler.simulator.engine.routing_inputs import fill_routing_inputs, gather_placed
from rescheduler.simulator.simulation import RunSetup, Simulation
from rescheduler.step_time.profile import load_profile

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_MANY_REQUESTS = 32.0
"""A count of requests that the state shows as 1."""
_LONG_WAIT_S = 2.0
"""Seconds until the first request ends that the state shows as 1."""
_MUCH_CAPACITY = 0.2
"""Free share of a KV cache that the state shows as 1."""


@dataclass(frozen=True)
class RouterConfig(
    Checked,
    interval=POSITIVE,
    long_prompt=POSITIVE,
    prompt_seconds=POSITIVE,
    token_seconds=POSITIVE,
    balance="[0, 1]",
    tolerance_s=POSITIVE,
    guidance_tolerance_s=POSITIVE,
    max_seconds=POSITIVE,
):
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
        super().__post_init__()
        ascending = all(low < high for low, high in pairwise(self.edges))
        if not self.edges or self.edges[0] != 0 or not ascending:
            raise ValueError(f"router.edges must ascend from 0, not {list(self.edges)}")

    def _section(self) -> str:
        return "router."

    def rewards(self) -> "RewardRules":
        """Return the constants of the reward.

        The gradients are the paper's, or the least-squares slopes of the profile (§3).

        Raises:
            ValueError: ``profile`` is not a profile; so `scales`.
        """
        gradients, alone = V100_GRADIENTS, (float(self.prompt_seconds), float(self.token_seconds))
        if self.profile is not None:
            profile = load_profile(self.profile)
            gradients = profile.gradients.prompt, profile.gradients.decode
            alone = profile.gradients.prompt, profile.batch.seconds(1, 0)
        impact = ImpactRules(*gradients, float(self.balance), float(self.tolerance_s))
        guide = impact._replace(tolerance=float(self.guidance_tolerance_s))
        return RewardRules(float(self.completion_reward), *alone, impact, guide)

    def scales(self, slots: int) -> StateScales:
        """Return what the state's numbers are measured in, of instances with so many slots."""
        seconds = self.rewards().token_seconds
        return StateScales(
            float(slots),
            _MANY_REQUESTS,
            float(self.long_prompt),
            seconds,
            _LONG_WAIT_S,
            _MUCH_CAPACITY,
        )


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

    def length_edges(self) -> IntArray:
        """Return the buckets of the state."""
        return np.array(self.config.edges, dtype=np.int64)

    def decide_every(self) -> float:
        """Return Δt."""
        return self.config.interval


class RouterEnvironment(gym.Env[FloatArray, np.int64]):
    """A simulated cluster of G instances, with a queue whose first request is routed.

    Every Δt of the simulation the first request of the queue goes to the m-th instance by KV load,
    as the state shows them, or waits if m = G; without a request the action means nothing. The
    observation is `router_state`, the reward equation 3's first two sums, as of the next decision,
    plus what `shaping` says. An episode ends when all requests of its trace are served, or is cut
    at ``max_seconds``.

    ``info`` has ``routable`` (a request waits, so that the action will mean something), ``mixing``
    and ``guidance`` (r_mixing and h of the action just taken, 0 where none was), and ``work`` [4]
    (see `_Written`).

    Args:
        setup: cluster, requests and forecasts; with dispatch instant, so that an instance queues
            what it has no place for.
        config: of the task.

    Attributes:
        shaping: of the reward, none at first; may be changed between two steps.
        simulation: of the episode, as it is; its results are the episode's.

    Raises:
        ValueError: there are no forecasts, or a simulation is of a kind that is not routed at
            intervals.
    """

    def __init__(self, setup: RunSetup, config: RouterConfig) -> None:
        self.config = config
        self.shaping = Shaping()
        self.n_instances = setup.config.cluster.instances
        self.simulation = Simulation(setup, _Agent(config), 0)
        scales = config.scales(setup.config.cluster.slots)
        n_state = state_size(self.n_instances, len(config.edges))
        self.observation_space = gym.spaces.Box(*state_bounds(scales), (n_state,), np.float64)
        self.action_space = gym.spaces.Discrete(self.n_instances + 1)
        self._setup = setup
        self._decision = 0
        self._wanted = int(Wanted.PAUSED)
        self._written = _Written(
            order=np.zeros(self.n_instances, dtype=np.int64),
            state=np.zeros(n_state),
            work=np.zeros(4),
            terms=np.zeros(3),
            completed=np.zeros(1, dtype=np.int64),
        )
        self._settings = config.rewards(), scales, float(config.interval), self._written
        self._task = _compiled_task(self.simulation.engine, *self._settings)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        """Begin an episode whose requests are drawn with a seed, or with one that is drawn."""
        super().reset(seed=seed)
        own = int(self.np_random.integers(0, 2**31)) if seed is None else seed
        self.simulation = Simulation(self._setup, _Agent(self.config), own)
        self._task = _compiled_task(self.simulation.engine, *self._settings)
        self._decision = 0
        self._written.completed[:] = 0
        self._advance()
        self._written.terms[:] = 0.0
        return self._written.state.copy(), self._info()

    def step(self, action: np.int64) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        """Act, and simulate to the next decision; return state, reward, ended, cut, info.

        Raises:
            ValueError: an unknown action.
        """
        if not 0 <= action <= self.n_instances:
            raise ValueError(f"an action is in 0 .. {self.n_instances}, not {action}")
        terms = self._written.terms
        terms[:] = 0.0
        if self._wanted == Wanted.ASK:
            _act(self._task, NONE if action == self.n_instances else int(action))
        self._decision += 1
        self._advance()
        ended = self._wanted == Wanted.DONE
        cut = not ended and self._decision * self.config.interval >= self.config.max_seconds
        reward = terms[0] + self.shaping.mixing * terms[1] + self.shaping.guidance * terms[2]
        return self._written.state.copy(), float(reward), ended, cut, self._info()

    def _advance(self) -> None:
        """Simulate to the next decision, as `Simulation.advance` does, but in compiled code."""
        until = self._decision * self.config.interval
        with held_interrupts():
            while (wanted := _step(self._task, NO_KERNEL, until)) not in _DECISIONS:
                self.simulation.provide(wanted)
                self._task = _compiled_task(self.simulation.engine, *self._settings)
        self._wanted = wanted

    def _info(self) -> dict[str, Any]:
        return {
            "routable": self._wanted == Wanted.ASK,
            "mixing": float(self._written.terms[1]),
            "guidance": float(self._written.terms[2]),
            "work": self._written.work.tolist(),
        }


def router_environments(
    setups: Sequence[RunSetup], config: RouterConfig, n: int
) -> list[RouterEnvironment]:
    """Return n environments, of the setups in turn.

    Raises:
        ValueError: the clusters differ in instances or slots, some setup has no environment, or as
            `RouterEnvironment`.
    """
    if n < len(setups):
        raise ValueError(f"at least {len(setups)} simulations at once, not {n}")
    clusters = {(setup.config.cluster.instances, setup.config.cluster.slots) for setup in setups}
    if len(clusters) != 1:
        raise ValueError(
            f"one router for clusters of {sorted(clusters)} instances and slots; they must be alike"
        )
    return [RouterEnvironment(setups[i % len(setups)], config) for i in range(n)]


_DECISIONS = (Wanted.ASK, Wanted.PAUSED, Wanted.DONE)
"""What the engine returns at a decision: a request waits, none waits, or all are served."""


class _Written(NamedTuple):
    r"""What compiled code writes of a decision.

    Attributes:
        order: [G] instances as the state shows them.
        state: [D] of `router_state`, at the next decision.
        work: [4] :math:`\sum_j (1 - f_j) / \hat T_j`, the first sum of equation 3 without its
            sign, and :math:`\sum_j (1 - f_j)`, of the requests in the system; then both of those
            alone that came since the last decision.
        terms: [3] of the reward: equation 3's sums, r_mixing, and h.
        completed: [1] requests completed since the start.
    """

    order: IntArray
    state: FloatArray
    work: FloatArray
    terms: FloatArray
    completed: IntArray


class _Task(NamedTuple):
    """What compiled code works on."""

    engine: EngineParts
    rewards: RewardRules
    scales: StateScales
    interval: float
    written: _Written


@compiled
def _compiled_task(
    engine: EngineParts,
    rewards: RewardRules,
    scales: StateScales,
    interval: float,
    written: _Written,
) -> Any:
    """Return a list with a `_Task`, which compiled code reads without unpacking it."""
    tasks = List()
    tasks.append(_Task(engine, rewards, scales, interval, written))
    return tasks


@compiled
def _act(tasks: Any, action: int) -> None:
    """Send the first request of the queue to the instance at a place in the order, or nowhere."""
    engine, rewards, _, _, written = tasks[0]
    arrivals, terms = engine.arrivals, written.terms
    g = NONE if action == NONE else written.order[action]
    shown = engine.policy_state.inputs  # as it was filled for the last state
    prompt, output = shown.size[0], shown.remaining[0]
    arrivals.target[: engine.cluster.scalars[0].waiting] = NONE
    terms[2] = guidance(rewards.guide, shown.load, prompt, output, g)
    if g != NONE:
        terms[1] = mixing(rewards.impact, shown.load[g], prompt, output)
        arrivals.target[0] = g
    apply_target(engine.rules, engine.cluster, arrivals)


@compiled
def _step(tasks: Any, kernel: Kernel, until: float) -> int:
    """Simulate until a time, or until the engine wants something; return what, as `advance` does.

    At a decision, write of it what `_Written` has. The engine takes a kernel, and never calls it.
    """
    task = tasks[0]
    wanted = advance(task.engine, kernel, until)
    if wanted in (Wanted.ASK, Wanted.PAUSED, Wanted.DONE):
        _write(task, until - task.interval)
    return wanted


@compiled_core
def _write(task: _Task, since: float) -> None:
    rules, cluster, arrivals = task.engine.rules, task.engine.cluster, task.engine.arrivals
    policy_state, written = task.engine.policy_state, task.written
    waiting = cluster.scalars[0].waiting
    inputs = fill_routing_inputs(rules, policy_state, cluster, arrivals, waiting)
    router_state(inputs, task.scales, written.order, written.state)
    written.work[:] = 0.0
    for i in range(gather_placed(cluster)):
        placed = cluster.placed[i]
        _add_left(task, placed.row, placed.generated, since)
    for i in range(waiting):
        row = arrivals.pool[i]
        _add_left(task, row, cluster.requests[row].generated, since)
    ended = cluster.scalars[0].revealed - cluster.scalars[0].in_system
    completed = ended - written.completed[0]
    written.terms[0] = task.rewards.completion * completed - written.work[0]
    written.completed[0] = ended


@compiled_inline
def _add_left(task: _Task, row: int, generated: int, since: float) -> None:
    """Add what is left of a request to the work; one that came after ``since`` is new."""
    rules, cluster, work = task.rewards, task.engine.cluster, task.written.work
    request = cluster.requests[row]
    left = expected_left(task.engine.policy_state.forecast, cluster, row, generated)
    whole = generated + left
    alone = request.prompt * rules.prompt_seconds + whole * rules.token_seconds
    unfinished = left / whole / alone
    to_come = 1.0 - generated / request.output
    work[0] += unfinished
    work[1] += to_come
    if request.arrival > since:
        work[2] += unfinished
        work[3] += to_come
