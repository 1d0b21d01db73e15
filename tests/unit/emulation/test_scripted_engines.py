"""What may be emulated, scripted answers, and forecasts of them."""

import math
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from measured_profiles import ENGINE, TRUE, profile_of

from data_collection.capture.capture_hook import CapturedRows
from data_collection.files import find_config
from predictor.forecasts.forecast import SurvivalForecast
from predictor.live.engine_forecasts import FORECASTS_ATTRIBUTE, EngineForecasts
from rescheduler.emulation.emulate_options import (
    EMULATE_SECTION,
    AnswerLengths,
    EmulateConfig,
    EmulateOptions,
    ForecastQuality,
    KVTransfer,
    StepSeconds,
    read_emulate_config,
    read_machine,
)
from rescheduler.emulation.length_posterior import (
    EmulatedPrompts,
    forecast_edges,
    posterior_survival,
)
from rescheduler.emulation.scripted_answers import (
    ScriptedAnswers,
    refuse_unscripted,
    scripted_token,
    standard_normal,
)
from rescheduler.emulation.scripted_forecaster import ScriptedForecaster
from rescheduler.step_time.profile import write_profile

SHIPPED = sorted(path.stem for path in find_config("h100-llama-8b").parent.glob("*.yaml"))
STEPS = StepSeconds(constant=1e-3, per_new=1e-5, per_context=1e-8)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_machine_is_whole_and_names_its_source(name: str) -> None:
    machine = read_machine(name)
    assert machine.source and machine.kv_tokens and machine.transfer
    # A decode step of eight requests of a thousand tokens takes milliseconds on any GPU.
    assert 1e-3 < machine.step_time.of(8, 8_000) < 0.1
    assert machine.transfer.seconds(1_000) > machine.transfer.latency_s


def test_the_h100_reproduces_the_latencies_that_it_was_fitted_to() -> None:
    # NVIDIA NIM 1.8, Llama 3.1 8B, 200 tokens in and out: milliseconds between tokens.
    step = read_machine("h100-llama-8b").step_time
    for requests, seconds in ((1, 4.63e-3), (25, 5.19e-3), (50, 5.91e-3), (100, 7.57e-3)):
        new, context = 2 * requests, 300 * requests  # prompts are computed between the tokens
        assert step.of(new, context) == pytest.approx(seconds, rel=0.1)


def test_what_is_given_takes_precedence_over_the_machine() -> None:
    options = EmulateOptions(profile="h100-llama-8b", kv_tokens=5_000, dilation=3).resolved()
    machine = read_machine("h100-llama-8b")
    assert options.profile is None and options.dilation == 3
    assert (options.kv_tokens, options.step_time) == (5_000, machine.step_time)
    assert EmulateOptions(step_time=STEPS).resolved().step_time == STEPS


