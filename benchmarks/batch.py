"""What a batch costs the online traffic beside it, with emulated engines: vLLM without its model.

    python -m benchmarks.batch [--quick] [--rounds N] [--load X] [--arms NAME ...] [--requests N]
        [--dilation D] [--report] [--kill] [--out FOLDER] [--json OUT]

Two replicas of an emulated H100 that serves an 8B model. Online requests come at a share of the
capacity, which is measured first; in a round every arm gets the same ones at the same times:

- ``alone``: nothing else.
- ``flex``: beside a batch that is longer than they are, with ``service_tier: flex``.
- ``eager``: the same, where background requests may use larger shares of an instance.
- ``ranked``: the same, on engines with ``--scheduling-policy priority``.
- ``ordinary``: the same batch as ordinary requests.

Prints latencies of the online requests, relative to ``alone``, in percent with half a 95% interval
over rounds; the tokens a second that the batch got meanwhile; and their share of what the online
requests leave of the capacity. A run whose steps took over 0.7% longer than asked is repeated. What
is finished is kept in the folder and not run again while its settings stay the same.

With ``--kill`` the proxy, an engine, and the batch itself are killed in the middle of a batch of
1,000 requests, and it says how many answers are lost, repeated or changed.
"""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import to_builtins
from msgspec.structs import replace

from benchmarks.support.deployments import (
    POLL_SECONDS,
    StalledError,
    engines,
    proxy,
    proxy_process,
    until_idle,
)
from benchmarks.support.experiment import (
    PATIENCE,
    Arms,
    Experiment,
    PromptLengths,
    Run,
    checks_of,
    drawn_load,
    emulated_replicas,
    of_results,
    steady_capacity,
    step_logs,
)
from benchmarks.support.report import Cells, by_round, change, mean_of, relative_cells
from rescheduler.demo.load import (
    MAX_TOKENS,
    EmulatedAnswer,
    EmulatedRequest,
    answer_figures,
    asked_body,
    changed_answers,
    metric_total,
    preemptions,
    serve_load,
    step_sums,
)
from rescheduler.emulation.emulate_options import AnswerLengths, EmulateOptions
from rescheduler.engines.deployment import Deployment
from rescheduler.engines.emulated_deployment import model_to_load
from rescheduler.engines.launch_engines import Launched
from rescheduler.engines.launch_process import ServerProcess
from rescheduler.engines.proxy_options import BackgroundOptions
from rescheduler.simulator.results.report import markdown_table

PROFILE, REPLICAS, SLOTS, KV_TOKENS = "h100-llama-8b", 2, 32, 60_000
LAW = AnswerLengths(median=150, sigma=0.8, longest=1_000)
PROMPTS = PromptLengths(200, 2_000)
BASE, BATCHED = "alone", 20_000
CONCURRENCY = 96
FIGURES = ("ttft_p99", "ttft", "tpot", "tpot_p99", "latency", "latency_p99")


class Arm(NamedTuple):
    """Whether a batch runs beside, as what, with which shares, and on engines that rank."""

    tier: str | None = None
    ranked: bool = False
    shares: BackgroundOptions = BackgroundOptions()


ARMS = {
    BASE: Arm(),
    "flex": Arm("flex"),
    "eager": Arm("flex", shares=BackgroundOptions(slots=0.75, kv=0.75, prefill=1.0)),
    "ranked": Arm("flex", ranked=True),
    "ordinary": Arm("default"),
}


