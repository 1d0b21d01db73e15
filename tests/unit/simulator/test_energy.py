"""Power of a GPU in both readings, against the paper's formula worked out by hand."""

import numpy as np
import pytest

from rescheduler.simulator.config.simulation_config import PowerConfig
from rescheduler.simulator.engine.step_metrics import load_watts, mfu_watts, power_model, watts

POWER = power_model(PowerConfig())


def test_power_between_idle_and_busy_is_the_papers() -> None:
    assert watts(POWER, 0.0) == 100.0
    assert watts(POWER, 1.0) == 400.0
    assert watts(POWER, 0.5) == pytest.approx(100 + 300 * 0.5**0.7)
    assert watts(POWER, 7.0) == 400.0, "saturated"
    linear = power_model(PowerConfig(idle=50, max=150, gamma=1.0))
    assert watts(linear, 0.25) == pytest.approx(75.0)


def test_by_load_a_gpu_draws_for_the_share_of_the_step_that_it_works() -> None:
    found = load_watts(POWER, np.array([1000, 500, 0]))
    assert found == pytest.approx(400 + (100 + 300 * 0.5**0.7) + 100)
    assert load_watts(POWER, np.array([700, 700])) == pytest.approx(800.0), "balanced"
    assert load_watts(POWER, np.array([0, 0])) == pytest.approx(200.0), "nothing to do"


def test_by_mfu_a_gpu_draws_for_its_tokens_a_second() -> None:
    config = PowerConfig(flops_per_token=14e9, peak_flops=312e12, mfu_sat=0.45)
    power = power_model(config)
    mfu = 72 / 0.015 * 14e9 / 312e12  # 21.5%
    assert mfu_watts(power, 72, 0.015) == pytest.approx(100 + 300 * (mfu / 0.45) ** 0.7)
    assert mfu_watts(power, 2048, 0.015) == 400.0, "a prefill saturates it"
    assert mfu_watts(power, 0, 0.015) == 100.0
    assert mfu_watts(power, 0, 0.0) == 100.0


def test_balanced_work_costs_less_than_unbalanced_work() -> None:
    """The paper's point: what counts is the time that all wait for the fullest."""
    seconds_per_token = 1e-7
    unbalanced, balanced = np.array([150_000, 50_000]), np.array([100_000, 100_000])
    joules = [
        load_watts(POWER, load) * load.max() * seconds_per_token for load in (unbalanced, balanced)
    ]
    assert joules[0] > joules[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"idle": 500.0}, "power: 0 <= idle <= max, not 500.0 and 400.0"),
        ({"idle": -1.0}, "power: 0 <= idle"),
        ({"gamma": 0.0}, "power.gamma must be above 0, not 0.0"),
        ({"mfu_sat": float("nan")}, "power.mfu_sat must be above 0"),
        ({"peak_flops": float("inf")}, "power.peak_flops must be above 0"),
    ],
)
def test_refusals(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PowerConfig(**options)