def test_an_engine_s_own_profile_can_be_emulated(tmp_path: Path) -> None:
    profile = profile_of(TRUE)
    write_profile(profile, tmp_path / "profile.yaml")
    machine = read_machine(str(tmp_path / "profile.yaml"))
    assert machine.step_time.of(10, 1_000) == pytest.approx(profile.batch.seconds(10, 1_000))
    assert (machine.machine, machine.max_num_batched_tokens) == (ENGINE.machine, 512)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1, 2]", "not a machine"),
        ("machine: x\n", "missing required field"),
        ("{machine: x, model: y, source: z, step_time: {constant: -1}}", "step_time.constant"),
        ("batch: [1, 2]\n", "not a machine"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text(content)
    with pytest.raises(ValueError, match=words) as raised:
        read_machine(str(file))
    assert str(file) in str(raised.value)


def test_what_cannot_be_found_says_what_there_is() -> None:
    with pytest.raises(ValueError, match="shipped are h100-llama-8b"):
        read_machine("a100")
    with pytest.raises(ValueError, match="step_time"):
        EmulateOptions().resolved()


def test_an_engine_reads_what_a_deployment_writes() -> None:
    transfer = KVTransfer(bytes_per_token=100, gigabytes_per_second=1)
    config = EmulateConfig(step_time=STEPS, transfer=transfer)
    given = {EMULATE_SECTION: msgspec.to_builtins(config)}
    assert read_emulate_config(yaml.safe_load(yaml.safe_dump(given))) == config
    for wrong in ({}, {EMULATE_SECTION: {}}, {EMULATE_SECTION: {"step_time": 3}}):
        with pytest.raises(ValueError, match=EMULATE_SECTION):
            read_emulate_config(wrong)
    telemetry = {"step_time": msgspec.to_builtins(STEPS), "telemetry": {}}
    with pytest.raises(ValueError, match="requires a forecast"):
        read_emulate_config({EMULATE_SECTION: telemetry})


LAW = AnswerLengths(median=200.0, sigma=0.7, longest=2_000)
VOCABULARY = 49_152

json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def answer(answers: ScriptedAnswers, name: str) -> list[int]:
    tokens, n = [], 0
    while (token := answers.token(name, n)) is not None:
        tokens.append(token)
        n += 1
    return tokens


def test_a_stated_length_counts_the_end() -> None:
    answers = ScriptedAnswers(LAW, VOCABULARY)
    answers.begin("cmpl-1-0-0a1b2c3d", {"emulated_length": 7, "emulated_seed": 3}, 0)
    assert answer(answers, "cmpl-1-0-0a1b2c3d") == [
        scripted_token(3, n, VOCABULARY) for n in range(6)
    ]
    assert answers.scripts["cmpl-1-0-0a1b2c3d"].length == 7
    assert answers.token("cmpl-1-0-0a1b2c3d", 7) is not None, "who ignores the end goes on"
    answers.forget(["cmpl-1-0-0a1b2c3d", "another"])
    assert answers.scripts == {}


def test_an_answer_begins_with_the_tokens_that_are_stated() -> None:
    answers = ScriptedAnswers(LAW, VOCABULARY)
    answers.begin("cmpl-1-0-0a1b2c3d", {"emulated_tokens": [7, 8, 9]}, 0)
    assert answer(answers, "cmpl-1-0-0a1b2c3d") == [7, 8, 9]
    answers.begin("cmpl-2-0-0a1b2c3d", {"emulated_tokens": [7, 8.0], "emulated_length": 5}, 0)
    assert answer(answers, "cmpl-2-0-0a1b2c3d")[:2] == [7, 8]
    assert len(answer(answers, "cmpl-2-0-0a1b2c3d")) == 4
    for wrong in ("7", [7, "8"], [-1], [7.5]):
        with pytest.raises(ValueError, match="emulated_tokens must be a list of token ids"):
            refuse_unscripted({"emulated_tokens": wrong})


def test_an_answer_is_the_same_on_the_engine_that_its_request_moves_to() -> None:
    moving = {"kv_transfer_params": {"headway": {"id": "abc", "hop": 0}}}
    moved = {"kv_transfer_params": {"headway": {"id": "abc", "hop": 1, "generated": 9}}}
    first, second = (ScriptedAnswers(LAW, VOCABULARY) for _ in range(2))
    first.begin("cmpl-1-0-0a1b2c3d", moving, 0)
    second.begin("cmpl-9-0-99999999", moved, 0)
    assert answer(first, "cmpl-1-0-0a1b2c3d") == answer(second, "cmpl-9-0-99999999")
    second.begin("1_cmpl-9-0-99999999", moved, 0)
    assert answer(second, "1_cmpl-9-0-99999999") != answer(second, "cmpl-9-0-99999999")


def test_an_answer_is_no_shorter_than_its_minimum() -> None:
    answers = ScriptedAnswers(LAW, VOCABULARY)
    answers.begin("a", {"emulated_length": 5}, 12)
    assert len(answer(answers, "a")) == 11


def test_lengths_that_are_not_stated_follow_the_law() -> None:
    answers = ScriptedAnswers(LAW, VOCABULARY)
    for i in range(4_000):
        answers.begin(f"cmpl-{i}-0-0a1b2c3d", {}, 0)
    lengths = np.array([script.length for script in answers.scripts.values()])
    assert np.median(lengths) == pytest.approx(LAW.median, rel=0.05)
    assert np.log(lengths).std() == pytest.approx(LAW.sigma, rel=0.05)
    assert lengths.min() >= 1 and lengths.max() <= LAW.longest


transfers = st.one_of(
    json,
    st.builds(lambda value: {"headway": value}, json),
    st.builds(lambda value: {"headway": {"id": value}}, json),
)


KEYS = ["emulated_length", "emulated_seed", "emulated_tokens", "x"]


@given(st.dictionaries(st.sampled_from(KEYS), json), transfers)
def test_whatever_clients_attach_gives_an_answer(
    arguments: dict[str, object], transfer: object
) -> None:
    answers = ScriptedAnswers(LAW, VOCABULARY)
    answers.begin("a", {**arguments, "kv_transfer_params": transfer}, 0)
    assert 1 <= answers.scripts["a"].length < 2**31
    token = answers.token("a", 0)
    assert token is None or 0 <= token < VOCABULARY


@pytest.mark.parametrize(
    ("key", "value"),
    [("length", value) for value in (0, -1, 2**31, 1.5, "120", True, None, [3], math.nan)]
    + [("seed", value) for value in (-1, 2**31, 0.5, "x", False)],
)
def test_a_script_that_cannot_be_is_refused(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"vllm_xargs, emulated_{key} must be a whole number"):
        refuse_unscripted({f"emulated_{key}": value})
    refuse_unscripted({})
    refuse_unscripted({"emulated_length": 1, "emulated_seed": 0.0, "x": "y"})


@given(st.integers(0, 2**31), st.integers(0, 10**6), st.integers(8, 300_000))
def test_a_word_is_in_the_vocabulary(seed: int, n: int, vocabulary: int) -> None:
    assert 0 <= scripted_token(seed, n, vocabulary) < vocabulary


def test_numbers_that_depend_on_a_text_are_standard_normal() -> None:
    z = np.array([standard_normal(f"key {i}") for i in range(20_000)])
    assert abs(z.mean()) < 0.03
    assert z.std() == pytest.approx(1.0, abs=0.02)
    assert np.mean(np.abs(z) < 1.96) == pytest.approx(0.95, abs=0.01)


WIDE = AnswerLengths(median=300.0, sigma=1.0, longest=8_000)


class _Output:
    """What a step's output is to whoever attaches something."""


def drawn_lengths(n: int) -> npt.NDArray[np.int64]:
    drawn = WIDE.median * np.exp(WIDE.sigma * np.random.default_rng(0).standard_normal(n))
    return np.clip(np.round(drawn), 1, WIDE.longest).astype(np.int64)


def forecasts(quality: ForecastQuality, lengths: npt.NDArray[np.int64], n: int) -> EngineForecasts:
    """Forecast answers of these lengths that have generated n tokens, by the worker's calls."""
    answers = ScriptedAnswers(WIDE, 49_152)
    names = [f"cmpl-{i}-0-0a1b2c3d" for i in range(len(lengths))]
    for name, length in zip(names, lengths.tolist(), strict=True):
        answers.begin(name, {"emulated_length": length}, 0)
    forecaster = ScriptedForecaster(WIDE, quality, answers, None)
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
    edges = forecast_edges(WIDE)
    curves = posterior_survival(WIDE, sigma, generated, [seen] * len(generated), edges)
    assert np.isfinite(curves).all()
    assert (curves[:, 0] == 1).all() and (np.diff(curves, axis=1) <= 1e-9).all()
    assert (curves >= -1e-9).all()


def body(**fields: object) -> dict[str, msgspec.Raw]:
    return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}