class Batch(Experiment):
    """Two emulated replicas, online traffic, and a batch beside it.

    The capacity is requests and tokens a second.
    """

    name = "batch"
    arms = ARMS
    base = BASE
    figures = FIGURES
    most_excess = 0.007

    @property
    def emulate(self) -> EmulateOptions:
        dilation = self.options.dilation
        return self.emulated(LAW, profile=PROFILE, kv_tokens=KV_TOKENS, dilation=dilation)

    def settings(self, run: Run | None) -> dict[str, Any]:
        shared = {
            "emulate": of_results(self.emulate),
            "replicas": REPLICAS,
            "slots": SLOTS,
            "prompts": PROMPTS,
            "requests": self.options.requests,
            "concurrency": CONCURRENCY,
        }
        if run is None:
            return shared
        rate = round(run.load * (self.capacity or (0.0, 0.0))[0], 4)
        return shared | {"arm": to_builtins(ARMS[run.arm]), "rate": rate}

    def engines_of(self, arm: str) -> bool:
        return ARMS[arm].ranked

    def deployment(self, key: bool) -> Deployment:
        ranked = ["--scheduling-policy", "priority"] if key else []
        return emulated_replicas(self.emulate, REPLICAS, SLOTS, *ranked)

    async def measure(self, deployment: Deployment) -> tuple[float, float]:
        requests = self.options.requests
        rate, tokens = await steady_capacity(deployment, requests, PROMPTS, self.scratch)
        return rate, rate * tokens

    async def serve(self, deployment: Deployment, run: Run, salt: int) -> dict[str, float]:
        arm, dilation = ARMS[run.arm], self.options.dilation
        rate = run.load * self.capacity[0]
        load = drawn_load(run.round, self.options.requests, rate, PROMPTS, LAW)
        await until_idle(deployment, PATIENCE)
        before = await asyncio.to_thread(preemptions, deployment)
        began = time.monotonic()
        serving = replace(deployment, proxy=replace(deployment.proxy, background=arm.shares))
        with proxy(serving, self.scratch):
            url, name = deployment.proxy_url, deployment.served_name
            if arm.tier is None:
                since = time.perf_counter()
                answers = await serve_load(url, name, load, dilation, salt)
                batched = 0
            else:
                file, out = self.scratch / "asked.jsonl", self.scratch / "answers.jsonl"
                for old in (out, self.scratch / "answers.errors.jsonl"):
                    old.unlink(missing_ok=True)
                asked = drawn_load(1_000 + run.round, BATCHED, inf, PROMPTS, LAW)
                write_batch(file, name, asked, salt, service_tier=arm.tier)
                with batch_process(file, out, url, CONCURRENCY):
                    while len(answered_tokens(out)) < CONCURRENCY:  # so that lengths are mixed
                        await asyncio.sleep(1.0)
                    earlier, since = sum(answered_tokens(out)), time.perf_counter()
                    answers = await serve_load(url, name, load, dilation, salt)
                    batched = sum(answered_tokens(out)) - earlier
            seconds = (time.perf_counter() - since) / dilation
            name = "headway_proxy_background_requests_that_gave_way_total"
            gave_way = await asyncio.to_thread(metric_total, f"{url}/metrics", name)
        sums = step_sums(step_logs(self.scratch, deployment.instances), since)
        return answer_figures(answers, dilation) | {
            "batch_tokens_per_s": batched / seconds,
            "gave_way": gave_way,
            "preemptions": await asyncio.to_thread(preemptions, deployment) - before,
            "changed": float(changed_answers(answers, Path(model_to_load(deployment)))),
            "excess": sums.excess,
            "steps": float(sums.steps),
            "wall": time.monotonic() - began,
        }

    def run_missing(self, arms: Sequence[str], rounds: int) -> None:
        """Run what is missing, or only kill in the middle of a batch."""
        if self.options.kill:
            self._run_killed(60 if self.options.quick else 1_000)
        super().run_missing(arms, 0 if self.options.kill else rounds)

    def _run_killed(self, requests: int) -> None:
        kept = Cells(self.options.out, self.settings(None))
        if kept.read("killed") is not None:
            return
        deployment, folder = self.deployment(True), self.scratch / "killed"
        folder.mkdir(exist_ok=True)
        for old in [*folder.iterdir()]:
            old.unlink()
        load = drawn_load(2_003, requests, inf, PROMPTS, LAW)
        with engines(deployment, self.scratch / "logs") as launched:
            found = killed_batch(deployment, launched, load, folder, CONCURRENCY)
        kept.write("killed", found._asdict())

    def tables(self, found: Mapping[float, Arms]) -> list[str]:
        shown = [f"{name}: {value:.5g}" for name, value in self.summary(found).items()]
        tables = [table(self._tokens, load, runs) for load, runs in found.items()]
        return [*tables, "\n".join(shown)]

    def summary(self, found: Mapping[float, Arms]) -> dict[str, float]:
        ((load, runs),) = found.items()
        killed = Cells(self.options.out, self.settings(None)).read("killed") or {}
        killed_figures = {f"killed_{name}": float(value) for name, value in killed.items()}
        return {"load": load} | figures_of(self._tokens, runs) | killed_figures

    @property
    def _tokens(self) -> float:
        tokens: float = (self.capacity or (0.0, 0.0))[1]
        return tokens


