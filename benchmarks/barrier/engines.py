"""Two engines of a small mixture of experts on two cores: ranks of one group, or on their own."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from benchmarks.support.moe_model import write_moe_model
from rescheduler.engines.deployment import Deployment, EngineOptions, Instance
from rescheduler.engines.launch_engines import Launched, launched
from rescheduler.engines.launch_local import free_ports, local_deployment
from rescheduler.engines.launch_progress import LaunchProgress

Kind = Literal["ranks", "lone", "balanced"]
"""Two servers of one group; two without a group; one server that balances between two ranks."""

_ROOT = Path(__file__).parents[2]
_WORKER = "benchmarks.support.cpu_rank_worker.CpuRankWorker"
_ENGINE = re.compile(r"VLLM::(?:EngineCore|Worker)(?:_DP(\d+))?")

ENGINE = EngineOptions(
    dtype="float32",
    max_model_len=3_648,
    max_num_seqs=6,
    kv_blocks=1_024,
    enforce_eager=True,
    arguments=["--worker-cls", _WORKER],
    environment={
        # Forked engines are ready sooner, share memory, and do not spin while they wait.
        "PYTHONPATH": f"{_ROOT / 'tests' / 'forked_engines'}{os.pathsep}{_ROOT}",
        "HF_HUB_OFFLINE": "1",
    },
)


@dataclass(frozen=True)
class Engines:
    """Two engines that run, each on a core of its own."""

    deployment: Deployment
    logs: tuple[Path, Path]

    @property
    def urls(self) -> list[str]:
        return [instance.url for instance in self.deployment.decode]


@contextmanager
def running(kind: Kind, folder: Path) -> Iterator[Engines]:
    """Run two engines; those of a group split the experts between them.

    Args:
        kind: how they belong together.
        folder: of the model, their logs and those of their steps.
    """
    model = folder / "model"
    if not (model / "chat_template.jinja").is_file():  # it is written last
        write_moe_model(model)
    logs = folder / kind
    logs.mkdir(parents=True, exist_ok=True)
    deployment, steps = _described(kind, str(model), logs)
    for log in steps:
        log.unlink(missing_ok=True)
    with (
        LaunchProgress(logs) as progress,
        launched(deployment, logs, report=progress.report) as servers,
    ):
        progress.finish()
        _pin(servers)
        yield Engines(deployment, steps)


def _described(kind: Kind, model: str, logs: Path) -> tuple[Deployment, tuple[Path, Path]]:
    count = 1 if kind == "balanced" else 2
    deployment = local_deployment(model, ENGINE, decode=count, prefill=0)
    group = ["--data-parallel-size", "2", "--data-parallel-address", "127.0.0.1"]
    group += ["--data-parallel-rpc-port", str(free_ports(20)[-1]), "--enable-expert-parallel"]

    def instance(number: int, of: Instance) -> Instance:
        prefix = logs / (f"lone-{number}" if kind == "lone" else "rank")
        arguments = ["--additional-config", json.dumps({"step_log": str(prefix)})]
        if kind != "lone":
            arguments += group
        rank = number if kind == "ranks" else None
        return replace(of, arguments=arguments, data_parallel_rank=rank)

    instances = [instance(number, of) for number, of in enumerate(deployment.instances)]
    names = ("lone-0-0.csv", "lone-1-0.csv") if kind == "lone" else ("rank-0.csv", "rank-1.csv")
    deployment = replace(deployment, instances=instances, served_model_name="moe")
    return deployment, (logs / names[0], logs / names[1])


def _pin(servers: Launched) -> None:
    """Give each engine's core process and worker a core; what serves HTTP may run on either."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    groups = [server.pid for server in servers.servers.values()]
    for process in Path("/proc").iterdir():
        with suppress(ValueError, FileNotFoundError, ProcessLookupError):  # no process, or gone
            place = groups.index(os.getpgid(int(process.name)))
            title = _ENGINE.match((process / "cmdline").read_text())
            if title is None:
                continue
            if len(groups) == 1:
                place = int(title[1])
            for thread in (process / "task").iterdir():
                os.sched_setaffinity(int(thread.name), {cores[place]})
