"""The oldest and the newest version of vLLM, each in an environment of its own."""

import pytest

from benchmarks.compatibility import VERSION_TESTS, run
from data_collection.versions import SUPPORTED_VLLM

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("version", [SUPPORTED_VLLM[0], SUPPORTED_VLLM[-1]])
def test_all_parts_work_on_another_version(version: str) -> None:
    found = run(version, VERSION_TESTS)
    assert set(found.values()) == {"passed"}, found
