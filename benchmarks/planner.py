"""How long the migration planners take to decide.

    python -m benchmarks.planner [--quick] --json OUT

256, 32 and 8 instances with 64 requests each on average, placed at random, so that many instances
are overloaded and the search is wide; contexts lognormal, of 900 tokens on average; a look at
every step to H = 128; a survival curve of 57 edges a request, its hazard lognormal around 1/300
a token (``_point``: the true lengths instead, as STAR's regressor gives them).

``decision_ms_256`` is a decision on loads that are added up already, as STAR's workers report
them, the dearer of the two planners: from the arrays to the plan with its reason, the curves of
the requests that may move read on the way. ``plan_ms`` is the whole of it, from the view of the
cluster to the plan, which ``aggregate_ms`` of adding up the loads ahead is part of. Medians of
this thread's CPU time, with compiled code in place.

``live_*`` is a round of the proxy's planner with 256 instances, from the bytes that their
telemetry sockets receive to the plan: ``receive`` one snapshot per instance (on the proxy's
telemetry thread), then on its event loop ``refresh`` the forecasts, build the ``view`` of the
cluster, and ``plan`` with the dearer of the two planners. ``live_forecasts_per_plan`` is receive,
refresh and view together, in multiples of the plan: of two versions of this code measured on
different machines, it is what to compare.
"""

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from benchmarks.support.report import arguments, report
from predictor.forecasts.forecast import Forecast, PointForecast, SurvivalForecast
from predictor.live.telemetry_messages import (
    TOPIC,
    Gauges,
    RequestForecast,
    Snapshot,
    encode_message,
    encode_survival,
)
from rescheduler.cluster.cluster_view import UNLIMITED, ClusterView
from rescheduler.engines.deployment import Instance, ProxyOptions
from rescheduler.migration import create_migration_policy
from rescheduler.migration.inputs import migration_inputs
from rescheduler.openai.openai_request import COMPLETIONS
from rescheduler.openai.request_reader import read_request
from rescheduler.placement.cluster_state import cluster_view
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.placeable import Placements
from rescheduler.telemetry.subscriber import TelemetrySubscriber
from rescheduler.telemetry.telemetry_view import TelemetryView

REQUESTS, HORIZON, MEAN_LENGTH = 64, 128, 300
LIVE_INSTANCES = 256
AGE = 20  # tokens since a forecast, at most


def main() -> None:
    options = arguments("time of a migration planner's decision").parse_args()
    figures: dict[str, float] = {}
    for n_instances in (8, 32, 256):
        for kind, curves in (("", True), ("_point", False)):
            figures |= times(n_instances, curves, kind, 3 if options.quick else 25)
        figures[f"decision_ms_{n_instances}"] = max(
            figures[f"{name}_decision_ms_{n_instances}"] for name in ("star", "survival")
        )
    figures |= live_times(2 if options.quick else 9)
    report("planner", figures, options.json)


