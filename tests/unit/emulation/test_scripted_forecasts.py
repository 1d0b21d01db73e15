"""Forecasts of scripted answers: calibrated by Bayes' rule, as sharp as is asked for."""

import math

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data_collection.capture.capture_hook import CapturedRows
from predictor.forecasts.forecast import SurvivalForecast
from predictor.live.engine_forecasts import FORECASTS_ATTRIBUTE, EngineForecasts
from rescheduler.emulation.emulate_options import AnswerLengths, ForecastQuality
from rescheduler.emulation.length_posterior import (
    EmulatedPrompts,
    forecast_edges,
    posterior_survival,
)
from rescheduler.emulation.scripted_answers import ScriptedAnswers
from rescheduler.emulation.scripted_forecaster import ScriptedForecaster

LAW = AnswerLengths(median=300.0, sigma=1.0, longest=8_000)


class _Output:
    """What a step's output is to whoever attaches something."""


def drawn_lengths(n: int) -> npt.NDArray[np.int64]:
    drawn = LAW.median * np.exp(LAW.sigma * np.random.default_rng(0).standard_normal(n))
    return np.clip(np.round(drawn), 1, LAW.longest).astype(np.int64)


def forecasts(quality: ForecastQuality, lengths: npt.NDArray[np.int64], n: int) -> EngineForecasts:
    """Forecast answers of these lengths that have generated n tokens, by the worker's calls."""
    answers = ScriptedAnswers(LAW, 49_152)
    names = [f"cmpl-{i}-0-0a1b2c3d" for i in range(len(lengths))]
    for name, length in zip(names, lengths.tolist(), strict=True):
        answers.begin(name, {"emulated_length": length}, 0)
    forecaster = ScriptedForecaster(LAW, quality, answers, None)
    count = len(names)
    rows = CapturedRows(
        3,
        names,
        [10] * count,
        [n] * count,
        [4_000] * count,
        [0.0] * count,
        [""] * count,
        torch.zeros(count, 1),
    )
    forecaster.on_rows(rows)
    output = _Output()
    forecaster.attach_arrived(output)
    (found,) = getattr(output, FORECASTS_ATTRIBUTE)
    again = _Output()
    forecaster.attach_arrived(again)
    assert not hasattr(again, FORECASTS_ATTRIBUTE)
    assert isinstance(found, EngineForecasts)
    return found


def median(found: EngineForecasts) -> npt.NDArray[np.float64]:
    return np.array([np.interp(-0.5, -row, found.edges) for row in found.survival])


@pytest.mark.parametrize("n", [0, 200])
@pytest.mark.parametrize("sigma", [0.5, 1.9])
def test_an_interval_holds_as_many_lengths_as_it_says(n: int, sigma: float) -> None:
    lengths = drawn_lengths(6_000)
    lengths = lengths[lengths > n]
    found = forecasts(ForecastQuality(sigma=sigma), lengths, n)
    remaining = lengths - n
    at = np.array(
        [np.interp(r, found.edges, row) for r, row in zip(remaining, found.survival, strict=True)]
    )
    for level in (0.5, 0.8, 0.9):
        held = np.mean(np.abs(at - 0.5) <= level / 2)
        assert held == pytest.approx(level, abs=0.04), (level, held)


def test_no_more_is_expected_than_the_longest_answer_has_left() -> None:
    law = AnswerLengths(median=3_000, sigma=1.0, longest=8_192)
    edges = forecast_edges(law)
    (curve,) = posterior_survival(law, 1.9, [8_000], [np.log(192.0)], edges)
    assert np.interp(250.0, edges, curve) < 0.01
    (fresh,) = posterior_survival(law, 100.0, [0], [5.0], edges)
    beyond = 0.5 * math.erfc(np.log(edges[-2] / 3_000) / math.sqrt(2))
    assert fresh[-2] == pytest.approx(beyond, abs=0.01)
    assert edges[-1] == 8_192 and fresh[-1] < 0.01


def test_a_smaller_error_is_a_better_forecast_and_none_is_exact() -> None:
    lengths = drawn_lengths(1_500)
    errors = []
    for sigma in (1.9, 0.5, 0.0):
        found = forecasts(ForecastQuality(sigma=sigma), lengths, 0)
        errors.append(np.abs(np.log(np.maximum(median(found), 1.0) / lengths)).mean())
    assert errors[0] > errors[1] > errors[2]
    exact = forecasts(ForecastQuality(sigma=0.0), lengths, 0)
    assert ((exact.edges[None, :] < lengths[:, None]) == (exact.survival == 1)).all()
    assert set(np.unique(exact.survival)) == {0.0, 1.0}


