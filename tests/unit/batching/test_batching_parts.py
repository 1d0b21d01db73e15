"""What a batching scheduler is made of: tables, plans, clocks, times, forecasts, garbage."""

import gc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rescheduler.batching.admission import retry_seconds
from rescheduler.batching.batch_formation import (
    FAIR,
    BatchRules,
    RequestRow,
    RequestTable,
    plan_batch,
    table_prefill_budget,
)
from rescheduler.batching.batching_config import BatchingConfig
from rescheduler.batching.fair_batching import (
    BatchTimes,
    GarbageCollection,
    MeasuredStep,
    StepClock,
)
from rescheduler.batching.objectives import Objectives
from rescheduler.step_time.profile import BatchTime

RULES = BatchRules(FAIR, 1 / 16, 1 / 1024, 0.0, 1000, 1000)


def decode(name: str, slack: float, eligible: bool = True) -> RequestRow:
    return RequestRow(name, slack, 1 / 8, True, 1, 50, eligible)


def prefill(name: str, slack: float, prompt: int, eligible: bool = True) -> RequestRow:
    return RequestRow(name, slack, 1 / 8, False, prompt, prompt, eligible)


def test_a_plan_is_of_the_eligible_requests_the_most_urgent_first() -> None:
    table = RequestTable.of(
        [
            decode("ahead", 1.0),
            prefill("late", 0.2, 300),
            prefill("later", 0.5, 60),
            decode("urgent", 0.25),
            prefill("no slot", 0.1, 10, eligible=False),
        ]
    )
    plan = plan_batch(RULES, table)
    # Of a budget of 256/1024 s every batch takes 64, and a token 1.
    assert list(plan.tokens.items()) == [("urgent", 1), ("late", 191), ("later", 0), ("ahead", 0)]
    assert plan.seconds == 0.25


def test_an_engine_without_requests_has_its_whole_budget() -> None:
    table = RequestTable.of([])
    assert plan_batch(RULES, table).tokens == {}
    budget = table_prefill_budget(RULES, table, Objectives(1.0, 0.1), True)
    assert budget == 960


def test_a_waiting_prompt_lowers_the_budget_eligible_or_not() -> None:
    rest = RequestTable.of([decode("a", 5.0)])
    both = RequestTable.of([decode("a", 5.0), prefill("b", 5.0, 100, eligible=False)])
    objectives = Objectives(1.0, 0.1)
    alone = table_prefill_budget(RULES, rest, objectives, True)
    assert table_prefill_budget(RULES, both, objectives, True) == pytest.approx(alone - 100)
    np.testing.assert_equal(both.without({"b"}).slack, rest.slack)
    assert both.without({"a", "b"}).names == ()


def test_a_rejected_prompt_comes_back_when_its_excess_is_computed() -> None:
    assert retry_seconds(excess=1700.0, token_seconds=0.002) == 4
    assert retry_seconds(excess=1.0, token_seconds=0.002) == 1
    assert retry_seconds(excess=1e12, token_seconds=0.002) == 60


def test_steps_one_at_a_time_are_measured_from_their_scheduling() -> None:
    clock = StepClock()
    clock.scheduled(10.0, 5, 70, 0.3)
    assert clock.output(10.25) == MeasuredStep(5, 70, 0.25)
    assert clock.begins(11.0) == 11.0


def test_steps_scheduled_ahead_are_measured_from_the_output_before() -> None:
    clock = StepClock()
    clock.scheduled(10.0, 5, 70, 0.5)
    assert clock.begins(10.1) == 10.5, "the step before is estimated to end then"
    clock.scheduled(10.1, 6, 80, 0.5)
    assert clock.begins(10.2) == 11.0
    first, second = clock.output(10.4), clock.output(11.0)
    assert first is not None and first.seconds == pytest.approx(0.4)
    assert second is not None and second.seconds == pytest.approx(0.6)


def test_empty_steps_are_not_measured() -> None:
    clock = StepClock()
    clock.scheduled(10.0, 0, 0, 0.0)
    assert clock.output(10.1) is None


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.booleans()), max_size=20))
def test_measured_steps_never_overlap(pauses: list[tuple[float, float, bool]]) -> None:
    clock, now, waiting, measured = StepClock(), 0.0, 0, 0.0
    for before, after, ahead in pauses:
        now += before
        clock.scheduled(now, 1, 1, 0.1)
        waiting += 1
        while waiting > ahead:
            now += after
            step = clock.output(now)
            waiting -= 1
            assert step is not None and step.seconds >= 0
            measured += step.seconds
    assert measured <= now + 1e-9


def test_times_follow_the_steps_that_are_served_only_if_asked() -> None:
    profile = BatchTime(0.01, 0.001, 1e-6)
    for learns in (True, False):
        config = BatchingConfig(profile="p.yaml", recalibrate=learns)
        times = BatchTimes(config, profile, max_tokens=512)
        for i in range(400):
            new, context = 1 + i % 97, 100 + 13 * (i % 31)
            times.learn(MeasuredStep(new, context, 2 * profile.seconds(new, context)))
        grown = times.seconds(50, 300) / profile.seconds(50, 300)
        assert grown == (pytest.approx(2.0, rel=0.1) if learns else 1.0)


def test_without_a_profile_nothing_is_estimated() -> None:
    times = BatchTimes(BatchingConfig(formation="sarathi", token_budget=9000), None, 512)
    assert not times.known and times.seconds(10, 10) == 0.0
    assert times.rules.token_budget == 512
    times.learn(MeasuredStep(1, 1, 1.0))
    assert times.rules.constant == 0.0


def test_garbage_is_collected_when_there_is_time_for_it() -> None:
    garbage = GarbageCollection(patience=0.0)
    garbage.start()
    try:
        assert not gc.isenabled()
        garbage.between_steps(prefills_wait=True, least_slack=100.0)
        assert not garbage.pauses, "a prompt waits"
        garbage.between_steps(prefills_wait=False, least_slack=100.0)
        assert len(garbage.pauses) == 1 and garbage.untimely == 0
        garbage.between_steps(prefills_wait=False, least_slack=0.0)
        assert len(garbage.pauses) == 1, "a token is due"
        GarbageCollection(patience=1000.0).between_steps(False, 100.0)
        assert len(garbage.pauses) == 1, "it was just collected"
    finally:
        garbage.stop()
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_memory_is_bounded_when_there_never_is() -> None:
    garbage = GarbageCollection(patience=1000.0, most_objects=500)
    garbage.start()
    try:
        kept = [[i] for i in range(1000)]
        garbage.between_steps(prefills_wait=True, least_slack=-1.0)
        assert len(garbage.pauses) == garbage.untimely == 1 and kept
    finally:
        garbage.stop()
