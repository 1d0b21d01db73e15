"""The arrays of one simulation: the records that the engine keeps and moves on."""

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rescheduler.ordering.kernel import LATENCIES, OrderParameters, Waiting, new_waiting
from rescheduler.routing.inputs import RoutingInputs, new_routing_inputs
from rescheduler.routing.policy import Needs, RoutingPolicy
from rescheduler.simulator.config.rules import Rules
from rescheduler.simulator.forecasts.forecast_arrays import ForecastArrays

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Records = npt.NDArray[Any]

INSTANCE = np.dtype(
    [
        ("load", np.int64),  # context tokens of requests that decode or fill
        ("decoding", np.int64),
        ("filling", np.int64),  # first row of those whose prompts are being computed, or NONE
        ("n_filling", np.int64),
        ("queued", np.int64),
        ("queued_tokens", np.int64),
        ("arriving", np.int64),  # migrations on their way here, for which room is kept
        ("arriving_tokens", np.int64),
        ("leaving_tokens", np.int64),  # migrations on their way from here, still in memory
        ("steps", np.int64),
        ("grown", np.int64),  # tokens that a request which decoded from the first step has gained
        ("next_end", np.int64),  # value of steps at which a request ends next
        ("stepping", np.int64),
        ("step_end", np.float64),
        ("queue_head", np.int64),
        ("queue_tail", np.int64),
        ("suspended", np.int64),  # first row of those that others may pass, or NONE
        ("looked", np.int64),  # value of steps at the last look for room for them
        ("unlearned", np.int64),  # ended since `Rests.by_age` was made
        ("learn_after", np.int64),  # so many, and it is made anew with the next
        ("new_tokens", np.int64),  # of the step in progress
        ("reading", np.int64),  # context tokens that it reads
        ("waiting", np.int64),  # decoding requests that get no token in it
        ("budget", np.float64),  # prompt tokens that it could take on in time, as last reported
        ("joined", np.int64),  # requests that decode from this step on
        ("taken", np.int64),  # tokens of KV cache that were ever taken for something new
    ],
    align=True,
)

REQUEST = np.dtype(
    [
        ("number", np.int64),
        ("template", np.int64),
        ("client", np.int64),
        ("prompt", np.int64),
        ("output", np.int64),
        ("generated", np.int64),  # while it decodes: as of when it began to
        ("context", np.int64),  # while it decodes: less what its instance had grown
        ("todo", np.int64),  # context tokens still to prefill
        ("missing", np.int64),  # context tokens not computed yet when it was preempted
        ("freed", np.int64),  # ``taken`` of its instance when it was preempted
        ("resumes", np.int64),  # goes first: after being `PREEMPTED` or `MIGRATED`, or NONE
        ("entered", np.int64),  # steps counted when it came into the pool
        ("admitted", np.int64),  # serial number of its admission
        ("until", np.int64),  # steps to which others pass it; once it is back, it is kept
        ("allowed", np.int64),  # steps for which others may pass it yet, NONE before they have
        ("rest", np.float64),  # tokens that it was expected to generate when it was suspended
        ("preemptions", np.int64),
        ("migrations", np.int64),
        ("landed", np.int64),  # tokens generated when it last arrived from elsewhere, or -1
        ("target", np.int64),  # instance to migrate to after this step, or -1
        ("next", np.int64),
        ("arrival", np.float64),
        ("placed", np.float64),
        ("start", np.float64),
        ("first_token", np.float64),
        ("last_token", np.float64),
        ("tpot_worst", np.float64),  # of its tokens so far, if that is asked for
        ("expected", np.float64),  # output forecast before its first token, once asked for
        ("cost", np.float64),  # share of an instance, times ``alone``; NaN until asked for
        ("alone", np.float64),  # seconds that it is expected to last by itself
        ("turn", np.int64),  # serial number of its coming into the pool
        ("service", np.float64),  # expected, as its account is charged; 0 until it is asked for
        ("charged", np.float64),  # of it so far
    ],
    align=True,
)

