"""What the page says: expectations, outlooks, and how accurate forecasts were."""

import asyncio
import math
from dataclasses import replace
from typing import Literal, cast

import msgspec
import numpy as np
import pytest
import routing_views
from published_telemetry import EDGES, KEY, Engine, GivenTelemetry, endpoint_of, frames, publisher
from scripted_cluster import PROMPT, cluster, until
from tokenizers import Tokenizer

from predictor.forecasts.forecast import Forecast, PointForecast, SurvivalForecast
from predictor.live.telemetry_messages import FinishedEvent
from rescheduler.cluster.cluster_view import UNLIMITED, ClusterView
from rescheduler.monitoring.forecast_quality import ForecastFigures, ForecastScores, score
from rescheduler.page.expectations import SECONDS, Outlooks, expectations, known, remaining_interval
from rescheduler.page.live_snapshots import EngineSteps, LiveSnapshots, Look, accuracy
from rescheduler.page.snapshot import UNKNOWN, Instance, Phase, Requests, Snapshot
from rescheduler.placement.placeable import Placeable, Source
from rescheduler.telemetry.telemetry_view import FinishedForecasts, KeptForecast


def view(forecast: Forecast | None, where: list[int], context: list[int], *kv: int) -> ClusterView:
    held = list(zip(where, context, strict=True))
    instances = [[(tokens, 1.0) for on, tokens in held if on == g] for g in range(len(kv))]
    return replace(routing_views.cluster(instances, [], slots=8, capacity=kv), forecast=forecast)


def curves(n: int) -> SurvivalForecast:
    return SurvivalForecast.new([0, 100, 200], [[1.0, 0.5, 0.0]] * n)


def test_the_interval_holds_80_percent_of_the_ends() -> None:
    low, median, high = remaining_interval(curves(1), 1)[0].tolist()
    assert (low, median, high) == (20, 100, 180)


def test_nothing_is_made_up_without_forecasts() -> None:
    assert remaining_interval(None, 2).tolist() == [[UNKNOWN] * 3] * 2
    of = expectations(view(None, [0], [10], 100), remaining_interval(None, 1)).of(0)
    assert of == ([], [], [])


def test_loads_ahead_are_those_of_requests_that_still_run() -> None:
    """S(h) is linear here, so that at h = 50 three of four still run, each with h more tokens."""
    interval = remaining_interval(curves(2), 2)
    expected = expectations(view(curves(2), [0, 0], [300, 100], 1000, 500), interval)
    assert expected.points[0] == 0
    assert expected.points[-1] == 256, "the power of two from 180 on"
    at = expected.points.tolist().index(48)
    alive = 1 - 48 / 200
    assert expected.mean[0, 0] == 400
    assert expected.mean[0, at] == pytest.approx(alive * (348 + 148))
    variance = alive * (1 - alive) * (348**2 + 148**2)
    assert expected.deviation[0, at] == pytest.approx(math.sqrt(variance))
    assert expected.mean[1].tolist() == [0.0] * len(expected.points)


def test_the_probability_of_an_overflow() -> None:
    forecast = curves(3)
    interval = remaining_interval(forecast, 3)
    kv = [350, 410, int(UNLIMITED)]
    expected = expectations(view(forecast, [0, 1, 2], [400, 400, 400], *kv), interval)
    assert expected.overflow[0, 0] == 1, "it is over its capacity now"
    assert expected.overflow[1, 0] == 0, "and it is not"
    at = expected.points.tolist().index(96)
    z = (expected.mean[1, at] - 410) / expected.deviation[1, at]
    assert expected.overflow[1, at] == pytest.approx(0.5 * math.erfc(-z / math.sqrt(2)))
    assert 0 < expected.overflow[1, at] < 1
    assert expected.of(2)[2] == [], "without a capacity there is no overflow"


def test_known_ends_are_looked_at_as_they_are() -> None:
    forecast = PointForecast.new([30.0])
    interval = remaining_interval(forecast, 1)
    assert interval.tolist() == [[30, 30, 30]]
    ahead, deviation, overflow = expectations(view(forecast, [0], [100], 120), interval).of(0)
    assert ahead[:3] == [100, 102, 104]
    assert set(ahead[-10:]) == {0}
    assert set(deviation) == {0}
    assert max(overflow) == 1, "its last tokens have no room"


