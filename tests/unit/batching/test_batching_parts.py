"""What a batching scheduler reads and is made of: options, objectives, plans, clocks, garbage."""

import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_collection.capture.capture_config import CaptureConfig, read_capture_config
from predictor.live.engine_forecasts import LiveConfig
from rescheduler.batching.admission import retry_seconds
from rescheduler.batching.batch_formation import (
    FAIR,
    BatchRules,
    RequestRow,
    RequestTable,
    plan_batch,
    table_prefill_budget,
)
from rescheduler.batching.batching_config import BatchingConfig, read_batching_config
from rescheduler.batching.fair_batching import (
    BatchTimes,
    GarbageCollection,
    MeasuredStep,
    StepClock,
)
from rescheduler.batching.objectives import Objectives, read_objectives
from rescheduler.step_time.profile import BatchTime


def section(**batching: Any) -> dict[str, Any]:
    return {"headway": {"batching": batching}}


def test_the_defaults_are_fairbatching_with_a_profile() -> None:
    config = read_batching_config(section(profile="profile.yaml"))
    assert config.formation == "fairbatching" and not config.admission
    assert config.objectives == (2.0, 0.2)


@pytest.mark.parametrize(
    ("batching", "message"),
    [
        ({"formatoin": "vllm"}, "unknown field `formatoin`.*Known keys: formation, profile"),
        ({"formation": "fifo"}, "no formation 'fifo'; there are fairbatching, .*, vllm"),
        ({}, "formation 'fairbatching' needs to know how long.*headway profile"),
        ({"formation": "fairbatching_fixed"}, "'fairbatching_fixed' needs to know"),
        ({"formation": "sarathi", "admission": True}, "admission needs to know how long"),
        ({"formation": "vllm", "tpot_s": 0}, "tpot_s must be seconds from 0.0001 to 60, not 0"),
        ({"formation": "sarathi", "token_budget": 0}, "`int` >= 1.*token_budget"),
        ({"formation": "vllm", "reserve": 1.0}, "`float` < 1.*reserve"),
        ({"formation": "vllm", "reserve": -0.1}, "`float` >= 0.*reserve"),
    ],
)
def test_what_cannot_work_is_refused_by_name(batching: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_batching_config(section(**batching))


@pytest.mark.parametrize("formation", ["vllm", "sarathi"])
def test_formations_that_count_tokens_need_no_profile(formation: str) -> None:
    assert read_batching_config(section(formation=formation)).profile is None


@pytest.mark.parametrize("additional", [{}, {"headway": {"k": 20}}, {"headway": None}])
def test_a_missing_section_shows_one(additional: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"no 'batching' in its 'headway' section; give"):
        read_batching_config(additional)


@pytest.mark.parametrize("kind", [CaptureConfig, LiveConfig])
def test_the_worker_leaves_batching_to_the_scheduler(kind: type[CaptureConfig]) -> None:
    both = {"headway": {"k": 5, "batching": {"profile": "profile.yaml"}}}
    assert read_capture_config(both, kind).k == 5
    assert "batching" in both["headway"]


DEFAULT = Objectives(ttft=2.0, tpot=0.2)


@pytest.mark.parametrize("given", [None, {}, {"session_id": "a"}])
def test_what_is_not_asked_for_is_the_engine_s(given: dict[str, Any] | None) -> None:
    assert read_objectives(given, DEFAULT) == DEFAULT


def test_each_objective_is_the_client_s_own() -> None:
    assert read_objectives({"ttft_s": 1}, DEFAULT) == (1.0, 0.2)
    assert read_objectives({"tpot_s": 0.05, "ttft_s": 0.5}, DEFAULT) == (0.5, 0.05)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ttft_s": 0}, "ttft_s must be seconds from 0.001 to 3600, not 0"),
        ({"ttft_s": -1.0}, "ttft_s .* not -1.0"),
        ({"ttft_s": float("nan")}, "ttft_s .* not nan"),
        ({"ttft_s": 1e9}, "ttft_s .* not 1000000000.0"),
        ({"tpot_s": "0.1"}, "tpot_s must be seconds from 0.0001 to 60, not '0.1'"),
        ({"tpot_s": True}, "tpot_s .* not True"),
        ({"tpot_s": [0.1]}, r"tpot_s .* not \[0.1\]"),
    ],
)
def test_absurd_objectives_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_objectives(given, DEFAULT)


def test_tokens_are_due_one_tpot_apart_from_the_ttft_on() -> None:
    """Lyu et al. 2025, §3.1."""
    assert [DEFAULT.deadline(10.0, j) for j in (0, 1, 5)] == [12.0, 12.2, 13.0]


def test_a_reserve_makes_every_token_due_earlier() -> None:
    planned = DEFAULT.less(0.25)
    assert planned == (1.5, pytest.approx(0.15))
    assert DEFAULT.less(0.0) == DEFAULT
    assert planned.deadline(10.0, 4) == pytest.approx(12.1)


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
