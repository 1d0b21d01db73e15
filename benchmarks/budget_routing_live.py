"""Routers before two replicas that turn prompts away: does knowing their prefill budgets help?

    python -m benchmarks.budget_routing_live --trace azure2023_conv.csv.gz [--quick]
        [--loads X ...] [--rounds N] [--out FOLDER] [--json OUT]

Two engines of SmolLM2 with FairBatching and admission, one core each, behind `headway serve`; each
router gets the same requests at the same times, see `benchmarks.fairbatching_live`. A request that
one replica turns away is offered to the other. What is finished is kept in the folder.
"""

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from benchmarks.fairbatching_live import (
    DEADLINES,
    ENGINE,
    MODEL,
    SECONDS,
    TPOT_TIMES,
    TTFT_TIMES,
    Case,
    capacity_of,
    figures_of,
    measured_alone,
    profiled,
    scaled_trace,
    serve,
)
from benchmarks.support.fairbatching_figures import print_tables, summarised
from benchmarks.support.report import arguments, report
from data_collection.atomic_file import write_text_atomically
from rescheduler.engines.deployment import Deployment
from rescheduler.engines.launch_engines import launched
from rescheduler.engines.launch_local import local_deployment, write_deployment
from rescheduler.engines.launch_progress import LaunchProgress

REPLICAS = 2
ROUTERS = ("round_robin", "jsq", "jsq_load", "pab")
LOADS = (0.6, 0.9)
CHECKPOINT = Path(__file__).parents[1] / "checkpoints" / "smollm2-135m-instruct"
_READY_SECONDS = 60


@dataclass(frozen=True)
class RoutedCase(Case):
    """A case whose system is a router; the replicas go by the objectives."""

    @property
    def informed(self) -> bool:
        return True


def main() -> None:
    parser = arguments("routers before two replicas with admission")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--loads", nargs="+", type=float, default=list(LOADS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/fairbatching_live"))
    options = parser.parse_args()
    seconds = SECONDS / 3 if options.quick else SECONDS
    folder: Path = options.out
    folder.mkdir(parents=True, exist_ok=True)
    profile, trace, alone = profiled(folder), scaled_trace(options.trace), measured_alone(folder)
    cases = [
        RoutedCase(router, load, TTFT_TIMES * alone["ttft"], TPOT_TIMES * alone["tpot"], 0, number)
        for number in range(options.rounds)
        for turn, load in enumerate(options.loads)
        for router in np.roll(ROUTERS, number + turn).tolist()
    ]
    missing = [case for case in cases if not case.file(folder).is_file()]
    if missing:
        with replicas(folder) as deployment:
            for number, case in enumerate(missing):
                with routed(deployment, case.system, folder) as url:
                    capacity = REPLICAS * capacity_of(profile, trace)
                    served = serve(url, case, trace, capacity, seconds)
                write_text_atomically(case.file(folder), json.dumps(served))
                print(f"{number + 1}/{len(missing)} {case}", file=sys.stderr, flush=True)
    results = [
        figures_of(case, json.loads(case.file(folder).read_text()), seconds) for case in cases
    ]
    print_tables(results)
    report("budget_routing_live", summarised(results), options.json)


@contextmanager
def replicas(folder: Path) -> Iterator[Deployment]:
    batching: dict[str, Any] = {
        "profile": str((folder / "profile" / "profile.yaml").resolve()),
        "admission": True,
        "reserve": 0.0,  # as the paper has it
        **DEADLINES,
    }
    engine = replace(ENGINE, batching=batching, checkpoint=str(CHECKPOINT))
    deployment = local_deployment(MODEL, engine, decode=REPLICAS, prefill=0)
    with LaunchProgress(folder) as progress, launched(deployment, folder, report=progress.report):
        progress.finish()
        yield deployment


@contextmanager
def routed(deployment: Deployment, router: str, folder: Path) -> Iterator[str]:
    """Run a proxy with one of the routers; yield its URL."""
    config = folder / "served.yaml"
    write_deployment(replace(deployment, routing={"name": router}), config)
    command = [sys.executable, "-m", "rescheduler", "serve", "--config", str(config)]
    with (folder / f"{router}.log").open("w") as log:
        proxy = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + _READY_SECONDS
        while not _ready(deployment.proxy_url):
            if proxy.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the proxy did not start, see {folder / router}.log")
            time.sleep(0.2)
        yield deployment.proxy_url
    finally:
        proxy.terminate()
        proxy.wait()


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready"):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    main()
