"""What the session's deployment is, for the tests that use it."""

import json
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forecast_messages import CHECKPOINT
from msgspec.structs import replace

from rescheduler.engines.deployment import Deployment, EngineOptions, Instance
from rescheduler.engines.engine_command import engine_command
from rescheduler.engines.launch_engines import Launched, launched
from rescheduler.engines.launch_local import write_deployment
from rescheduler.engines.proxy_options import ProxyOptions

ENGINE = EngineOptions(
    dtype="float32",
    max_model_len=1024,
    max_num_seqs=8,
    kv_blocks=96,  # of 32 tokens: three requests of the greatest length
    enforce_eager=True,
    checkpoint=str(CHECKPOINT),
    k=10,
)

PATIENT = ProxyOptions(
    pool_seconds=600,
    connect_seconds=60,
    prefill_seconds=600,
    first_token_seconds=600,
    token_seconds=300,
    freeze_seconds=120,
    control_seconds=120,
    moved_token_seconds=300,
    shutdown_seconds=60,
)
"""Deadlines that only an engine which is dead or stopped can miss, on a busy machine too."""


def patient(deployment: Deployment) -> Deployment:
    """Return the deployment with a patient proxy, on the ports of its own."""
    ports = {"port": deployment.proxy.port, "admin_port": deployment.proxy.admin_port}
    return replace(deployment, proxy=replace(PATIENT, **ports))


@dataclass(frozen=True)
class RunningDeployment:
    """Engines that run: the deployment and its file, and the processes, to kill and restart."""

    config_path: Path
    deployment: Deployment
    launched: Launched


@contextmanager
def running(deployment: Deployment, folder: Path) -> Iterator[RunningDeployment]:
    """Run the engines of a deployment, whose file and logs are in the folder."""
    config = folder / "deployment.yaml"
    write_deployment(deployment, config)
    with launched(deployment, folder / "logs") as engines:
        yield RunningDeployment(config, deployment, engines)


def complete(instance: Instance, **fields: Any) -> Any:
    """Return what an instance answers to a completion."""
    body = {"model": "smollm2", "prompt": "One two three", "max_tokens": 5, "temperature": 0}
    request = urllib.request.Request(
        f"{instance.url}/v1/completions",
        data=json.dumps(body | fields).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def recording(deployment: Deployment, one: Instance, dataset: Path, listens: str) -> list[str]:
    """Return the flag with which an engine also records, and sends its telemetry to a listener."""
    command = engine_command(deployment, one, deployment.model, sys.executable)
    given = command.arguments[command.arguments.index("--additional-config") + 1]
    section: dict[str, Any] = json.loads(given)["headway"]
    section["record"] = {"path": str(dataset), "dtype": "float32", "flush_seconds": 1}
    section["forecast"]["telemetry"]["connect"] = [listens]
    return ["--additional-config", json.dumps({"headway": section})]
