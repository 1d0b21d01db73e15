"""What a module does not load: that is what commands and the workers of a sweep start fast by."""

import subprocess
import sys

import predictor


def test_routing_the_proxy_and_the_simulator_load_no_pytorch_and_no_matplotlib() -> None:
    modules = (
        "rescheduler.serving.serve",
        "rescheduler.simulator.simulate",
        "rescheduler.migration",
    )
    loads = f"import sys, {', '.join(modules)}"
    loads += "; print({'torch', 'matplotlib'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", loads], capture_output=True, text=True)
    assert found.stdout == "set()\n", found.stderr


def test_collecting_starts_without_vllm_and_replaying_without_the_planner() -> None:
    for module, costly in (
        ("data_collection.workload.collect", "vllm"),
        ("rescheduler.serving.replay", "rescheduler.placement.planner"),
    ):
        loads = f"import sys, {module}; print({costly!r} in sys.modules)"
        found = subprocess.run([sys.executable, "-c", loads], capture_output=True, text=True)
        assert found.stdout == "False\n", (module, found.stderr)


def test_the_pickers_command_is_there_without_grpc() -> None:
    loads = "import sys, rescheduler.gateway.picker_command; print('grpc' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", loads], capture_output=True, text=True)
    assert found.stdout == "False\n", found.stderr


def test_every_public_name_of_the_predictor_loads() -> None:
    for name in predictor.__all__:
        assert getattr(predictor, name).__name__ == name
    assert not hasattr(predictor, "load_predictors")
