"""Two engines of a small mixture of experts on two cores, and the log of their steps.

They are ranks of one group, or on their own; see `benchmarks.support.cpu_rank_worker` for the log.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from benchmarks.support.deployments import engines
from data_collection.models import prepare_embedded
from rescheduler.engines.deployment import Deployment, EngineOptions, Instance
from rescheduler.engines.launch_engines import Launched
from rescheduler.engines.launch_local import free_ports, local_deployment

FloatArray = npt.NDArray[np.float64]
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


_MODEL: dict[str, Any] = {
    "head_dim": 64,
    "hidden_size": 128,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 128,
    "num_attention_heads": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
"""Little to compute but its attention: 64 heads that read 4 heads' keys and values, so that a
context costs time rather than memory. vLLM lets ranks step together only for a mixture of experts.
"""


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
    """Run two engines; those of a group split the experts between them."""
    model = folder / "model"
    if not (model / "chat_template.jinja").is_file():  # it is written last
        write_moe_model(model)
    logs = folder / kind
    logs.mkdir(parents=True, exist_ok=True)
    deployment, steps = _described(kind, str(model), logs)
    for log in steps:
        log.unlink(missing_ok=True)
    with engines(deployment, logs) as servers:
        _pin(servers)
        yield Engines(deployment, steps)


def write_moe_model(folder: Path) -> Path:
    """Write the model, with SmolLM2's tokenizer, into a folder, the same every time; return it."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    untyped: Any = AutoModelForCausalLM
    untyped.from_config(Qwen3MoeConfig(**_MODEL)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(prepare_embedded("smollm2") / name, folder / name)
    return folder


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


class Steps(NamedTuple):
    """Steps of an engine, in order, each [n]."""

    begins: FloatArray  # seconds on the monotonic clock
    requests: FloatArray  # 0 where only another rank had some
    new: FloatArray  # tokens computed
    context: FloatArray  # tokens of its requests

    def between(self, start: float, end: float) -> "Steps":
        inside = (self.begins >= start) & (self.begins <= end)
        return Steps(*(column[inside] for column in self))

    def seconds(self, requests: int) -> FloatArray:
        """Return the seconds of all but the last step that decode so many requests and no more."""
        alike = (self.requests[:-1] == requests) & (self.new[:-1] == requests)
        return np.asarray(np.diff(self.begins)[alike])


def read_steps(log: Path) -> Steps:
    """Return the whole lines of a log; no steps if there is none yet."""
    text = log.read_text() if log.is_file() else ""
    lines = text[: text.rfind("\n") + 1].split()
    rows = np.array([line.split(",") for line in lines], dtype=np.float64).reshape(-1, 4)
    return Steps(*rows.T)


def contexts_at(steps: Steps, times: FloatArray) -> FloatArray:
    """Return the context tokens of the step under way at each time; 0 before the first, [n]."""
    context = np.concatenate([[0.0], steps.context])
    return context[np.searchsorted(steps.begins, times, "right")]
