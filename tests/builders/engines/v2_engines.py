"""Engines on vLLM's V2 model runner with asynchronous scheduling, on a CPU, with all we add."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batching_profile import profile_of
from forecast_messages import write_all_reading
from msgspec.structs import replace
from running_deployment import ENGINE, recording

from data_collection.models import resolve_model
from rescheduler.engines.deployment import Deployment, Instance
from rescheduler.engines.launch_engines import launched
from rescheduler.engines.launch_local import local_deployment
from rescheduler.step_time.profile import BatchTime

V2_RUNNER = "vllm.v1.worker.cpu.model_runner.CPUModelRunner"

BATCHED_TOKENS = 64
"""Prompts are cut, and the cache of 23 blocks holds 736 tokens: some requests are preempted."""
_BACKEND = Path(__file__).parents[2] / "v2_engines"
_TIMES = BatchTime(constant=0.1, per_new=0.001, per_context=1e-6)


@dataclass(frozen=True)
class V2Engines:
    """Two decode engines that run; see `headway_triton_cpu` for how."""

    deployment: Deployment
    folder: Path

    @property
    def instances(self) -> list[Instance]:
        return self.deployment.decode

    @property
    def checkpoint(self) -> Path:
        return self.folder / "predictor"

    def dataset(self, instance: Instance) -> Path:
        return self.folder / f"{instance.name}-dataset"

    def assert_v2_with_steps_in_flight(self) -> None:
        """Assert what the engines report from inside their steps."""
        reports = self.folder / "what-runs"
        assert what_ran(reports) == ([V2_RUNNER] * 2, [1, 1])
        schedulers = [report["scheduler"] for report in _reports(reports) if "scheduler" in report]
        assert schedulers == ["AsyncFairBatchingScheduler"] * 2

    def printed(self) -> str:
        return "".join(log.read_text() for log in sorted((self.folder / "logs").iterdir()))


def v2_environment(reports: Path) -> dict[str, str]:
    """Return the environment of an engine on the V2 runner, which reports into a folder."""
    return {
        "PYTHONPATH": os.pathsep.join([str(_BACKEND), os.environ["PYTHONPATH"]]),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "HEADWAY_WHAT_RUNS": str(reports),
    }


def what_ran(reports: Path) -> tuple[list[str], list[int]]:
    """Return the runner of each worker, and the most steps in flight of each scheduler."""
    found = _reports(reports)
    runners = [report["runner"] for report in found if "runner" in report]
    return runners, [report["steps_in_flight"] for report in found if "steps_in_flight" in report]


def _reports(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(one.read_text()) for one in folder.glob("*.json")]


@contextmanager
def v2_engines(folder: Path, listens: str) -> Iterator[V2Engines]:
    """Run two engines that capture, forecast, form batches by deadlines and move requests.

    They send telemetry to an endpoint, and write all else into the folder.
    """
    (folder / "what-runs").mkdir()
    profile = profile_of(Path(resolve_model("smollm2")), folder / "profile.yaml", _TIMES)
    checkpoint = write_all_reading(folder / "predictor")
    options = replace(
        ENGINE,
        checkpoint=str(checkpoint),
        max_model_len=512,
        kv_blocks=24,
        k=1,
        batching={"profile": str(profile), "recalibrate": False},
        arguments=["--async-scheduling", "--max-num-batched-tokens", str(BATCHED_TOKENS)],
        environment=v2_environment(folder / "what-runs"),
    )
    deployment = local_deployment("smollm2", options, prefill=0, routing={"name": "pab"})
    engines = V2Engines(deployment, folder)
    instances = [
        replace(one, arguments=recording(deployment, one, engines.dataset(one), listens))
        for one in engines.instances
    ]
    engines = V2Engines(replace(deployment, instances=instances), folder)
    with launched(engines.deployment, folder / "logs"):
        yield engines
