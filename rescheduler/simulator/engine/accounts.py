r"""What each account has had of the cluster, which shares the pool out between them.

A request i with :math:`p_i` prompt tokens counts as the service :math:`p_i + 2\,o_i`. Its account
is charged with what it is expected to generate as the request is placed, and with what it has
generated once it has ended. An account of which a request comes while none of it waits is lifted
to

.. math:: V = \max_{t} \min_{a \text{ waits at } t} v_a

over the placements t so far. Nobody saves up service for later.

Source: see `rescheduler.ordering.fairness`.
"""

from math import inf, isnan

from predictor.compilation import compiled_core, compiled_inline
from rescheduler.ordering.fairness import OUTPUT_WEIGHT
from rescheduler.simulator.engine.engine_state import Cluster


@compiled_inline
def wait_for_account(cluster: Cluster, row: int) -> None:
    """Count a request that comes into the pool."""
    scalars, account = cluster.scalars[0], cluster.accounts[cluster.requests[row].client]
    if account.waiting == 0:
        account.served = max(account.served, scalars.virtual_time)
    account.waiting += 1


@compiled_core
def charge_account(cluster: Cluster, row: int) -> None:
    """Charge the account of a request from the pool that gets its place."""
    scalars, request = cluster.scalars[0], cluster.requests[row]
    account = cluster.accounts[request.client]
    if request.service > 0.0:  # else nobody shares the pool out
        least = inf
        for a in range(len(cluster.accounts)):
            if cluster.accounts[a].waiting > 0:
                least = min(least, cluster.accounts[a].served)
        scalars.virtual_time = max(scalars.virtual_time, least)
    account.waiting -= 1
    account.served += request.service
    request.charged = request.service


@compiled_inline
def settle_account(cluster: Cluster, row: int, end: float) -> None:
    """Charge for what a request has truly taken; for nothing if it was turned away."""
    scalars, request = cluster.scalars[0], cluster.requests[row]
    account = cluster.accounts[request.client]
    if isnan(end):
        account.served -= request.charged
        return
    service = request.prompt + OUTPUT_WEIGHT * request.output
    account.served += service - request.charged
    scalars.service += service
    scalars.ended += 1


@compiled_inline
def mean_service(cluster: Cluster) -> float:
    """Return the mean service of the requests that have ended; 0 before any has."""
    scalars = cluster.scalars[0]
    return scalars.service / scalars.ended if scalars.ended > 0 else 0.0
