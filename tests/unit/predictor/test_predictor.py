"""The predictors and their checkpoints: shapes, inputs, what loads and what is refused."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorded_dataset import D, K, new_session
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from predictor import (
    CheckpointError,
    ModelMismatchError,
    RemainingLengthMLP,
    RequestRows,
    SurvivalMLP,
    load_predictor,
)
from predictor.models.hidden_state_mlp import INPUTS, NO_REPETITION, HiddenStateMLP
from predictor.models.repetition import repetition
from predictor.training.row_table import load_rows
from predictor.training.rows_data_module import request_rows

SHIPPED = Path(__file__).parents[3] / "checkpoints"
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"


def small(predictor: type[HiddenStateMLP], **options: Any) -> HiddenStateMLP:
    """Return an untrained predictor of vectors of 8 values."""
    shared = {"model": "acme/small-model", "model_revision": "abc123", "hidden_size": D, "k": K}
    return predictor(**shared, **options).eval()


def test_the_default_is_the_papers_mlp() -> None:
    predictor = RemainingLengthMLP(model="m", model_revision="r", hidden_size=3584, k=20)
    shapes = [tuple(p.shape) for name, p in predictor.named_parameters() if "weight" in name]
    assert shapes == [(2048, 3584), (512, 2048), (64, 512), (1, 64)]
    # Table 1 of STAR says 8.4 M parameters.
    assert sum(p.numel() for p in predictor.parameters()) == pytest.approx(8.4e6, rel=0.01)
    assert isinstance(predictor.network[1], torch.nn.ReLU)


def test_the_regressors_forecast_is_its_prediction_under_max_tokens(
    memoryless: Path, regressor_checkpoint: Path
) -> None:
    predictor, table = load_predictor(str(regressor_checkpoint)), load_rows(memoryless)
    assert isinstance(predictor, RemainingLengthMLP)
    with torch.inference_mode():
        predicted = predictor(request_rows(table)).clamp_min(0).numpy()
    assert predicted.shape == (len(table),)
    forecast = predictor.forecast(request_rows(table))
    expected = np.maximum(np.minimum(predicted, table.tokens_left()), 1)
    np.testing.assert_array_equal(forecast.median(), expected)
    np.testing.assert_array_equal(forecast.uncapped().median(), np.maximum(predicted, 1))


@pytest.mark.parametrize(
    "predictor",
    [small(RemainingLengthMLP), small(SurvivalMLP, edges=[0, 5, 20], inputs=["tokens_left"])],
    ids=lambda predictor: predictor.kind,
)
def test_a_predictor_built_by_hand_can_be_saved(predictor: HiddenStateMLP, tmp_path: Path) -> None:
    predictor.save_pretrained(tmp_path)
    again = load_predictor(str(tmp_path))
    rows = RequestRows(torch.ones(2, D), torch.full((2, 3), 40.0))
    assert type(again) is type(predictor)
    h = [0, 3, 5, 19, 20]
    np.testing.assert_array_equal(again.forecast(rows).at(h), predictor.forecast(rows).at(h))
    assert predictor.serving_model in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    "inputs", [(), ("prompt_tokens",), ("tokens_left", "generated_tokens"), INPUTS[3:]]
)
def test_the_numbers_that_were_asked_for_are_read_and_no_others(inputs: tuple[str, ...]) -> None:
    predictor = small(SurvivalMLP, edges=[0, 5, 20], inputs=inputs, widths=[64])
    before = torch.tensor([[20.0, 11, 90, 0.7, 0.1, 2]])
    for column, name in enumerate(INPUTS):
        after = before.clone()
        after[0, column] += 400
        curves = [
            predictor.forecast(RequestRows(torch.ones(1, D), numbers)).uncapped().at(5.0)
            for numbers in (before, after)
        ]
        assert (curves[0] != curves[1]) == (name in inputs)


def test_what_a_predictor_cannot_read_is_refused() -> None:
    regressor = small(RemainingLengthMLP, inputs=["temperature"])
    with pytest.raises(ValueError, match="reads temperature: RequestRows needs all of"):
        regressor.forecast(RequestRows(torch.zeros(1, D), torch.zeros(1, 3)))
    plain = small(RemainingLengthMLP)
    with pytest.raises(ModelMismatchError, match="vectors have 8 values"):
        plain.forecast(RequestRows(torch.zeros(1, 9), torch.zeros(1, 3)))
    with pytest.raises(ModelMismatchError, match=r"trained on .*small-model.* these are of Qwen"):
        plain.refuse_other_model(new_session(model="Qwen/Qwen3-0.6B"))
    with pytest.raises(CheckpointError, match="unknown input 'age'; known: generated_tokens, "):
        small(SurvivalMLP, edges=[0, 5], inputs=["age"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, r"no config\.json"),
        ("config.json", '{"kind": "regr', r"config\.json: not JSON"),
        ("config.json", '{"kind": ' + "[" * 100_000, r"config\.json: not JSON"),
        ("config.json", "[]", r"config\.json: not a JSON object"),
        ("config.json", '{"kind": null}', "kind None; known: regression, survival"),
        ("config.json", '{"kind": "quantile"}', "kind 'quantile'; known: regression, survival"),
        ("model.safetensors", None, r"no model\.safetensors"),
        ("model.safetensors", "half a file", "cannot be loaded"),
    ],
)
def test_a_folder_that_is_no_checkpoint_is_refused(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    small(RemainingLengthMLP).save_pretrained(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        load_predictor(str(tmp_path))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("trained_remaining_tokens", [], r"length 2, got 0 - at `\$\.trained_remaining_tokens"),
        ("trained_remaining_tokens", None, r"got `null` - at `\$\.trained_remaining_tokens"),
        ("trained_remaining_tokens", [1, float("nan")], r"at `\$\.trained_remaining_tokens\[1\]"),
        ("trained_generated_tokens", [0, -5], r"at `\$\.trained_generated_tokens\[1\]"),
        ("averaging_half_life", 30.0, "it averages a request's forecasts"),
        ("state_half_life", float("nan"), r"at `\$\.state_half_life"),
        ("hidden_size", 10**22, r"at `\$\.hidden_size"),
        ("hidden_size", "8", r"at `\$\.hidden_size"),
        ("edges", [], r"length >= 2 - at `\$\.edges"),
        ("edges", [0, float("nan")], r"at `\$\.edges\[1\]"),
        ("edges", [0, 10**22], r"at `\$\.edges\[1\]"),
        ("edges", [5, 0], "edges must be whole token counts that ascend from 0"),
        ("widths", [[[8]]], r"at `\$\.widths\[0\]"),
        ("model", None, r"at `\$\.model"),
        ("recalibration_nominal", [0.0, float("nan"), 1.0], "recalibration"),
    ],
)
def test_a_checkpoint_s_settings_that_cannot_be_are_named(
    tmp_path: Path, field: str, value: Any, message: str
) -> None:
    small(SurvivalMLP, edges=[0, 5], widths=[4]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(CheckpointError, match=message) as raised:
        load_predictor(str(tmp_path))
    assert str(tmp_path) in str(raised.value)


def test_a_checkpoint_of_earlier_versions_that_averaged_nothing_is_read(tmp_path: Path) -> None:
    made = small(SurvivalMLP, edges=[0, 5], widths=[4])
    made.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"averaging_half_life": 0.0}))
    loaded = load_predictor(str(tmp_path))
    assert isinstance(loaded, SurvivalMLP)
    assert loaded.fingerprint() == made.fingerprint()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0])
@pytest.mark.parametrize("name", ["network.0.weight", "input_mean", "input_std", "count_std"])
def test_weights_that_forecast_nonsense_are_refused(
    tmp_path: Path, name: str, value: float
) -> None:
    """One of them is enough: every forecast would be the same, or none."""
    predictor = small(SurvivalMLP, edges=[0, 5], widths=[4], inputs=["prompt_tokens"])
    predictor.state_dict()[name].view(-1)[0] = value
    predictor.save_pretrained(tmp_path)
    if name.endswith("std") or not np.isfinite(value):
        with pytest.raises(CheckpointError, match=f"{name} has values that are"):
            load_predictor(str(tmp_path))
    else:
        load_predictor(str(tmp_path))


def test_a_checkpoint_of_the_other_kind_is_refused() -> None:
    survival, regressor = small(SurvivalMLP, edges=[0, 5]).config(), small(RemainingLengthMLP)
    with pytest.raises(CheckpointError, match=r"'survival' checkpoint .* is no remaining-length"):
        RemainingLengthMLP(**survival)
    with pytest.raises(CheckpointError, match="'regression' checkpoint holds no survival"):
        SurvivalMLP(edges=[0, 5], **regressor.config())


@pytest.mark.parametrize(
    ("name", "kind"),
    [("smollm2-135m-instruct", "survival"), ("smollm2-135m-instruct-star", "regression")],
)
def test_the_shipped_checkpoints_load_with_their_metrics(name: str, kind: str) -> None:
    predictor = load_predictor(str(SHIPPED / name))
    assert (predictor.kind, predictor.serving_model) == (kind, SMOLLM2)
    rows = RequestRows(
        torch.zeros(2, 576), torch.tensor([[0.0, 30, 500, 1, 0, 0], [400, 30, 100, 1, 0, 0]])
    )
    survival = predictor.forecast(rows).at([0, 50, 100])
    assert survival.shape == (2, 3)
    assert (survival[:, 0] == 1).all() and survival[1, 2] == 0
    metrics = json.loads((SHIPPED / name / "metrics.json").read_text())
    assert metrics["n_rows"] > 0 and metrics["mae_median"] > 0
    if kind == "survival":
        assert min(metrics[f] for f in ("mae_regressor", "ibs", "ibs_kaplan_meier")) > 0
        assert {"regressor", "kaplan_meier"} <= set(metrics["comparators"])
        assert set(metrics["coverage"]) == {"50", "80", "90"}


class NothingFromPython(TorchDispatchMode):
    """Refuses tensors made of Python objects, whose values a GPU would copy from the host.

    Every tensor that an operation uses must be known before, or the result of another one.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.known = {id(tensor): tensor for tensor in known}  # kept, so that no id is used twice

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in self.known:
                raise AssertionError(f"{func} uses values from the host: {tensor}")
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.known[id(tensor)] = tensor
        return result


