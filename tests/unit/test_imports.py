"""What a module does not load: that is what commands and the workers of a sweep start fast by."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import predictor


@pytest.mark.parametrize(
    ("loads", "costly"),
    [
        # A worker that has llvmlite loaded ends as vLLM looks through all modules for its kernels.
        ("import predictor.live.forecaster", {"vllm", "numba", "llvmlite"}),
        (
            "import data_collection, rescheduler, rescheduler.commands.command_line",
            {"vllm", "torch", "lightning", "nixl"},
        ),
        (
            "import rescheduler.serving.serve, rescheduler.simulator.simulate; "
            "import rescheduler.migration",
            {"torch", "matplotlib"},
        ),
        ("import data_collection.workload.collect", {"vllm"}),
        (
            "import rescheduler.demo.demo, rescheduler.serving.replay",
            {"rescheduler.placement.planner", "rescheduler.proxy"},
        ),
        ("import rescheduler.gateway.picker_command", {"grpc"}),
        (
            "import rescheduler.serving.serve, rescheduler.engines.launch_engines; "
            "from rescheduler.tracing.span import create_tracer; create_tracer(None)",
            {"opentelemetry.sdk"},
        ),
    ],
    ids=["worker", "command", "routing", "collect", "replay", "picker", "no traces"],
)
def test_a_command_starts_without_what_it_does_not_need(loads: str, costly: set[str]) -> None:
    program = f"import sys\n{loads}\nprint({costly!r} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout == "set()\n", found.stderr


def test_every_public_name_of_the_predictor_loads() -> None:
    for name in predictor.__all__:
        assert getattr(predictor, name).__name__ == name
    assert not hasattr(predictor, "load_predictors")


PACKAGES = ("data_collection", "predictor", "rescheduler")
RE_EXPORTS = {Path("data_collection/vllm_adapter/engine.py")}


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for package in PACKAGES:
        for path in sorted(Path(package).rglob("*.py")):
            yield path, ast.parse(path.read_text())


def test_only_the_face_of_a_package_lists_what_it_offers() -> None:
    listing = {
        path
        for path, module in sources()
        if path.name != "__init__.py"
        and any(
            isinstance(name, ast.Name) and name.id == "__all__"
            for statement in module.body
            if isinstance(statement, ast.Assign)
            for name in statement.targets
        )
    }
    assert listing == RE_EXPORTS


def test_three_attributes_are_not_assigned_on_one_line() -> None:
    crowded = [
        f"{path}:{statement.lineno}"
        for path, module in sources()
        for statement in ast.walk(module)
        if isinstance(statement, ast.Assign)
        and isinstance(statement.targets[0], ast.Tuple)
        and isinstance(statement.value, ast.Tuple)
        and sum(isinstance(one, ast.Attribute) for one in statement.targets[0].elts) >= 3
    ]
    assert not crowded
