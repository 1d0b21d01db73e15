"""What happened to honest clients' requests, which engines lived then, and what is to blame.

The harness kills, stops and starts the engines, and so knows which of them lived at any time.
The proxy and the engines count for themselves, too.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

Outage = Literal["proxy", "engine", "killer"]

COUNTED = (
    *("blocks_leaked", "clients_left", "clients_stalled", "cut_by_proxy_restart"),
    *("dead_out_of_service", "engines_lost_to_killers", "fills", "garbage", "honest_429"),
    *("honest_4xx", "honest_5xx", "honest_5xx_at_a_kill", "innocents_lost", "killers_beyond_two"),
    *("killers_refused_after_two", "killers_sent", "kills", "living_out_of_service"),
    *("loop_stall_ms", "lost", "moves", "moves_ended", "moves_gone", "moves_no_answer"),
    *("moves_no_room", "moves_not_copied", "moves_not_frozen", "moves_rolled_back", "overloads"),
    *("poison", "poison_5xx", "poison_answered", "poison_unanswered", "prompts_computed_twice"),
    *("prompts_computed_twice_in_overloads", "proxy_restarts", "recomputed_after_deaths"),
    *(
        "recomputed_of_living",
        "refused_at_proxy_restart",
        "refused_without_engines",
        "requests",
        "resumed_elsewhere",
    ),
    *(
        "silent_cut_by_proxy_restart",
        "silent_ended",
        "silent_failed",
        "silent_failed_at_a_kill",
        "silent_sent",
    ),
    *("silent_without_end", "slow_steps_times", "slowed", "stopped_out_of_service", "stops"),
    *("tokens_changed",),
)
"""What is counted: reported also where it is zero, since that is what most of it should be."""
_AFTERWARDS = 2.0
"""Seconds for which the end of an outage still counts as one: clients learn of it late."""


@dataclass
class Ledger:
    """Counts, and when what was out of service."""

    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(COUNTED, 0)))
    notes: list[str] = field(default_factory=list)
    _shown: int = 0
    _outages: list[tuple[Outage, float, float | None]] = field(default_factory=list)

    @contextmanager
    def outage(self, what: Outage) -> Iterator[None]:
        began, place = time.monotonic(), len(self._outages)
        self._outages.append((what, began, None))
        try:
            yield
        finally:
            self._outages[place] = (what, began, time.monotonic() + _AFTERWARDS)

    def new_notes(self) -> list[str]:
        """Return the notes since the last call."""
        new, self._shown = self.notes[self._shown :], len(self.notes)
        return new

    def during(self, what: Outage, began: float) -> bool:
        """Return whether there has been an outage since some moment."""
        return any(kind == what and (end is None or began < end) for kind, _, end in self._outages)

    def silent(self, number: int, tokens: list[int], expected: list[int], how: str) -> None:
        """Count a silent stream; how: ``ended``, ``without_end`` (it was left), or what failed."""
        if tokens != (expected if how == "ended" else expected[: len(tokens)]):
            self._changed(number, tokens, expected)
            how = "other tokens"
        if how not in ("ended", "without_end"):
            self.notes.append(f"silent stream {number}, {len(tokens)} tokens: {how}")
            now, how = time.monotonic(), "failed"
            if self.during("proxy", now):
                how = "cut_by_proxy_restart"
            elif self.during("engine", now) or self.during("killer", now):
                how = "failed_at_a_kill"
        self.counts[f"silent_{how}"] += 1

    def ended(self, number: int, tokens: list[int], expected: list[int]) -> None:
        self.counts["requests"] += 1
        if tokens != expected:
            self._changed(number, tokens, expected)

    def failed(
        self, number: int, tokens: list[int], expected: list[int], began: float, why: str, how: str
    ) -> None:
        """Count a request that has failed after some tokens.

        How: ``503`` (before the stream), ``5xx``, ``429`` or ``4xx`` (before or in the stream),
        ``refused`` or ``broken`` (connection), or ``silent`` (it ended as if all was well).
        """
        if how in ("refused", "503") and self.during("proxy", began):
            self.counts["refused_at_proxy_restart"] += 1
            return
        if how == "503" and self.during("killer", began):
            self.counts["refused_without_engines"] += 1
            return
        how = "5xx" if how == "503" else how
        self.counts["requests"] += 1
        self.counts["innocents_lost"] += self.during("killer", began)
        if tokens != expected[: len(tokens)]:
            self._changed(number, tokens, expected)
        if how in ("5xx", "broken") and self.during("proxy", began):
            self.counts["cut_by_proxy_restart"] += 1
            return
        self.notes.append(f"request {number}, {len(tokens)} tokens, {how}: {why}")
        if how in ("refused", "broken", "silent"):
            self.counts["lost"] += 1
        elif how == "5xx":
            at_outage = self.during("engine", began) or self.during("killer", began)
            self.counts["honest_5xx_at_a_kill" if at_outage else "honest_5xx"] += 1
        else:
            self.counts[f"honest_{how}"] += 1

    def _changed(self, number: int, tokens: list[int], expected: list[int]) -> None:
        self.counts["tokens_changed"] += 1
        both = zip(tokens, expected, strict=False)
        same = next((i for i, (a, b) in enumerate(both) if a != b), min(len(tokens), len(expected)))
        self.notes.append(f"request {number}: token {same} of {len(expected)} differs")


_STARTED_SECONDS = 5.0
"""After a new engine is ready, for which what befell the old one may still be noticed."""
_CONTINUED_SECONDS = 5.0
"""After SIGCONT, for which an engine taken out of service counts as stopped."""
_SAMPLE_SECONDS = 0.2

_Spell = list[float]  # its begin and end


@dataclass
class Lives:
    """When each engine was dead, and when it was stopped by SIGSTOP.

    An engine counts as dead from just before the harness kills it until five seconds after the next
    one in its place answered ``/health``, and whenever its process has ended on its own. At any
    other time it lives, however slow it is.
    """

    is_running: Callable[[str], bool]
    _dead: dict[str, list[_Spell]] = field(default_factory=lambda: defaultdict(list))
    _stopped: dict[str, list[_Spell]] = field(default_factory=lambda: defaultdict(list))

    @contextmanager
    def dead(self, name: str) -> Iterator[None]:
        with _spell(self._dead[name], _STARTED_SECONDS):
            yield

    @contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        with _spell(self._stopped[name], _CONTINUED_SECONDS):
            yield

    def lived(self, name: str, since: float, until: float) -> bool:
        """Return whether an engine lived during the whole of a time that ends now."""
        return self.is_running(name) and not _within(self._dead[name], since, until)

    def was_stopped(self, name: str, since: float, until: float) -> bool:
        return _within(self._stopped[name], since, until)

    def is_dead(self, name: str) -> bool:
        """Return whether an engine is being killed or started again."""
        return any(end == inf for _, end in self._dead[name])


@contextmanager
def _spell(spells: list[_Spell], further: float) -> Iterator[None]:
    spell = [time.monotonic(), inf]
    spells.append(spell)
    try:
        yield
    finally:
        spell[1] = time.monotonic() + further


def _within(spells: list[_Spell], since: float, until: float) -> bool:
    return any(begin <= until and since <= end for begin, end in spells)


class ServiceWatch:
    """Counts how often the proxy takes an engine out of service, and whether that engine lived.

    The state of each breaker is read from the admin API every 0.2 s: an open one stays open for a
    second at least. An engine is taken out when its breaker was closed at one reading and is not at
    the next; a proxy that has just started has all closed. ``living_out_of_service`` counts it if
    the engine lived, as `Lives` has it, from the one reading to the other, and
    ``stopped_out_of_service`` those among them that were stopped by SIGSTOP, or had been until five
    seconds before; otherwise ``dead_out_of_service`` counts it.
    """

    def __init__(self, lives: Lives, ledger: Ledger) -> None:
        self._lives, self._ledger = lives, ledger
        self._closed: dict[str, bool] = {}
        self._proxy: int | None = None
        self._read = self._began = time.monotonic()

    async def watch(self, read: Callable[[], Any], proxy: Callable[[], int | None]) -> None:
        """Look forever: ``read`` returns the states by name, or None; ``proxy`` its process id."""
        while True:
            states = await read()
            if states is not None:
                self.see(states, proxy(), time.monotonic())
            await asyncio.sleep(_SAMPLE_SECONDS)

    def see(self, states: Mapping[str, str], proxy: int | None, now: float) -> None:
        """Take a reading of the proxy with this process id."""
        if proxy != self._proxy:
            self._closed.clear()
            self._proxy = proxy
        for name, state in states.items():
            if self._closed.get(name, True) and state != "closed":
                self._taken_out(name, now)
            self._closed[name] = state == "closed"
        self._read = now

    def _taken_out(self, name: str, now: float) -> None:
        counts = self._ledger.counts
        if not self._lives.lived(name, self._read, now):
            counts["dead_out_of_service"] += 1
            return
        counts["living_out_of_service"] += 1
        stopped = self._lives.was_stopped(name, self._read, now)
        counts["stopped_out_of_service"] += stopped
        how = "stopped" if stopped else "running"
        self._ledger.notes.append(
            f"{now - self._began:.0f} s: {name} is taken out of service, and lives ({how})"
        )


SCRAPE_SECONDS = 1.0
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
            await asyncio.sleep(SCRAPE_SECONDS)

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

    def prompts_since(self, before: "PromptTokens", of_moves: int = 0) -> int:
        """Return how many prompts of mean length have been computed since an earlier moment.

        Not counted are so many tokens as ``of_moves``, which engines may have computed for those.
        """
        requests = self.requests - before.requests
        mean = (self.tokens - before.tokens) / requests if requests else 0.0
        computed = max(0.0, self.computed - before.computed - of_moves)
        return round(computed / mean) if mean else 0


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
