"""Comparators that read text, with real MiniLM and SmolLM2 weights on a handful of rows."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from row_tables import row_table
from transformers import AutoTokenizer

from data_collection.models import EMBEDDED_MODELS, resolve_model
from predictor.evaluation.comparators import ConstantMedian
from predictor.training.row_table import RowTable
from rescheduler.papers.comparators import (
    AuxiliaryCausalLM,
    AuxiliaryEncoder,
    PromptSelfReport,
    TextRegressor,
)

pytestmark = pytest.mark.slow

CONVERSATIONS = [
    ("Say yes.", "Yes.", 2),
    ("What is the capital of France?", "The capital of France is Paris.", 8),
    ("Name one colour.", "Blue.", 3),
    ("Write a long story about a lighthouse.", "Once upon a time, on a grey cliff, there", 700),
    ("Explain in detail how a compiler works.", "A compiler reads a program and turns it", 900),
    ("Write an essay about the history of tea.", "Tea has been drunk for thousands of years", 800),
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(resolve_model("smollm2"))


@pytest.fixture(scope="module")
def rows(tokenizer: Any) -> RowTable:
    """Two rows a conversation: before the answer, and after its first tokens."""
    prompts, outputs = [], []
    for user, answer, _ in CONVERSATIONS:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": user}], tokenize=False, add_generation_prompt=True
        )
        prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
        outputs.append(tokenizer(answer, add_special_tokens=False)["input_ids"])
    return row_table(
        [total for _, _, total in CONVERSATIONS],
        ages=[[0, 2]] * len(CONVERSATIONS),
        prompts=prompts,
        outputs=outputs,
        max_tokens=1000,
        model=EMBEDDED_MODELS["smollm2"].name,
        k=2,
    )


def mean_absolute_error(comparator: TextRegressor | ConstantMedian, rows: RowTable) -> float:
    return float(np.abs(comparator.predict(rows) - rows.remaining_tokens).mean())


def assert_training_lowers_the_loss(comparator: TextRegressor, rows: RowTable) -> None:
    comparator.fit(rows, rows)
    constant = ConstantMedian()
    constant.fit(rows, rows)
    assert comparator.training_loss[-1] < 0.7 * comparator.training_loss[0]
    assert mean_absolute_error(comparator, rows) < 0.7 * mean_absolute_error(constant, rows)
    assert mean_absolute_error(comparator, rows) == pytest.approx(min(comparator.validation_mae))
    assert comparator.training_seconds > 0
    predicted = comparator.predict(rows)
    assert predicted.shape == (len(rows),)
    assert predicted.dtype == np.float32
    assert (predicted >= 0).all()


def test_encoder_learns_from_the_text(rows: RowTable) -> None:
    comparator = AuxiliaryEncoder(
        max_tokens=32, max_epochs=10, batch_size=4, learning_rate=5e-4, patience=10
    )
    assert 22e6 < comparator.parameters < 23e6
    assert_training_lowers_the_loss(comparator, rows)


def test_causal_lm_learns_from_the_text(rows: RowTable) -> None:
    comparator = AuxiliaryCausalLM(max_tokens=32, max_epochs=4, batch_size=3, learning_rate=1e-3)
    assert 134e6 < comparator.parameters < 136e6
    assert_training_lowers_the_loss(comparator, rows)


def test_training_is_the_same_for_the_same_seed(rows: RowTable) -> None:
    def trained(seed: int) -> list[float]:
        comparator = AuxiliaryEncoder(max_tokens=32, max_epochs=1, max_rows=6, seed=seed)
        comparator.fit(rows, rows)
        predicted: list[float] = comparator.predict(rows).tolist()
        return predicted

    assert trained(0) == trained(0)
    assert trained(0) != trained(1)


def test_text_past_the_limit_is_lost(rows: RowTable) -> None:
    """The newest tokens are cut, so both rows of a request look alike (STAR §4.3)."""
    comparator = AuxiliaryEncoder(max_tokens=8, max_epochs=1)
    comparator.fit(rows, rows)
    predicted = comparator.predict(rows).reshape(-1, 2)
    assert (predicted[:, 0] == predicted[:, 1]).all()


def test_max_minutes_stops_training(rows: RowTable) -> None:
    comparator = AuxiliaryEncoder(max_tokens=8, batch_size=1, max_minutes=0)
    comparator.fit(rows, rows)
    assert len(comparator.training_loss) == len(comparator.validation_mae) == 1


def test_requests_that_clients_left_are_left_out_of_training(rows: RowTable) -> None:
    left = replace(rows.requests, finish_reason=["abort"] * len(CONVERSATIONS))
    with pytest.raises(ValueError, match="no request of 12 training rows ran to its end"):
        AuxiliaryEncoder().fit(replace(rows, requests=left), rows)


def test_limits_of_the_models_are_enforced() -> None:
    with pytest.raises(ValueError, match="minilm reads 512 tokens here, max_tokens is 513"):
        AuxiliaryEncoder(max_tokens=513)
    with pytest.raises(ValueError, match="smollm2 reads 1024 tokens here, max_tokens is 1025"):
        AuxiliaryCausalLM(max_tokens=1025)
    with pytest.raises(ValueError, match="train_layers is 31, the model has 30 layers"):
        AuxiliaryCausalLM(train_layers=31)


def test_rows_of_another_model_are_refused(rows: RowTable) -> None:
    rows = rows.select(np.arange(len(rows)))
    rows.session.model, recorded = "someone/another-model", rows.session.model
    try:
        with pytest.raises(ValueError, match="recorded from someone/another-model"):
            AuxiliaryEncoder().fit(rows, rows)
    finally:
        rows.session.model = recorded


def test_serving_model_reports_a_length(rows: RowTable) -> None:
    comparator = PromptSelfReport()
    comparator.fit(rows, rows)
    both = rows.select(np.array([2, 3, 6, 7]))
    predicted = comparator.predict(both)
    assert predicted.shape == (4,)
    assert comparator.asked == 2
    assert 0 <= comparator.parsed <= 2
    assert ((predicted >= 0) & (predicted <= 1000)).all()
    # Both rows of a request have the same reported length, less the 2 tokens generated since.
    before, after = predicted.reshape(-1, 2).T
    assert (after == np.maximum(before - 2, 0)).all()
    assert comparator.predict(both).tolist() == predicted.tolist()
    assert comparator.asked == 2


def test_self_report_does_not_depend_on_the_batch(rows: RowTable) -> None:
    """Padding on the left must not change what a request is answered."""
    alone, together = PromptSelfReport(batch_size=1), PromptSelfReport(batch_size=6)
    for comparator in (alone, together):
        comparator.fit(rows, rows)
    assert alone.predict(rows).tolist() == together.predict(rows).tolist()


def test_prompts_without_the_chat_template_are_refused(rows: RowTable, tokenizer: Any) -> None:
    comparator = PromptSelfReport()
    comparator.fit(rows, rows)
    requests = rows.requests
    recorded = requests.prompt_token_ids[0]
    requests.prompt_token_ids[0] = tokenizer("def area(radius):")["input_ids"]
    try:
        with pytest.raises(ValueError, match="request-0 does not end as the chat template"):
            comparator.predict(rows)
    finally:
        requests.prompt_token_ids[0] = recorded
