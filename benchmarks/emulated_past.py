"""What the past of real conversations is worth on a fleet of GPUs, with emulated engines.

    python -m benchmarks.emulated_past --trace FILE [--quick] [--rounds N] [--arms NAME ...]
        [--load X] [--requests N] [--dilation D] [--report] [--out FOLDER] [--json OUT]

FILE is Mooncake's conversation trace (``mooncake_conversation*.jsonl.gz``), whose ``hash_ids`` say
which prompts begin alike. Four replicas of an emulated H100 serve an 8B model; a KV cache holds
60,000 tokens. Prompts have a quarter of the trace's tokens, and the same prefixes in common;
answers are as long as in the trace. Nothing that orders is told their length. A round has
the next requests of the trace, a Poisson process. ``headroom`` routes: it keeps requests in the
proxy until they are expected to fit, and there an order has a choice. The proxy has learned the
lengths of all requests before these, as it does by itself, and learns from those of the round as
they end.

``boost`` and ``shortest`` order by the past, ``scaled`` is ``boost`` with a tenth of its γ, and
``exact`` are ``shortest`` and ``boost`` with true lengths. ``blind`` is ``boost`` without a past.

Prints, relative to ``fcfs``, latencies in percent with half a 95% interval over rounds. A load is a
share of the capacity, which is measured first. A run whose steps took over 0.01% longer than asked
is repeated. What is finished is kept in the folder, and not run again.
"""

import json
from argparse import Namespace
from functools import cached_property, lru_cache
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from tqdm import tqdm

from benchmarks.emulated_fleet import FIGURES, HEADROOM, KV_TOKENS, PROFILE, REPLICAS, SLOTS
from benchmarks.past import find
from benchmarks.support.experiment import (
    Experiment,
    Run,
    emulated_replicas,
    of_results,
    served,
    steady_part,
)
from rescheduler.demo.load import FIRST_WORD, MAX_TOKENS, WORDS, EmulatedRequest, asked_body
from rescheduler.emulation.emulate_options import AnswerLengths, EmulateOptions
from rescheduler.engines.deployment import Deployment
from rescheduler.engines.proxy_options import PastOptions
from rescheduler.openai.openai_request import COMPLETIONS
from rescheduler.openai.request_reader import read_request
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.placeable import Placements
from rescheduler.proxy.past_forecasts import PastForecasts

LAW = AnswerLengths(median=250, sigma=1.0, longest=MAX_TOKENS)
BLOCK, SCALE, LONGEST_PROMPT = 512, 4, 14_000
ROUNDS, CLIENT = 6, "127.0.0.1"


class Arm(NamedTuple):
    """An order, and what is known: the past, lengths exactly, or nothing."""

    order: dict[str, Any]
    past: bool = True
    exact: bool = False


BOOST, SHORTEST = {"name": "boost"}, {"name": "shortest"}
ARMS = {
    "fcfs": Arm({"name": "fcfs"}, past=False),
    "blind": Arm(BOOST, past=False),
    "boost": Arm(BOOST),
    "scaled": Arm({"name": "boost", "scale": 0.1}),
    "shortest": Arm(SHORTEST),
    "boost_exact": Arm(BOOST, exact=True),
    "shortest_exact": Arm(SHORTEST, exact=True),
}