def test_the_shipped_predictor_needs_nothing_of_the_host() -> None:
    predictor = load_predictor(str(SHIPPED / "smollm2-135m-instruct"))
    assert isinstance(predictor, SurvivalMLP) and predictor.inputs, "which index the counts"
    rows = RequestRows(torch.randn(4, predictor.hidden_size), torch.full((4, 6), 7.0))
    on_device = [rows.hidden_states, rows.numbers, *predictor.parameters(), *predictor.buffers()]
    with torch.no_grad():
        expected = predictor.survival(rows)
        with NothingFromPython(on_device):
            curves = predictor.survival(rows)
    torch.testing.assert_close(curves, expected, rtol=0, atol=0)


def spelled_out(answer: list[int]) -> tuple[float, float]:
    seen = answer[-256:]
    n = len(seen)
    grams = {end: tuple(seen[end - 3 : end + 1]) for end in range(3, n)}
    newest = [end for end in grams if end >= n - 64]
    repeated = [any(grams[e] == grams[end] for e in grams if e < end) for end in newest]
    suffixes = [
        length
        for length in range(1, min(64, n - 1) + 1)
        if any(
            seen[end - length + 1 : end + 1] == seen[n - length :]
            for end in range(length - 1, n - 1)
        )
    ]
    return sum(repeated) / max(1, len(newest)), float(max(suffixes, default=0))


loops = st.builds(
    lambda start, loop, times: start + loop * times,
    st.lists(st.integers(0, 60_000), max_size=40),
    st.lists(st.integers(0, 60_000), min_size=1, max_size=90),
    st.integers(1, 8),
)


@given(st.lists(st.integers(0, 3), max_size=400) | loops)
def test_it_is_what_its_definition_says(answer: list[int]) -> None:
    found = repetition(np.array(answer, dtype=np.int64))
    assert found == pytest.approx(spelled_out(answer))


@given(st.lists(st.integers(0, 3), min_size=256, max_size=400), st.lists(st.integers(0, 3)))
def test_only_the_last_tokens_are_read(answer: list[int], before: list[int]) -> None:
    tokens = np.array(answer, dtype=np.int64)
    assert repetition(tokens) == repetition(tokens[-256:])
    assert repetition(np.array(before + answer, dtype=np.int64)) == repetition(tokens)


def test_a_beginning_repeats_nothing_and_a_loop_everything() -> None:
    for n in range(2):
        assert repetition(np.arange(n)) == NO_REPETITION
    assert repetition(np.tile([7, 8, 9], 40)) == (1.0, 64.0)
    assert repetition(np.arange(300)) == (0.0, 0.0)
