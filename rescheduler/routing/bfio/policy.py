"""BF-IO: balance a short future, by integer optimisation."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from rescheduler.cluster.cluster_view import Assignment, ClusterView
from rescheduler.cluster.registry import NOT_NEGATIVE
from rescheduler.routing.bfio.fast import FURTHEST, bfio_fast
from rescheduler.routing.inputs import FloatArray, IntArray
from rescheduler.routing.policy import (
    NO_POINTS,
    Needs,
    RoutingPolicy,
    routing_policy,
    spaced_points,
)


@routing_policy("bfio")
@dataclass(frozen=True)
class BFIO(RoutingPolicy, horizon=NOT_NEGATIVE, time_limit="(0, inf]", starvation=NOT_NEGATIVE):
    r"""Admit the requests, and place them, that least unbalance the steps to come.

    With c_g free slots on instance g, U = min(n, Σ c_g) of the n waiting requests are admitted
    (fewer if KV room lacks), x_ig = 1 where request i goes to instance g, so as to minimise

    .. math::
        J = \sum_h w(h) \Big[ G \max_g L_g(h) - \sum_g L_g(h) \Big], \qquad
        L_g(h) = \Lambda_g(h) + \sum_i x_{ig} S_i(h) \big(c_i + \delta(h)\big)
            + D_g(h) \, \bar s(h)

    where D_g(h) of the requests on g, those admitted now included, are expected to have ended by
    step h and left their slots to requests of s̄(h) tokens. The weight w(h) is what is expected to
    be left by then of a difference between loads, since with every admission the router takes a
    part of it back. `foresight` derives both from the forecasts, so that there is no horizon to
    choose. With a ``horizon`` H given, J is as published: w is 1 up to H and 0 from
    there on, and slots stay empty.

    The drift δ is the ``growth`` of the inputs. Ties go to the lowest load, then to the lowest
    index.

    Attributes:
        horizon: H, decode steps looked ahead with equal weights, as published; 0 looks at the
            present loads only and needs no forecasts; None weighs all steps to come.
        solver: "fast", `bfio_fast`, near the optimum within microseconds; or "exact", the MILP
            of `solve_exactly`, for small cases.
        time_limit: seconds that "exact" may take for one decision; then the best it has found
            counts. What is found by then depends on the machine.
        starvation: W, a request that has waited so many steps is admitted before all others,
            the oldest first, as far as slots and KV room allow; None for no bound. Not in the
            paper, where a request of an unfit size may wait forever.

    Source: A Universal Load Balancing Principle (Chen et al. 2026), section 4, problem (IO), with
    a ``horizon``; weights and refills are Headway's own.
    """

    needs = Needs.FORECASTS
    kernel = bfio_fast
    horizon: int | None = None
    solver: Literal["fast", "exact"] = "fast"
    time_limit: float = 10.0
    starvation: int | None = None

    def __post_init__(self) -> None:
        """Refuse options that mean nothing; a myopic policy needs no forecasts."""
        super().__post_init__()
        if self.horizon == 0:
            object.__setattr__(self, "needs", Needs.LOADS)
        if self.solver == "exact":
            object.__setattr__(self, "kernel", None)

    def parameters(self) -> FloatArray:
        """Return W, or -1 for no bound."""
        return np.array([-1 if self.starvation is None else self.starvation], dtype=float)

    def points(self) -> IntArray:
        """Return 0 .. H; none if H = 0, where the loads say all; without H, steps ever further."""
        if self.horizon is None:
            return spaced_points(FURTHEST, 1.1)
        return np.arange(self.horizon + 1) if self.horizon else NO_POINTS

    def with_alive(self) -> bool:
        """Return whether ends are counted, for weights and refills."""
        return self.horizon is None

    def assign(self, view: ClusterView) -> Assignment:
        """Return where the waiting requests of a view go."""
        if self.solver == "fast":
            return super().assign(view)
        from rescheduler.routing.bfio.exact import solve_exactly

        inputs = self.inputs(view)
        solution = solve_exactly(inputs, self.starvation, self.time_limit)
        return Assignment(solution.instance)
