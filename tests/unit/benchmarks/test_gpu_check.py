"""The check of a GPU machine: what it says where there is none, and that its parts can fail."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_check import parts, plain_pytorch
from benchmarks.gpu_check.findings import Findings, Here, NotRunError

ROOT = Path(__file__).parents[3]


def check(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Run the command; return its status, its JSON and what it printed."""
    out = folder / "check.json"
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--json", str(out), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert out.exists(), done.stderr
    return done.returncode, json.loads(out.read_text()), done.stdout


@pytest.mark.slow
def test_what_a_cpu_can_show_passes_and_the_rest_is_not_run(tmp_path: Path) -> None:
    asked = ["replayed_capture", "migration", "vectors_graphs"]
    status, found, printed = check(tmp_path, "--device", "cpu", "--only", *asked)
    assert status == 0
    assert found["figures"] == {
        "replayed_capture": "passed",
        "migration": "not run",
        "vectors_graphs": "not run",
    }
    measured = found["parts"]["replayed_capture"]["measured"]
    assert (measured["rows"], measured["rows_of_another_step"]) == (256 * 8, 0)
    assert found["parts"]["migration"]["reason"] == "needs a CUDA device"
    assert found["hardware"]["device"] == "cpu"
    assert found["versions"]["torch"] == torch.__version__
    assert "migration: not run: needs a CUDA device" in printed


def run_here(monkeypatch: pytest.MonkeyPatch, folder: Path, part: parts.Part) -> parts.Outcome:
    monkeypatch.chdir(folder)
    monkeypatch.setitem(parts.PARTS, "own", part)
    ((_, outcome),) = parts.run_parts(["own"], "cpu", context="fork")
    return outcome


def test_a_part_that_cannot_hold_is_failed_with_its_figure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def wrong(findings: Findings, here: Here) -> None:
        findings.require_at_most("lost", 3, 0)
        findings.require_at_least("share", float("nan"), 0.9)
        findings.require("runner", "V1", "V2")

    outcome = run_here(monkeypatch, tmp_path, parts.Part(wrong, 60, on_cpu=True))
    assert outcome.status == "failed"
    assert outcome.reason == (
        "lost is 3, more than 0; share is nan, less than 0.9; runner is 'V1' instead of 'V2'"
    )


def test_a_part_that_crashes_or_hangs_or_lacks_something_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def crash(findings: Findings, here: Here) -> None:
        raise ArithmeticError("no kernel image")

    def end(findings: Findings, here: Here) -> None:
        sys.exit("killed by the driver")

    def hang(findings: Findings, here: Here) -> None:
        time.sleep(600)

    def lack(findings: Findings, here: Here) -> None:
        raise NotRunError("NIXL is not installed")

    crashed = run_here(monkeypatch, tmp_path, parts.Part(crash, 60, on_cpu=True))
    assert crashed.status == "failed"
    assert "ArithmeticError: no kernel image; see runs" in crashed.reason
    ended = run_here(monkeypatch, tmp_path, parts.Part(end, 60, on_cpu=True))
    assert (ended.status, "SystemExit" in ended.reason) == ("failed", True)
    # What other tests have left in this process may keep it from ending when it is asked to.
    monkeypatch.setattr(parts, "_ENDING_SECONDS", 0.5)
    late = run_here(monkeypatch, tmp_path, parts.Part(hang, 1, on_cpu=True))
    assert (late.status, "took more than 1 s" in late.reason) == ("failed", True)
    lacking = run_here(monkeypatch, tmp_path, parts.Part(lack, 60, on_cpu=True))
    assert lacking == parts.Outcome("not run", "NIXL is not installed")


def test_rows_of_another_step_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def later_rows(*arguments: Any) -> torch.Tensor:
        """As if the model had gone on before the rows were read."""
        return select(*arguments) + 1e-3

    select = torch.index_select
    monkeypatch.setattr(torch, "index_select", later_rows)
    findings = Findings()
    plain_pytorch.replayed_capture(findings, Here("cpu", tmp_path))
    assert findings.measured["rows_of_another_step"] == 256 * 8
    assert len(findings.failures) == 1
