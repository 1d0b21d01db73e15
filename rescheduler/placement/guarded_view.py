"""Views of a cluster that no instance can prevent from being built."""

import logging
from collections.abc import Sequence
from typing import Literal

from rescheduler.cluster.cluster_view import ClusterView
from rescheduler.placement.cluster_state import cluster_view
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.placeable import Counted, Placeable, PlacedRequests
from rescheduler.placement.prefill_budgets import PrefillBudgets

__all__ = ["guarded_view"]

logger = logging.getLogger("headway.serve")


def guarded_view(
    purpose: Literal["placing", "planning", "page"],
    placements: PlacedRequests[Counted],
    instances: Sequence[InstanceState],
    waiting: Sequence[Placeable],
    forecasts: LiveForecasts | None,
    now: float,
    step_seconds: float,
    dispatched: int = 0,
    budgets: PrefillBudgets | None = None,
) -> tuple[list[InstanceState], ClusterView]:
    """Return the instances that can be viewed, and the view of them.

    An instance of which no view can be built by itself, whatever it says of itself, is left out
    and noted. If the view of all others still fails, it is built without forecasts and budgets.

    Args:
        purpose: what the view is for.
        placements: as for `cluster_view`, like all that follow but the budgets.
        instances: that requests may go to.
        waiting: requests that wait for one of them.
        forecasts: of remaining lengths, if they are needed.
        now: seconds.
        step_seconds: of a decode step.
        dispatched: requests placed so far.
        budgets: of prompts that can be computed in time, if they are needed.
    """

    def view(
        shown: Sequence[InstanceState],
        waiting: Sequence[Placeable],
        forecasts: LiveForecasts | None = forecasts,
        budgets: PrefillBudgets | None = budgets,
    ) -> ClusterView:
        left = None if budgets is None else budgets.left(shown)
        return cluster_view(
            placements, shown, waiting, forecasts, now, step_seconds, dispatched, left
        )

    try:
        return list(instances), view(instances, waiting)
    except Exception as error:
        failure = error
    shown = []
    for instance in instances:
        try:
            view([instance], [])
        except Exception as error:
            instance.leave_out(purpose, error)
        else:
            shown.append(instance)
    if len(shown) < len(instances):
        try:
            return shown, view(shown, waiting)
        except Exception as error:
            failure = error
    logger.debug("%s without forecasts and budgets", purpose, exc_info=failure)
    return shown, view(shown, waiting, None, None)