def times(n_instances: int, curves: bool, kind: str, repeats: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name in ("star", "survival"):
        planner = create_migration_policy(name, horizon=HORIZON)
        aggregate, decision, plan = [], [], []
        for seed in range(repeats):
            view = cluster(np.random.default_rng(seed), n_instances, curves)
            if seed == 0:
                planner.plan(view)
            inputs = migration_inputs(view, planner.points())
            aggregate.append(seconds(migration_inputs, view, planner.points()))
            decision.append(seconds(planner.decide, inputs))
            plan.append(seconds(planner.plan, view))
        for what, took in (("aggregate", aggregate), ("decision", decision), ("plan", plan)):
            figures[f"{name}_{what}_ms_{n_instances}{kind}"] = 1e3 * float(np.median(took))
    return figures


def live_times(repeats: int) -> dict[str, float]:
    """Time rounds of the proxy's planner, each with a new snapshot of every instance."""
    generator = np.random.default_rng(0)
    planners = [create_migration_policy(name, horizon=HORIZON) for name in ("star", "survival")]
    placements: Placements[LiveRequest] = Placements()
    instances = live_cluster(generator, placements)
    took: dict[str, list[float]] = {"receive": [], "refresh": [], "view": [], "plan": []}
    with TelemetrySubscriber(
        bind="tcp://127.0.0.1:*", view=TelemetryView(history=False)
    ) as telemetry:
        forecasts = LiveForecasts(telemetry)

        def receive(messages: list[bytes]) -> None:
            for message in messages:
                with telemetry.lock:
                    telemetry.view.receive([TOPIC, message], time.monotonic())

        def view() -> ClusterView:
            return cluster_view(placements, instances, [], forecasts, 0.0, 0.05)

        for seq in range(repeats + 1):
            messages = [
                snapshot(generator, instance, list(placements.on(instance)), seq)
                for instance in instances
            ]
            round_ = [seconds(receive, messages), seconds(forecasts.refresh), seconds(view)]
            seen = view()
            round_.append(max(seconds(planner.plan, seen) for planner in planners))
            if seq > 0:  # the first one compiles
                for part, value in zip(took.values(), round_, strict=True):
                    part.append(value)
        assert not telemetry.view.malformed
    figures = {
        f"live_{part}_ms_{LIVE_INSTANCES}": 1e3 * float(np.median(values))
        for part, values in took.items()
    }
    total = np.sum(list(took.values()), axis=0)
    figures[f"live_total_ms_{LIVE_INSTANCES}"] = 1e3 * float(np.median(total))
    figures["live_forecasts_per_plan"] = float(np.median(total / took["plan"] - 1))
    return figures


def live_cluster(
    generator: np.random.Generator, placements: Placements[LiveRequest]
) -> list[InstanceState]:
    tokenizer = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    body = json.dumps({"prompt": "a", "max_tokens": 4096}).encode()
    client = read_request(COMPLETIONS, body)
    instances = []
    for g in range(LIVE_INSTANCES):
        deployed = Instance(f"decode-{g}", "decode", f"http://127.0.0.1:{g + 1}")
        instance = InstanceState(deployed, ProxyOptions(), None)
        for i in range(REQUESTS):
            name = f"{g}-{i}"
            request = LiveRequest(name, name, client, {}, 0.0, tokenizer, placements)
            request.begin_prefill(instance)
            request.prefilled({}, max(1, int(generator.lognormal(6.3, 1.0))))
            request.place(instance)
            request.token(0.0)
            request.splicer.output_token_ids = [0] * AGE
        instances.append(instance)
    return instances


def snapshot(
    generator: np.random.Generator, instance: InstanceState, running: list[LiveRequest], seq: int
) -> bytes:
    curves = forecast(generator, REQUESTS, True)
    assert isinstance(curves, SurvivalForecast)
    ages = generator.integers(0, AGE, REQUESTS).tolist()
    requests = [
        RequestForecast(
            f"{request.external_id}-0-{i:08x}",
            request.prompt_tokens,
            AGE + seq,
            AGE + seq - ages[i],
            4096 - AGE - seq + ages[i],
            coded,
        )
        for i, (request, coded) in enumerate(
            zip(running, encode_survival(curves.survival), strict=True)
        )
    ]
    return encode_message(
        Snapshot(
            instance=instance.name,
            rank=0,
            epoch=1,
            seq=seq,
            step=seq,
            time=0.0,
            gauges=Gauges(running=REQUESTS),
            model="m",
            checkpoint="c",
            k=AGE,
            edges=[int(edge) for edge in curves.edges],
            requests=requests,
        )
    )


def seconds(function: Callable[..., Any], *given: Any) -> float:
    begun = time.thread_time()
    function(*given)
    return time.thread_time() - begun


def cluster(generator: np.random.Generator, n_instances: int, curves: bool) -> ClusterView:
    n = n_instances * REQUESTS
    none = np.empty(0, dtype=np.int64)
    context = np.maximum(generator.lognormal(6.3, 1.0, n), 1.0).astype(np.int64)
    return ClusterView(
        slots=np.full(n_instances, 4 * REQUESTS),
        kv_capacity=np.full(n_instances, UNLIMITED),
        queued=np.zeros(n_instances, dtype=np.int64),
        instance=generator.integers(0, n_instances, n),
        prompt_tokens=context,
        generated_tokens=np.zeros(n, dtype=np.int64),
        forecast=forecast(generator, n, curves),
        waiting_prompt_tokens=none,
        waiting_generated_tokens=none,
        waiting_forecast=None,
        waited_steps=none,
    )


def forecast(generator: np.random.Generator, n: int, curves: bool) -> Forecast:
    """Return curves of constant hazards, predicted up to 20 tokens ago, or true lengths."""
    if not curves:
        return PointForecast.new(generator.geometric(1 / MEAN_LENGTH, n).astype(np.float64))
    edges = np.unique(np.concatenate([np.arange(16), np.geomspace(16, 4096, 44).astype(np.int64)]))
    hazard = np.clip(generator.lognormal(0.0, 1.0, n) / MEAN_LENGTH, 1e-5, 0.5)
    survival = ((1 - hazard[:, None]) ** edges).astype(np.float32)
    return SurvivalForecast.new(edges, survival).aged(generator.integers(0, AGE, n))


if __name__ == "__main__":
    main()
