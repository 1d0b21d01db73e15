"""What forecasts are worth: every use has its arms, and gains are paired and signed."""

import numpy as np
import pytest

from benchmarks.forecast_value import FORECASTS, USES, Arm, Use, rows
from benchmarks.room import BY_AGE, EXACT, Case, filled

FIVE_TASKS = Case(
    "five_tasks", filled({"name": "five_tasks", "requests": 200}, 10_240), (EXACT, BY_AGE)
)


@pytest.mark.parametrize("name", USES)
def test_a_use_is_compared_with_what_needs_no_forecast(name: str) -> None:
    use = USES[name]
    without, by_forecast = use.arms(FIVE_TASKS)
    assert all(arm.setup.forecast.name == "none" for arm in without)
    assert {forecast: arm.setup.forecast.name for forecast, arm in by_forecast.items()} == {
        "oracle": "oracle",
        "kaplan_meier": "kaplan_meier",
    }
    for metric, (cells, gains) in zip(use.metrics, rows(use, FIVE_TASKS, seeds=2), strict=True):
        assert set(gains) == {f"{name}_five_tasks_{metric}_{f}" for f in by_forecast}
        assert all(np.isfinite(gain) for gain in gains.values())
        assert len(cells) == 4 + len(FORECASTS)
        assert any(cells[3].startswith(arm.label) for arm in without)


@pytest.mark.parametrize("more_is_better", [True, False])
def test_the_gain_is_over_the_best_without_forecasts(more_is_better: bool) -> None:
    """An arm gains nothing over itself, and nobody gains over the best."""
    crowded = FIVE_TASKS._replace(config=filled({"name": "five_tasks", "requests": 1000}, 10_240))
    without, _ = USES["room"].arms(crowded)
    worst, best = without[0], without[3]

    def arms(case: Case) -> tuple[list[Arm], dict[str, Arm]]:
        return [worst, best], {"oracle": best, "kaplan_meier": worst}

    metrics = {"throughput" if more_is_better else "latency": more_is_better}
    ((_, gains),) = rows(Use("room", metrics, arms), FIVE_TASKS, seeds=2)
    assert sorted(gains.values())[1] == 0.0
    assert sorted(gains.values())[0] < 0.0
