"""Buckets as a classifier names them, and the lengths of the five tasks."""

import numpy as np
import pytest

from rescheduler.simulator.forecasts.forecast_arrays import expected_remaining
from rescheduler.simulator.forecasts.forecast_sources import Classified, create_forecast
from rescheduler.simulator.workloads.length_generators import TASKS, FiveTasks
from rescheduler.simulator.workloads.trace import first_requests
from rescheduler.simulator.workloads.trace_files import create_trace

LENGTHS = np.array([100] * 6 + [200] * 2 + [500] * 3 + [3000])
MEANS = {0: 125.0, 1: 500.0, 2: 3000.0}


def named(source: Classified, outputs: list[int], seed: int = 0) -> list[float]:
    arrays = source.arrays(LENGTHS, seed)
    return [expected_remaining(arrays, i, 0, 0, output) for i, output in enumerate(outputs)]


def test_a_bucket_is_represented_by_the_mean_of_its_requests() -> None:
    source = Classified(accuracy=1.0)
    assert (
        named(source, [1, 255, 256, 2047, 2048, 4000]) == [125.0] * 2 + [500.0] * 2 + [3000.0] * 2
    )


def test_the_named_bucket_stays_and_ages() -> None:
    arrays = Classified(accuracy=0.5).arrays(LENGTHS, 1)
    for number in range(40):
        first = expected_remaining(arrays, number, 0, 0, 200)
        assert first in MEANS.values()
        later = [expected_remaining(arrays, number, 0, n, 200) for n in (50, 100, 199)]
        assert later == [max(first - n, 1.0) for n in (50, 100, 199)]


def test_accuracy_is_as_set_and_errors_follow_bucket_frequencies() -> None:
    outputs = [500] * 20_000
    said = np.array(named(Classified(accuracy=0.79), outputs, seed=7))
    assert np.mean(said == 500.0) == pytest.approx(0.79, abs=0.01)
    wrong = said[said != 500.0]
    assert np.mean(wrong == 125.0) == pytest.approx(8 / 9, abs=0.02)


def test_an_invalid_classifier_is_refused() -> None:
    for options, match in (
        ({"edges": (1, 5)}, "ascend from 0"),
        ({"accuracy": 1.5}, "accuracy must be at least 0 and at most 1"),
    ):
        with pytest.raises(ValueError, match=match):
            create_forecast("classified", **options)
    with pytest.raises(ValueError, match="needs output lengths"):
        Classified().arrays(None, 0)


def test_every_task_has_the_mean_and_the_heavy_share_of_the_table() -> None:
    for i, task in enumerate(TASKS.values()):
        shares = tuple(float(j == i) for j in range(len(TASKS)))
        trace = FiveTasks(requests=60_000, shares=shares, longest=100_000)
        block = first_requests(trace, np.random.default_rng(i), 60_000)
        assert block.output.mean() == pytest.approx(task.mean_output, rel=0.04)
        assert np.mean(block.output >= 125) == pytest.approx(task.heavy, abs=0.01)
        assert block.prompt.mean() == pytest.approx(task.mean_prompt, rel=0.04)


def test_the_mix_is_the_tables_and_may_drift() -> None:
    mixed = first_requests(create_trace("five_tasks"), np.random.default_rng(0), 2000)
    assert mixed.prompt.max() <= 1000 and (mixed.prompt + mixed.output).max() <= 4096
    n = sum(task.samples for task in TASKS.values())
    many = first_requests(FiveTasks(requests=100_000), np.random.default_rng(1), 100_000)
    for name, mean in (("prompt", "mean_prompt"), ("output", "mean_output")):
        expected = sum(task.samples * getattr(task, mean) for task in TASKS.values()) / n
        assert getattr(many, name).mean() == pytest.approx(expected, rel=0.03), name
    drifting = FiveTasks(requests=10_000, shares=(1, 0, 0, 0, 0), drift_to=(0, 1, 0, 0, 0))
    block = first_requests(drifting, np.random.default_rng(0), 10_000)
    assert block.output[-2000:].mean() > 3 * block.output[:2000].mean()


def test_a_mix_or_a_bound_that_does_not_exist_is_refused() -> None:
    for options, match in (
        ({"shares": (1, 2)}, "shares are 5 numbers"),
        ({"drift_to": (0, 0, 0, 0, 0)}, "drift_to are 5 numbers"),
        ({"longest": 900}, "longest must exceed"),
    ):
        with pytest.raises(ValueError, match=match):
            FiveTasks(**options)
