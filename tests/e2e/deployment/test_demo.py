"""`headway demo` on engines that run: a client's stream goes on across a migration."""

import re
import subprocess

import pytest
from running_deployment import RunningDeployment


@pytest.mark.timeout(1200)
def test_the_demonstration_moves_requests_and_loses_none(
    deployment: RunningDeployment, headway_command: list[str]
) -> None:
    command = [*headway_command, "demo", "--config", str(deployment.config_path), "--pairs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split("2 of 2: with rescheduling")
    moved = r"moved +[\d.]+ s  (?:long|short)-\d+  decode-(\d) → decode-(\d)  after \d+ tokens"
    assert not re.search(moved, first)
    moves = re.findall(moved, second)
    assert moves
    assert all(source != target for source, target in moves)
    assert re.search(r"⟪decode-\d→decode-\d⟫", second), "the moment is marked in the text"
    (migrations,) = re.findall(r"migrations +│ +(\d+) │ +(\d+)", second)
    assert migrations == ("0", str(len(moves)))
    assert "failed requests" not in second
    assert "4 of 4 answered" in first and "4 of 4 answered" in second
