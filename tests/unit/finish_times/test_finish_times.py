"""Finish times of a fleet in virtual time: they hold, and promises are kept."""

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_fleet import Fleet, VirtualRequest, VirtualRun

from predictor.forecasts.forecast import PointForecast
from rescheduler.emulation.emulate_options import AnswerLengths, StepSeconds
from rescheduler.finish_times.finish_times import Calibration, Interval, Observed
from rescheduler.finish_times.fleet_load import PoolLoad, wanted_instances
from rescheduler.finish_times.lengths import Arrivals, FirstTokens, LatelyEnded, Pace
from rescheduler.finish_times.load_ahead import ANYWHERE, STEPS, LoadAhead, Queue, load_ahead
from rescheduler.finish_times.promises import Promises
from rescheduler.openai.openai_request import RequestRefusedError
from rescheduler.placement.account import Account
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.placeable import Placeable

FLEET = Fleet(
    instances=2,
    slots=8,
    kv_tokens=6_000,
    step=StepSeconds(constant=0.02, per_new=1e-4, per_context=1e-6),
    law=AnswerLengths(median=80.0, sigma=0.8, longest=600),
)
CAPACITY = 5.0
"""Requests a second that the fleet ends when there are always some that wait."""


def requests(n: int, load: float, seed: int = 0) -> list[VirtualRequest]:
    generator = np.random.default_rng(seed)
    at = np.cumsum(generator.exponential(size=n)) / (load * CAPACITY)
    law = FLEET.law
    lengths = np.clip(law.median * np.exp(law.sigma * generator.normal(size=n)), 1, law.longest)
    return [
        VirtualRequest(
            f"r{i}", int(generator.integers(20, 300)), int(lengths[i]), 600, float(at[i])
        )
        for i in range(n)
    ]


@pytest.mark.parametrize("load", [0.5, 1.2])
def test_8_of_10_intervals_hold_at_any_load(load: float) -> None:
    within: dict[str, list[bool]] = defaultdict(list)

    def observed(one: Observed) -> None:
        within[one.of].append(one.expected.low <= one.actual <= one.expected.high)

    run = VirtualRun(FLEET, 1, observed)
    run.run(requests(500, load))
    assert len(run.finished) == 500
    for of, held in within.items():
        assert len(held) > 400, of
        assert 0.7 < np.mean(held) < 0.9, of
    assert not run.finish_times._followed, "nothing is kept of what has ended"


@pytest.mark.parametrize("load", [0.8, 1.5])
def test_no_start_is_expected_after_the_finish_less_what_it_takes(load: float) -> None:
    seen: list[bool] = []

    def admit(run: VirtualRun, request: VirtualRequest) -> bool:
        pace = run.finish_times.load.pace.of(None)
        for one in [request, *run._line]:
            told = run.finish_times.expect(one)
            if told is None or told.start is None or pace is None:
                continue
            own = told.tokens.low * pace
            pairs = list(zip(told.start, told.finish, strict=True))
            seen.append(all(start <= finish - own + 1e-9 for start, finish in pairs))
            assert list(told.start) == sorted(told.start)
            assert list(told.finish) == sorted(told.finish)
        return True

    VirtualRun(FLEET, 1, admit=admit).run(requests(150, load))
    assert len(seen) > 100 and all(seen)


def test_promises_are_kept_where_the_others_are_refused() -> None:
    kept: list[str] = []
    refused: list[str] = []
    promises: list[Promises] = []

    def admit(run: VirtualRun, request: VirtualRequest) -> bool:
        if not promises:
            promises.append(Promises(run.finish_times, {}, lambda: run.now, kept.append))
        if int(request.id[1:]) % 2:
            return True  # as many others ask for none
        try:
            promises[0].give(request, 6.0, 0.9, "default")
        except RequestRefusedError as error:
            assert error.status == 429
            refused.append(error.body.decode())
            return False
        return True

    run = VirtualRun(
        FLEET, 1, admit=admit, ended=lambda run, request: promises[0].ended(request, by_itself=True)
    )
    run.run(requests(700, 1.1))
    given = kept.count("kept") + kept.count("broken")
    assert given > 50, "some can be promised"
    assert refused, "and some cannot"
    assert "the earliest that can be promised is" in refused[-1]
    assert kept.count("kept") / given > 0.85