class Conversations:
    """The requests of the trace whose prompts the engines take.

    Attributes:
        prompts: tokens of their prompts.
        answers: tokens of their answers.
        blocks: keys of each prompt's blocks; those that begin alike have the same.
    """

    def __init__(self, path: Path) -> None:
        trace = find(path.parent, path.name, 1 << 20)
        if trace is None or not len(trace.prefixes):
            raise SystemExit(f"{path}: no trace with hash_ids")
        prompts = np.maximum(trace.prompt // SCALE, 1)
        kept = np.flatnonzero(prompts <= LONGEST_PROMPT).tolist()
        self.prompts = [int(prompts[i]) for i in kept]
        self.answers = [min(int(trace.output[i]), LAW.longest) for i in kept]
        self.blocks = [np.frombuffer(trace.prefixes[i], dtype=np.uint64).tolist() for i in kept]

    def load(self, first: int, requests: int, rate: float) -> list[EmulatedRequest]:
        """Return some requests, from one on; at an infinite rate they come at once."""
        gaps = np.random.default_rng(first).exponential(size=requests) / rate
        return [
            EmulatedRequest(i, self.prompts[i], self.answers[i], float(arrives))
            for i, arrives in enumerate(np.cumsum(gaps).tolist(), first)
        ]

    def prompt(self, salt: int, request: EmulatedRequest) -> list[int]:
        """Return the prompt of a request, which begins as others do that share its blocks."""
        tokens = [word for key in self.blocks[request.seed] for word in _words(salt, key)]
        return tokens[: request.prompt_tokens]

    def remember(self, until: int, model: str, salt: int, file: Path) -> None:
        """Write what a proxy has learned from the requests before one into a file."""
        file.unlink(missing_ok=True)
        past = PastForecasts(PastOptions(file=str(file)))
        for request in tqdm(self.load(0, until, inf), desc="past", leave=False):
            body = asked_body(model, request, salt, MAX_TOKENS, self.prompt)
            asked = read_request(COMPLETIONS, json.dumps(body).encode())
            live = LiveRequest("id", "name", asked, {}, 0.0, None, Placements[LiveRequest]())
            live.account.name = CLIENT
            past.expected(live)
            live.reported(request.prompt_tokens, request.answer_tokens)
            past.ended(live, by_itself=True)
        past.close()


@lru_cache(1 << 16)
def _words(salt: int, key: int) -> list[int]:
    words = np.random.default_rng((salt, key)).integers(0, WORDS, BLOCK // SCALE)
    return [*(FIRST_WORD + words).tolist()]


class EmulatedPast(Experiment):
    """Four emulated replicas that serve conversations of the trace."""

    name = "emulated_past"
    arms = ARMS
    base = "fcfs"
    figures = FIGURES
    counts = ("preemptions", "changed")

    @cached_property
    def conversations(self) -> Conversations:
        if self.options.trace is None:
            raise SystemExit("--trace FILE: the conversations, unless --report shows what there is")
        return Conversations(self.options.trace)

    def emulate(self, exact: bool) -> EmulateOptions:
        dilation = self.options.dilation
        options = self.emulated(LAW, exact, profile=PROFILE, kv_tokens=KV_TOKENS, dilation=dilation)
        # Engines forecast nothing, and only the arms that know all have forecasts of prompts.
        prompts = options.prompt_forecast if exact else None
        return replace(options, forecast=None, prompt_forecast=prompts)

    def settings(self, run: Run | None) -> dict[str, Any]:
        exact = run is not None and ARMS[run.arm].exact
        shared = {"emulate": of_results(self.emulate(exact), "barrier"), "scale": SCALE}
        if run is None:
            return shared
        return shared | {
            "replicas": REPLICAS,
            "arm": ARMS[run.arm]._asdict(),
            "routing": HEADROOM,
            "requests": self.options.requests,
            "rate": round(run.load * (self.capacity or 0.0), 4),
        }

    def engines_of(self, arm: str) -> bool:
        return ARMS[arm].exact

    def deployment(self, key: bool) -> Deployment:
        return emulated_replicas(self.emulate(key), REPLICAS, SLOTS)

    async def measure(self, deployment: Deployment) -> float:
        conversations = self.conversations
        load = conversations.load(self.first(0), max(200, self.options.requests // 2), inf)
        serving = replace(deployment, routing=HEADROOM)
        rate, _ = await steady_part(serving, load, self.scratch, conversations.prompt)
        return rate

    async def serve(self, deployment: Deployment, run: Run, salt: int) -> dict[str, float]:
        arm, conversations = ARMS[run.arm], self.conversations
        first, file = self.first(run.round), self.scratch / "past"
        past = PastOptions(keys=0)
        if arm.past and not arm.exact:
            conversations.remember(first, deployment.served_name, salt, file)
            past = PastOptions(file=str(file.absolute()))
        proxy = replace(deployment.proxy, past=past)
        serving = replace(deployment, routing=HEADROOM, order=arm.order, proxy=proxy)
        load = conversations.load(first, self.options.requests, run.load * self.capacity)
        return await served(serving, load, salt, self.scratch, conversations.prompt)

    def first(self, number: int) -> int:
        """Return the number of a round's first request; the trace ends with the last round's."""
        known = len(self.conversations.prompts) - ROUNDS * self.options.requests
        if known < 0:
            raise SystemExit("--requests: the trace has fewer than six rounds of them")
        return int(known + number % ROUNDS * self.options.requests)


def main() -> None:
    parser = EmulatedPast.parser("what the past of conversations is worth", rounds=ROUNDS)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="Mooncake's conversations")
    parser.add_argument("--load", type=float, dest="loads", nargs=1, help="of the capacity (1.1)")
    parser.add_argument("--requests", type=int, default=800, help="of a run (800)")
    parser.add_argument("--dilation", type=float, default=2.0, help="of all times (2)")
    parser.set_defaults(loads=[1.1])
    quick = {"requests": 100, "arms": ["boost"]}
    options = parser.parse_args()
    if not options.report:  # before any engine starts
        EmulatedPast(Namespace(**{**vars(options), **(quick if options.quick else {})})).first(0)
    EmulatedPast(options).main(quick)


if __name__ == "__main__":
    main()
