"""Telemetry, however it arrives: what runs is reported right, and no end twice."""

import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from published_telemetry import EDGES, KEY, MAX_TOKENS, Engine, coded_curve, frames

from predictor.forecasts.forecast import SurvivalForecast
from predictor.live.telemetry_messages import (
    MOST_EDGES,
    TOPIC,
    Message,
    TelemetryError,
    decode_message,
    decode_survival,
    encode_message,
)
from rescheduler.telemetry.telemetry_view import InstanceKey, TelemetryView


def view_of(*messages: Message, history: bool = True) -> TelemetryView:
    """Return what is known after messages have come, at time 0."""
    view = TelemetryView(history=history)
    for message in messages:
        view.receive(frames(message), 0.0)
    return view


actions = st.sampled_from(["start", "start", "finish", "snapshot", "idle snapshot", "restart"])


def life(chosen: list[str]) -> tuple[Engine, list[Message]]:
    """Return an engine at the end of its life so far, and all it published."""
    engine, published = Engine(), list[Message]()
    for action in chosen:
        engine.decode()
        if action == "restart":
            engine = Engine(engine.epoch + 1)
        elif action == "start":
            published.append(engine.start())
        elif action == "finish":
            published.append(engine.finish())
        else:
            published.append(engine.snapshot(predicts=action == "snapshot"))
    return engine, published


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[Engine, list[Message]]:
    """What an engine published, with any message dropped, doubled and out of place."""
    engine, published = life(draw(st.lists(actions, min_size=2, max_size=20)))
    copies = draw(st.lists(st.integers(0, 2), min_size=len(published), max_size=len(published)))
    came = [message for message, n in zip(published, copies, strict=True) for _ in range(n)]
    return engine, draw(st.one_of(st.just(came), st.permutations(came)))


@settings(deadline=None)
@given(arrivals())
def test_the_next_snapshot_corrects_whatever_came_before(
    arrived: tuple[Engine, list[Message]],
) -> None:
    engine, messages = arrived
    view = view_of(*messages)
    view.receive(frames(engine.snapshot()), 1.0)
    instance = view.instances[KEY]
    published = {name: request.latest for name, request in instance.requests.items()}
    assert published == engine.running
    said = (instance.epoch, instance.seq, instance.step)
    assert said == (engine.epoch, engine.seq - 1, engine.step)
    assert instance.gauges.running == len(engine.running)
    assert (instance.model, instance.k, instance.received) == ("acme/small", 3, 1.0)


@settings(deadline=None)
@given(arrivals())
def test_an_end_is_published_once_and_never_taken_back(
    arrived: tuple[Engine, list[Message]],
) -> None:
    view, ended = TelemetryView(), set[tuple[int, str]]()
    for message in arrived[1]:
        for finished in view.receive(frames(message), 0.0):
            assert (message.epoch, finished.event.request_id) not in ended
            ended.add((message.epoch, finished.event.request_id))
            at = [kept.forecast_at for kept in finished.forecasts]
            assert at == sorted(set(at))
        instance = view.instances[KEY]
        assert not {(instance.epoch, name) for name in instance.requests} & ended


@settings(deadline=None)
@given(st.lists(actions, min_size=1, max_size=25), st.randoms(use_true_random=False))
def test_messages_that_only_get_lost_are_counted(chosen: list[str], rng: random.Random) -> None:
    _, published = life(chosen)
    came = [message for message in published if rng.random() < 0.6]
    view, expected = view_of(*came), 0
    for epoch in {message.epoch for message in came}:
        numbers = [message.seq for message in came if message.epoch == epoch]
        expected += numbers[-1] - numbers[0] + 1 - len(numbers)
    assert view.lost == expected
    assert (view.duplicated, view.malformed) == (0, 0)


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=80))
def test_a_late_message_is_not_lost_and_a_second_one_is_a_duplicate(numbers: list[int]) -> None:
    engine = Engine()
    published = [engine.finish(name=f"request-{i}") for i in range(41)]
    view = view_of(*(published[number] for number in numbers))
    assert view.lost == max(numbers) - min(numbers) + 1 - len(set(numbers))
    assert view.duplicated == len(numbers) - len(set(numbers))


