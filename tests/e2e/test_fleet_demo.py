"""`headway demo --emulate`: a fleet at work, and its end by Ctrl-C."""

import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from process_groups import living

from rescheduler.page.snapshot import read_log


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_fleet_is_shown_until_ctrl_c(headway_command: list[str], tmp_path: Path) -> None:
    given = ["--emulate", "h100-llama-8b", "--engines", "2", "--clients", "12"]
    recorded = tmp_path / "fleet.jsonl.gz"
    given += ["--record", str(recorded), "--logs", str(tmp_path / "logs")]
    command = [*headway_command, "demo", *given]
    shown = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert shown.stdout is not None
    printed, found = "", None
    try:
        for line in shown.stdout:
            printed += line
            found = re.search(r" s  (\d+) running, (\d+) answered, ([\d,]+) tokens a second", line)
            if found is not None and int(found[2]) >= 3:
                break
        assert found is not None, printed
        assert 1 <= int(found[1]) <= 12
        assert int(found[3].replace(",", "")) > 0
        assert "failed" not in printed
        assert "/ui#token=" in printed
        engines = psutil.Process(shown.pid).children(recursive=True)
        assert len(engines) >= 6  # each has a tether, a server and a core
    finally:
        shown.send_signal(signal.SIGINT)
        rest, _ = shown.communicate(timeout=120)
    assert shown.returncode == 130, printed + rest
    assert "Traceback" not in rest
    assert read_log(recorded).about.routing == "jsq_load"
    assert not living(engines)
