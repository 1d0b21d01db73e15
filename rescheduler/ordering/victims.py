"""Who is suspended when an engine's KV cache is full, and when it comes back.

vLLM preempts the request that it admitted last, puts it at the front of its queue, and begins no
other until it fits again. Here those that run are kept in the order in which they would be given
up, and one that was given up waits behind those that fit.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from data_collection.capture.capture_config import SECTION
from data_collection.vllm_adapter.requests import ended_by_itself, is_new_prompt, suspended
from data_collection.vllm_adapter.scheduling import (
    cache_room,
    caches_prefixes,
    copied_requests,
    going_on,
    is_preempted,
    move_to_back,
    move_to_front,
)
from data_collection.vllm_scheduler import SchedulerPart
from predictor.live.vllm_scheduler import KnownForecasts
from rescheduler.ordering.expected_rest import (
    LONGEST_HOLD,
    LONGEST_SUSPENSION,
    LOOKED_AT,
    LOOKED_STEPS,
    RECOMPUTED,
    SHORTEST_LIMIT,
    FloatArray,
    RestByAge,
    Victim,
    held,
    peak,
)

logger = logging.getLogger("vllm.headway.victims")  # with vLLM's handler

_NEARLY_FULL = 0.1
"""Share of the cache that is free, from which on the order of what runs matters."""
_SORTED_STEPS = 16
"""Steps after which the order is made anew though nothing came or went."""
_COPIED, _KEPT, _LAST, _ANY, _FIRST = range(5)
_GROUPS = {"first": _FIRST, "last": _LAST}


def read_victim(additional_config: Mapping[str, Any]) -> Victim:
    """Return whom vLLM's additional configuration wants to be suspended.

    Raises:
        ValueError: none of `Victim`.
    """
    section = additional_config.get(SECTION)
    given = section.get("victim", "newest") if isinstance(section, Mapping) else "newest"
    for victim in get_args(Victim):
        if given == victim:
            return victim  # type: ignore[no-any-return]
    choices = ", ".join(get_args(Victim))
    raise ValueError(f"--additional-config, {SECTION}.victim: one of {choices}, not {given!r}")


@dataclass(slots=True)
class _Suspended:
    """A request that was preempted.

    Attributes:
        request: vLLM's.
        rest: tokens that it was expected to generate.
        since: step before which it ran.
        until: step until which others may pass it by.
    """

    request: Any
    rest: float
    since: int
    until: int


class Victims(SchedulerPart):
    r"""Suspends the request with the longest expected rest, and lets it back when it fits.

    The order is made when less than a tenth of the cache is free, and costs nothing before. The
    rest is that of the engine's last forecast, else that of `RestByAge`; before 30 requests have
    ended, the longest context stands for it. Prompts that are being computed stay behind what
    decodes, as vLLM has them: they lose least. One that is back is not suspended again before it
    has gained what it cost to compute it anew, nor while it is copied to another engine, when its
    blocks would not be freed. The proxy says which go before others, those of background, and which
    after them, those whose end it has promised.

    A suspended request comes back when nothing else runs, or when what runs and it are expected to
    fit until they end (`peak`). It is passed by what fits, but not for as long as it would take to
    compute it anew, 128 steps at most, if it is expected to fit by then (`held`): whatever begins
    would overwrite its blocks, which the prefix cache has. Once it has waited for twice its
    expected rest, in steps and in all, none may begin before it, and once it is back it is kept for
    good: one such request at a time, since a crowd of them would have the others wait. The rest is
    that of its forecast or of its age, whichever is shorter: a forecast that is far too long would
    leave it out for as long.

    Raises:
        ValueError: the configuration names none of `Victim`.
    """

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        self._victim = read_victim(scheduler.vllm_config.additional_config)
        if scheduler.vllm_config.scheduler_config.policy != "fcfs":
            self._victim = "newest"  # its own policy says who goes
        self._lengths = RestByAge()
        self._suspended: dict[str, _Suspended] = {}
        self._kept_until: dict[str, float] = {}
        self._allowed: dict[str, int] = {}
        """Steps for which others may pass those that were suspended yet."""
        self._back: set[str] = set()
        self._keeps = False
        self._going_on: list[str] = []
        self._waited = -1
        self._step = self._looked_at = self._sorted_at = 0
        self._sorted: tuple[int, Any] = 0, None
        self._failed = False

    def before_scheduling(self) -> None:
        """Put what runs in the order in which it would be given up, and what waits likewise."""
        if self._victim == "newest":
            return
        self._step += 1
        self._keeps = False
        try:
            if self._suspended:
                self._line_up()
            self._order()
        except Exception:  # an engine ends by one
            self._suspended.clear()  # all wait as vLLM has them wait
            self._back.clear()
            self._note_failure("vLLM chooses whom to suspend, since the order failed")

    def most_tokens(self, request: Any, tokens: int) -> int:
        """Compute nothing of a request that stays suspended, nor of what may not pass it yet."""
        if not self._suspended:
            return tokens
        if request.request_id in self._suspended:
            holds_cache = request.num_computed_tokens > 0  # as one whose cache was loaded again
            return tokens if holds_cache or request.request_id in self._back else 0
        return 0 if self._keeps and is_new_prompt(request) else tokens

    def preempted(self, request: Any) -> None:
        """Note that vLLM has suspended a request."""
        if self._victim == "newest":
            return
        rest = float(self._rests([request])[0])
        sure = min(rest, float(self._rests_by_age([request])[0]))
        limit, name = round(max(LONGEST_SUSPENSION * sure, SHORTEST_LIMIT)), request.request_id
        self._allowed[name] = min(limit, self._allowed.get(name, limit))
        until = self._step + self._allowed[name]
        self._suspended[name] = _Suspended(request, rest, self._step, until)
        self._kept_until.pop(name, None)
        self._back.discard(name)

    def scheduled(self, output: Any, prefills_throttled: bool) -> None:
        """Note which suspended requests are back."""
        for name in [name for name in self._back if name in output.num_scheduled_tokens]:
            suspended = self._suspended[name]
            gained = round(min(suspended.rest, suspended.request.num_tokens / RECOMPUTED))
            self._allowed[name] = max(0, suspended.until - self._step)
            for_good = not self._allowed[name] and not self._keeps_one()
            self._kept_until[name] = inf if for_good else self._step + gained
            self._forget(name)

    def ended(self, request: Any) -> None:
        """Learn from a request that has ended by itself, and forget it."""
        self._kept_until.pop(request.request_id, None)
        self._allowed.pop(request.request_id, None)
        self._forget(request.request_id)
        if ended_by_itself(request) and request.num_output_tokens > 0:
            cut = str(request.get_finished_reason()) == "length"
            self._lengths.ended(request.num_output_tokens, cut)

    def _keeps_one(self) -> bool:
        """Return whether a request runs that is kept for good."""
        kept = {name for name, until in self._kept_until.items() if until == inf}
        return bool(kept) and any(one.request_id in kept for one in self.scheduler.running)

    def _order(self) -> None:
        running = self.scheduler.running
        free, total = cache_room(self.scheduler)
        if len(running) < 2 or free > max(_NEARLY_FULL * total, 2 * len(running)):
            return
        seen = len(running), running[-1]
        if seen == self._sorted and self._step - self._sorted_at < _SORTED_STEPS:
            return
        decoding = [request for request in running if not request.is_prefill_chunk]
        groups = self._groups(decoding)
        keys = np.where(groups > _KEPT, self._keys(decoding), 0.0)  # of these the newest goes
        order = np.lexsort([keys, groups]).tolist()
        filling = [request for request in running if request.is_prefill_chunk]
        running[:] = [decoding[i] for i in order] + filling
        self._sorted, self._sorted_at = (len(running), running[-1]), self._step

    def _groups(self, requests: Sequence[Any]) -> npt.NDArray[np.int64]:
        """Return the groups in which requests are given up, the largest first, [n]."""
        kept, copied, step = self._kept_until, copied_requests(self.scheduler), self._step
        groups = [_GROUPS.get(suspended(request), _ANY) for request in requests]
        if kept or copied:
            for i, request in enumerate(requests):
                if request.request_id in copied:
                    groups[i] = _COPIED
                elif kept.get(request.request_id, 0) > step:
                    groups[i] = _KEPT
        return np.array(groups, dtype=np.int64)

    def _keys(self, requests: Sequence[Any]) -> FloatArray:
        """Return by what requests are given up, the largest first, [n]."""
        if self._victim == "context":
            return np.array([float(request.num_tokens) for request in requests])
        return self._rests(requests)

    def _rests(self, requests: Sequence[Any]) -> FloatArray:
        """Return the tokens that each is expected to generate, [n], at least 1."""
        rests = self._rests_by_age(requests)
        if self._victim == "age":
            return rests
        try:
            means = self.scheduler.part(KnownForecasts).means(requests)
        except Exception:  # an engine ends by one
            self._note_failure("the age says who is suspended, since the forecasts failed")
            return rests
        return _capped(np.where(np.isnan(means), rests, means), requests)

    def _rests_by_age(self, requests: Sequence[Any]) -> FloatArray:
        """Return the rests that others of their age had, [n], at least 1."""
        if self._lengths.knows:
            ages = (request.num_output_tokens for request in requests)
            rests = self._lengths.at(np.fromiter(ages, np.float64, len(requests)))
        else:
            contexts = (request.num_tokens for request in requests)
            rests = np.fromiter(contexts, np.float64, len(requests))
        return _capped(rests, requests)

    def _note_failure(self, what: str) -> None:
        self.scheduler.failures += 1
        if not self._failed:
            logger.exception(what)
        self._failed = True

    def _forget(self, name: str) -> None:
        self._suspended.pop(name, None)
        self._back.discard(name)

    def _line_up(self) -> None:
        """Put suspended requests behind all others, but for those that come back."""
        for name in [n for n, one in self._suspended.items() if not is_preempted(one.request)]:
            self._forget(name)  # its cache is loaded from elsewhere
        looks = self._step - self._looked_at >= LOOKED_STEPS or not self.scheduler.running
        if looks:
            self._looked_at = self._step
            self._back = set(self._fitting())
        waiting = self.scheduler.waiting
        if not waiting or not self._suspended:
            return
        first, ahead = waiting[0].request_id, [n for n in self._suspended if n in self._back]
        keeping = self._keeping_cache()
        self._keeps = bool(keeping)
        if keeping:
            if looks or len(waiting) != self._waited:
                self._going_on = going_on(self.scheduler)
            ahead += [n for n in self._going_on if n not in self._suspended] + keeping
        self._waited = len(waiting) if keeping else -1
        before = {*ahead}
        if looks or (first in self._suspended and first not in before):
            away = {name: one for name, one in self._suspended.items() if name not in before}
            last = {waiting[-1 - i].request_id for i in range(min(len(away), len(waiting)))}
            if last != away.keys():
                move_to_back(self.scheduler, [one.request for one in away.values()])
        if any(one.request_id != name for one, name in zip(waiting, ahead, strict=False)):
            move_to_front(self.scheduler, ahead)

    def _keeping_cache(self) -> list[str]:
        """Return the suspended requests before which nothing new begins."""
        fresh = dict[str, float]()
        for name, one in self._suspended.items():
            steps = min(one.request.num_tokens / RECOMPUTED, LONGEST_HOLD)
            is_fresh = self._step - one.since < steps and name not in self._back
            if is_fresh and suspended(one.request) != "first":  # all others go before those
                fresh[name] = steps
        if not fresh or not caches_prefixes(self.scheduler):
            return []
        contexts, rests = self._running()
        room = cache_room(self.scheduler)[0] * self.scheduler.block_size + contexts.sum()
        room_then = room - held(contexts, rests, list(fresh.values()))
        return [
            name
            for name, room in zip(fresh, room_then.tolist(), strict=True)
            if self._suspended[name].request.num_tokens <= room
        ]

    def _running(self) -> tuple[FloatArray, FloatArray]:
        """Return the contexts of what runs, and its expected rests, [n]."""
        running = self.scheduler.running
        contexts = np.fromiter((r.num_tokens for r in running), np.float64, len(running))
        return contexts, self._rests(running)

    def _fitting(self) -> list[str]:
        """Return the suspended requests that come back now."""
        line = sorted(self._suspended, key=lambda name: self._suspended[name].until)[:LOOKED_AT]
        if not line:
            return []
        free, total = cache_room(self.scheduler)
        tokens_a_block = self.scheduler.block_size
        contexts, rests = self._running()
        room, fitting = free * tokens_a_block, list[str]()
        waits, idle = self._keeps_one(), not self.scheduler.running
        for name in line:
            one = self._suspended[name]
            context = float(one.request.num_tokens)
            more = np.append(contexts, context), np.append(rests, one.rest)
            fits = context <= room and peak(*more) <= total * tokens_a_block
            due = idle or (one.until <= self._step and not waits)
            if fits or (due and not fitting):
                fitting.append(name)
                (contexts, rests), room = more, room - context
            if due and not fits:
                break  # none begins before it
        return fitting


def _capped(rests: FloatArray, requests: Sequence[Any]) -> FloatArray:
    """Return rests between 1 and what requests may generate yet, [n]."""
    left = (request.max_tokens - request.num_output_tokens for request in requests)
    most = np.fromiter(left, np.float64, len(requests))
    expected: FloatArray = np.maximum(np.minimum(rests, most), 1.0)
    return expected
