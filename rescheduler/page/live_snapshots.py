"""Snapshots of a proxy that serves."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count

import numpy as np
from msgspec.structs import replace

from rescheduler.cluster.cluster_view import ClusterView
from rescheduler.page.engine_steps import EngineSteps
from rescheduler.page.expectations import expectations, known, remaining_interval
from rescheduler.page.live_accuracy import LiveAccuracy
from rescheduler.page.snapshot import (
    UNKNOWN,
    About,
    Accuracy,
    Instance,
    MoveReport,
    Phase,
    Requests,
    Snapshot,
)
from rescheduler.placement.cluster_state import cluster_view
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest
from rescheduler.proxy.move_history import EndedMove
from rescheduler.proxy.proxy import Proxy

__all__ = ["LiveSnapshots", "Look"]

_LONGEST_NAME = 40


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen of a proxy at one moment; nothing of it changes any more.

    Attributes:
        view: of the decode instances, with what waits for one of them.
        instances: all; of the decode instances only what the view does not say.
        requests: those of the view, running and waiting, and then those being prefilled; what is
            forecast of them is left out.
        time: seconds since 1970.
        further_waiting: requests that wait for a prefill instance.
        moves: the latest.
        accuracy: scores the forecasts of what has ended.
    """

    view: ClusterView
    instances: list[Instance]
    requests: Requests
    time: float
    further_waiting: int
    moves: list[MoveReport]
    accuracy: Callable[[], Accuracy | None] = lambda: None

    def snapshot(self) -> Snapshot:
        """Return the snapshot: the part that takes a while, and may be done in a thread."""
        view, n_requests = self.view, len(self.requests.number)
        running = remaining_interval(view.forecast, len(view.instance))
        waiting = remaining_interval(view.waiting_forecast, view.n_waiting)
        others = remaining_interval(None, n_requests - len(running) - len(waiting))
        low, median, high = np.concatenate([running, waiting, others]).T.tolist()
        expected = expectations(view, running)
        instances, g = list(self.instances), 0
        for i, one in enumerate(instances):
            if one.role == "decode":
                ahead, deviation, overflow = expected.of(g)
                instances[i] = replace(
                    one,
                    kv_tokens=int(view.kv_load[g]),
                    ahead=ahead,
                    deviation=deviation,
                    overflow=overflow,
                )
                g += 1
        return Snapshot(
            time=self.time,
            step_seconds=view.step_seconds,
            points=expected.points.tolist(),
            instances=instances,
            requests=replace(self.requests, low=low, median=median, high=high),
            further_waiting=self.further_waiting,
            moves=self.moves,
            accuracy=self.accuracy(),
        )


class LiveSnapshots:
    """Looks at a proxy.

    Args:
        proxy: that serves.
        seconds: between two looks, as others are told.

    Attributes:
        about: what is looked at.
    """

    def __init__(self, proxy: Proxy, seconds: float) -> None:
        deployment = proxy.deployment
        self.about = About(
            source="proxy",
            title=deployment.served_name,
            routing=str(deployment.routing["name"]),
            migration=str((deployment.migration or {}).get("name", "")),
            seconds=seconds,
        )
        self._proxy = proxy
        telemetry = proxy.telemetry
        self._accuracy = None if telemetry is None else LiveAccuracy(telemetry)
        self._steps = None if telemetry is None else EngineSteps(telemetry)
        self._numbers: dict[str, int] = {}
        self._next = count()

    def watched(self) -> AbstractContextManager[None]:
        """Have forecasts kept while the body runs, to score them."""
        return nullcontext() if self._accuracy is None else self._accuracy.kept()

    def look(self) -> Look:
        """Look at the proxy, in its event loop."""
        proxy = self._proxy
        instances = list(proxy.instances.values())
        index = {instance: i for i, instance in enumerate(instances)}
        decodes = [one for one in instances if one.instance.role == "decode"]
        running = [request for one in decodes for request in proxy.placements.on(one)]
        waiting = list(proxy.dispatcher.waiting)
        prefilling = [
            request
            for one in instances
            if one.instance.role == "prefill"
            for request in proxy.placements.on(one)
        ]
        requests = [*running, *waiting, *prefilling]
        numbers = {one.id: self._number(one.id) for one in requests}
        self._numbers = numbers
        if proxy.forecasts is not None:
            proxy.forecasts.refresh()
        steps = {} if self._steps is None else self._steps.seconds()
        return Look(
            view=cluster_view(
                proxy.placements,
                decodes,
                waiting,
                proxy.forecasts,
                asyncio.get_running_loop().time(),
                proxy.dispatcher.step_seconds,
            ),
            instances=[self._instance(one, steps.get(one.name)) for one in instances],
            requests=_columns(requests, numbers, index),
            time=round(time.time(), 3),
            further_waiting=proxy.dispatcher.waiting_for_prefill,
            moves=[_report(move, numbers) for move in proxy.migrator.history.latest],
            accuracy=(lambda: None) if self._accuracy is None else self._accuracy.now,
        )

    def _number(self, id: str) -> int:
        number = self._numbers.get(id)
        return next(self._next) if number is None else number

    def _instance(self, state: InstanceState, step_seconds: float | None) -> Instance:
        requests = self._proxy.placements.on(state)
        return Instance(
            name=state.name,
            role=state.instance.role,
            in_service=state.breaker.closed,
            draining=state.draining,
            slots=known(state.slots),
            kv_capacity=known(state.kv_capacity),
            kv_tokens=sum(request.context_tokens for request in requests),
            step_seconds=None if step_seconds is None else round(step_seconds, 5),
        )


def _columns(
    requests: list[LiveRequest], numbers: dict[str, int], index: dict[InstanceState, int]
) -> Requests:
    columns = Requests()
    for request in requests:
        phase, instance, target = _phase(request), request.instance, request.destination
        moving = phase is Phase.MOVING and target is not instance and target is not None
        columns.number.append(numbers[request.id])
        columns.name.append(request.name[:_LONGEST_NAME])
        columns.phase.append(phase.value)
        columns.instance.append(UNKNOWN if instance is None else index[instance])
        columns.target.append(index[target] if moving and target is not None else UNKNOWN)
        columns.prompt.append(request.prompt_tokens)
        columns.generated.append(request.generated_tokens)
    return columns


def _phase(request: LiveRequest) -> Phase:
    instance = request.instance
    if instance is None:
        return Phase.WAITING
    if instance.instance.role == "prefill":
        return Phase.PREFILLING
    if request.destination is not instance:
        return Phase.MOVING
    return Phase.DECODING if request.generating else Phase.PLACED


def _report(move: EndedMove, numbers: dict[str, int]) -> MoveReport:
    return MoveReport(
        time=round(move.time, 3),
        number=numbers.get(move.id, UNKNOWN),
        name=move.name[:_LONGEST_NAME],
        source=move.source,
        target=move.target,
        tokens=move.tokens,
        reason=move.reason,
        outcome=move.outcome,
        pause=None if move.pause is None else round(move.pause, 4),
    )