ACCOUNT = np.dtype(
    [
        ("served", np.float64),  # virtual service, see `rescheduler.ordering.fairness`
        ("waiting", np.int64),  # requests of it in the pool
        ("place", np.int64),  # scratch: among the accounts in the pool
    ],
    align=True,
)

PLACED = np.dtype(
    [
        ("row", np.int64),
        ("instance", np.int64),
        ("context", np.int64),  # tokens in its KV cache now
        ("generated", np.int64),
        ("left", np.int64),  # tokens that it truly generates yet
        ("since_move", np.int64),  # as in `ClusterView`
    ],
    align=True,
)

FINISHED = np.dtype(
    [
        ("number", np.int64),
        ("instance", np.int64),
        ("arrival", np.float64),
        ("placed", np.float64),
        ("start", np.float64),
        ("first_token", np.float64),
        ("end", np.float64),
        ("prompt", np.int64),
        ("output", np.int64),
        ("preemptions", np.int64),
        ("migrations", np.int64),
        ("tpot_worst", np.float64),
        ("client", np.int64),
        ("template", np.int64),
    ],
    align=True,
)

MOVE = np.dtype(
    [("request", np.int64), ("source", np.int64), ("target", np.int64), ("arrives", np.float64)],
    align=True,
)

SAMPLE = np.dtype(
    [
        ("step", np.int64),
        ("time", np.float64),
        ("running", np.int64),
        ("power", np.float64),
        ("execution_variance", np.float64),
        ("held", np.int64),
        ("preemptions", np.int64),
        ("migrations", np.int64),
    ],
    align=True,
)

SCALARS = np.dtype(
    [
        ("now", np.float64),
        ("phase", np.int64),
        ("steps", np.int64),  # barrier steps, or step ends of instance 0
        ("all_steps", np.int64),  # step ends of all instances
        ("revealed", np.int64),  # requests taken from the trace
        ("leaving", np.int64),  # requests that are to migrate after their step
        ("plan_at", np.int64),  # value of all_steps from which the migration planner is asked
        ("plans", np.int64),
        ("dispatched", np.int64),
        ("decisions", np.int64),
        ("next_decision", np.int64),  # multiple of the time between decisions that is due next
        ("given_up", np.int64),  # the policy left everybody waiting, and nothing was going on
        ("admissions", np.int64),
        ("waiting", np.int64),  # in the pool
        ("shown", np.int64),  # of it to the policy, the first
        ("moving", np.int64),
        ("in_system", np.int64),  # rows in use
        ("free", np.int64),  # rows that are not
        ("cursor", np.int64),  # next request of the block
        ("block_length", np.int64),
        ("last_block", np.int64),
        ("finished", np.int64),  # records in the output buffer
        ("tokens", np.int64),
        ("preemptions", np.int64),
        ("migrations", np.int64),
        ("weight", np.float64),  # of what the imbalance is a mean over: steps, or seconds
        ("imbalance", np.float64),
        ("max_minus_min", np.float64),
        ("idle_share", np.float64),
        ("execution_variance", np.float64),  # of the instances' step times, seconds squared
        ("most_held", np.int64),  # most tokens that an instance has held
        ("busy_seconds", np.float64),
        ("last_end", np.float64),
        ("energy_load_joules", np.float64),
        ("energy_mfu_joules", np.float64),
        ("samples", np.int64),
        ("stride", np.int64),
        ("recorded", np.int64),  # states seen, of which each stride-th is kept
        ("oversized", np.int64),  # number of a request that no instance can hold
        ("latencies", np.int64),  # noted for the order of service
        ("gamma", np.float64),  # decay rate of their tail, as of
        ("gamma_of", np.int64),  # so many latencies
        ("virtual_time", np.float64),  # service to which an account that comes back is lifted
        ("service", np.float64),  # of all requests that have ended,
        ("ended", np.int64),  # so many
        ("learns", np.int64),  # an instance has enough new lengths for `Rests.by_age`
    ],
    align=True,
)

NONE = -1
"""No request: the end of a list, or an empty one."""