def test_messages_that_are_not_telemetry_are_counted() -> None:
    view, good = TelemetryView(), frames(Engine().snapshot())
    nested = b"\x81\xa4junk" + b"\x91" * 100_000
    bad = [[], [TOPIC], [*good, b""], [b"headway/2", good[1]], [TOPIC, b""], [TOPIC, good[1][:-1]]]
    for message in [*bad, [TOPIC, nested]]:
        assert view.receive(message, 0.0) == []
    assert view.malformed == len(bad) + 1
    assert view.instances == {}
    engine = Engine()
    view.receive(frames(engine.start()), 0.0)
    other = engine.start()
    other.edges[-1] += 1
    view.receive(frames(other), 0.0)  # another grid in one life of the engine
    assert view.malformed == len(bad) + 2
    assert set(view.instances[KEY].requests) == {"request-1"}


def test_a_restart_drops_what_ran_and_the_old_engine_is_not_heard_again() -> None:
    old, new, view = Engine(epoch=5), Engine(epoch=6), TelemetryView()
    view.receive(frames(old.start()), 0.0)
    late = [old.finish(), old.snapshot()]
    view.receive(frames(new.snapshot()), 1.0)
    assert view.instances[KEY].requests == {}
    for message in late:
        assert view.receive(frames(message), 2.0) == []
    assert (view.outdated, view.vanished, view.instances[KEY].received) == (2, 0, 1.0)
    view.receive(frames(new.start()), 3.0)  # of the same id as one that ended before
    assert set(view.instances[KEY].requests) == {"request-1"}


def test_ranks_are_engines_of_their_own() -> None:
    view, engine = TelemetryView(), Engine()
    snapshot = engine.snapshot()
    view.receive(frames(snapshot), 0.0)
    view.receive([TOPIC, encode_message(snapshot).replace(b"\xa4rank\x00", b"\xa4rank\x01")], 0.0)
    assert set(view.instances) == {KEY, InstanceKey("gpu0", 1)}


def test_forecasts_age_with_the_tokens_since() -> None:
    engine = Engine()
    view = view_of(engine.start())
    engine.decode(12)
    view.receive(frames(engine.snapshot(predicts=False)), 0.0)
    names, forecast = view.forecast(KEY)
    (curve,) = decode_survival([coded_curve(30.0)], len(EDGES))
    whole = SurvivalForecast.new(EDGES, curve[None], MAX_TOKENS)
    h = np.arange(0, 420)
    assert names == ["request-1"]
    np.testing.assert_allclose(forecast.at(h), whole.aged(12).at(h), atol=1e-12)
    conditional = whole.uncapped().at(h + 12.0) / whole.at(12.0)[:, None]
    np.testing.assert_allclose(forecast.at(h)[:, :388], conditional[:, :388], atol=1e-12)
    assert (forecast.at(h)[:, 388:] == 0).all()  # max_tokens
    assert view.forecast(KEY)[1].median()[0] < MAX_TOKENS


def test_a_request_that_ends_brings_its_forecasts_with_it() -> None:
    engine = Engine()
    view = view_of(engine.start())
    for predicts in (True, False, True):
        engine.decode(10)
        view.receive(frames(engine.snapshot(predicts)), 0.0)
    (finished,) = view.receive(frames(engine.finish("length")), 0.0)
    assert [kept.forecast_at for kept in finished.forecasts] == [0, 10, 30]
    assert [kept.tokens_left for kept in finished.forecasts] == [400, 390, 370]
    assert (finished.instance, finished.model, finished.edges) == (KEY, "acme/small", tuple(EDGES))
    assert finished.event.total_tokens == 30
    np.testing.assert_array_equal(
        finished.forecast().at(20.0),
        decode_survival([coded_curve(30.0 + n) for n in (0, 10, 30)], len(EDGES))[:, 3],
    )