def test_no_request_is_no_load() -> None:
    nothing = SurvivalForecast.new([0, 1], np.empty((0, 2)))
    expected = expectations(view(nothing, [], [], 100), remaining_interval(nothing, 0))
    assert set(expected.of(0)[0]) == {0}


def test_limits_that_nobody_knows() -> None:
    assert known(UNLIMITED) == UNKNOWN
    assert known(UNLIMITED - 1000) == UNKNOWN, "less what is on its way out"
    assert known(4608) == 4608


def instance(name: str, role: Literal["prefill", "decode"], kv: int, held: int) -> Instance:
    limits = {"slots": 8, "kv_capacity": kv, "kv_tokens": held}
    return Instance(name=name, role=role, in_service=True, draining=False, **limits)


def test_forecasts_and_loads_are_put_where_they_belong() -> None:
    """Two requests on the second decode instance, one waits, one is being prefilled."""
    running = SurvivalForecast.new([0, 10, 1000], [[1, 1, 0], [1, 0.5, 0]])
    nothing_waits = view(running, [1, 1], [100, 30], int(UNLIMITED), 500)
    seen_view = replace(
        nothing_waits,
        generated_tokens=np.array([51, 21]),
        waiting_prompt_tokens=np.array([40]),
        waiting_generated_tokens=np.array([1]),
        waiting_forecast=SurvivalForecast.new([0, 100], [[1, 0]]),
        waited_steps=np.array([3]),
        step_seconds=0.04,
    )
    requests = Requests(
        number=[7, 8, 9, 10],
        name=["a", "b", "c", "d"],
        phase=[Phase.DECODING, Phase.PLACED, Phase.WAITING, Phase.PREFILLING],
        instance=[2, 2, UNKNOWN, 1],
        target=[UNKNOWN] * 4,
        prompt=[100, 30, 40, 60],
        generated=[50, 20, 1, 0],
        **dict.fromkeys(("low", "median", "high"), [UNKNOWN] * 4),
    )
    instances = [
        instance("decode-0", "decode", UNKNOWN, 0),
        instance("prefill-0", "prefill", UNKNOWN, 60),
        instance("decode-1", "decode", 500, 0),
    ]
    unforeseen = Snapshot(
        time=12.5,
        step_seconds=0.04,
        points=[],
        instances=instances,
        requests=requests,
        further_waiting=2,
    )
    seen = Look(seen_view, ["decode-0", "decode-1"], unforeseen).snapshot()
    assert (seen.time, seen.step_seconds, seen.further_waiting) == (12.5, 0.04, 2)
    assert seen.requests.low == [109, 2, 10, UNKNOWN]
    assert seen.requests.median == [505, 10, 50, UNKNOWN]
    assert seen.requests.high == [901, 802, 90, UNKNOWN]
    assert seen.requests.name == ["a", "b", "c", "d"]
    first, prefill, second = seen.instances
    assert (first.kv_tokens, prefill.kv_tokens, second.kv_tokens) == (0, 60, 200)
    assert prefill.ahead == []
    assert set(first.ahead) == {0}
    assert first.overflow == [], "its capacity is not known"
    assert second.ahead[0] == 200
    assert len(second.overflow) == len(seen.points)
    assert seen.points[-1] == 1024


def lives(engine: Engine, telemetry: GivenTelemetry, steps: int = 40) -> None:
    """Let a request begin, be forecast again and end."""
    telemetry.hear(frames(engine.start()))
    engine.decode(steps)
    telemetry.hear(frames(engine.snapshot()))
    engine.decode(steps)
    telemetry.hear(frames(engine.finish()))


def test_what_ends_is_scored() -> None:
    engine = Engine()
    with GivenTelemetry() as telemetry:
        scores = ForecastScores(telemetry)
        assert accuracy(scores) is None, "nothing has ended"
        for _ in range(3):
            lives(engine, telemetry)
        scores.take()
        seen = accuracy(scores)
        assert seen.requests == scores.quality.scored == 3
        assert seen.alarm is seen.drift is None, "too few to say"
        for _ in range(47):
            lives(engine, telemetry)
        scores.take()
        seen = accuracy(scores)
        assert seen.requests == 50
        assert seen.alarm is not None