def test_while_nothing_is_known_nothing_is_promised() -> None:
    """Yet requests are taken: only those that run can tell how long they take."""
    answers: list[float | None] = []

    def admit(run: VirtualRun, request: VirtualRequest) -> bool:
        promises = Promises(run.finish_times, {}, lambda: run.now, lambda outcome: None)
        answers.append(promises.give(request, 1e-3, 0.99, "default"))
        return True

    VirtualRun(FLEET, 1, admit=admit).run(requests(5, 1.0))
    assert answers == [None] * 5


def test_the_load_ahead_falls_without_arrivals_and_stays_with_them() -> None:
    loads: list[tuple[PoolLoad, PoolLoad, PoolLoad]] = []

    def admit(run: VirtualRun, request: VirtualRequest) -> bool:
        now = run.finish_times.load.at(0.0, arrivals=False)
        later = run.finish_times.load.at(30.0, arrivals=False)
        going_on = run.finish_times.load.at(30.0, arrivals=True)
        if now is not None and later is not None and going_on is not None:
            loads.append((now, later, going_on))
        return True

    run = VirtualRun(FLEET, 1, admit=admit)
    run.run(requests(300, 0.6))
    now, later, going_on = (
        np.array([one[i].requests for one in loads[150:]]).mean() for i in range(3)
    )
    assert later < 0.1 * now
    assert going_on == pytest.approx(now, rel=0.3)
    drained = run.finish_times.load.drain_seconds(0)
    assert drained is not None and drained >= 0.0
    wanted = wanted_instances(PoolLoad(20.0, 0.0, 4_000.0, 0.0, 1.0), run.instances)
    assert wanted == 3, "20 requests take 8 slots each, of which 9 in 10 are to be used"


def test_lengths_are_learnt_with_those_that_were_cut() -> None:
    """Half of the requests end at their limit of 50: nothing says that none is longer."""
    lengths, forecasts = LatelyEnded(), LiveForecasts(None)
    for i in range(100):
        one = Placeable(f"r{i}", max_tokens=50 if i % 2 else 1_000)
        one._generated = 50 if i % 2 else 10 + 2 * i
        lengths.ended(one)
    new = Placeable("new", max_tokens=1_000)
    low, median, high = lengths.quantiles(new, forecasts, (0.1, 0.5, 0.9))
    assert low < 50 < median < high <= 206
    cut = Placeable("new", max_tokens=30)
    assert lengths.quantiles(cut, forecasts, (0.9,)) == [30.0]
    running = Placeable("half way", max_tokens=1_000)
    running._generated = 100
    (rest,) = lengths.quantiles(running, forecasts, (0.5,))
    assert 100 < 100 + rest < 206, "of those that are longer than 100"
    to_come = lengths.new_request(forecasts, np.array([0.0, 60.0]))
    assert to_come.tolist() == [1.0, pytest.approx(0.36, abs=0.03)], "cut as others were"
    steps = np.array([0.0, 29.0, 30.0, 500.0])
    assert lengths.curves([cut], forecasts, steps)[0, [0, 2, 3]].tolist() == [1.0, 0.0, 0.0]


def ended(name: str, tokens: int, most: int | None = None) -> Placeable:
    one = Placeable(name, max_tokens=most)
    one._generated = tokens
    return one


def test_health_checks_of_one_token_do_not_teach_that_answers_have_one() -> None:
    lengths, forecasts, new = LatelyEnded(), LiveForecasts(None), Placeable("new")
    for i in range(30):
        lengths.ended(ended(f"check-{i}", 1, most=1))
    assert not lengths.knows(new, forecasts), "nobody has seen how long an answer is"
    assert lengths.quantiles(new, forecasts, (0.5,))[0] > 100
    assert lengths.knows(Placeable("another check", max_tokens=1), forecasts)
    for i in range(100):
        lengths.ended(ended(f"r{i}", 100 + i, most=1_000))
    before = lengths.quantiles(new, forecasts, (0.1, 0.5, 0.9))
    for i in range(2_000):
        lengths.ended(ended(f"check-{i}", 1, most=1))
    assert lengths.quantiles(new, forecasts, (0.1, 0.5, 0.9)) == before