@pytest.mark.parametrize("sigma", [1e-200, 1e-4, 0.003, 0.05])
def test_a_very_small_error_is_nearly_none(sigma: float) -> None:
    lengths = drawn_lengths(300)
    found = forecasts(ForecastQuality(sigma=sigma), lengths, 0)
    near = np.abs(np.log(np.maximum(median(found), 1.0) / lengths))
    assert np.median(near) < 0.25  # as far as the curve's grid tells


def test_errors_of_a_request_are_the_more_alike_the_more_is_asked() -> None:
    lengths = drawn_lengths(1_500)
    lengths = lengths[lengths > 60]
    alike = []
    for correlation in (0.0, 0.5, 1.0):
        quality = ForecastQuality(sigma=1.0, correlation=correlation)
        logs = [np.log(median(forecasts(quality, lengths, n)) / (lengths - n)) for n in (20, 40)]
        alike.append(float(np.corrcoef(logs)[0, 1]))
    # Those of no correlation share what the law says of both.
    assert alike[0] < alike[1] - 0.1 < alike[2] - 0.2
    assert alike[2] > 0.97


@given(
    st.floats(0.05, 5.0),
    st.lists(st.integers(0, 20_000), min_size=1, max_size=5),
    st.floats(-2.0, 15.0),
)
def test_a_curve_is_one_whatever_is_seen(sigma: float, generated: list[int], seen: float) -> None:
    edges = forecast_edges(LAW)
    curves = posterior_survival(LAW, sigma, generated, [seen] * len(generated), edges)
    assert np.isfinite(curves).all()
    assert (curves[:, 0] == 1).all() and (np.diff(curves, axis=1) <= 1e-9).all()
    assert (curves >= -1e-9).all()


def body(**fields: object) -> dict[str, msgspec.Raw]:
    return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}


def test_a_prompt_s_forecast_is_a_mean_that_is_right_on_average() -> None:
    prompts = EmulatedPrompts(LAW, ForecastQuality(sigma=1.9))
    lengths = drawn_lengths(3_000)
    found = [
        prompts.expected_tokens(
            body(vllm_xargs={"emulated_length": length, "emulated_seed": i}), None
        )
        for i, length in enumerate(lengths.tolist())
    ]
    expected = np.array(found, dtype=float)
    assert expected.mean() == pytest.approx(lengths.mean(), rel=0.05)
    assert np.corrcoef(np.log(expected), np.log(lengths))[0, 1] == pytest.approx(0.46, abs=0.05)


def test_requests_of_one_length_without_a_seed_are_not_all_forecast_alike() -> None:
    prompts = EmulatedPrompts(LAW, ForecastQuality(sigma=1.0))
    stated = body(vllm_xargs={"emulated_length": 120.0})
    assert len({prompts.expected_tokens(stated, None) for _ in range(20)}) > 5


def test_a_prompt_s_forecast_heeds_the_cap_and_may_be_exact() -> None:
    exact = EmulatedPrompts(LAW, ForecastQuality(sigma=0.0))
    stated = body(vllm_xargs={"emulated_length": 900})
    assert exact.expected_tokens(stated, None) == 900
    assert exact.expected_tokens(stated, 100) == 100
    blurred = EmulatedPrompts(LAW, ForecastQuality(sigma=1.0))
    few = blurred.expected_tokens(stated, 100)
    assert few is not None and 1 <= few <= 100


def test_a_prompt_whose_client_wants_no_end_is_forecast_to_have_none() -> None:
    exact = EmulatedPrompts(LAW, ForecastQuality(sigma=0.0))
    stated = body(vllm_xargs={"emulated_length": 90}, ignore_eos=True)
    assert exact.expected_tokens(stated, 2_000) == 2_000
    assert exact.expected_tokens(stated, None) == 90


@pytest.mark.parametrize("value", [None, 3, [], {"emulated_length": "x"}, {"emulated_length": -1}])
def test_a_prompt_without_a_length_has_no_forecast(value: object) -> None:
    prompts = EmulatedPrompts(LAW, ForecastQuality())
    assert prompts.expected_tokens(body(vllm_xargs=value), None) is None
    assert prompts.expected_tokens({}, None) is None


def test_every_curve_can_be_read() -> None:
    """A sum of shares may exceed 1 by rounding: no survival is below 0 for that."""
    law = AnswerLengths()
    edges, random = forecast_edges(law), np.random.default_rng(0)
    generated = [671, *random.integers(0, 8000, 2000).tolist()]
    observed = [4.863098951992617, *random.normal(5.0, 2.0, 2000).tolist()]
    for sigma in (0.5, 1.0):
        SurvivalForecast.new(edges, posterior_survival(law, sigma, generated, observed, edges))
