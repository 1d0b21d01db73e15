from pathlib import Path

import pytest
from tokenizers import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
