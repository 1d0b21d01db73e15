r"""A compiled fleet of replicas whose number changes, in ticks of about a second.

A replica with B decoding requests, L tokens in its KV cache and U prompt tokens that it has yet to
compute makes

.. math:: n = \begin{cases} (\Delta - b U) / t(B, L) & \text{if all prompts are done in the tick} \\
    \Delta / (t(B, L) + b C) & \text{otherwise} \end{cases}

steps in a tick of :math:`\Delta` seconds, each of them a token for every decoding request, with t
the time of a decode step, b the seconds a prompt token adds, and C the tokens left of
``max_num_batched_tokens``: vLLM's chunked prefill, averaged over a tick.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled_core
from rescheduler.scaling.lengths import LengthForecast, still_running
from rescheduler.step_time.step_time import StepTime, step_seconds

__all__ = [
    "ARRIVED",
    "CUT",
    "DRAINING",
    "DRAIN_SECONDS",
    "HEAD",
    "MOVED",
    "NOW",
    "PAID_SECONDS",
    "PREEMPTED",
    "READY",
    "STARTING",
    "STOPPED",
    "Fleet",
    "Machine",
    "advance",
    "drain",
    "empty_fleet",
    "expected_load",
    "observed_load",
    "start",
    "waiting_load",
]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

STOPPED, STARTING, READY, DRAINING = 0, 1, 2, 3
"""States of a replica; all but the first are paid for."""

HEAD, ARRIVED, RETURNED, MOVED, CUT, PREEMPTED = 0, 1, 2, 3, 4, 5
NOW, PAID_SECONDS, DRAIN_SECONDS = 0, 1, 2

_LITTLE = 1e-9


class Machine(NamedTuple):
    """What every replica is like.

    Attributes:
        step_time: seconds of a step.
        slots: requests at once, vLLM's ``max_num_seqs``.
        capacity: tokens in the KV cache.
        batched_tokens: tokens of a step, at most.
        move_seconds: that a moved request stands still, whatever its size.
        move_seconds_per_token: of its KV cache, added to that.
        tick: seconds.
        moves: whether a drained replica's requests move when its time is up, or are cut.
    """

    step_time: StepTime
    slots: int
    capacity: float
    batched_tokens: int
    move_seconds: float
    move_seconds_per_token: float
    tick: float
    moves: bool


class Fleet(NamedTuple):
    """N requests and M places for replicas of S slots each; arrays that `advance` changes.

    Attributes:
        arrival: [N] seconds, ascending.
        prompt: [N] tokens.
        output: [N] tokens.
        prompts_before: [N + 1] prompt tokens of all earlier requests.
        first: [N] when the first token came; NaN before.
        end: [N] when the last one came; NaN before, and of a cut request.
        state: [M] of the replicas.
        ready_at: [M] when one that starts will be ready.
        started_at: [M] when it began to start.
        drain_end: [M] when what is left of one that drains moves, or is cut.
        occupied: [M] slots: requests on it.
        held: [M] tokens in its KV cache; those of a prompt from the beginning.
        request: [M, S] which requests, in the order of their admission.
        generated: [M, S] tokens; a part of one is under way.
        unread: [M, S] tokens whose KV is still to be computed.
        pause: [M, S] seconds that a moved request still stands.
        returned: [N] requests that were preempted, the next one last.
        returned_generated: [N] tokens that each had generated.
        counts: [6] integers, by HEAD, ARRIVED, RETURNED, MOVED, CUT, PREEMPTED.
        clock: [3] seconds, by NOW, PAID_SECONDS, DRAIN_SECONDS.
    """

    arrival: FloatArray
    prompt: FloatArray
    output: FloatArray
    prompts_before: FloatArray
    first: FloatArray
    end: FloatArray
    state: IntArray
    ready_at: FloatArray
    started_at: FloatArray
    drain_end: FloatArray
    occupied: IntArray
    held: FloatArray
    request: IntArray
    generated: FloatArray
    unread: FloatArray
    pause: FloatArray
    returned: IntArray
    returned_generated: FloatArray
    counts: IntArray
    clock: FloatArray


def empty_fleet(
    arrival: FloatArray, prompt: Any, output: Any, machine: Machine, replicas: int
) -> Fleet:
    """Return a fleet before its first request, all replicas stopped.

    Args:
        arrival: [N] seconds from 0, ascending; counted from the beginning of their tick.
        prompt: [N] tokens.
        output: [N] tokens.
        machine: of all replicas.
        replicas: M, the most there can be.
    """
    n, shape = len(arrival), (replicas, machine.slots)
    return Fleet(
        arrival=np.floor(arrival / machine.tick) * machine.tick,
        prompt=np.asarray(prompt, dtype=np.float64),
        output=np.asarray(output, dtype=np.float64),
        prompts_before=np.concatenate([[0.0], np.cumsum(prompt, dtype=np.float64)]),
        first=np.full(n, np.nan),
        end=np.full(n, np.nan),
        state=np.full(replicas, STOPPED),
        ready_at=np.zeros(replicas),
        started_at=np.zeros(replicas),
        drain_end=np.zeros(replicas),
        occupied=np.zeros(replicas, dtype=np.int64),
        held=np.zeros(replicas),
        request=np.zeros(shape, dtype=np.int64),
        generated=np.zeros(shape),
        unread=np.zeros(shape),
        pause=np.zeros(shape),
        returned=np.zeros(n, dtype=np.int64),
        returned_generated=np.zeros(n),
        counts=np.zeros(6, dtype=np.int64),
        clock=np.zeros(3),
    )


@compiled_core
def advance(fleet: Fleet, machine: Machine, until: float) -> None:
    """Let the fleet serve until a time: its requests arrive, are computed, move and end."""
    tick = machine.tick
    while fleet.clock[NOW] < until - _LITTLE:
        now = fleet.clock[NOW]
        for m in range(len(fleet.state)):
            if fleet.state[m] == STARTING and fleet.ready_at[m] <= now + _LITTLE:
                fleet.state[m] = READY
        _admit(fleet, machine)
        for m in range(len(fleet.state)):
            if fleet.state[m] == STOPPED:
                continue
            fleet.clock[PAID_SECONDS] += tick
            if fleet.state[m] == DRAINING:
                fleet.clock[DRAIN_SECONDS] += tick
            if fleet.occupied[m] > 0:
                _compute(fleet, machine, m)
        fleet.clock[NOW] = now + tick
        for m in range(len(fleet.state)):
            if fleet.state[m] == DRAINING:
                _clear(fleet, machine, m)


@compiled_core
def _admit(fleet: Fleet, machine: Machine) -> None:
    """Give room to those who wait: first to the preempted, then in the order of arrival."""
    counts, now = fleet.counts, fleet.clock[NOW]
    while counts[ARRIVED] < len(fleet.arrival) and fleet.arrival[counts[ARRIVED]] <= now + _LITTLE:
        counts[ARRIVED] += 1
    while counts[RETURNED] > 0:
        last = counts[RETURNED] - 1
        i, generated = fleet.returned[last], fleet.returned_generated[last]
        if not _place(fleet, machine, i, generated, fleet.prompt[i] + generated, 0.0):
            return
        counts[RETURNED] -= 1
    while counts[HEAD] < counts[ARRIVED]:
        i = counts[HEAD]
        if not _place(fleet, machine, i, 0.0, fleet.prompt[i], 0.0):
            return
        counts[HEAD] += 1


@compiled_core
def _place(
    fleet: Fleet, machine: Machine, i: int, generated: float, unread: float, pause: float
) -> bool:
    """Put a request on the ready replica with the least KV load that has room; say if one had."""
    needed = fleet.prompt[i] + generated
    best, least = -1, machine.capacity - needed + _LITTLE
    for m in range(len(fleet.state)):
        if fleet.state[m] == READY and fleet.occupied[m] < machine.slots and fleet.held[m] < least:
            best, least = m, fleet.held[m]
    if best < 0:
        return False
    s = fleet.occupied[best]
    fleet.request[best, s] = i
    fleet.generated[best, s] = generated
    fleet.unread[best, s] = unread
    fleet.pause[best, s] = pause
    fleet.occupied[best] = s + 1
    fleet.held[best] += needed
    return True


@compiled_core
def _compute(fleet: Fleet, machine: Machine, m: int) -> None:
    """Compute a replica's tick, see the module's equation."""
    tick, now = machine.tick, fleet.clock[NOW]
    decoding, unread = 0, 0.0
    for s in range(fleet.occupied[m]):
        if fleet.unread[m, s] > 0:
            unread += fleet.unread[m, s]
        else:
            decoding += 1
    step = max(step_seconds(machine.step_time, decoding, fleet.held[m]), 1e-6)
    chunk = max(machine.batched_tokens - decoding, 1)
    full = max(step_seconds(machine.step_time, decoding + chunk, fleet.held[m]), step + 1e-9)
    per_token = (full - step) / chunk
    steps = tick / step
    if unread > 0:
        in_time = unread / chunk * full <= tick
        steps = (tick - per_token * unread) / step if in_time else tick / full
    _preempt(fleet, machine, m, steps)
    read, rate, kept = 0.0, chunk / full, 0
    for s in range(fleet.occupied[m]):
        i, generated, left = fleet.request[m, s], fleet.generated[m, s], fleet.unread[m, s]
        pause, active = fleet.pause[m, s], tick
        if left > 0:
            share = min(left, rate * tick - read)
            read += share
            left -= share
            active = 0.0 if left > _LITTLE else tick - read / rate
            if left <= _LITTLE:
                left = 0.0
                if generated == 0:
                    generated = 1.0
                    fleet.held[m] += 1
                    fleet.first[i] = now + read / rate
        lost = min(pause, active)
        pause -= lost
        active -= lost
        grown, to_come = steps * active / tick, fleet.output[i] - generated
        if left == 0 and grown >= to_come - _LITTLE:
            share = to_come / grown if grown > 0 else 0.0
            fleet.end[i] = now + tick - active * (1 - share)
            fleet.held[m] -= fleet.prompt[i] + generated
            continue
        fleet.held[m] += grown
        fleet.request[m, kept] = i
        fleet.generated[m, kept] = generated + grown
        fleet.unread[m, kept] = left
        fleet.pause[m, kept] = pause
        kept += 1
    fleet.occupied[m] = kept
    if kept == 0:
        fleet.held[m] = 0.0


@compiled_core
def _preempt(fleet: Fleet, machine: Machine, m: int, steps: float) -> None:
    """Send those back that came last, until what the others generate in a tick fits."""
    growth = 0.0
    for s in range(fleet.occupied[m]):
        growth += _most_grown(fleet, m, s, steps)
    while fleet.held[m] + growth > machine.capacity and fleet.occupied[m] > 1:
        s = fleet.occupied[m] - 1
        i, generated = fleet.request[m, s], fleet.generated[m, s]
        growth -= _most_grown(fleet, m, s, steps)
        fleet.held[m] -= fleet.prompt[i] + generated
        fleet.occupied[m] = s
        fleet.returned[fleet.counts[RETURNED]] = i
        fleet.returned_generated[fleet.counts[RETURNED]] = generated
        fleet.counts[RETURNED] += 1
        fleet.counts[PREEMPTED] += 1


@compiled_core
def _most_grown(fleet: Fleet, m: int, s: int, steps: float) -> float:
    """Return the most tokens that a request can add in a tick, its first one included."""
    left = fleet.output[fleet.request[m, s]] - fleet.generated[m, s]
    return min(steps + 1.0, float(left))


@compiled_core
def _clear(fleet: Fleet, machine: Machine, m: int) -> None:
    """Move or cut what is left of a replica whose time to drain is up; stop an empty one."""
    if fleet.occupied[m] > 0 and fleet.clock[NOW] >= fleet.drain_end[m] - _LITTLE:
        kept = 0
        for s in range(fleet.occupied[m]):
            i, generated, unread = fleet.request[m, s], fleet.generated[m, s], fleet.unread[m, s]
            tokens = fleet.prompt[i] + generated
            if machine.moves:
                pause = machine.move_seconds + machine.move_seconds_per_token * (tokens - unread)
                pause += fleet.pause[m, s]
                if not _place(fleet, machine, i, generated, unread, pause):
                    fleet.request[m, kept] = i
                    fleet.generated[m, kept] = generated
                    fleet.unread[m, kept] = unread
                    fleet.pause[m, kept] = fleet.pause[m, s]
                    kept += 1
                    continue
                fleet.counts[MOVED] += 1
            else:
                fleet.counts[CUT] += 1
            fleet.held[m] -= tokens
        fleet.occupied[m] = kept
    if fleet.occupied[m] == 0:
        fleet.held[m] = 0.0
        fleet.state[m] = STOPPED


def start(fleet: Fleet, seconds: float) -> bool:
    """Start a replica that will be ready in so many seconds; say whether there was a place."""
    stopped = np.flatnonzero(fleet.state == STOPPED)
    if len(stopped) == 0:
        return False
    m = stopped[0]
    fleet.state[m] = STARTING
    fleet.started_at[m] = fleet.clock[NOW]
    fleet.ready_at[m] = fleet.clock[NOW] + seconds
    return True


def drain(fleet: Fleet, m: int, seconds: float) -> None:
    """Give a replica no more requests, and so many seconds; one that starts stops at once."""
    if fleet.state[m] == STARTING:
        fleet.state[m] = STOPPED
    else:
        fleet.state[m] = DRAINING
        fleet.drain_end[m] = fleet.clock[NOW] + seconds


@compiled_core
def observed_load(fleet: Fleet) -> tuple[float, float, float]:
    """Return what vLLM's metrics sum up to: requests running, requests waiting, tokens held.

    A request waits as long as nothing of its prompt is computed, as ``num_requests_waiting`` has
    it; so do those that no replica has room for. Draining replicas count too.
    """
    counts = fleet.counts
    waiting = float(counts[ARRIVED] - counts[HEAD] + counts[RETURNED])
    running, held = 0.0, 0.0
    for m in range(len(fleet.state)):
        held += fleet.held[m]
        for s in range(fleet.occupied[m]):
            i = fleet.request[m, s]
            if fleet.unread[m, s] == fleet.prompt[i] + fleet.generated[m, s]:
                waiting += 1.0
            else:
                running += 1.0
    return running, waiting, held


@compiled_core
def waiting_load(fleet: Fleet) -> tuple[float, float]:
    """Return the requests that no replica has room for, and their tokens."""
    counts = fleet.counts
    tokens = fleet.prompts_before[counts[ARRIVED]] - fleet.prompts_before[counts[HEAD]]
    for k in range(counts[RETURNED]):
        tokens += fleet.prompt[fleet.returned[k]] + fleet.returned_generated[k]
    return float(counts[ARRIVED] - counts[HEAD] + counts[RETURNED]), tokens


@compiled_core
def expected_load(
    fleet: Fleet, forecast: LengthForecast, first: int, last: int, steps: float
) -> tuple[float, float, float]:
    r"""Return what the requests of some replicas are expected to be in some steps.

    .. math:: \sum_i p_i, \qquad \sum_i p_i (1 - p_i), \qquad \sum_i p_i (c_i + h)

    with :math:`p_i = P(o_i > n_i + h \mid o_i > n_i)`, :math:`c_i` the tokens held and h the steps:
    requests, their variance, and tokens.
    """
    requests, variance, tokens = 0.0, 0.0, 0.0
    for m in range(first, last + 1):
        for s in range(fleet.occupied[m]):
            i, generated = fleet.request[m, s], fleet.generated[m, s]
            p = still_running(forecast, i, generated, steps, fleet.output[i])
            requests += p
            variance += p * (1 - p)
            tokens += p * (fleet.prompt[i] + generated + steps)
    return requests, variance, tokens
