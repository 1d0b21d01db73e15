r"""Steps of simulations from decision to decision, and their rewards, in compiled code.

.. math:: r_t = -\sum_{j} \frac{1}{\hat T_j} (1 - f_{jt}) + \sum_i r_w w_{it}, \qquad
   f_{jt} = \frac{o_{jt}}{\hat d_{jt}}, \qquad \hat T_j = p_j t_p + \hat d_{jt} t_d \tag{3}

over all requests j in the system, in the queue or on an instance; :math:`w_{it}` is 1 for those
completed since the last step. With :math:`o` tokens so far and :math:`\hat R` expected yet,
:math:`\hat d = o + \hat R`. Jain et al. 2025, §4.3.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba.typed import List

from predictor.compilation import compiled, compiled_core, compiled_inline
from rescheduler.papers.jain_router.workload_impact import ImpactRules, guidance, mixing
from rescheduler.routing.learned.rl import StateScales, router_state
from rescheduler.routing.policy import Kernel
from rescheduler.simulator.engine.engine import EngineParts, advance, apply_target
from rescheduler.simulator.engine.engine_state import NONE, Arrivals, Cluster, Wanted
from rescheduler.simulator.engine.ordered_pool import expected_left
from rescheduler.simulator.engine.routing_inputs import fill_routing_inputs, gather_placed
from rescheduler.simulator.forecasts.forecast_arrays import ForecastArrays

FloatArray = npt.NDArray[np.float64]
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
