"""Who is suspended when an engine's KV cache is full, and when it comes back.

vLLM preempts the request that it admitted last, puts it at the front of its queue, and begins no
other until it fits again. Here those that run are kept in the order in which they would be given
up, and one that was given up waits behind those that fit.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from data_collection.capture.capture_config import SECTION
from data_collection.vllm_adapter.requests import ended_by_itself
from data_collection.vllm_adapter.scheduling import (
    cache_room,
    is_preempted,
    move_to_back,
    move_to_front,
)
from data_collection.vllm_scheduler import SchedulerPart
from predictor.live.vllm_scheduler import KnownForecasts
from rescheduler.ordering.expected_rest import FloatArray, RestByAge, Victim, peak

logger = logging.getLogger("vllm.headway.victims")  # with vLLM's handler

_NEARLY_FULL = 0.1
"""Share of the cache that is free, from which on the order of what runs matters."""
_SORTED_STEPS, _LOOKED_STEPS = 16, 8
"""Steps after which the order is made anew though nothing came or went, and between two looks for
room for one that is suspended."""
_LONGEST_SUSPENSION, _SHORTEST_LIMIT = 2.0, 256.0
"""Steps for which one is passed by, as a multiple of its expected rest, and at least."""
_LOOKED_AT = 16
"""Suspended requests for which room is looked for at a time."""
_RECOMPUTED = 64.0
"""Tokens of context that are computed again in the time of about a step."""


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
        until: step until which others may pass it by.
    """

    request: Any
    rest: float
    until: int


