"""How a routing policy came to place requests."""

from collections.abc import Sequence
from dataclasses import dataclass

from rescheduler.cluster.cluster_view import UNLIMITED, ClusterView
from rescheduler.placement.instance_state import InstanceState
from rescheduler.tracing.span import Attribute

__all__ = ["Decision"]


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision about requests that waited.

    Attributes:
        policy: name of the routing policy that decided.
        instances: that it chose from.
        view: that it decided on.
        began: nanoseconds since 1970.
        ended: nanoseconds since 1970.
    """

    policy: str
    instances: Sequence[InstanceState]
    view: ClusterView
    began: int
    ended: int

    def attributes(self) -> dict[str, Attribute]:
        """Return what a trace says of it; lists are by instance."""
        capacity = self.view.kv_capacity
        known = bool((capacity < UNLIMITED).all())
        budget = self.view.prefill_budget
        return {
            "policy": self.policy,
            "waiting": self.view.n_waiting,
            "instances": [instance.name for instance in self.instances],
            "requests": self.view.running.tolist(),
            "kv_tokens": self.view.kv_load.tolist(),
            "kv_capacity_tokens": capacity.tolist() if known else None,
            "prefill_budget_tokens": budget.tolist() if budget is not None else None,
        }
