"""Capture, forecasts, batches by deadlines and moves, on whichever vLLM is imported here.

`make versions` runs this with every supported version, on two layers of the embedded model.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import vllm
from captured_rows import assert_rows_are_whole, assert_vectors_equal
from forecast_messages import assert_forecasts_equal
from move_cases import Compared, assert_unchanged, there_and_back
from parts_engines import MOVED, PartsEngines, parts_engines
from truncated_model import truncated_model

from predictor.live.telemetry_messages import Snapshot
from predictor.training.row_table import RowTable


@pytest.fixture(scope="module")
def model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return truncated_model(smollm2, 2, tmp_path_factory.mktemp("models") / "two-layers")


@pytest.fixture(scope="module")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PartsEngines]:
    with parts_engines(model, tmp_path_factory.mktemp("version")) as running:
        yield running


@pytest.fixture(scope="module")
def recorded(engines: PartsEngines) -> RowTable:
    return engines.recorded()


@pytest.fixture(scope="module")
def compared(engines: PartsEngines) -> Compared:
    return engines.on_both()(lambda both: there_and_back(both, MOVED))  # type: ignore[no-any-return]


def test_the_version_is_the_one_that_was_asked_for() -> None:
    asked = os.environ.get("HEADWAY_TEST_VLLM")
    assert asked is None or vllm.__version__.startswith(f"{asked}.")


def test_capture(recorded: RowTable, model: Path) -> None:
    assert recorded.session.engine == f"vLLM {vllm.__version__}"
    assert_rows_are_whole(recorded)
    assert_vectors_equal(recorded, model)


def test_forecasts(engines: PartsEngines, recorded: RowTable) -> None:
    heard, checkpoint = engines.heard.messages, engines.checkpoint
    assert_forecasts_equal(heard, recorded, checkpoint, least=0.25)  # steps of two layers are short


def test_batching(engines: PartsEngines, recorded: RowTable) -> None:
    gauges = [one.gauges for one in engines.heard.messages if isinstance(one, Snapshot)]
    assert any(one.prefill_budget is not None for one in gauges)


@pytest.mark.parametrize("name", MOVED)
def test_moves(compared: Compared, name: str) -> None:
    assert_unchanged(compared, name, MOVED[name])


def test_moves_are_read_and_not_computed_again(engines: PartsEngines) -> None:
    assert engines.read_by_a_move() > 0.9
    assert "Traceback" not in engines.printed()
