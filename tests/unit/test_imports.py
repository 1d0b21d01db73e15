"""What a module does not load: that is what commands and the workers of a sweep start fast by."""

import subprocess
import sys

import pytest

import predictor


@pytest.mark.parametrize(
    ("loads", "costly"),
    [
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
        ("import rescheduler.serving.replay", {"rescheduler.placement.planner"}),
        ("import rescheduler.gateway.picker_command", {"grpc"}),
        (
            "import rescheduler.serving.serve, rescheduler.engines.launch_engines; "
            "from rescheduler.tracing.span import create_tracer; create_tracer(None)",
            {"opentelemetry.sdk"},
        ),
    ],
    ids=["command", "routing", "collect", "replay", "picker", "no traces"],
)
def test_a_command_starts_without_what_it_does_not_need(loads: str, costly: set[str]) -> None:
    program = f"import sys\n{loads}\nprint({costly!r} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout == "set()\n", found.stderr


def test_every_public_name_of_the_predictor_loads() -> None:
    for name in predictor.__all__:
        assert getattr(predictor, name).__name__ == name
    assert not hasattr(predictor, "load_predictors")