def test_of_very_many_that_end_at_once_a_part_is_scored() -> None:
    engine = Engine()
    with GivenTelemetry() as telemetry:
        scores = ForecastScores(telemetry)
        for _ in range(250):
            lives(engine, telemetry)
        scores.take()
        assert scores.quality.scored == 84, "every third"


def test_the_figures_are_those_of_the_forecasts() -> None:
    engine = Engine()
    with GivenTelemetry() as telemetry:
        scores = ForecastScores(telemetry)
        begun = engine.start()
        engine.decode(40)
        later = engine.snapshot()
        engine.decode(40)
        telemetry.hear(frames(begun), frames(later), frames(engine.finish()))
        scores.take()
        seen = accuracy(scores)
    kept = [
        KeptForecast(one.forecast_at, one.tokens_left, one.survival)
        for one in (*begun.requests, *later.requests)
    ]
    event = FinishedEvent("request-1", "stop", 7, 80, 400)
    scored = score(FinishedForecasts(KEY, "", "", event, tuple(EDGES), kept))
    figures: ForecastFigures = scored.figures()
    assert seen.error == pytest.approx(figures.mae(), abs=0.1)
    assert seen.bias == pytest.approx(figures.bias(), abs=0.1)
    assert seen.coverage == pytest.approx(list(figures.coverage().values()), abs=1e-4)
    assert seen.late == pytest.approx(figures.late_share(), abs=1e-4)


def test_forecasts_are_kept_to_score_them_and_handed_on_to_policies() -> None:
    engine = Engine()
    with GivenTelemetry() as telemetry:

        def kept() -> int:
            with telemetry.lock:
                requests = telemetry.view.instances[KEY].requests.values()
                return sum(len(one.forecasts) for one in requests)

        telemetry.hear(frames(engine.start()), frames(engine.snapshot()))
        assert kept() == 0, "nobody scores them"
        ForecastScores(telemetry)
        engine.decode(20)
        telemetry.hear(frames(engine.snapshot()))
        assert kept() == 1
        assert len(telemetry.take_forecasts()) == 3, "policies get them either way"


def test_steps_are_timed_of_engines_at_work() -> None:
    engine, now = Engine(), [0.0]
    with GivenTelemetry() as telemetry:
        steps = EngineSteps(telemetry, clock=lambda: now[0])

        def looked(at: float, *messages: list[bytes]) -> dict[str, float]:
            now[0] = at
            telemetry.hear(*messages, at=at)
            return steps.seconds()

        assert looked(0.0, frames(engine.start())) == {}, "one look says nothing"
        engine.decode(20)
        assert looked(0.8, frames(engine.snapshot())) == {"gpu0": pytest.approx(0.04)}
        assert looked(1.0) == {"gpu0": pytest.approx(0.04)}, "nothing new has come"
        engine.decode(10)
        assert looked(1.8, frames(engine.snapshot())) == {"gpu0": pytest.approx(0.1)}
        assert looked(2.0, frames(engine.finish())) == {}, "it idles"
        assert looked(9.0, frames(engine.start())) == {}, "how long it idled is no step"
        engine.decode(10)
        assert looked(9.5, frames(engine.snapshot())) == {"gpu0": pytest.approx(0.05)}
        assert looked(15.0) == {}, "it is stale"


async def test_the_page_is_sent_both(tokenizer: Tokenizer) -> None:
    engine = Engine(instance="decode-0")
    with publisher(bind=True) as sender:
        async with cluster(tokenizer, telemetry={"decode-0": endpoint_of(sender)}) as it:
            shown, took = None, dict[str, float | None]()
            with it.listeners.feed.watching() as following:
                async with asyncio.timeout(60):
                    while shown is None or took["decode-0"] is None:
                        for message in (engine.start(), engine.snapshot()):
                            sender.send_multipart(frames(message))
                        engine.decode(10)
                        if len(engine.running) > 2:
                            sender.send_multipart(frames(engine.finish()))
                        line = await following()
                        seen = msgspec.json.decode(line, type=Snapshot)
                        shown = seen.accuracy
                        took = {one.name: one.step_seconds for one in seen.instances}
            assert shown.requests >= 1
            assert took["decode-0"] > 0
            assert took["decode-1"] is took["prefill-0"] is None, "they publish nothing"
            assert seen.joules is None, "no engine says what it uses"


