"""`headway demo` on engines that run: no stream is lost in a migration."""

import re
import subprocess

import pytest
from running_deployment import RunningDeployment

pytestmark = pytest.mark.slow


@pytest.mark.timeout(1200)
def test_the_demonstration_moves_requests_and_loses_none(
    deployment: RunningDeployment, headway_command: list[str]
) -> None:
    command = [*headway_command, "demo", "--config", str(deployment.config_path), "--pairs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("4 of 4 answered") >= 2
    assert "/ui#token=" in done.stderr
    shown = {
        name: [float(value) for value in values]
        for name, *values in re.findall(r"│ ([\w ]+?) +│ +(\d+) │ +(\d+) │", done.stdout)
    }
    assert shown["failed requests"] == [0, 0]
    without, moved = shown["migrations"]
    assert without == 0 and moved > 0
