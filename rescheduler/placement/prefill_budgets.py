"""How many tokens of new prompts each engine can still compute in time, as last reported."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.placeable import Placeable
from rescheduler.telemetry.subscriber import TelemetrySubscriber

__all__ = ["PrefillBudgets"]

_MOST_SENT = 1024
"""Prompts that may have been sent to an engine since its last report."""


class PrefillBudgets:
    """The engines' prefill budgets, less the prompts that an engine's report cannot know of.

    Those are the prompts sent to it since its last report, and those that were still on their way
    when it came. An engine reckons its budget with its first step. Until then it counts as having
    as much as the one that has most.

    Source: FairBatching (Lyu et al. 2025), §3.4.

    Args:
        telemetry: of the engines.
    """

    def __init__(self, telemetry: TelemetrySubscriber) -> None:
        self._telemetry = telemetry
        self._seen: dict[str, tuple[int, int]] = {}
        self._sent: dict[str, dict[Placeable, int]] = {}

    def left(self, instances: Sequence[InstanceState]) -> npt.NDArray[np.float64]:
        """Return the budgets of some instances now, [G], in tokens."""
        budget: dict[str, float] = {}
        with self._telemetry.lock:
            for key, view in self._telemetry.view.instances.items():
                snapshot = view.epoch, view.snapshot_seq
                if self._seen.get(key.name) != snapshot:
                    self._seen[key.name] = snapshot
                    sent = self._sent.get(key.name, {})
                    self._sent[key.name] = {
                        request: tokens for request, tokens in sent.items() if request.on_its_way
                    }
                if view.gauges.prefill_budget is not None:
                    budget[key.name] = view.gauges.prefill_budget
        most = max(budget.values(), default=0.0)
        return np.array(
            [
                budget.get(one.name, most) - sum(self._sent.get(one.name, {}).values())
                for one in instances
            ]
        )

    def spend(self, instance: InstanceState, request: Placeable) -> None:
        """Count the prompt of a request that is being sent to an instance."""
        sent = self._sent.setdefault(instance.name, {})
        sent[request] = request.prompt_tokens
        if len(sent) > _MOST_SENT:  # it reports nothing
            del sent[next(iter(sent))]
