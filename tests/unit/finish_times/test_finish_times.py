"""Finish times of a fleet in virtual time: they hold, and promises are kept."""

from collections import defaultdict

import numpy as np
import pytest
from virtual_fleet import Fleet, VirtualRequest, VirtualRun

from rescheduler.emulation.emulate_options import AnswerLengths, StepSeconds
from rescheduler.finish_times.finish_times import Observed
from rescheduler.finish_times.fleet_load import PoolLoad, wanted_instances
from rescheduler.finish_times.lengths import Arrivals, FirstTokens, LatelyEnded, Pace
from rescheduler.finish_times.promises import Promises
from rescheduler.openai.openai_request import RequestRefusedError
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
        FLEET,
        1,
        admit=admit,
        ended=lambda run, request: promises[0].ended(request, by_itself=True),
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