@pytest.mark.parametrize("rare", [2, 10])
def test_a_client_that_ends_many_requests_takes_no_others_place(rare: int) -> None:
    lengths, forecasts = LatelyEnded(), LiveForecasts(None)
    generator = np.random.default_rng(0)

    def end(client: str, tokens: int) -> None:
        one = ended(client, tokens)
        one.account, one.expected_tokens = Account(client), 200
        lengths.ended(one)

    for _ in range(600):
        end("honest", int(generator.integers(100, 400)))
    new = Placeable("new", expected_tokens=200)
    before = lengths.quantiles(new, forecasts, (0.3, 0.7))
    for i in range(5_000):
        end("liar", 100_000 if i % rare == 0 else 1)
    assert len([*lengths._ratios._ended]) == 1_000
    own = [ratio for ratio in lengths._ratios._ended if 0.5 <= ratio <= 2.0]
    assert len(own) == 500
    assert before[0] > 150
    end("another", 300)
    assert len([*lengths._ratios._ended]) == 1_000


def test_an_answer_that_was_cut_says_only_that_answers_are_as_long() -> None:
    forecasts = LiveForecasts(None)

    def mean() -> float:
        return float(forecasts.forecast([Placeable("new")]).mean()[0])

    first = mean()
    for i in range(1_000):
        forecasts.ended(ended(f"check-{i}", 1, most=1), by_itself=True)
    assert mean() == first
    for i in range(1_000):
        forecasts.ended(ended(f"r{i}", 600, most=600), by_itself=True)
    assert mean() > 1.5 * first, "they would have been longer than 600"


def test_forecasts_from_prompts_scale_what_was_learnt() -> None:
    lengths, forecasts = LatelyEnded(), LiveForecasts(None)
    for i in range(100):
        one = Placeable(f"r{i}", expected_tokens=100 + i)
        one._generated = 2 * (100 + i)
        lengths.ended(one)
    new = Placeable("new", expected_tokens=400)
    assert lengths.quantiles(new, forecasts, (0.5,)) == [pytest.approx(800.0)]


def test_pace_follows_the_last_half_minute() -> None:
    pace = Pace()
    assert pace.of("a") is None
    for second in range(100):
        pace.took("a", 10, 1.0, float(second))
    assert pace.of("a") == pytest.approx(0.1)
    assert pace.of("unknown") == pytest.approx(0.1), "as of all"
    for second in range(100, 220):
        pace.took("a", 5, 1.0, float(second))
    assert pace.of("a") == pytest.approx(0.2, rel=0.05)


def test_first_tokens_take_longer_after_longer_prompts() -> None:
    first = FirstTokens()
    assert first.seconds(100.0) == 0.0
    for tokens in range(10, 1_000, 10):
        first.took(tokens, 0.05 + 1e-3 * tokens)
    assert first.seconds(500.0) == pytest.approx(0.55, rel=0.01)
    alike = FirstTokens()
    alike.took(100.0, 0.5)
    alike.took(100.0, 0.7)
    assert alike.seconds(1_000.0) == pytest.approx(0.6, rel=0.01), "no slope is known"


def test_arrivals_are_counted_over_the_last_minute() -> None:
    arrivals = Arrivals(0.0)
    for i in range(600):
        arrivals.came(40, i / 2)
    assert arrivals.rate(300.0) == pytest.approx(2.0, rel=0.05)
    assert arrivals.prompt_tokens == pytest.approx(40)
    assert arrivals.rate(900.0) < 0.01


TOLD = Interval(5.0, 10.0, 20.0)
seconds = st.floats(1e-3, 1e6)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def tried(
    calibration: Calibration, clock: Clock, expected: Interval, actual: float
) -> tuple[bool, bool]:
    """Forecast something that comes at once; return whether it was below and above."""
    told = calibration.interval(expected)
    trial = calibration.begin(expected, told)
    clock.now += 1.0
    calibration.came(trial, actual)
    return actual < told.low, actual > told.high