class Victims(SchedulerPart):
    r"""Suspends the request with the longest expected rest, and lets it back when it fits.

    The order is made when less than a tenth of the cache is free, and costs nothing before. The
    rest is that of the engine's last forecast, else that of `RestByAge`; before 30 requests have
    ended, the longest context stands for it. Prompts that are being computed stay behind what
    decodes, as vLLM has them: they lose least. One that is back is not suspended again before it
    has gained what it cost to compute it anew.

    A suspended request is passed by what fits. It comes back when nothing else runs, or when what
    runs and it are expected to fit until they end (`peak`). After twice its expected rest, in
    steps, none may begin before it.

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
        self._kept_until: dict[str, int] = {}
        self._back: set[str] = set()
        self._step = self._looked_at = self._sorted_at = 0
        self._sorted: tuple[int, Any] = 0, None
        self._failed = False

    def before_scheduling(self) -> None:
        """Put what runs in the order in which it would be given up, and what waits likewise."""
        if self._victim == "newest":
            return
        self._step += 1
        try:
            if self._suspended:
                self._line_up()
            self._order()
        except Exception:  # an engine ends by one
            self._note_failure("vLLM chooses whom to suspend, since the order failed")

    def most_tokens(self, request: Any, tokens: int) -> int:
        """Compute nothing of a request that stays suspended."""
        if self._suspended and request.request_id in self._suspended:
            holds_cache = request.num_computed_tokens > 0  # as one whose cache was loaded again
            return tokens if holds_cache or request.request_id in self._back else 0
        return tokens

    def preempted(self, request: Any) -> None:
        """Note that vLLM has suspended a request."""
        if self._victim == "newest":
            return
        rest = float(self._rests([request])[0])
        limit = max(_LONGEST_SUSPENSION * rest, _SHORTEST_LIMIT)
        name = request.request_id
        self._suspended[name] = _Suspended(request, rest, self._step + round(limit))
        self._kept_until.pop(name, None)
        self._back.discard(name)

    def scheduled(self, output: Any, prefills_throttled: bool) -> None:
        """Note which suspended requests are back."""
        for name in [name for name in self._back if name in output.num_scheduled_tokens]:
            suspended = self._suspended[name]
            gained = min(suspended.rest, suspended.request.num_tokens / _RECOMPUTED)
            self._kept_until[name] = self._step + round(gained)
            self._forget(name)

    def ended(self, request: Any) -> None:
        """Learn from a request that has ended by itself, and forget it."""
        self._kept_until.pop(request.request_id, None)
        self._forget(request.request_id)
        if ended_by_itself(request) and request.num_output_tokens > 0:
            cut = str(request.get_finished_reason()) == "length"
            self._lengths.ended(request.num_output_tokens, cut)

    def _order(self) -> None:
        running = self.scheduler.running
        free, total = cache_room(self.scheduler)
        if len(running) < 2 or free > max(_NEARLY_FULL * total, 2 * len(running)):
            return
        seen = len(running), running[-1]
        if seen == self._sorted and self._step - self._sorted_at < _SORTED_STEPS:
            return
        decoding = [request for request in running if not request.is_prefill_chunk]
        key = self._keys(decoding)
        if self._kept_until:
            for i, request in enumerate(decoding):
                if self._kept_until.get(request.request_id, 0) > self._step:
                    key[i] = 0.0
        order = np.argsort(key, kind="stable").tolist()
        filling = [request for request in running if request.is_prefill_chunk]
        running[:] = [decoding[i] for i in order] + filling
        self._sorted, self._sorted_at = (len(running), running[-1]), self._step

    def _keys(self, requests: Sequence[Any]) -> FloatArray:
        """Return by what requests are given up, the largest first, [n]."""
        if self._victim == "context":
            return np.array([float(request.num_tokens) for request in requests])
        return self._rests(requests)

    def _rests(self, requests: Sequence[Any]) -> FloatArray:
        """Return the tokens that each is expected to generate, [n], at least 1."""
        n = len(requests)
        generated = np.fromiter((r.num_output_tokens for r in requests), np.float64, n)
        left = np.fromiter((r.max_tokens for r in requests), np.float64, n) - generated
        if self._lengths.knows:
            rests = self._lengths.at(generated)
        else:
            rests = np.fromiter((r.num_tokens for r in requests), np.float64, n)
        if self._victim != "age":
            try:
                means = self.scheduler.part(KnownForecasts).means(requests)
                rests = np.where(np.isnan(means), rests, means)
            except Exception:  # an engine ends by one
                self._note_failure("the age says who is suspended, since the forecasts failed")
        expected: FloatArray = np.maximum(np.minimum(rests, left), 1.0)
        return expected

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
        looks = self._step - self._looked_at >= _LOOKED_STEPS
        if looks:
            self._looked_at = self._step
            self._back = set(self._fitting())
        waiting = self.scheduler.waiting
        if not waiting or not self._suspended:
            return
        first = waiting[0].request_id
        if looks or (first in self._suspended and first not in self._back):
            away = {name: one for name, one in self._suspended.items() if name not in self._back}
            last = {waiting[-1 - i].request_id for i in range(min(len(away), len(waiting)))}
            if last != away.keys():
                move_to_back(self.scheduler, [one.request for one in away.values()])
        if self._back and first not in self._back:
            move_to_front(self.scheduler, [n for n in self._suspended if n in self._back])

    def _fitting(self) -> list[str]:
        """Return the suspended requests that come back now."""
        line = sorted(self._suspended, key=lambda name: self._suspended[name].until)[:_LOOKED_AT]
        if not line:
            return []
        running = self.scheduler.running
        free, total = cache_room(self.scheduler)
        tokens_a_block = self.scheduler.block_size
        rests = self._rests(running)
        contexts = np.fromiter((r.num_tokens for r in running), np.float64, len(running))
        room, fitting = free * tokens_a_block, list[str]()
        for name in line:
            one = self._suspended[name]
            context = float(one.request.num_tokens)
            more = np.append(contexts, context), np.append(rests, one.rest)
            fits = context <= room and peak(*more) <= total * tokens_a_block
            due = one.until <= self._step or not running
            if fits or (due and not fitting):
                fitting.append(name)
                (contexts, rests), room = more, room - context
            if due and not fits:
                break  # none begins before it
        return fitting
