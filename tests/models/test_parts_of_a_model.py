"""Capture, forecasts and moves of models with random weights, of many architectures.

`make models` runs all of them, `make slow` five that differ most.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from captured_rows import assert_rows_are_whole, assert_vectors_equal
from forecast_messages import assert_forecasts_equal, write_all_reading
from move_cases import assert_unchanged, there_and_back
from msgspec.structs import replace
from parts_engines import MOVED, PartsEngines, parts_engines
from running_deployment import ENGINE

from benchmarks.support.tiny_models import TINY_MODELS, tiny_model
from predictor.training.row_table import RowTable
from rescheduler.engines.engine_command import LaunchError
from rescheduler.engines.launch_engines import launched
from rescheduler.engines.launch_local import local_deployment

NAMES = os.environ.get("HEADWAY_TEST_MODELS", "qwen3 gemma3 gpt2 opt mimo").split()
SERVED = [name for name in NAMES if TINY_MODELS[name].captured]
REFUSED = [name for name in NAMES if not TINY_MODELS[name].captured]

pytestmark = pytest.mark.slow


class Served(NamedTuple):
    name: str
    model: Path
    engines: PartsEngines
    rows: RowTable


@pytest.fixture(scope="module", params=SERVED)
def served(
    request: pytest.FixtureRequest, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder, made = tmp_path_factory.mktemp("model"), TINY_MODELS[request.param]
    model = tiny_model(request.param, smollm2, folder / request.param)
    with parts_engines(model, folder, made.flags, made.moves, made.kv_blocks) as engines:
        yield Served(request.param, model, engines, engines.recorded())


def test_capture(served: Served) -> None:
    assert_rows_are_whole(served.rows)
    assert_vectors_equal(served.rows, served.model)


def test_forecasts(served: Served) -> None:
    heard, checkpoint = served.engines.heard.messages, served.engines.checkpoint
    # Random weights repeat nothing, and a tiny model's steps are shorter than a publisher's delays.
    assert_forecasts_equal(heard, served.rows, checkpoint, repeats=False, least=0.25)


def test_moves(served: Served) -> None:
    if not TINY_MODELS[served.name].moves:
        assert_refused(served.model, served.engines.folder / "refused", "layers whose state is not")
        return
    compared = served.engines.on_both()(lambda both: there_and_back(both, MOVED))
    for name, case in MOVED.items():
        assert_unchanged(compared, name, case)
    assert served.engines.read_by_a_move() > 0.9
    assert served.engines.cached_by_a_copy() == 1.0
    for tokens in (126, 127, 128):  # of which one ends where a window of 64 begins with a block
        computed, read = served.engines.handed_over(tokens)
        assert read.tokens == computed.tokens
        assert read.logprobs == pytest.approx(computed.logprobs, abs=1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_capture_refused(name: str, smollm2: Path, tmp_path: Path) -> None:
    model = tiny_model(name, smollm2, tmp_path / name)
    checkpoint = str(write_all_reading(tmp_path / "predictor", model))
    assert_refused(model, tmp_path, "its next tokens do not come from the hidden", checkpoint)


def assert_refused(model: Path, folder: Path, why: str, checkpoint: str | None = None) -> None:
    """Assert that an engine does not start that forecasts, or requests move from; and says why."""
    options = replace(ENGINE, checkpoint=checkpoint, max_model_len=512)
    deployment = local_deployment(str(model), options, 1, 0)
    with pytest.raises(LaunchError), launched(deployment, folder / "logs"):
        pass
    assert why in (folder / "logs" / "decode-0.log").read_text()