def test_without_outcomes_intervals_stay_as_they_are() -> None:
    calibration = Calibration(Clock())
    assert not calibration.learned
    for told, meant in zip(calibration.interval(TOLD), TOLD, strict=True):
        assert told == pytest.approx(meant, rel=0.1)
    assert calibration.probability(TOLD, 10.0) == pytest.approx(0.5, abs=0.05)
    assert calibration.probability(TOLD, 20.0) == pytest.approx(0.9, abs=0.05)


@pytest.mark.parametrize(("scale", "spread"), [(1.0, 0.5), (3.0, 0.5), (0.3, 1.5), (1.0, 0.05)])
def test_whatever_the_errors_are_8_of_10_come_to_be_within(scale: float, spread: float) -> None:
    generator, clock = np.random.default_rng(1), Clock()
    calibration = Calibration(clock)
    outside = [
        tried(calibration, clock, TOLD, float(10 * scale * np.exp(spread * generator.normal())))
        for _ in range(1_500)
    ]
    early, late = np.mean(outside[500:], axis=0)
    assert early == pytest.approx(0.1, abs=0.03)
    assert late == pytest.approx(0.1, abs=0.03)
    actual = 10 * scale * np.exp(spread * generator.normal(size=2_000))
    within = 10 * scale * np.exp(spread * 1.2816)
    assert calibration.probability(TOLD, float(within)) == pytest.approx(0.9, abs=0.04)
    promised = calibration.quantile(TOLD, 0.95)
    assert np.mean(actual <= promised) == pytest.approx(0.95, abs=0.03)


def test_what_still_runs_counts_for_the_time_that_it_has_taken() -> None:
    """Half of the requests take 100 times as long, and are not over when the others are."""
    clock = Clock()
    calibration = Calibration(clock)
    short = [calibration.begin(TOLD, TOLD) for _ in range(100)]
    for _ in range(100):
        calibration.begin(TOLD, TOLD)
    clock.now = 10.0
    for trial in short:
        calibration.came(trial, 10.0)
    clock.now = 500.0
    assert calibration.probability(TOLD, 11.0) == pytest.approx(0.5, abs=0.05)
    assert calibration.quantile(TOLD, 0.9) >= 20.0, "not 10 s, as of all that ended"


def test_of_forecasts_that_nothing_came_of_nothing_is_learnt() -> None:
    clock = Clock()
    calibration = Calibration(clock)
    before = calibration.interval(TOLD)
    for _ in range(50):
        calibration.drop(calibration.begin(TOLD, TOLD))
    clock.now = 1_000.0
    assert calibration.interval(TOLD) == before


def test_what_was_late_and_then_refused_leaves_no_trace() -> None:
    clock = Clock()
    calibration = Calibration(clock)
    before = calibration.interval(TOLD)
    trials = [calibration.begin(TOLD, TOLD) for _ in range(20)]
    clock.now = 100.0
    assert calibration.interval(TOLD).high > before.high, "it is late"
    for trial in trials:
        calibration.drop(trial, unlearn=True)
    clock.now = 101.0
    assert calibration.interval(TOLD) == pytest.approx(before)


def test_ten_thousand_awaited_forecasts_are_not_kept() -> None:
    calibration = Calibration(Clock())
    for _ in range(10_000):
        calibration.begin(TOLD, TOLD)
    assert len(calibration._trials) <= 2_000
    assert calibration.quantile(TOLD, 0.5) > 0


@given(bounds=st.tuples(seconds, seconds, seconds), actual=st.lists(seconds, max_size=60))
def test_intervals_are_in_order_and_agree_with_probabilities(
    bounds: tuple[float, float, float], actual: list[float]
) -> None:
    expected, clock = Interval(*sorted(bounds)), Clock()
    calibration = Calibration(clock)
    for one in actual:
        tried(calibration, clock, expected, one)
    told = calibration.interval(expected)
    assert 0 < told.low <= told.median <= told.high
    levels = [calibration.probability(expected, most) for most in (0.0, *told, 1e9)]
    assert levels == sorted(levels)
    assert levels[0] == 0.0 and levels[-1] <= 1.0


def integers(values: list[int]) -> Any:
    return np.array(values, dtype=np.int64)


