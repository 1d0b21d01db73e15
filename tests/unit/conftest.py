"""What several files test: predictors, each trained once, and proxies before scripted engines."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from chosen_ports import free_port
from coordinated_cluster import Coordinated, coordinated_cluster
from memoryless_dataset import record_memoryless
from scripted_cluster import Cluster, cluster
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


def options_of(test: pytest.FixtureRequest) -> dict[str, Any]:
    """What a test's mark `cluster` says."""
    mark = test.node.get_closest_marker("cluster")
    return mark.kwargs if mark else {}


@pytest.fixture
async def it(tokenizer: Tokenizer, request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    """A proxy before scripted engines."""
    async with cluster(tokenizer, **options_of(request)) as made:
        yield made


@pytest.fixture
async def many(tokenizer: Tokenizer, request: pytest.FixtureRequest) -> AsyncIterator[Coordinated]:
    """Proxies and their coordinator, before scripted engines."""
    async with coordinated_cluster(tokenizer, free_port(), **options_of(request)) as made:
        yield made