def test_many_forecasts_are_thinned_evenly() -> None:
    engine = Engine(max_tokens=4_000)
    view = view_of(engine.start())
    for _ in range(2_000):
        engine.decode(1)
        view.receive(frames(engine.snapshot()), 0.0)
    (finished,) = view.receive(frames(engine.finish()), 0.0)
    at = [kept.forecast_at for kept in finished.forecasts]
    assert 128 <= len(at) <= 256
    assert len(set(np.diff(at))) == 1
    assert at[0] == 0
    assert at[-1] > 2_000 - 16


def test_a_vanished_request_may_still_be_reported_as_ended_or_come_back() -> None:
    engine = Engine()
    first = engine.start()
    without, again, end = (
        replace(engine.snapshot(), requests=[]),
        engine.snapshot(),
        engine.finish(),
    )
    view = view_of(first, without)
    assert (view.vanished, view.instances[KEY].requests) == (1, {})
    (finished,) = view.receive(frames(end), 0.0)
    assert len(finished.forecasts) == 1
    assert view.vanished == 0
    view = view_of(first, without, again)
    assert set(view.instances[KEY].requests) == {"request-1"}
    assert view.vanished == 0


def test_late_messages_do_not_undo_a_snapshot_nor_what_began_after_it() -> None:
    engine = Engine()
    late, first = engine.snapshot(), engine.start()
    view = view_of(first, late)
    assert (set(view.instances[KEY].requests), view.vanished) == ({"request-1"}, 0)
    engine = Engine()
    first, early = engine.start(), engine.snapshot()
    engine.finish()  # lost
    view = view_of(engine.snapshot())
    for late in (first, early):
        view.receive(frames(late), 0.0)
        assert view.instances[KEY].requests == {}
        assert view.instances[KEY].gauges.running == 0
    assert view.outdated == 2


def test_gauges_of_engines_that_reckon_no_prefill_budget_can_be_read() -> None:
    snapshot = Engine().snapshot()
    published = msgspec.msgpack.decode(encode_message(snapshot))
    assert published["gauges"] == [0, 2, 0.25, 1_000, None, 0]
    del published["gauges"][4:]  # as engines send it that know no such things
    assert decode_message(msgspec.msgpack.encode(published)) == snapshot
    tight = replace(snapshot, gauges=replace(snapshot.gauges, prefill_budget=-12.5))
    assert decode_message(encode_message(tight)) == tight


def test_late_forecasts_do_not_replace_newer_ones() -> None:
    engine, view = Engine(), TelemetryView()
    first = engine.start()
    (begun,) = first.requests
    moved = replace(begun, generated_tokens=6)
    predicted = replace(begun, generated_tokens=9, forecast_at=9)
    published = [
        replace(first, seq=seq, requests=[request])
        for seq, request in ((1, moved), (0, begun), (3, predicted), (4, moved))
    ]
    shown = []
    for message in published:
        view.receive(frames(message), 0.0)
        shown.append(view.instances[KEY].requests["request-1"].latest)
    assert shown == [moved, moved, predicted, predicted]


def test_a_silent_engine_is_stale_and_later_forgotten() -> None:
    engine, view = Engine(), TelemetryView(stale_after=3.0, forget_after=60.0)
    view.receive(frames(engine.snapshot()), 100.0)
    assert not view.is_stale(KEY, 103.0)
    assert view.is_stale(KEY, 103.1)
    view.receive([b"junk"], 161.0)
    assert view.instances == {}


MANY_EDGES = list(range(2_000_000))
BEGUN, SNAPSHOT = Engine().start(), Engine().snapshot()
MALFORMED: list[tuple[Message, str | None]] = [
    *(
        (replace(BEGUN, requests=[replace(BEGUN.requests[0], **changed)]), None)
        for changed in (
            {"request_id": ""},
            {"request_id": "9" * 5000 + "_1-0-0123abcd"},
            {"tokens_left": 2**63},
            {"prompt_tokens": 2**64 - 1},
        )
    ),
    (replace(BEGUN, edges=MANY_EDGES, requests=[]), r"length|bytes"),
    (replace(BEGUN, edges=MANY_EDGES[: MOST_EDGES + 1], requests=[]), r"length|bytes"),
    *(
        (replace(SNAPSHOT, gauges=replace(SNAPSHOT.gauges, **{name: value})), "gauges")
        for name, values in {
            "running": [2**40],
            "waiting": [2**40],
            "kv_usage": [float("nan"), 1.5],
            "kv_capacity_tokens": [2**53],
            "prefill_budget": [float("nan"), float("-inf"), 1e308],
            "failures": [-1],
        }.items()
        for value in values
    ),
]
"""Messages that no engine sends, and what is said of those that are refused where they are read."""