BODY = {"prompt": PROMPT, "max_tokens": 20}


async def test_nothing_is_said_before_anything_is_known(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer) as it:
        snapshot = it.listeners.feed._source.look().snapshot()
        assert snapshot.finishes is snapshot.outlook is None


async def test_how_forecasts_and_promises_came_out_is_counted(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer) as it:
        for _ in range(55):
            await it.stream(BODY)
        await it.stream({**BODY, "finish_in_s": 600})
        status, _, _ = await it.post({"model": "m", **BODY, "finish_in_s": 0.001})
        assert status == 429
        seen = it.listeners.feed._source.look().snapshot().finishes
        assert (seen.kept, seen.broken, seen.refused) == (1, 0, 1)
        assert seen.forecasts > 25
        exported = {"within": 0.0, "any": 0.0}
        for line in (await it.text("/metrics")).splitlines():
            if line.startswith('headway_proxy_finish_forecasts_total{of="finish"'):
                exported["any"] += float(line.split()[-1])
                if 'outcome="within"' in line:
                    exported["within"] += float(line.split()[-1])
        assert seen.forecasts == exported["any"]
        assert seen.held == pytest.approx(exported["within"] / exported["any"], abs=1e-4)


async def test_what_was_expected_of_now_is_said_beside_what_is(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer) as it:
        now = [1000.0]
        outlooks = Outlooks(it.proxy.reports, it.proxy.cluster.decodes, clock=lambda: now[0])
        assert outlooks.now() is None
        await it.stream(BODY)
        first = outlooks.now()
        assert first.foretold == []
        low, median, high = first.tokens
        assert 0 <= low <= median <= high
        assert first.wanted is not None and first.wanted >= 1
        for _ in range(20):
            await it.stream(BODY)  # the same minute's arrivals are more by now
        now[0] += SECONDS / 2
        second = outlooks.now()
        assert second.tokens[1] > median
        assert second.foretold == []
        now[0] += SECONDS / 2
        third = outlooks.now()
        assert third is not None and third.foretold == first.tokens
        now[0] += SECONDS / 2 + 0.4
        fourth = outlooks.now()
        assert fourth is not None and fourth.foretold == second.tokens
        now[0] += 10 * SECONDS
        late = outlooks.now()
        assert late is not None and late.foretold == [], "nobody looked a minute before"


async def test_a_snapshot_says_how_good_forecasts_on_arrival_were(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer) as it:
        snapshots = LiveSnapshots(it.proxy.cluster)

        def ended(tokens: int, **forecasts: int) -> None:
            answered = Placeable("", length_forecasts=cast("dict[Source, int]", forecasts))
            answered.reported(1, tokens)
            it.proxy.cluster.length_factors.ended(answered)

        assert snapshots.look().snapshot().length_errors == []
        ended(300, past=100)
        ended(50, past=100)
        ended(100, past=100, prompt=1000)
        prompt, past = snapshots.look().snapshot().length_errors
        assert (prompt.source, prompt.answers, prompt.factor) == ("prompt", 1, 10.0)
        assert (past.source, past.answers, past.factor) == ("past", 3, 2.0), "the median"
        for _ in range(600):
            ended(100, past=100)
        past = snapshots.look().snapshot().length_errors[1]
        assert (past.answers, past.factor) == (500, 1.0), "only the latest count"


async def test_a_snapshot_has_the_load_ahead_of_a_proxy_that_forecasts(
    tokenizer: Tokenizer,
) -> None:
    async with cluster(tokenizer) as it:
        await it.stream(BODY)
        for engine in it.decodes:
            engine.stalls_at = 12
        running = asyncio.create_task(it.stream(BODY))
        await until(lambda: any(r.generated_tokens == 12 for r in it.requests()))
        seen = LiveSnapshots(it.proxy.cluster, reports=it.proxy.reports).look().snapshot()
        without = LiveSnapshots(it.proxy.cluster).look().snapshot()
        for engine in it.decodes:
            engine.stalls_at = 0
        await running
        assert (seen.outlook.seconds, len(seen.outlook.tokens)) == (SECONDS, 3)
        assert without.outlook is without.finishes is None, "as where a coordinator decides"
