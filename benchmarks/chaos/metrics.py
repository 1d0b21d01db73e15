"""What the proxy and the engines count themselves."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.chaos.ledger import Ledger
from benchmarks.chaos.lives import Lives

_SCRAPE_SECONDS = 1.0
_TWICE = "headway_proxy_prompts_computed_twice"
_PROMPT_TOKENS = (
    "vllm:prompt_tokens_by_source_total",
    "vllm:request_prompt_tokens_count",
    "vllm:request_prompt_tokens_sum",
)
"""vLLM's counters of what `PromptTokens` has."""


class ProxyCounters:
    """Adds up the proxy's counters over its restarts.

    Requests that were computed again are divided by whether the engine that had them lived then:
    ``recomputed_of_living`` and ``recomputed_after_deaths``, see `Lives`.

    Attributes:
        tells_of_prompts: whether a proxy counts the prompts that are computed twice.
    """

    def __init__(self, lives: Lives, ledger: Ledger) -> None:
        self.tells_of_prompts = False
        self._lives, self._ledger = lives, ledger
        self._last: Counter[str] = Counter()
        self._read = time.monotonic()

    async def watch(self, url: str, session: aiohttp.ClientSession) -> None:
        while True:
            await self.read(url, session)
            await asyncio.sleep(_SCRAPE_SECONDS)

    async def read(self, url: str, session: aiohttp.ClientSession) -> None:
        """Read once; nothing if the proxy does not answer."""
        try:
            async with session.get(f"{url}/metrics") as response:
                text = await response.text()
        except (aiohttp.ClientError, OSError, TimeoutError):
            return
        self.add(text, time.monotonic())

    def add(self, text: str, now: float) -> None:
        """Add what a proxy says."""
        counts, read = self._ledger.counts, Counter[str]()
        for family in text_string_to_metric_families(text):
            self.tells_of_prompts |= family.name == _TWICE
            for sample in family.samples:
                if sample.name == "headway_proxy_migrations_total":
                    moved = sample.labels["outcome"] == "moved"
                    name = "moves" if moved else f"moves_{sample.labels['outcome']}"
                    read[name] += round(sample.value)
                elif sample.name == "headway_proxy_recomputed_requests_total":
                    read[f"recomputed {sample.labels['instance_name']}"] += round(sample.value)
                elif sample.name == f"{_TWICE}_total":
                    read["prompts_computed_twice"] += round(sample.value)
                elif sample.name == "headway_proxy_event_loop_max_stall_seconds":
                    stall = round(1e3 * sample.value)
                    counts["loop_stall_ms"] = max(counts["loop_stall_ms"], stall)
        for name, value in read.items():
            before = self._last[name]
            more = value - before if value >= before else value
            if name.startswith("recomputed "):
                lived = self._lives.lived(name.partition(" ")[2], self._read, now)
                counts["recomputed_of_living" if lived else "recomputed_after_deaths"] += more
                name = "resumed_elsewhere"
            counts[name] += more
        self._last, self._read = read, now


@dataclass(frozen=True)
class PromptTokens:
    """What engines counted until some moment.

    Attributes:
        computed: tokens of prompts that they computed themselves: none of a prefilled request.
        requests: that have ended.
        tokens: of the prompts of these.
    """

    computed: float = 0.0
    requests: float = 0.0
    tokens: float = 0.0

    def prompts_since(self, before: "PromptTokens") -> int:
        """Return how many prompts of mean length have been computed since an earlier moment."""
        requests = self.requests - before.requests
        mean = (self.tokens - before.tokens) / requests if requests else 0.0
        return round((self.computed - before.computed) / mean) if mean else 0


async def prompt_tokens(urls: Iterable[str], session: aiohttp.ClientSession) -> PromptTokens:
    """Return what some engines have counted together; raises as ``session.get`` does."""
    texts = []
    for url in urls:
        async with session.get(f"{url}/metrics") as response:
            texts.append(await response.text())
    return read_prompt_tokens("\n".join(texts))


def read_prompt_tokens(text: str) -> PromptTokens:
    sums = defaultdict[str, float](float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("source") in (None, "local_compute"):
                sums[sample.name] += sample.value
    return PromptTokens(*(sums[name] for name in _PROMPT_TOKENS))
