"""What a selfish client gains, and the others lose, with accounts and without.

    python -m benchmarks.fairness [--quick] [--rounds N] [--attacks NAME ...] [--json OUT]

One emulated H100 with an 8B model runs eight requests at a time. Eight honest clients, an address
each, ask for two answers of 120 tokens at a time, again and again. Beside them a ninth client:

- ``none``: is one of them.
- ``flood``: sends 200 requests at a time to the pool of 64; one that is refused, again after 0.5 s.
- ``promises``: 16 requests at a time, each with a promise at level 0.001 that it cannot keep.
- ``asks``: the same 16 without a promise, to compare.
- ``filler``: four requests with answers of 500 tokens, whose prompts end as if they were short.
- ``plain``: the same four without, to compare.
- ``split``: four requests of 125 tokens at a time for each one of 500.
- ``rare``: prompts of 6,000 rare characters, as fast as it can.
- ``scrape``: reads /metrics as fast as it can.
- ``peer``: the 16 requests of ``asks`` by another proxy of the same coordinator, which says of each
  that it has waited for ten days.
- ``fellow``: the same by a proxy that does not lie, to compare.

The proxy orders by ``boost`` with forecasts from prompts. With accounts, ``order.fairness`` is 1;
without, every request is of the same account. Both proxies stand before the same engine and are
attacked in turn, so that each round pairs them.

Prints the mean over the rounds with half a 95% interval: the honest clients' answers, relative to
their share of those of ``none``; what the selfish client's latency or answers gain by the claim;
and the longest stretch so far for which the proxy's event loop computed: the flood comes last.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from msgspec.structs import replace

from benchmarks.support.deployments import engines, proxy
from benchmarks.support.report import (
    Estimate,
    arguments,
    by_round,
    change,
    mean_of,
    rotated,
    write_report,
)
from benchmarks.support.server_process import server
from rescheduler.demo.load import metric_in
from rescheduler.emulation.emulate_options import EmulateOptions
from rescheduler.emulation.scripted_answers import LENGTH, SEED
from rescheduler.engines.deployment import CoordinatorOptions, Deployment, EngineOptions
from rescheduler.engines.launch_local import free_ports, local_deployment, write_deployment
from rescheduler.engines.proxy_options import AccountOptions
from rescheduler.simulator.results.report import markdown_table

PROFILE, SLOTS, POOL = "h100-llama-8b", 8, 64
HONEST, EACH, TOKENS = 8, 2, 120
CHECKPOINT = "checkpoints/smollm2-135m-instruct-prompt"
HEADER = "X-Same"
ATTACKS = (
    *("none", "rare", "scrape", "asks", "promises", "plain", "filler", "split"),
    *("fellow", "peer", "flood"),
)
COMPARED = {"promises": "asks", "filler": "plain", "split": "plain", "peer": "fellow"}
ARMS = ("without", "with")
WARM_SECONDS = 4.0
REFUSED_SECONDS = 0.5  # as the openai library waits at first
_PROMPT = "Tell me how to plan a journey along the river, with a budget and a packing list."
_FILLER = "2+2=? Answer with one word. " * 16
_RARE = "".join(chr(code) for code in range(0x20000, 0x20000 + 1500)) * 4
_LIES = """
import sys
from msgspec.structs import replace
from rescheduler.commands.command_line import main
from rescheduler.coordination.link import Link
true = Link._record
Link._record = lambda link, request: replace(true(link, request), waited=864000.0)
sys.exit(main())
"""


@dataclass
class Served:
    """What clients got in the time that counts."""

    answers: int = 0
    tokens: int = 0
    refused: int = 0
    seconds: list[float] = field(default_factory=list)


def main() -> None:
    parser = arguments("what a selfish client gains, with accounts and without")
    parser.add_argument("--rounds", type=int, help="of all attacks on both (default: 5)")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--seconds", type=float, help="of an attack that count (default: 15)")
    options = parser.parse_args()
    rounds = (1 if options.quick else 5) if options.rounds is None else options.rounds
    seconds = (4.0 if options.quick else 15.0) if options.seconds is None else options.seconds
    if rounds < 1 or not seconds > 0:
        parser.error("--rounds and --seconds must be positive")
    attacks = ["none", *(name for name in options.attacks if name != "none")]
    attacks += [base for name, base in COMPARED.items() if name in attacks and base not in attacks]
    with tempfile.TemporaryDirectory() as folder:
        results = _measured(Path(folder), attacks, rounds, seconds)
    estimates = _estimates(results, attacks)
    _show(estimates, attacks)
    figures: dict[str, float] = {}
    for name, one in estimates.items():
        figures |= {name: one.mean, f"{name}_half": one.half}
    figures |= _summary(figures)
    write_report("fairness", figures, options.json, rounds=rounds, seconds=seconds)


def _summary(figures: Mapping[str, float]) -> dict[str, float]:
    """Return what accounts are judged by, in percent and milliseconds, of the attacks that ran."""
    of = {
        "selfish_gain_promise": ("with_selfish_gain_promises_percent", 0.0),
        "selfish_gain_filler": ("with_selfish_gain_filler_percent", 0.0),
        "selfish_gain_peer": ("with_selfish_gain_peer_percent", 0.0),
        "honest_answers_with_flood": ("with_flood_honest_percent", 100.0),
        "loop_stall_ms_prompts": ("with_rare_stall_ms", 0.0),
    }
    return {
        f"{name}{half}": figures[f"{key}{half}"] + (0.0 if half else more)
        for name, (key, more) in of.items()
        if key in figures
        for half in ("", "_half")
    }


Results = dict[tuple[str, str], dict[int, dict[str, float]]]
"""Figures by arm and attack, and round."""


def _measured(folder: Path, attacks: Sequence[str], rounds: int, seconds: float) -> Results:
    results: Results = {(arm, name): {} for arm in ARMS for name in attacks}
    networks = (f"127.{i}.{j}" for i in count() for j in range(1, 255))
    deployment = _deployment()
    with engines(deployment, folder), ExitStack() as stack:
        urls = stack.enter_context(_proxies(deployment, folder))
        if "peer" in attacks:
            for arm, one in (("with", deployment), ("without", _same_account(deployment))):
                urls |= _peers(stack, one, folder, arm)
        for number in range(rounds):
            for name in attacks:
                for arm in rotated(list(ARMS), number):
                    url = urls.get(f"{arm}_peers" if name in ("fellow", "peer") else arm, "")
                    selfish_url, model = urls.get(f"{arm}_{name}", url), deployment.served_name
                    attack = Attack(url, selfish_url, model, name, seconds, next(networks))
                    figures = asyncio.run(attack.run())
                    results[arm, name][number] = figures
                    shown = ", ".join(f"{key} {value:.3g}" for key, value in figures.items())
                    print(f"round {number}, {name}, {arm} accounts: {shown}", flush=True)
    return results


def _deployment() -> Deployment:
    engine = EngineOptions(
        emulate=EmulateOptions(profile=PROFILE, kv_tokens=200_000),
        max_model_len=8192,
        max_num_seqs=SLOTS,
    )
    made = local_deployment("smollm2", engine, decode=1, prefill=0)
    options = replace(made.proxy, pool=POOL, admin_port=0)
    order = {"name": "boost", "fairness": 1.0}
    return replace(made, proxy=options, order=order, prompt_checkpoint=CHECKPOINT)


def _same_account(deployment: Deployment) -> Deployment:
    """Return the deployment with one account for all clients."""
    port = deployment.proxy.port + 100
    same = replace(deployment.proxy, port=port, accounts=AccountOptions(header=HEADER))
    return replace(deployment, proxy=same, order={"name": "boost"})


def _peers(stack: ExitStack, deployment: Deployment, folder: Path, arm: str) -> dict[str, str]:
    """Run a coordinator with three proxies, the last of which lies; return their addresses."""
    (port,) = free_ports(1)
    coordinated = replace(
        deployment,
        coordinator=CoordinatorOptions(endpoint=f"tcp://127.0.0.1:{port}", port=0),
        proxy=replace(deployment.proxy, port=0),
    )
    config = folder / f"{arm}-peers.yaml"
    write_deployment(coordinated, config)
    honest = ("-m", "rescheduler")
    stack.enter_context(server([sys.executable, *honest, "coordinator", "--config", str(config)]))
    urls = {}
    for name, start in (("peers", honest), ("fellow", honest), ("peer", ("-c", _LIES))):
        command = [sys.executable, *start, "serve", "--config", str(config)]
        urls[f"{arm}_{name}"] = stack.enter_context(server(command)).url
    return urls


@contextmanager
def _proxies(deployment: Deployment, folder: Path) -> Iterator[dict[str, str]]:
    """Run a proxy with accounts and one without; yield their addresses."""
    without = _same_account(deployment)
    (folder / "without").mkdir()
    with proxy(deployment, folder), proxy(without, folder / "without"):
        yield {"with": deployment.proxy_url, "without": without.proxy_url}


class Attack:
    """Honest clients, and one that is not.

    All of them are new: what they had in another attack would be held against them in this one.
    """

    def __init__(
        self, url: str, selfish_url: str, model: str, name: str, seconds: float, network: str
    ) -> None:
        self._url, self._selfish_url = url, selfish_url
        self._model = model
        self._network = network
        self._name = name
        self._seconds = seconds
        self._counts = False
        self._seed = 0

    async def run(self) -> dict[str, float]:
        """Serve all for as long as counts; return what the honest and the selfish got."""
        honest, selfish = Served(), Served()
        async with AsyncExitStack() as stack:
            tasks = []
            for i in range(HONEST):
                address = f"{self._network}.{i + 1}"
                session = await stack.enter_async_context(self._client(self._url, address))
                for _ in range(EACH):
                    tasks.append(asyncio.create_task(self._ask(session, honest, self._body)))
            client = self._client(self._selfish_url, f"{self._network}.200")
            session = await stack.enter_async_context(client)
            tasks += [asyncio.create_task(one) for one in self._selfish(session, selfish)]
            await asyncio.sleep(WARM_SECONDS)
            self._counts = True
            await asyncio.sleep(self._seconds)
            self._counts = False
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            async with session.get("/metrics") as response:
                text = await response.text()
        await self._idle()
        return {
            "honest_answers": float(honest.answers),
            "honest_seconds": float(np.mean(honest.seconds or [np.nan])),
            "selfish_answers": float(selfish.answers),
            "selfish_tokens": float(selfish.tokens),
            "selfish_seconds": float(np.mean(selfish.seconds or [np.nan])),
            "refused": float(honest.refused),
            "stall_ms": 1e3 * metric_in(text, "headway_proxy_event_loop_max_stall_seconds"),
        }

    def _client(self, url: str, address: str) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0, local_addr=(address, 0))
        headers = {HEADER: "all"}
        return aiohttp.ClientSession(url, connector=connector, headers=headers)

    def _selfish(self, session: aiohttp.ClientSession, got: Served) -> list[Any]:
        """Return what the ninth client does."""
        ask: Callable[..., Any] = self._ask
        long = {"tokens": 500}
        many: dict[str, list[Any]] = {
            "none": [(EACH, {})],
            "flood": [(200, {})],
            "asks": [(16, {})],
            "fellow": [(16, {})],
            "peer": [(16, {})],
            "promises": [(16, {"finish_in_s": 0.9, "finish_level": 0.001})],
            "plain": [(4, long)],
            "filler": [(4, {**long, "prompt": f"{_PROMPT} {_FILLER}"})],
            "split": [(16, {"tokens": 125})],
            "rare": [(4, {"prompt": _RARE, "tokens": 2})],
        }
        if self._name == "scrape":
            return [self._scrape(session, got) for _ in range(8)]
        ((at_once, fields),) = many[self._name]

        def body() -> dict[str, Any]:
            return self._body(**fields)

        return [ask(session, got, body) for _ in range(at_once)]

    def _body(self, tokens: int = TOKENS, prompt: str = _PROMPT, **fields: Any) -> dict[str, Any]:
        self._seed += 1
        return {
            "model": self._model,
            "prompt": f"{self._seed}. {prompt}",
            "max_tokens": 1000,
            "vllm_xargs": {LENGTH: tokens, SEED: self._seed},
            **fields,
        }

    async def _ask(
        self,
        session: aiohttp.ClientSession,
        got: Served,
        body: Callable[[], dict[str, Any]],
    ) -> None:
        """Ask for an answer, and for the next one as soon as it has come, until cancelled."""
        while True:
            began = time.monotonic()
            with suppress(aiohttp.ClientError):
                async with session.post("/v1/completions", json=body()) as response:
                    answer = json.loads(await response.read())
                if response.status == 200 and self._counts:
                    got.answers += 1
                    got.tokens += answer["usage"]["completion_tokens"]
                    got.seconds.append(time.monotonic() - began)
                if response.status != 200:
                    got.refused += self._counts
                    await asyncio.sleep(REFUSED_SECONDS)

    async def _scrape(self, session: aiohttp.ClientSession, got: Served) -> None:
        while True:
            async with session.get("/metrics") as response:
                await response.read()
            got.answers += self._counts

    async def _idle(self) -> None:
        """Wait until nothing runs or waits at the proxy any more."""
        async with aiohttp.ClientSession() as session, asyncio.timeout(60):
            for url in {self._url, self._selfish_url}:
                busy = True
                while busy:
                    await asyncio.sleep(0.1)
                    async with session.get(f"{url}/metrics") as response:
                        text = await response.text()
                    running = metric_in(text, "headway_proxy_num_requests_running")
                    busy = running + metric_in(text, "headway_proxy_num_requests_waiting") > 0


def _estimates(results: Results, attacks: Sequence[str]) -> dict[str, Estimate]:
    found = {}
    for arm in ARMS:
        alone = results[arm, "none"]
        for name in attacks:
            rounds = results[arm, name]
            found[f"{arm}_{name}_honest_percent"] = change(rounds, alone, "honest_answers")
            found[f"{arm}_{name}_stall_ms"] = mean_of(by_round(rounds, "stall_ms"))
            base = COMPARED.get(name)
            if base is not None:
                gained = change(rounds, results[arm, base], "selfish_tokens")
                found[f"{arm}_selfish_gain_{name}_percent"] = gained
    return found


def _show(estimates: Mapping[str, Estimate], attacks: Sequence[str]) -> None:
    rows = []
    for name in attacks:
        cells = [name]
        for what in (
            "{arm}_{name}_honest_percent",
            "{arm}_selfish_gain_{name}_percent",
            "{arm}_{name}_stall_ms",
        ):
            found = [estimates.get(what.format(arm=arm, name=name)) for arm in ARMS]
            cells += ["" if one is None else one.shown() for one in found]
        rows.append(cells)
    heads = ["attack"]
    for what in ("honest answers %", "selfish gain %", "loop ms"):
        heads += [f"{what}, {arm}" for arm in ARMS]
    print()
    print("\n".join(markdown_table(heads, rows)))


if __name__ == "__main__":
    main()