class Wanted(IntEnum):
    """Why the engine returns: what it needs from outside to go on, or why it does not."""

    DONE = 0
    """All requests are served, or the run was to end here."""
    TRACE = 1
    """The next block of the trace."""
    GROW = 2
    """More rows for requests."""
    FLUSH = 3
    """Room in the output buffer."""
    ASK = 4
    """The decision of a policy that is not compiled."""
    PAUSED = 5
    """The time to pause at is reached."""
    STUCK = 6
    """Requests wait, and nothing would ever happen again."""
    OVERSIZED = 7
    """A request is larger than an instance."""
    PLAN = 8
    """A plan of migrations."""
    WIDEN = 9
    """A wider pool."""
    LEARN = 10
    """The expected rests by age, of the lengths of what has ended."""


FIRST_POOL = 512
"""Requests that a pool without a limit is made for at first."""

NEVER = np.iinfo(np.int64).max

PREEMPTED, MIGRATED = 0, 1
"""Why a request that has been started waits in a queue, before all that have not."""

SERIES_SAMPLES = 4096
SHORTEST_ITL, _LONGEST_ITL = 1e-5, 1e5  # seconds
_HISTOGRAM_BINS = 1600
ITL_BINS_PER_E = _HISTOGRAM_BINS / np.log(_LONGEST_ITL / SHORTEST_ITL)
"""Bins of the histogram of inter-token latencies in a factor of e."""
_FIRST_ROWS = 4096
_OUTPUT_ROWS = 8_192  # few enough to stay in a core's cache


class Sharing(NamedTuple):
    """Scratch of `rescheduler.ordering.fairness.interleave`, [n] each for a pool of n requests.

    Accounts are numbered as they appear in the pool, which has few of those of a trace.
    """

    account: IntArray
    served: FloatArray
    service: FloatArray
    following: IntArray
    ranks: IntArray
    first: IntArray


class PolicyState(NamedTuple):
    """The policy, the forecasts it goes by, and the arrays of its decisions.

    Attributes:
        asks: the policy has no kernel and is asked in Python.
        parameters: of the kernel.
        forecast: what is known of lengths.
        with_ahead: the policy has horizon points.
        with_lengths: the policy reads expected lengths.
        inputs: arrays of a decision, for as many waiting requests as the pool may hold.
        order: in which the pool is served.
        waiting: arrays of that order, likewise.
        sharing: scratch of the fairness between accounts, likewise.
        ending: [2, G, P + 1] scratch.
        row: [P] scratch.
    """

    asks: bool
    parameters: FloatArray
    forecast: ForecastArrays
    with_ahead: bool
    with_lengths: bool
    inputs: RoutingInputs
    order: OrderParameters
    waiting: Waiting
    sharing: Sharing
    ending: FloatArray
    row: FloatArray


class Cluster(NamedTuple):
    """The instances and the requests. Lists of requests are linked through ``REQUEST.next``.

    Attributes:
        scalars: [1] of `SCALARS`.
        instances: [G] of `INSTANCE`.
        slot_request: [G, slots] rows of the decoding requests, the first ``decoding`` of each.
        slot_end: [G, slots] value of the instance's ``steps`` at which each has ended.
        slot_waits: [G, slots] whether each sits the step in progress out.
        requests: [rows] of `REQUEST`.
        accounts: [A] of `ACCOUNT`, by the number of the client; as many as the trace has so far.
        free: [rows] stack of unused rows.
        joined: [G, slots] rows that decode from the step in progress on.
        moves: of `MOVE`, migrations on their way.
        placed: [rows] of `PLACED`, scratch of `gather_placed`.
        finished: buffer of `FINISHED`.
        histogram: counts of inter-token latencies, weighted by tokens.
        histogram_edges: seconds, ascending.
        latencies: seconds of the last requests that have ended.
        tail: [2, latencies] scratch.
    """

    scalars: Records
    instances: Records
    slot_request: IntArray
    slot_end: IntArray
    slot_waits: npt.NDArray[np.bool_]
    requests: Records
    accounts: Records
    free: IntArray
    joined: IntArray
    moves: Records
    placed: Records
    finished: Records
    histogram: IntArray
    histogram_edges: FloatArray
    latencies: FloatArray
    tail: IntArray


