"""The simulator's scheduler against what vLLM's did with the same requests, on emulated engines."""

import json
from pathlib import Path

import pytest

from benchmarks.emulator_check import FLEET, MOST_ERROR, comparison, emulated_runs

KEPT = Path("benchmarks/results/emulator_check")
REPORT = KEPT.with_suffix(".json")
SIMULATED = 2
BY_CHANCE = 5.0
"""Percent, of two simulations in place of eight."""


@pytest.mark.parametrize(
    ("load", "arm"),
    [("90", "jsq_load"), ("105", "jsq_load"), ("105", "max_capacity"), ("130", "reserve")],
)
def test_preemptions_and_latencies_are_those_of_vllm(load: str, arm: str) -> None:
    found = emulated_runs((FLEET, KEPT))
    assert (load, arm) in found, "the kept runs are of other settings: measure them again"
    runs = found[load, arm]
    dispatch = json.loads(REPORT.read_text())["figures"]["dispatch"]
    compared = comparison(arm, runs[:2], dispatch, SIMULATED)
    for name, one in compared.items():
        assert not one.counts or abs(one.error) <= MOST_ERROR + BY_CHANCE, (name, one)


def test_runs_of_other_engines_are_none(tmp_path: Path) -> None:
    kept = json.loads((KEPT / "90" / "round-0" / "vllm.json").read_text())
    file = tmp_path / "90" / "round-0" / "vllm.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(kept))
    assert list(emulated_runs((tmp_path,))) == [("90", "vllm")]
    kept["settings"]["emulate"]["kv_tokens"] += 1
    file.write_text(json.dumps(kept))
    assert emulated_runs((tmp_path,)) == {}
