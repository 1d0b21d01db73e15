"""The records that the engine keeps of instances, requests, migrations and itself."""

import numpy as np

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
    ],
    align=True,
)