def ahead(
    left: list[int],
    context: list[int],
    waiting: list[tuple[int, int]],
    slots: int = 2,
    capacity: int = 10_000,
    instance: list[int] | None = None,
    fixed: list[int] | None = None,
    n_instances: int = 1,
) -> LoadAhead:
    """The load of requests that end after so many tokens for certain."""
    queue = PointForecast.new([float(length) for length, _ in waiting])
    return load_ahead(
        PointForecast.new([float(tokens) for tokens in left]),
        integers(instance or [0] * len(left)),
        integers(context),
        integers([slots] * n_instances),
        integers([capacity] * n_instances),
        Queue(
            queue.at(STEPS) if waiting else np.empty((0, len(STEPS))),
            integers([prompt for _, prompt in waiting]),
            integers(fixed or [ANYWHERE] * len(waiting)),
        ),
    )


def test_a_free_place_is_taken_at_once() -> None:
    found = ahead([50], [10], [(20, 100)])
    assert found.start.tolist() == [0.0]
    assert found.instance.tolist() == [0]


def test_a_place_is_free_when_the_first_request_ends() -> None:
    found = ahead([50, 200], [10, 10], [(20, 100), (20, 100)])
    step = STEPS[np.searchsorted(STEPS, 50)] - STEPS[np.searchsorted(STEPS, 50) - 1]
    first, second = found.start.tolist()
    assert first == pytest.approx(50, abs=step)
    assert second == pytest.approx(first + 20, abs=2 * step), "after the first of those that wait"


def test_memory_is_waited_for_as_places_are() -> None:
    found = ahead([100], [800], [(20, 300)], slots=16, capacity=1_000)
    assert found.start[0] == pytest.approx(100, abs=20)
    alone = ahead([], [], [(20, 5_000)], slots=16, capacity=1_000)
    assert alone.start.tolist() == [0.0], "whether it ever fits, the engine says"


def test_what_waits_on_an_instance_waits_for_that_one() -> None:
    found = ahead([80, 80], [10, 10], [(5, 10), (5, 10)], 2, 10_000, [0, 0], [0, 1], 2)
    assert found.start[1] == 0.0
    assert found.start[0] > 50
    assert found.instance.tolist() == [0, 1]


def test_what_no_instance_has_room_for_never_starts() -> None:
    found = ahead([], [], [(20, 10)], slots=0)
    assert found.start.tolist() == [np.inf]
    assert found.instance.tolist() == [ANYWHERE]
    assert found.next_start(10) == np.inf


def test_one_more_counts_for_the_next() -> None:
    found = ahead([50, 60], [10, 10], [], slots=2)
    curve = PointForecast.new([30.0]).at(STEPS)[0]
    first = found.next_start(10)
    found = found.with_one_more(curve, 10)
    second = found.next_start(10)
    found = found.with_one_more(curve, 10)
    assert first <= second < found.next_start(10)
    assert found.start.tolist() == [first, second]


def test_drained_when_the_last_one_ends() -> None:
    found = ahead([50, 300], [10, 10], [(9_999, 10)])
    assert found.drained[0] == pytest.approx(300, abs=40), "what waits does not count"
    assert ahead([], [], []).drained.tolist() == [0.0]


def test_tokens_grow_until_requests_end() -> None:
    found = ahead([100], [40], [])
    assert float(found.at(0.0)[2, 0]) == 40
    assert float(found.at(7.0)[2, 0]) == 47
    assert float(found.at(5_000.0)[2, 0]) == 0


@given(
    left=st.lists(st.integers(1, 3_000), max_size=6),
    waiting=st.lists(st.tuples(st.integers(1, 3_000), st.integers(1, 500)), max_size=8),
    slots=st.integers(1, 4),
)
def test_no_more_run_than_there_are_slots(
    left: list[int], waiting: list[tuple[int, int]], slots: int
) -> None:
    left = left[:slots]
    found = ahead(left, [10] * len(left), waiting, slots=slots)
    assert (found.load[0] <= slots + 1e-6).all()
    assert (found.load[0] >= -1e-9).all() and (found.load[3] >= -1e-6).all()
    starts = found.start[np.isfinite(found.start)]
    assert (np.diff(starts) >= -1e-6).all(), "alike in memory, they start in their order"
    assert found.next_start(10) >= starts.max(initial=0.0)
