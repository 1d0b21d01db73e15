"""What policies see of the proxy's requests."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from live_requests import instance_state, live_request
from published_telemetry import GivenTelemetry, frames, snapshot

from benchmarks.support.engine_states import engine_state
from predictor.forecasts.forecast import SurvivalForecast
from predictor.live.telemetry_messages import (
    Finished,
    FinishedEvent,
    Forecasts,
    RequestForecast,
    encode_survival,
)
from rescheduler.cluster.cluster_view import CANNOT_MOVE, NEVER_MOVED, UNLIMITED
from rescheduler.migration import create_migration_policy
from rescheduler.placement.guarded_policy import PrefillBudgets, cluster_view, crowded_view
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.placeable import Placements
from rescheduler.routing import create_policy
from rescheduler.telemetry.subscriber import TelemetrySubscriber

EDGES = [0, 10, 100, 1000]


@dataclass
class Heard:
    """What engines published, and the forecasts that come of it."""

    telemetry: TelemetrySubscriber
    forecasts: LiveForecasts

    def receive(self, *messages: list[bytes], source: str | None = None) -> None:
        with self.telemetry.lock:
            for message in messages:
                self.telemetry.view.receive(message, 0.0, source)
        self.forecasts.refresh()


@pytest.fixture
def heard() -> Iterator[Heard]:
    """Of no engine yet."""
    with GivenTelemetry() as telemetry:
        yield Heard(telemetry, LiveForecasts(telemetry))


ENGINE = engine_state(max_num_seqs=8, max_model_len=512, num_blocks=100, free_blocks=90)


instance = partial(instance_state, control="a client")


def request(
    name: str,
    prompt: int,
    generated: int,
    at: InstanceState | None = None,
    placements: Placements[LiveRequest] | None = None,
    **body: Any,
) -> LiveRequest:
    made = live_request(name, placements, **body)
    made.begin_prefill(instance("prefill"))
    made.prefilled({}, prompt)
    if at is not None:
        made.place(at)
        if generated:
            made.token(0.0)
    made.splicer.output_token_ids = list(range(generated))
    return made


def move(request: LiveRequest, target: InstanceState, tokens: int) -> None:
    """Move a request, which generates some tokens at its target."""

    async def run() -> None:
        request.move_to(target)
        request.freeze()

    asyncio.run(run())
    request.frozen(request.splicer.output_token_ids, {})
    request.land()
    request.token(1.0)
    request.splicer.output_token_ids += range(tokens)


def test_the_view_counts_what_is_where() -> None:
    a, b, on = instance("a"), instance("b"), Placements[LiveRequest]()
    a.engine = ENGINE
    request("r1", 10, 5, a, on)
    request("r2", 20, 0, a, on)
    request("r3", 30, 7, b, on)
    waiting = request("r4", 40, 0)
    waiting.wait(8.0)
    view = cluster_view(on, [a, b], [waiting], None, 10.0, 0.05, 3)
    assert view.slots.tolist() == [8, UNLIMITED]
    assert view.kv_capacity.tolist() == [1600, UNLIMITED]
    assert view.kv_load.tolist() == [35, 37]
    assert view.running.tolist() == [2, 1]
    assert view.queued.tolist() == [1, 0]
    assert view.waiting_prompt_tokens.tolist() == [40]
    assert view.waited_steps.tolist() == [40]
    assert view.dispatched == 3
    assert view.forecast is None


def test_a_guessed_prompt_is_no_longer_than_what_an_engine_takes() -> None:
    """Half a megabyte of an image; the engine says whether it is too long."""
    a, on = instance("a"), Placements[LiveRequest]()
    a.engine = ENGINE
    request("r1", 125_000, 0, a, on)
    view = cluster_view(on, [a], [request("r2", 125_000, 0)], None, 0.0, 0.05)
    assert view.kv_load.tolist() == [512]
    assert view.waiting_prompt_tokens.tolist() == [512]
    view = cluster_view(Placements(), [a], [request("r3", 125_000, 0)], None, 0.0, 0.05)
    assert create_policy("jsq_load").assign(view).instance.tolist() == [0]


def test_who_may_move_and_since_when() -> None:
    a, deaf = instance("a"), instance("deaf", control=None)
    on = Placements[LiveRequest]()
    request("never moved", 10, 5, a, on)
    move(request("moved", 10, 20, instance("b"), on), a, tokens=30)
    request("has not begun", 10, 0, a, on)
    request("n = 2", 10, 5, a, on, n=2)
    request("without a control socket", 10, 5, deaf, on)
    view = cluster_view(on, [a, deaf], [], None, 0.0, 0.05)
    assert view.since_move is not None
    assert view.since_move.tolist() == [NEVER_MOVED, 30, CANNOT_MOVE, CANNOT_MOVE, CANNOT_MOVE]


def test_what_is_said_of_a_name_that_two_requests_have_counts_for_neither(heard: Heard) -> None:
    a = instance("a")
    earlier = request("job", 30_000, 0, a, n=2)
    later = request("job", 10, 0, a, n=2)
    later.movable = earlier.movable = False
    for each in (earlier, later):
        heard.forecasts.began(each)
    heard.receive(snapshot_of("a", 0, EDGES, job=[1.0, 0.8, 0.4, 0.0]))
    assert later.prompt_tokens == 10
    assert not heard.forecasts.has(later.external_id)
    heard.forecasts.ended(later, by_itself=False)
    heard.forecasts.began(later)  # while the earlier one still runs
    heard.receive(snapshot_of("a", 1, EDGES, job=[1.0, 0.8, 0.4, 0.0]))
    assert later.prompt_tokens == 10
    for each in (later, earlier):
        heard.forecasts.ended(each, by_itself=False)
    heard.forecasts.began(later)
    heard.receive(snapshot_of("a", 2, EDGES, job=[1.0, 0.8, 0.4, 0.0]))
    assert heard.forecasts.has(later.external_id)


def test_forecasts_follow_their_requests_and_age(heard: Heard) -> None:
    forecasts = heard.forecasts
    known = request("r1", 10, 15, max_tokens=4096)
    unknown = request("r2", 10, 0, max_tokens=40)
    heard.receive(snapshot_of("a", 0, EDGES, r1=[1.0, 0.8, 0.4, 0.0]))
    both = forecasts.forecast([known, unknown])
    # Ten tokens after its forecast: S(h) = S(10 + h) / S(10).
    assert both.at([0, 90])[0] == pytest.approx([1.0, 0.4 / 0.8], abs=1e-4)
    assert both.at([0, 39, 40])[1].tolist()[2] == 0.0  # its max_tokens

    # Its engine has handed it over: the forecast stays until the next engine has its own.
    event = FinishedEvent("cmpl-r1-0-00000000", "moved", 10, 6, 500)
    header = {"rank": 0, "epoch": 1, "step": 1, "time": 0.0}
    heard.receive(frames(Finished(instance="a", seq=1, requests=[event], **header)))
    assert forecasts.forecast([known]).at([90])[0] == pytest.approx([0.5], abs=1e-4)
    (curve,) = encode_survival(np.array([[1.0, 0.5, 0.2, 0.0]]))
    later = RequestForecast("cmpl-r1-0-ffff0000", 25, 0, 0, 500, curve)
    heard.receive(frames(snapshot("b", [later], EDGES)))
    assert forecasts.forecast([known]).at([10])[0] == pytest.approx([0.5], abs=1e-4)
    forecasts.ended(known, True)
    assert forecasts.forecast([known]).at([10])[0] > 0.9  # as of any request


def test_a_client_may_ask_for_more_tokens_than_a_float_holds(heard: Heard) -> None:
    greedy = request("r1", 10, 3, max_tokens=10**400)
    assert 0 < heard.forecasts.forecast([greedy]).at([1_000])[0] < 1


def test_an_engine_says_how_many_tokens_a_request_has_whose_stream_is_not_read(
    heard: Heard,
) -> None:
    a, on = instance("a"), Placements[LiveRequest]()
    read = request("read", 300, 4, a, on)
    whole = request("whole", 300, 0, a, on, echo=True)
    several = request("several", 300, 0, a, on, n=2)
    for one in (read, whole, several):
        heard.forecasts.began(one)
    curve = [1.0, 0.8, 0.4, 0.0]
    heard.receive(snapshot_of("a", 0, EDGES, read=curve, whole=curve, several=curve))
    known = [(one.prompt_tokens, one.generated_tokens) for one in (read, whole, several)]
    assert known == [(300, 4), (10, 5), (300, 0)]


def snapshot_of(at: str, seq: int, edges: list[int], **curves: list[float]) -> list[bytes]:
    """Return what an engine publishes of requests with 10 prompt tokens, 5 tokens on."""
    requests = [
        RequestForecast(f"cmpl-{name}-0-{seq:08x}", 10, 5, 5, 500, curve)
        for name, curve in zip(
            curves, encode_survival(np.array(list(curves.values()))), strict=True
        )
    ]
    return frames(snapshot(at, requests, edges, seq))


def test_a_rolling_change_of_predictors_loses_no_forecast(heard: Heard) -> None:
    forecasts, receive = heard.forecasts, heard.receive
    requests = [request(name, 10, 5) for name in ("r1", "r2", "r3")]
    r1, r2, r3 = [1.0, 0.8, 0.4, 0.1], [1.0, 0.6, 0.2], [1.0, 0.9, 0.9, 0.3]
    at = np.array([0, 10, 49, 50, 51, 99, 100, 399, 400, 401])

    def alone(edges: list[int], curve: list[float]) -> np.ndarray:
        coded = np.rint(np.array([curve]) * 65_535) / 65_535
        return SurvivalForecast.new(edges, coded, 500.0).at(at)[0]

    receive(snapshot_of("a", 0, EDGES, r1=r1, r3=r3))
    only = forecasts.forecast(requests[::2])
    assert only.edges.tolist() == EDGES
    assert (only.at(at) == [alone(EDGES, r1), alone(EDGES, r3)]).all()
    # The engine b has a new predictor, whose grid is another and ends earlier.
    receive(snapshot_of("b", 0, [0, 50, 400], r2=r2))
    both = forecasts.forecast(requests)
    expected = [alone(EDGES, r1), alone([0, 50, 400], r2), alone(EDGES, r3)]
    assert both.at(at) == pytest.approx(np.array(expected), abs=1e-12)
    assert both.mean()[1] == pytest.approx(
        SurvivalForecast.new([0, 50, 400], [r2], 500.0).mean()[0], abs=0.05
    )
    # The request r1 moves to b, whose first forecast of it replaces the other.
    receive(snapshot_of("b", 1, [0, 50, 400], r1=r2, r2=r2), snapshot_of("a", 1, EDGES, r3=r3))
    expected[0] = alone([0, 50, 400], r2)
    assert forecasts.forecast(requests).at(at) == pytest.approx(np.array(expected), abs=1e-12)
    # The last request of the old predictor ends.
    forecasts.ended(requests[2], True)
    forecasts.refresh()
    assert forecasts.forecast(requests[:2]).edges.tolist() == [0, 50, 400]


def test_many_requests_keep_their_own_forecasts(heard: Heard) -> None:
    forecasts, n = heard.forecasts, 700
    curves = {f"r{i}": [1.0, 1 - i / 1000, 0.1, 0.0] for i in range(n)}
    heard.receive(snapshot_of("a", 0, EDGES, **curves))
    for i in range(0, n, 3):
        forecasts.ended(request(f"r{i}", 10, 5), False)
    new = {f"new{i}": [1.0, i / 1000, 0.0, 0.0] for i in range(n)}
    heard.receive(snapshot_of("b", 0, EDGES, **new))
    names = [f"r{i}" for i in range(n) if i % 3] + [f"new{i}" for i in range(n)]
    at = forecasts.forecast([request(name, 10, 5) for name in names]).at(10)
    expected = [1 - i / 1000 for i in range(n) if i % 3] + [i / 1000 for i in range(n)]
    assert at == pytest.approx(expected, abs=1e-5)


def test_prefill_budgets_are_spent_until_an_engine_can_have_reckoned_with_it(heard: Heard) -> None:
    instances, budgets = [instance("a"), instance("b")], PrefillBudgets(heard.telemetry)

    def spend(at: InstanceState, tokens: int, accepted: bool) -> LiveRequest:
        sent = request(f"{tokens}", tokens, 0, at)
        budgets.spend(at, sent)
        if accepted:
            sent.accepted()
        return sent

    def publish(seq: int, budget: float) -> None:
        heard.receive(frames(snapshot("a", seq=seq, prefill_budget=budget)))

    assert budgets.left(instances).tolist() == [0.0, 0.0]
    publish(0, 100.5)
    spend(instances[0], 30, accepted=True)
    spend(instances[0], 40, accepted=True)
    assert budgets.left(instances).tolist() == [100.5, 100.5]  # accepted before it published
    spend(instances[0], 30, accepted=True)
    late = spend(instances[0], 90, accepted=False)
    spend(instances[1], 20, accepted=True)
    assert budgets.left(instances[::-1]).tolist() == [80.5, -19.5]
    publish(1, 97.0)
    assert budgets.left(instances).tolist() == [7.0, 77.0], "one is still on its way"
    late.accepted()
    publish(2, -3.0)
    assert budgets.left(instances).tolist() == [-3.0, -23.0]


@pytest.mark.parametrize("prediction", [True, False])
@pytest.mark.parametrize("name", ["star", "survival"])
def test_the_cluster_to_warm_up_with_gives_planners_something_to_move(
    name: str, prediction: bool
) -> None:
    options = {"prediction": prediction} if name == "star" else {}
    assert create_migration_policy(name, **options).plan(crowded_view()).migrations


@pytest.mark.parametrize("name", ["fcfs", "vllm", "jsq_load", "fast_phi", "bfio", "pab"])
def test_the_cluster_to_warm_up_with_has_requests_to_place(name: str) -> None:
    assert (create_policy(name).assign(crowded_view()).instance >= 0).all()


def test_forecasts_that_come_late_are_not_those_of_the_next_request_of_that_name(
    heard: Heard,
) -> None:
    forecasts = heard.forecasts
    first, second = request("r", 500, 5), request("r", 2, 3)
    forecasts.began(first)
    with heard.telemetry.lock:  # and nobody looks before the request ends
        heard.telemetry.view.receive(snapshot_of("a", 0, EDGES, r=[1.0, 0.9, 0.8, 0.7]), 0.0)
    forecasts.ended(first, True)
    forecasts.refresh()
    forecasts.began(second)
    assert forecasts.forecast([second]).at(10)[0] > 0.95, "as of any request"
    heard.receive(snapshot_of("a", 1, EDGES, r=[1.0, 0.3, 0.2, 0.1]))
    assert forecasts.forecast([request("r", 10, 5)]).at(10)[0] == pytest.approx(0.3, abs=1e-4)


def test_an_engine_with_ever_new_grids_and_forecasts_costs_the_others_none(heard: Heard) -> None:
    heard.receive(snapshot_of("a", 0, EDGES, r=[1.0, 0.5, 0.2, 0.1]), source="a")
    curve = np.full(4, 65_535, dtype="<u2").tobytes()
    for life in range(14):
        grid = [0, life + 1, 500, 600]
        names = [f"life{life}x{i}" for i in range(4_000)]
        lies = [RequestForecast(f"cmpl-{name}", 1, 0, 0, 500, curve) for name in names]
        heard.receive(frames(snapshot("b", lies, grid, epoch=100 - life)), source="b")
    honest = heard.forecasts.forecast([request("r", 10, 5)])
    assert honest.at(10)[0] == pytest.approx(0.5, abs=1e-4)
    assert set(honest.edges.tolist()) == {*EDGES, *grid}


def test_the_engine_that_has_a_request_knows_best(heard: Heard) -> None:
    """Another one, which has prefilled it, says that it is far ahead already."""
    forecasts = heard.forecasts
    running = request("r", 10, 5, instance("a"))
    stays = request("s", 10, 0, instance("a"), n=1, echo=True)
    forecasts.began(running)
    forecasts.began(stays)
    lies = RequestForecast("cmpl-r-0-0123abcd", 2**30, 9, 9, 500, b"\xff" * 8)
    other = msgspec.structs.replace(lies, request_id="cmpl-s-0-0123abcd")
    header = {"rank": 0, "epoch": 1, "step": 0, "time": 0.0, "seq": 0}
    said = Forecasts(instance="b", edges=EDGES, requests=[lies, other], **header)
    heard.receive(frames(said), source="b")
    heard.receive(snapshot_of("a", 0, EDGES, r=[1.0, 0.5, 0.2, 0.1]), source="a")
    heard.receive(frames(said), source="b")
    assert forecasts.forecast([running]).at(10)[0] == pytest.approx(0.5, abs=1e-4)
    assert stays.prompt_tokens == 10, "as its own engine says"
