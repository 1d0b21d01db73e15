"""The oldest and the newest version of vLLM, each in an environment of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.support.vllm_versions import environment_of
from data_collection.versions import SUPPORTED_VLLM

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("version", [SUPPORTED_VLLM[0], SUPPORTED_VLLM[-1]])
def test_all_parts_work_on_another_version(version: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "tests/versions"]
    contract = "tests/integration/test_vllm_contract.py"
    done = subprocess.run(
        [*command, contract],
        env=environment_of(version),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
