"""Steps of several simulations at once, from decision to decision, in compiled code."""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba.typed import List

from predictor.compilation import compiled, compiled_core
from rescheduler.papers.jain_router.reward import RewardRules, work_left
from rescheduler.routing.kernels import Kernel
from rescheduler.routing.learned.router_state import StateScales, router_state
from rescheduler.routing.learned.workload_impact import guidance, mixing
from rescheduler.simulator.engine.engine import EngineParts, advance, apply_target
from rescheduler.simulator.engine.engine_state import ASK, DONE, NONE, PAUSED
from rescheduler.simulator.engine.routing_inputs import fill_routing_inputs

__all__ = ["BASE", "GUIDANCE", "MIXING", "TERMS", "engine_list", "put_engine", "step_engines"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

BASE, MIXING, GUIDANCE = range(3)
"""Terms of a reward: its first two sums, r_mixing, and h."""

TERMS = 3


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
    going: npt.NDArray[np.bool_],
    wanted: IntArray,
    completed: IntArray,
    order: IntArray,
    state: FloatArray,
    work: FloatArray,
    terms: FloatArray,
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
        going: [B] which to simulate. Is written: which wait for what they returned for.
        wanted: [B] why each returned before: `ASK` where it can act, `PAUSED` where no request
            waits; others continue where they were. Is written.
        completed: [B] requests completed. Is written.
        order: [B, G] instances as the states show them. Is written with the states.
        state: [B, D] is written once a simulation is at its next decision.
        work: [B, 4] of `work_left`, new being what came since the last decision. Is written.
        terms: [B, 3] of the reward. Is written.
    """
    there = True
    for b in range(len(engines)):
        if going[b]:
            wanted[b] = _step(
                engines[b],
                rewards,
                scales,
                kernel,
                until[b],
                interval,
                action[b],
                wanted[b],
                completed[b : b + 1],
                order[b],
                state[b],
                work[b],
                terms[b],
            )
            going[b] = not _at_a_decision(wanted[b])
            there = there and not going[b]
    return there


@compiled_core
def _at_a_decision(wanted: int) -> bool:
    return wanted in (ASK, PAUSED, DONE)


@compiled_core
def _step(
    engine: EngineParts,
    rewards: RewardRules,
    scales: StateScales,
    kernel: Kernel,
    until: float,
    interval: float,
    action: int,
    returned: int,
    completed: IntArray,
    order: IntArray,
    state: FloatArray,
    work: FloatArray,
    terms: FloatArray,
) -> int:
    """Step one simulation; see `step_engines`."""
    rules, cluster, arrivals, policy_state = (
        engine.rules,
        engine.cluster,
        engine.arrivals,
        engine.policy_state,
    )
    scalars = cluster.scalars[0]
    if returned == ASK:
        _act(engine, rewards, NONE if action == NONE else order[action], terms)
    elif returned == PAUSED:
        terms[MIXING] = 0.0
        terms[GUIDANCE] = 0.0
    wanted = advance(
        rules,
        engine.step_time,
        engine.power_model,
        policy_state,
        cluster,
        engine.batch,
        arrivals,
        engine.series,
        kernel,
        until,
    )
    if not _at_a_decision(wanted):
        return wanted
    router_state(fill_routing_inputs(rules, policy_state, cluster, arrivals), scales, order, state)
    ended = scalars.revealed - scalars.in_system
    work_left(rewards, policy_state.forecast, cluster, arrivals, until - interval, work)
    terms[BASE] = rewards.completion * (ended - completed[0]) - work[0]
    completed[0] = ended
    return wanted


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
