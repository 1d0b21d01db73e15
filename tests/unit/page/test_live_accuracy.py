"""What is said of forecasts and steps, from what the engines publish."""

import asyncio

import msgspec
import pytest
from published_telemetry import EDGES, KEY, Engine, GivenTelemetry, endpoint_of, frames, publisher
from scripted_cluster import cluster
from tokenizers import Tokenizer

from predictor.live.telemetry_messages import FinishedEvent
from rescheduler.monitoring.forecast_quality import ForecastFigures, ForecastScores, score
from rescheduler.page.live_snapshots import EngineSteps, accuracy
from rescheduler.page.snapshot import Snapshot
from rescheduler.telemetry.telemetry_view import FinishedForecasts, KeptForecast


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
        assert seen is not None
        assert seen.requests == scores.quality.scored == 3
        assert seen.alarm is seen.drift is None, "too few to say"
        for _ in range(47):
            lives(engine, telemetry)
        scores.take()
        seen = accuracy(scores)
        assert seen is not None
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
    assert seen is not None
    assert scored is not None
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
                        assert line is not None
                        seen = msgspec.json.decode(line, type=Snapshot)
                        shown = seen.accuracy
                        took = {one.name: one.step_seconds for one in seen.instances}
            assert shown.requests >= 1
            assert took["decode-0"] > 0
            assert took["decode-1"] is took["prefill-0"] is None, "they publish nothing"
            assert seen.joules is None, "no engine says what it uses"
