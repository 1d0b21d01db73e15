"""Predictors that several files test, each trained once, and the embedded model's tokenizer."""

from functools import partial
from pathlib import Path

import pytest
from chosen_ports import free_port
from coordinated_cluster import Make, coordinated_cluster
from memoryless_dataset import record_memoryless
from tokenizers import Tokenizer
from training_runs import FEW_ROWS, SURVIVAL, fit


@pytest.fixture(scope="session")
def memoryless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset with known truth, see `memoryless_dataset`."""
    dataset = tmp_path_factory.mktemp("memoryless") / "dataset"
    record_memoryless(dataset)
    return dataset


@pytest.fixture(scope="session")
def survival_checkpoint(memoryless: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The survival model, which counts cut requests as longer than where they were cut."""
    out = tmp_path_factory.mktemp("survival") / "checkpoint"
    return fit("survival", memoryless, out, *SURVIVAL, *FEW_ROWS)


@pytest.fixture(scope="session")
def regressor_checkpoint(memoryless: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """STAR's regressor, which leaves rows of cut requests out."""
    out = tmp_path_factory.mktemp("regressor") / "checkpoint"
    return fit("star", memoryless, out, *FEW_ROWS)


@pytest.fixture(scope="session")
def as_ended_checkpoint(memoryless: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """STAR's regressor, which counts cut requests as if they had ended there."""
    out = tmp_path_factory.mktemp("as_ended") / "checkpoint"
    return fit("star", memoryless, out, "--data.cut_requests", "as_ended", *FEW_ROWS)


@pytest.fixture(scope="session")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2 / "tokenizer.json"))


@pytest.fixture
def coordinated(tokenizer: Tokenizer) -> Make:
    """Proxies and their coordinator, before scripted engines."""
    return partial(coordinated_cluster, tokenizer, free_port())
