"""BF-IO: balance a short future, by integer optimisation."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rescheduler.cluster.cluster_view import Assignment, ClusterView
from rescheduler.routing.bfio.fast import bfio_fast
from rescheduler.routing.policy import NO_POINTS, Needs, RoutingPolicy, routing_policy

__all__ = ["BFIO"]

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@routing_policy("bfio")
@dataclass(frozen=True)
class BFIO(RoutingPolicy):
    r"""Admit the requests, and place them, that least unbalance the steps to come.

    With c_g free slots on instance g, U = min(n, Σ c_g) of the n waiting requests are admitted
    (fewer if KV room lacks), x_ig = 1 where request i goes to instance g, so as to minimise

    .. math::
        J = \sum_{h=0}^{H} \Big[ G \max_g \big(L_g(h) + \kappa \sqrt{V_g(h)}\big)
            - \sum_g L_g(h) \Big], \qquad
        L_g(h) = \Lambda_g(h) + \sum_i x_{ig} S_i(h) (c_i + \delta(h)) .

    κ (``risk``) is 0 in the paper: the maximum is taken over expected loads. But a barrier
    waits for the load that turns out largest, and the expectation of the maximum is above the
    maximum of the expectations, the more so the less certain the loads are: for independent
    normal loads of one mean and one standard deviation σ, by 1.4 σ with 8 instances and by
    2.1 σ with 32. A κ of that size charges each instance for what is not known of it. V_g(h)
    is the variance of the load of the requests that run there and that are admitted, which
    end independently of each other. At h = 0 nothing is uncertain, and κ changes nothing.

    The drift δ is the ``growth`` of the inputs. Ties go to the lowest load, then to the lowest
    index.

    Attributes:
        horizon: H, decode steps looked ahead; 0 looks at the present loads only and needs no
            forecasts.
        solver: "fast", `bfio_fast`, near the optimum within microseconds; or "exact", the MILP
            of `solve_exactly`, for small cases.
        time_limit: seconds that "exact" may take for one decision; then the best it has found
            counts. What is found by then depends on the machine.
        starvation: W, a request that has waited so many steps is admitted before all others,
            the oldest first, as far as slots and KV room allow; None for no bound. Not in the
            paper, where a request of an unfit size may wait forever.
        risk: κ, not negative; "exact" takes 0 only, since √V is not linear in x.

    Source: A Universal Load Balancing Principle (Chen et al. 2026), section 4, problem (IO).
    """

    needs = Needs.FORECASTS
    kernel = bfio_fast
    horizon: int = 80
    solver: str = "fast"
    time_limit: float = 10.0
    starvation: int | None = None
    risk: float = 0.0

    def __post_init__(self) -> None:
        """Refuse options that mean nothing; a myopic policy needs no forecasts.

        Raises:
            ValueError: a negative number, an unknown solver, a time limit of 0, or "exact" with
                a risk.
        """
        if self.solver not in ("fast", "exact"):
            raise ValueError(f"no solver {self.solver!r}; known: exact, fast")
        if self.horizon < 0:
            raise ValueError(f"horizon must be 0 steps or more, not {self.horizon}")
        if not self.time_limit > 0:
            raise ValueError(f"time_limit must be more than 0 seconds, not {self.time_limit}")
        if self.starvation is not None and self.starvation < 0:
            raise ValueError(f"starvation must be 0 steps or more, or None: {self.starvation}")
        if not self.risk >= 0:
            raise ValueError(f"risk must be 0 or more, not {self.risk}")
        if self.solver == "exact" and self.risk > 0:
            raise ValueError(f"a risk of {self.risk} is not linear: use solver fast")
        if self.horizon == 0:
            object.__setattr__(self, "needs", Needs.LOADS)
        if self.solver == "exact":
            object.__setattr__(self, "kernel", None)

    def parameters(self) -> FloatArray:
        """Return W, or -1 for no bound, and κ."""
        return np.array(
            [-1 if self.starvation is None else self.starvation, self.risk], dtype=float
        )

    def points(self) -> IntArray:
        """Return 0 .. H; none if H = 0, where the loads say all."""
        return np.arange(self.horizon + 1) if self.horizon else NO_POINTS

    def with_spread(self) -> bool:
        """Return whether κ reads the variance."""
        return self.risk > 0 and self.horizon > 0

    def assign(self, view: ClusterView) -> Assignment:
        """Return where the waiting requests of a view go.

        Raises:
            ValueError: the view lacks forecasts that the policy needs.
        """
        if self.solver == "fast":
            return super().assign(view)
        from rescheduler.routing.bfio.exact import solve_exactly

        inputs = self.inputs(view)
        solution = solve_exactly(inputs, self.starvation, self.time_limit)
        return Assignment(solution.instance)
