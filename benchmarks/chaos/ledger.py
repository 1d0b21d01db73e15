"""What happened to honest clients' requests, and what is to blame."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

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