@pytest.mark.parametrize("history", [True, False])
@pytest.mark.parametrize("number", range(len(MALFORMED)))
def test_values_that_nothing_can_hold_are_malformed(number: int, history: bool) -> None:
    message, refused = MALFORMED[number]
    assert view_of(message, history=history).malformed == 1
    if refused is not None:
        with pytest.raises(TelemetryError, match=refused):
            decode_message(encode_message(message))


HOUR = 3_600_000_000_000


@pytest.mark.parametrize("hours", [-5, 5])
def test_a_restart_is_noticed_at_once_whatever_the_engines_clock_says(hours: int) -> None:
    old, new = Engine(epoch=100 * HOUR), Engine(epoch=(100 + hours) * HOUR)
    view = TelemetryView()
    old.start()
    view.receive(frames(old.snapshot()), 0.0, "its endpoint")
    view.receive(frames(new.snapshot()), 0.5, "its endpoint")
    assert view.instances[KEY].epoch == new.epoch
    assert not view.instances[KEY].requests
    assert (view.outdated, view.foreign) == (0, 0)


def test_where_messages_come_in_any_order_a_clock_set_back_silences_for_seconds() -> None:
    old, new, view = Engine(epoch=2 * HOUR), Engine(epoch=HOUR), TelemetryView(stale_after=3.0)
    view.receive(frames(old.snapshot()), 0.0)
    view.receive(frames(new.snapshot()), 2.0)
    assert view.instances[KEY].epoch == old.epoch
    view.receive(frames(new.snapshot()), 3.5)
    assert view.instances[KEY].epoch == new.epoch


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**53), st.integers(0, 2**16 - 1))
def test_no_engine_speaks_in_the_name_of_another(epoch: int, seq: int, rank: int) -> None:
    view, engine, liar = TelemetryView(), Engine(epoch=HOUR), Engine(epoch=epoch)
    engine.start()
    for now in range(4):
        view.receive(frames(engine.snapshot()), float(now), "a")
        lie = replace(liar.snapshot(), seq=seq, rank=rank)
        view.receive(frames(lie), float(now), "b")
        assert set(view.instances[KEY].requests) == {"request-1"}
    assert view.instances[KEY].received == 3.0
    assert view.foreign == (4 if rank == 0 else 0)


def test_a_name_that_has_fallen_silent_may_come_by_another_connection() -> None:
    view, engine = TelemetryView(stale_after=3.0), Engine()
    view.receive(frames(engine.snapshot()), 0.0, "a")
    view.receive(frames(engine.snapshot()), 2.0, "b")
    assert view.instances[KEY].source == "a"
    view.receive(frames(engine.snapshot()), 4.0, "b")
    assert view.instances[KEY].source == "b"


def test_one_connection_speaks_for_a_few_engines_at_most() -> None:
    view = TelemetryView()
    view.receive(frames(Engine().snapshot()), 0.0, "a")
    for i in range(1_000):
        view.receive(frames(Engine(instance=f"engine {i}").snapshot()), 0.0, "b")
    assert KEY in view.instances
    assert len(view.instances) <= 17


def test_forecasts_that_nobody_takes_are_bounded_by_engine() -> None:
    view, liar, engine = TelemetryView(history=False), Engine(), Engine(instance="gpu1")
    view.receive(frames(engine.start()), 0.0, "b")
    begun = liar.start()
    (one,) = begun.requests
    for i in range(100):
        named = [replace(one, request_id=f"{i}-{j}") for j in range(400)]
        message = replace(begun, seq=i, requests=named)
        view.receive(frames(message), 0.0, "a")
    batches = view.take_batches()
    assert sum(len(batch.names) for batch in batches) <= 16_385
    assert [batch.names for batch in batches if batch.instance == "gpu1"] == [("request-1",)]
