"""Snapshots of a proxy that serves, or of all proxies of a coordinator."""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from statistics import median
from typing import Generic, NamedTuple

from msgspec.structs import replace

from rescheduler.cluster.cluster_view import ClusterView
from rescheduler.monitoring.forecast_quality import MIN_REQUESTS, ForecastScores
from rescheduler.page.expectations import Outlooks, foreseen, known
from rescheduler.page.snapshot import (
    UNKNOWN,
    About,
    Accuracy,
    Instance,
    LengthErrors,
    MoveReport,
    Phase,
    Requests,
    Snapshot,
)
from rescheduler.placement.cluster import Cluster
from rescheduler.placement.guarded_policy import guarded_view, running_requests
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.placeable import EndedMove, Placeable, R, Source
from rescheduler.proxy.finish_reports import FinishReports
from rescheduler.telemetry.subscriber import TelemetrySubscriber
from rescheduler.telemetry.telemetry_view import InstanceKey


class _Seen(NamedTuple):
    """An engine at work: what it last said, and the seconds of a step, None at the first look."""

    epoch: int
    step: int
    received: float
    seconds: float | None


class EngineSteps:
    """Tells the duration of a step from two looks at an engine that works at both."""

    def __init__(
        self, telemetry: TelemetrySubscriber, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._telemetry, self._clock = telemetry, clock
        self._seen: dict[InstanceKey, _Seen] = {}

    def seconds(self) -> dict[str, float]:
        """Look; return the mean seconds of a step since the look before, by name.

        Of an engine with several ranks the slowest one's; nothing of one that idles, is stale, or
        was not at work at the last look.
        """
        now, seen = self._clock(), {}
        with self._telemetry.lock:
            view = self._telemetry.view
            for key, instance in view.instances.items():
                if instance.requests and not view.is_stale(key, now):
                    seen[key] = self._look(key, instance.epoch, instance.step, instance.received)
        self._seen = seen
        slowest: dict[str, float] = {}
        for key, one in seen.items():
            if one.seconds is not None:
                slowest[key.name] = max(one.seconds, slowest.get(key.name, 0.0))
        return slowest

    def _look(self, key: InstanceKey, epoch: int, step: int, received: float) -> _Seen:
        before = self._seen.get(key)
        if before is None or before.epoch != epoch or step < before.step:
            return _Seen(epoch, step, received, None)
        if step == before.step:
            return before  # nothing new has come
        return _Seen(epoch, step, received, (received - before.received) / (step - before.step))


_LONGEST_NAME = 40
_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen of a cluster at one moment; nothing of it changes any more.

    Attributes:
        view: of decode instances, with what waits for one of them.
        viewed: names of the decode instances that the view is of; all but those left out.
        seen: all but what is expected. Of the decode instances only what the view does not say;
            its requests are those of the view, running and waiting, and then all others.
        accuracy: says how good the forecasts were.
    """

    view: ClusterView
    viewed: list[str]
    seen: Snapshot
    accuracy: Callable[[], Accuracy | None] = lambda: None

    def snapshot(self) -> Snapshot:
        """Return the snapshot: the part that takes a while, and may be done in a thread."""
        return replace(foreseen(self.seen, self.view, self.viewed), accuracy=self.accuracy())


class LiveSnapshots(Generic[R]):
    """Looks at a cluster, of which ``about`` tells others, every so many seconds.

    Args:
        cluster: the instances and their requests.
        seconds: between two looks.
        reports: when its requests will finish; None: nobody says.
        scores: of the forecasts; None: nobody scores them.
    """

    def __init__(
        self,
        cluster: Cluster[R],
        seconds: float = _SECONDS,
        reports: FinishReports | None = None,
        scores: ForecastScores | None = None,
    ) -> None:
        deployment, planner = cluster.deployment, cluster.planner
        shadow = " (shadow)" if planner is not None and not planner.acts else ""
        self.about = About(
            source="proxy",
            title=deployment.served_name,
            routing=str(deployment.routing["name"]),
            migration=str((deployment.migration or {}).get("name", "")) + shadow,
            seconds=seconds,
        )
        self._cluster = cluster
        telemetry = cluster.telemetry
        self._scores = scores
        self._steps = None if telemetry is None else EngineSteps(telemetry)
        self._outlooks = None if reports is None else Outlooks(reports, cluster.decodes)
        self._numbers: dict[str, int] = {}
        self._next = count()

    def look(self) -> Look:
        """Look at the cluster, in its event loop."""
        cluster = self._cluster
        instances, decodes = cluster.all, cluster.decodes
        index = {instance: i for i, instance in enumerate(instances)}
        waiting = list(cluster.dispatcher.waiting)
        if cluster.forecasts is not None:
            cluster.forecasts.refresh()
        viewed, view = guarded_view(
            "page",
            cluster.placements,
            decodes,
            waiting,
            cluster.forecasts,
            asyncio.get_running_loop().time(),
            cluster.step.seconds,
        )
        running = running_requests(cluster.placements, viewed)
        others = running_requests(cluster.placements, [i for i in instances if i not in viewed])
        requests = [*running, *waiting, *others]
        known = self._numbers
        numbers = {
            one.id: known[one.id] if one.id in known else next(self._next) for one in requests
        }
        self._numbers = numbers
        steps = {} if self._steps is None else self._steps.seconds()
        seen = Snapshot(
            time=round(time.time(), 3),
            step_seconds=view.step_seconds,
            points=[],
            instances=[self._instance(one, steps.get(one.name)) for one in instances],
            requests=_columns(requests, numbers, index),
            further_waiting=cluster.dispatcher.waiting_for_prefill,
            moves=[_report(move, numbers) for move in cluster.moves.latest],
            finishes=None if self._outlooks is None else self._outlooks.finishes(),
            outlook=None if self._outlooks is None else self._outlooks.now(),
            length_errors=_length_errors(cluster.length_factors.latest),
        )
        return Look(view, [one.name for one in viewed], seen, partial(accuracy, self._scores))

    def _instance(self, state: InstanceState, step_seconds: float | None) -> Instance:
        requests = self._cluster.placements.on(state)
        return Instance(
            name=state.name,
            role=state.instance.role,
            in_service=state.breaker.closed,
            draining=state.draining,
            slots=known(state.slots),
            kv_capacity=known(state.kv_capacity),
            kv_tokens=sum(request.context_tokens for request in requests),
            step_seconds=None if step_seconds is None else round(step_seconds, 5),
            without=state.without if state.instance.role == "decode" else [],
            other_requests=len(state.others),
        )


def accuracy(scores: ForecastScores | None) -> Accuracy | None:
    """Return how good the forecasts of the last hour were; None where none was scored."""
    if scores is None:
        return None
    with scores.lock:
        now = time.monotonic()
        figures, drift = scores.hour.figures(now), scores.hour.drift(now)
    if figures is None:
        return None
    alarm = None if figures.requests < MIN_REQUESTS else figures.alarm() or ""
    return Accuracy(
        requests=figures.requests,
        coverage=[round(share, 4) for share in figures.coverage().values()],
        error=round(figures.mae(), 1),
        bias=round(figures.bias(), 1),
        late=round(figures.late_share(), 4),
        alarm=alarm,
        drift=drift,
    )


def _length_errors(length_factors: Mapping[Source, Collection[float]]) -> list[LengthErrors]:
    return [
        LengthErrors(source=source, answers=len(factors), factor=round(median(factors), 2))
        for source, factors in length_factors.items()
        if factors
    ]


def _columns(
    requests: Sequence[Placeable], numbers: dict[str, int], index: dict[InstanceState, int]
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


def _phase(request: Placeable) -> Phase:
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