def main() -> None:
    parser = Batch.parser("what a batch costs the online traffic beside it", rounds=6)
    parser.add_argument("--load", type=float, default=0.5, help="of the capacity, online (0.5)")
    parser.add_argument("--requests", type=int, default=1_000, help="online, of a run (1000)")
    parser.add_argument("--dilation", type=float, default=8.0, help="of all times (8)")
    parser.add_argument("--kill", action="store_true", help="only kill in the middle of a batch")
    parser.set_defaults(out=Path("runs/batch/results"))
    options = parser.parse_args()
    options.loads = [options.load]
    Batch(options).main({"requests": 60})


def leftover_share(capacity: float, runs: Arms, arm: str) -> dict[int, float]:
    """Return what a batch got of the tokens that online requests leave, by round."""
    return {
        number: one["batch_tokens_per_s"] / (capacity - runs[BASE][number]["tokens_per_s"])
        for number, one in runs[arm].items()
        if number in runs[BASE]
    }


def table(capacity: float, load: float, runs: Arms) -> str:
    rows = []
    for arm, rounds in runs.items():
        if not rounds or not runs[BASE]:
            continue
        cells = relative_cells(runs, arm, BASE, FIGURES)
        batched, *counts = (
            f"{mean_of(by_round(rounds, name)).mean:.0f}"
            for name in ("batch_tokens_per_s", "gave_way", "preemptions")
        )
        share = mean_of(leftover_share(capacity, runs, arm)).mean
        rows.append([arm, f"{len(rounds)}", *cells, batched, f"{share:.0%}", *counts])
    heads = ["arm", "rounds", *FIGURES, "batch tokens/s", "of the leftover", "gave way"]
    title = f"### Online at {100 * load:.0f}% of the capacity"
    return "\n".join([title, *markdown_table([*heads, "preemptions"], rows)])


def figures_of(capacity: float, runs: Arms) -> dict[str, float]:
    found = {"capacity_tokens_per_s": capacity}
    for arm, rounds in runs.items():
        found[f"rounds_{arm}"] = float(len(rounds))
        if arm == BASE or not rounds or not runs[BASE]:
            continue
        for figure in FIGURES:
            found |= change(rounds, runs[BASE], figure).figures(f"{figure}_change_{arm}")
        rates = by_round(rounds, "batch_tokens_per_s")
        found[f"batch_tokens_per_s_{arm}"] = mean_of(rates).mean
        found[f"leftover_share_{arm}"] = mean_of(leftover_share(capacity, runs, arm)).mean
    return found | checks_of(runs)


_PATIENCE = 900.0


def write_batch(
    path: Path, model: str, load: Sequence[EmulatedRequest], salt: int, **fields: Any
) -> None:
    """Write a batch of scripted requests; the fields are added to the body of each."""
    with path.open("w") as file:
        for request in load:
            line = {
                "custom_id": str(request.seed),
                "method": "POST",
                "url": "/v1/completions",
                "body": asked_body(model, request, salt, MAX_TOKENS) | fields,
            }
            file.write(json.dumps(line) + "\n")