class Rests(NamedTuple):
    """What is known of the tokens that requests generate yet, where instances suspend by it.

    Attributes:
        forecast: of each request.
        caps: [n_templates] most output tokens of a request; or empty: no request has a limit.
        by_age: [G, ages] expected rest of a request that has so many tokens, by the lengths of what
            has ended on its instance; and
        known: [G] ages of it that are known, 0 before enough have ended.
        contexts, rests: [slots + 16] scratch.
    """

    forecast: ForecastArrays
    caps: IntArray
    by_age: FloatArray
    known: IntArray
    contexts: FloatArray
    rests: FloatArray


class Arrivals(NamedTuple):
    """The requests that come in.

    Attributes:
        pool: [pool limit] rows of the waiting pool, in the order of service.
        target: [pool limit] where the last decision sends them.
        server_request: [n_servers] row that each prefill server works on, or -1.
        server_free: [n_servers] seconds at which it is free.
        arrival, prompt, output, template, client: a block of the trace.
    """

    pool: IntArray
    target: IntArray
    server_request: IntArray
    server_free: FloatArray
    arrival: FloatArray
    prompt: IntArray
    output: IntArray
    template: IntArray
    client: IntArray


class Series(NamedTuple):
    """Thinned states of the cluster over time, as in `LoadSeries`.

    Attributes:
        samples: [s] of `SAMPLE`.
        load: [s, G].
        current: [G] scratch.
    """

    samples: Records
    load: IntArray
    current: IntArray


def new_cluster(rules: Rules, n_servers: int) -> Cluster:
    """Return an empty cluster at time 0."""
    n, slots = rules.n_instances, rules.slots
    capacity = _FIRST_ROWS + n * slots + n_servers
    scalars = np.zeros(1, dtype=SCALARS)
    scalars["stride"] = 1
    scalars["free"] = capacity
    scalars["oversized"] = NONE
    instances = np.zeros(n, dtype=INSTANCE)
    for field in ("queue_head", "queue_tail", "filling", "suspended"):
        instances[field] = NONE
    instances["next_end"] = NEVER
    return Cluster(
        scalars=scalars,
        instances=instances,
        slot_request=np.full((n, slots), NONE, dtype=np.int64),
        slot_end=np.zeros((n, slots), dtype=np.int64),
        slot_waits=np.zeros((n, slots), dtype=np.bool_),
        requests=np.zeros(capacity, dtype=REQUEST),
        accounts=np.zeros(1, dtype=ACCOUNT),
        free=np.arange(capacity, dtype=np.int64)[::-1].copy(),
        joined=np.zeros((n, slots), dtype=np.int64),
        moves=np.zeros(n * slots, dtype=MOVE),
        placed=np.zeros(capacity, dtype=PLACED),
        finished=np.zeros(_OUTPUT_ROWS + n * slots, dtype=FINISHED),
        histogram=np.zeros(_HISTOGRAM_BINS, dtype=np.int64),
        histogram_edges=np.geomspace(SHORTEST_ITL, _LONGEST_ITL, _HISTOGRAM_BINS + 1),
        latencies=np.zeros(LATENCIES),
        tail=np.zeros((2, LATENCIES), dtype=np.int64),
    )


def new_rests(rules: Rules, forecast: ForecastArrays, caps: IntArray) -> Rests:
    """Return the rests before anything has ended."""
    n, most = rules.n_instances, rules.slots + 16
    by_age, known = np.zeros((n, 1)), np.zeros(n, dtype=np.int64)
    return Rests(forecast, caps, by_age, known, np.zeros(most), np.zeros(most))


def with_rests_of(rests: Rests, g: int, by_age: FloatArray) -> Rests:
    """Return the rests with those of an instance by age anew."""
    further = max(0, len(by_age) - rests.by_age.shape[1])
    wider = np.pad(rests.by_age, ((0, 0), (0, further)))
    wider[g, : len(by_age)] = by_age
    rests.known[g] = len(by_age)
    return rests._replace(by_age=wider)


