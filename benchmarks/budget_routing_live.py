"""Routers before two replicas that turn prompts away: does knowing their prefill budgets help?

    python -m benchmarks.budget_routing_live --trace azure2023_conv.csv.gz [--quick]
        [--loads X ...] [--rounds N] [--out FOLDER] [--json OUT]

Two engines of SmolLM2 with FairBatching and admission, one core each, behind `headway serve`; each
router gets the same requests at the same times, see `benchmarks.fairbatching_live`. A request that
one replica turns away is offered to the other. What is finished is kept in the folder.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from benchmarks.fairbatching_live import DEADLINES, ENGINE, MODEL, SECONDS, Case, Deployed, Server
from benchmarks.support.deployments import engines, proxy
from benchmarks.support.fairbatching_figures import print_tables, summarised
from benchmarks.support.report import arguments, report
from rescheduler.engines.deployment import Deployment
from rescheduler.engines.launch_local import local_deployment

REPLICAS = 2
ROUTERS = ("round_robin", "jsq", "jsq_load", "pab")
LOADS = (0.6, 0.9)
CHECKPOINT = Path(__file__).parents[1] / "checkpoints" / "smollm2-135m-instruct"


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
    deployed = Deployed.measured(options.out, options.trace, seconds, REPLICAS)
    ((ttft_s, tpot_s),) = deployed.objectives()
    results = deployed.results(
        [
            RoutedCase(router, load, ttft_s, tpot_s, 0, number)
            for number in range(options.rounds)
            for turn, load in enumerate(options.loads)
            for router in np.roll(ROUTERS, number + turn).tolist()
        ],
        lambda missing: serving(options.out),
    )
    print_tables(results)
    report("budget_routing_live", summarised(results), options.json)


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    batching: dict[str, Any] = {
        "profile": str((folder / "profile" / "profile.yaml").resolve()),
        "admission": True,
        "reserve": 0.0,  # as the paper has it
        **DEADLINES,
    }
    engine = replace(ENGINE, batching=batching, checkpoint=str(CHECKPOINT))
    deployment = local_deployment(MODEL, engine, decode=REPLICAS, prefill=0)
    with engines(deployment, folder):
        yield lambda case: routed(deployment, case.system, folder)


@contextmanager
def routed(deployment: Deployment, router: str, folder: Path) -> Iterator[str]:
    with proxy(replace(deployment, routing={"name": router}), folder):
        yield deployment.proxy_url


if __name__ == "__main__":
    main()
