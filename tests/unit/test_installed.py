"""The installed package, outside of the repository: it has what its commands name."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from numba import config

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SOURCES = ("data_collection", "predictor", "rescheduler", "checkpoints", "configs", "recordings")
FILES = ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py")
BRIEF = "--seeds 1 --policies {} --trace.requests 60 --cluster.slots 8"

Run = Callable[..., str]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as pip installs it; what it requires is here already."""
    folder = tmp_path_factory.mktemp("wheel")
    source, target = folder / "source", folder / "installed"
    for name in SOURCES:
        ignored = shutil.ignore_patterns("__pycache__", "*.png")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    alone = ["--no-deps", "--no-index"]
    wheel = [*pip, "wheel", *alone, "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run(wheel, check=True)
    (built,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", *alone, "--target", str(target), str(built)], check=True)
    shutil.rmtree(source)
    return target


@pytest.fixture
def run(installed: Path, tmp_path: Path) -> Run:
    """Run a program with the installed package, in an empty folder, which is also its home."""
    environment = {name: value for name, value in os.environ.items() if name in ("PATH", "TMPDIR")}
    environment |= {"PYTHONPATH": str(installed), "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    compiled = Path.home() / ".cache" / "headway" / "numba"  # of the same sources
    environment |= {"NUMBA_CACHE_DIR": config.CACHE_DIR or str(compiled)}

    def run_here(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        if not arguments[0].startswith("-"):
            command = [sys.executable, str(installed / "bin" / "headway"), *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run_here


def test_what_is_imported_is_the_installed_package(run: Run, installed: Path) -> None:
    packages = ("data_collection", "predictor", "rescheduler")
    code = f"import {', '.join(packages)}\nfor one in {', '.join(packages)}: print(one.__file__)"
    assert run("-c", code).split() == [str(installed / one / "__init__.py") for one in packages]
    assert run("-m", "rescheduler", "--version") == f"headway {metadata.version('headway')}\n"


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (f"simulate --config bfio_table1 {BRIEF.format('jsq,bfio')}", "| bfio |"),
        (f"simulate --config instant {BRIEF.format('rl')} --cluster.instances 4", "| rl |"),
        (f"simulate --config configs/simulate/replay.yaml {BRIEF.format('bfio')}", "| bfio |"),
        ("serve --config local-pd --print-config", "checkpoint: checkpoints/smollm2-135m-instruct"),
        ("demo --help", "--pairs"),
        (
            "advise trace.csv --requests 1200 --seeds 2 --clock barrier "
            "--recording recordings/smollm2-135m-instruct.parquet",
            "RECOMMENDATION",
        ),
    ],
)
def test_commands_find_what_they_name(
    run: Run, tmp_path: Path, arguments: str, printed: str
) -> None:
    lines = [f"{i / 5},{20 + i % 90},{5 + i * 7 % 60}" for i in range(200)]
    text = "\n".join(["arrival_s,input_tokens,output_tokens", *lines])
    (tmp_path / "trace.csv").write_text(text)
    assert printed in run(*arguments.split())


def test_the_checkpoint_of_the_demonstration_is_loaded(run: Run) -> None:
    code = "import predictor; print(predictor.load_predictor('checkpoints/smollm2-135m-instruct'))"
    assert "SurvivalMLP" in run("-c", code)