def with_more_rows(cluster: Cluster) -> Cluster:
    """Return the cluster with twice the rows for requests."""
    capacity = len(cluster.requests)
    cluster.scalars["free"] += capacity
    free = np.zeros(2 * capacity, dtype=np.int64)
    free[:capacity] = np.arange(2 * capacity - 1, capacity - 1, -1)
    rows = np.concatenate([cluster.requests, np.zeros_like(cluster.requests)])
    placed = np.zeros(2 * capacity, dtype=PLACED)
    return cluster._replace(requests=rows, free=free, placed=placed)


def with_accounts(cluster: Cluster, n: int) -> Cluster:
    """Return the cluster with at least n accounts."""
    further = np.zeros(max(0, n - len(cluster.accounts)), dtype=ACCOUNT)
    return cluster._replace(accounts=np.concatenate([cluster.accounts, further]))


def new_arrivals(rules: Rules, n_servers: int) -> Arrivals:
    """Return an empty pool, idle prefill servers, and no requests yet."""
    none = np.empty(0, dtype=np.int64)
    width = min(rules.pool_limit, FIRST_POOL)
    return Arrivals(
        pool=np.zeros(width, dtype=np.int64),
        target=np.zeros(width, dtype=np.int64),
        server_request=np.full(n_servers, NONE, dtype=np.int64),
        server_free=np.zeros(n_servers),
        arrival=np.empty(0),
        prompt=none,
        output=none,
        template=none,
        client=none,
    )


def with_wider_pool(arrivals: Arrivals, policy_state: PolicyState) -> tuple[Arrivals, PolicyState]:
    """Return both with room for twice the waiting requests; decisions' arrays are left empty."""
    width, inputs = 2 * len(arrivals.pool), policy_state.inputs
    wider = arrivals._replace(
        pool=np.concatenate([arrivals.pool, np.zeros_like(arrivals.pool)]),
        target=np.zeros(width, dtype=np.int64),
    )
    inputs = inputs._replace(
        size=np.zeros(width, dtype=np.int64),
        survival=np.zeros((width, inputs.survival.shape[1])),
        remaining=np.zeros(width),
        waited=np.zeros(width, dtype=np.int64),
    )
    return wider, policy_state._replace(
        inputs=inputs, waiting=new_waiting(width), sharing=_new_sharing(width)
    )


def _new_sharing(n: int) -> Sharing:
    whole = [np.zeros(n, dtype=np.int64) for _ in range(4)]
    account, following, ranks, first = whole
    return Sharing(account, np.zeros(n), np.zeros(n), following, ranks, first)


def new_series(rules: Rules) -> Series:
    """Return room for the samples of a run."""
    return Series(
        samples=np.zeros(SERIES_SAMPLES, dtype=SAMPLE),
        load=np.zeros((SERIES_SAMPLES, rules.n_instances), dtype=np.int64),
        current=np.zeros(rules.n_instances, dtype=np.int64),
    )


def new_policy_state(
    rules: Rules,
    policy: RoutingPolicy,
    asks: bool,
    forecast: ForecastArrays,
    order: OrderParameters,
) -> PolicyState:
    """Return the arrays of a policy's decisions."""
    points = np.ascontiguousarray(policy.points(), dtype=np.int64)
    edges = np.ascontiguousarray(policy.length_edges(), dtype=np.int64)
    n, n_points = rules.n_instances, len(points)
    width = min(rules.pool_limit, FIRST_POOL)
    # A changing drift is known to a policy by its mean.
    growth = (points * rules.drift.mean()).astype(np.float64)
    capacity = np.full(n, rules.kv_capacity)
    inputs = new_routing_inputs(
        capacity, width, points, growth, policy.with_excess(), policy.with_alive(), edges
    )
    return PolicyState(
        asks=asks,
        parameters=np.ascontiguousarray(policy.parameters(), dtype=np.float64),
        forecast=forecast,
        with_ahead=n_points > 0,
        with_lengths=policy.needs == Needs.LENGTHS,
        inputs=inputs,
        order=order,
        waiting=new_waiting(width),
        sharing=_new_sharing(width),
        ending=np.zeros((2, n, n_points + 1)),
        row=np.zeros(n_points),
    )