@contextmanager
def batch_process(
    file: Path, out: Path, url: str, concurrency: int
) -> "Iterator[subprocess.Popen[bytes]]":
    """Run `headway batch`; at the end, interrupt it if it still runs."""
    command = [sys.executable, "-m", "rescheduler", "batch", str(file), "--out", str(out)]
    command += ["--url", url, "--concurrency", str(concurrency)]
    with out.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


def answered_tokens(out: Path) -> list[int]:
    """Return the tokens of each answer that a batch has so far."""
    if not out.exists():
        return []
    whole = [line for line in out.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return [json.loads(line)["response"]["body"]["usage"]["completion_tokens"] for line in whole]


class KilledBatch(NamedTuple):
    """A batch in the middle of which a proxy, an engine and the batch itself were killed.

    ``lost`` requests have no answer, ``repeated`` ones have several, ``errors`` are final, and
    ``changed`` answers are not what was asked for.
    """

    requests: int
    answered: int
    lost: int
    repeated: int
    errors: int
    changed: int
    seconds: float


def killed_batch(
    deployment: Deployment,
    engines: Launched,
    load: Sequence[EmulatedRequest],
    folder: Path,
    concurrency: int,
) -> KilledBatch:
    """Run a batch on engines that run; kill -9 the proxy, an engine, and the batch, in turn.

    The first two after a quarter and the half of the answers, and each starts again.

    Raises:
        StalledError: no answer comes for a quarter of an hour.
        RuntimeError: the batch ended otherwise than with all of its answers.
    """
    file, out = folder / "asked.jsonl", folder / "answers.jsonl"
    write_batch(file, deployment.served_name, load, salt=0)
    server = proxy_process(deployment, folder, "--verbose")
    began = time.monotonic()
    try:
        _started(server)
        with batch_process(file, out, deployment.proxy_url, concurrency) as process:
            _until_answered(out, len(load) // 4, process)
            server.kill()
            _started(server)
            _until_answered(out, len(load) // 2, process)
            victim = deployment.decode[-1].name
            engines.kill(victim)
            engines.start([victim])
        with batch_process(file, out, deployment.proxy_url, concurrency) as process:
            _until_answered(out, 3 * len(load) // 4, process)
            process.send_signal(signal.SIGKILL)
        with batch_process(file, out, deployment.proxy_url, concurrency) as process:
            _until(lambda: process.poll() is not None)
            if process.returncode:
                raise _ended(out)
    finally:
        server.signal(signal.SIGTERM)
        server.end_by(time.monotonic() + 30.0)
    return _judged(deployment, load, out, time.monotonic() - began)


def _judged(
    deployment: Deployment, load: Sequence[EmulatedRequest], out: Path, seconds: float
) -> KilledBatch:
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    times = Counter(line["custom_id"] for line in lines)
    asked = {str(request.seed): request for request in load}
    answers = []
    for line in lines:
        body = line["response"]["body"]
        tokens, text = body["usage"]["completion_tokens"], body["choices"][0]["text"]
        answers.append(EmulatedAnswer(asked[line["custom_id"]], tokens=tokens, pieces=[text]))
    errors = out.with_name("answers.errors.jsonl").read_text().splitlines()
    return KilledBatch(
        requests=len(load),
        answered=len(times),
        lost=len(asked.keys() - times.keys()),
        repeated=sum(count > 1 for count in times.values()),
        errors=len(errors),
        changed=changed_answers(answers, Path(model_to_load(deployment))),
        seconds=seconds,
    )


def _started(server: ServerProcess) -> None:
    server.start()
    _until(server.is_ready)


def _until_answered(out: Path, answers: int, process: "subprocess.Popen[bytes]") -> None:
    def answered() -> bool:
        if process.poll() is not None:
            raise _ended(out)
        return len(answered_tokens(out)) >= answers

    _until(answered)


def _ended(out: Path) -> RuntimeError:
    return RuntimeError(f"the batch has ended: {out.with_suffix('.log').read_text()}")


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise StalledError("the batch goes no further")
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main()