def test_a_prompt_s_forecast_is_a_mean_that_is_right_on_average() -> None:
    prompts = EmulatedPrompts(WIDE, ForecastQuality(sigma=1.9))
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
    prompts = EmulatedPrompts(WIDE, ForecastQuality(sigma=1.0))
    stated = body(vllm_xargs={"emulated_length": 120.0})
    assert len({prompts.expected_tokens(stated, None) for _ in range(20)}) > 5


def test_a_prompt_s_forecast_heeds_the_cap_and_may_be_exact() -> None:
    exact = EmulatedPrompts(WIDE, ForecastQuality(sigma=0.0))
    stated = body(vllm_xargs={"emulated_length": 900})
    assert exact.expected_tokens(stated, None) == 900
    assert exact.expected_tokens(stated, 100) == 100
    blurred = EmulatedPrompts(WIDE, ForecastQuality(sigma=1.0))
    few = blurred.expected_tokens(stated, 100)
    assert few is not None and 1 <= few <= 100


def test_a_prompt_whose_client_wants_no_end_is_forecast_to_have_none() -> None:
    exact = EmulatedPrompts(WIDE, ForecastQuality(sigma=0.0))
    stated = body(vllm_xargs={"emulated_length": 90}, ignore_eos=True)
    assert exact.expected_tokens(stated, 2_000) == 2_000
    assert exact.expected_tokens(stated, None) == 90


@pytest.mark.parametrize("value", [None, 3, [], {"emulated_length": "x"}, {"emulated_length": -1}])
def test_a_prompt_without_a_length_has_no_forecast(value: object) -> None:
    prompts = EmulatedPrompts(WIDE, ForecastQuality())
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
