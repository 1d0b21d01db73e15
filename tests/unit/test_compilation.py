"""Machine code is kept by the sources that it was compiled from."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import predictor.compilation

_CALLER = """\
from predictor.compilation import compiled_core, is_kept
from rescheduler.two.factor import FACTOR, grow


@compiled_core
def scaled(x: float) -> float:
    return grow(x) * FACTOR


if __name__ != "__main__":
    kept = is_kept(scaled)
"""
_CALLEE = """\
from predictor.compilation import compiled_core

FACTOR = {factor}


@compiled_core
def grow(x: float) -> float:
    return x + {step}
"""
_RUN = "from rescheduler.one.factor import *; from rescheduler.one.factor import kept; "
_RUN += "print(scaled(3.0), kept, sum(scaled.stats.cache_hits.values()))"


def _project(root: Path, *, factor: float, step: float) -> Path:
    (root / "predictor").mkdir(parents=True, exist_ok=True)
    shutil.copy(predictor.compilation.__file__, root / "predictor" / "compilation.py")
    for folder, text in (("one", _CALLER), ("two", _CALLEE.format(factor=factor, step=step))):
        (root / "rescheduler" / folder).mkdir(parents=True, exist_ok=True)
        file = root / "rescheduler" / folder / "factor.py"
        file.write_text(text)
        os.utime(file, (1_000_000_000, 1_000_000_000))
    return root


def _run(project: Path, home: Path) -> list[str]:
    environment = {**os.environ, "HOME": str(home), "PYTHONPATH": str(project)}
    command = [sys.executable, "-c", _RUN]
    done = subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_a_change_in_another_file_compiles_its_callers_again(tmp_path: Path) -> None:
    """Files of one name, one size and one time: neither name nor time may stand for contents."""
    home = tmp_path / "home"
    project = _project(tmp_path / "project", factor=2.0, step=1.0)
    assert _run(project, home) == ["8.0", "False", "0"]
    assert _run(project, home) == ["8.0", "True", "1"]
    _project(project, factor=5.0, step=1.0)
    assert _run(project, home) == ["20.0", "False", "0"]
    _project(project, factor=5.0, step=2.0)
    assert _run(project, home) == ["25.0", "False", "0"]
    clone = _project(tmp_path / "clone", factor=2.0, step=1.0)
    assert _run(clone, home) == ["8.0", "True", "1"], "of the same sources nothing is compiled"


def test_without_a_place_for_machine_code_nothing_old_is_run(tmp_path: Path) -> None:
    """Not even what numba would keep beside the sources."""
    home = tmp_path / "a file"
    home.touch()
    project = _project(tmp_path / "project", factor=2.0, step=1.0)
    assert _run(project, home) == ["8.0", "False", "0"]
    _project(project, factor=5.0, step=1.0)
    assert _run(project, home) == ["20.0", "False", "0"]
