"""Who is suspended when memory runs out: shorter waits for all, and nobody is forgotten."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.request import RequestStatus

from data_collection.vllm_scheduler import SchedulerPart
from predictor.live.vllm_scheduler import KnownForecasts
from rescheduler.ordering.expected_rest import RestByAge, peak
from rescheduler.ordering.victims import Victims, read_victim

BLOCK = 16


@dataclass(eq=False)
class Asked:
    """What the parts read of vLLM's request."""

    request_id: str
    prompt: int
    length: int
    max_tokens: int = 10_000
    num_output_tokens: int = 0
    is_prefill_chunk: bool = False
    status: Any = RequestStatus.WAITING
    blocks: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    suspended_at: int = -1
    sampling_params: Any = None
    kv_transfer_params: Any = None
    passed_by: list[tuple[int, str]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return self.prompt + self.num_output_tokens

    def get_finished_reason(self) -> str:
        return "length" if self.num_output_tokens >= self.max_tokens else "stop"


class SmallScheduler:
    """vLLM's rules in short: a queue with one head, blocks, and the last that runs is preempted."""

    def __init__(self, blocks: int, victim: str, slots: int = 64) -> None:
        self.vllm_config = SimpleNamespace(
            additional_config={"headway": {"victim": victim}},
            scheduler_config=SimpleNamespace(policy="fcfs"),
        )
        self.running: list[Any] = []
        self.waiting = FCFSRequestQueue()
        self.free, self.slots, self.block_size = blocks, slots, BLOCK
        pool = SimpleNamespace(num_gpu_blocks=blocks, get_num_free_blocks=lambda: self.free)
        self.kv_cache_manager = SimpleNamespace(block_pool=pool, enable_caching=True)
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[None])
        self.steps = self.preemptions = self.failures = 0
        self.ended: list[Asked] = []
        self.suspended: list[str] = []
        self.connector = SimpleNamespace(connector_scheduler=SimpleNamespace(copied=set()))
        self.victims = Victims(self)

    def part(self, kind: type[SchedulerPart]) -> Any:
        assert kind is KnownForecasts
        return SimpleNamespace(means=lambda requests: np.full(len(requests), np.nan))

    def step(self) -> None:
        self.victims.before_scheduling()
        self.steps += 1
        scheduled: dict[str, int] = {}
        preempted = False
        i = 0
        while i < len(self.running):
            request = self.running[i]
            while not (fits := self._allocate(request, request.num_tokens + 1)):
                victim = self.running.pop()
                preempted = True
                self._suspend(victim)
                if victim is request:
                    break
            if not fits:
                break
            scheduled[request.request_id] = 1
            i += 1
        while not preempted and self.waiting and len(self.running) < self.slots:
            request = self.waiting.peek_request()
            if not self.victims.most_tokens(request, request.num_tokens):
                break
            if not self._allocate(request, request.num_tokens + 1):
                break
            self.waiting.pop_request()
            for other in self.waiting:
                if RequestStatus.PREEMPTED == other.status != request.status:
                    other.passed_by.append((self.steps, request.request_id))
            request.status = RequestStatus.RUNNING
            request.suspended_at = -1
            self.running.append(request)
            scheduled[request.request_id] = request.num_tokens
        self.victims.scheduled(SimpleNamespace(num_scheduled_tokens=scheduled), False)
        for request in [one for one in self.running if one.request_id in scheduled]:
            request.num_output_tokens += 1
            if request.num_output_tokens >= min(request.length, request.max_tokens):
                self.running.remove(request)
                self.free += request.blocks
                self.ended.append(request)
                request.status = RequestStatus.FINISHED_STOPPED
                self.victims.ended(request)

    def _allocate(self, request: Any, tokens: int) -> bool:
        needed = -(-tokens // BLOCK) - request.blocks
        if needed > self.free:
            return False
        self.free -= needed
        request.blocks += needed
        return True

    def _suspend(self, victim: Any) -> None:
        self.free += victim.blocks
        victim.blocks = 0
        victim.status, victim.suspended_at = RequestStatus.PREEMPTED, self.steps
        victim.passed_by = []
        self.preemptions += 1
        self.suspended.append(victim.request_id)
        self.waiting.prepend_request(victim)
        self.victims.preempted(victim)


def served(victim: str, lengths: list[int], blocks: int = 60, every: int = 3) -> SmallScheduler:
    """Return a scheduler that has served requests of these lengths, one every few steps."""
    scheduler = SmallScheduler(blocks, victim)
    coming = [Asked(f"r{i}", 20, length) for i, length in enumerate(lengths)]
    n = len(coming)
    while len(scheduler.ended) < n:
        if coming and scheduler.steps % every == 0:
            scheduler.waiting.add_request(coming.pop(0))
        scheduler.step()
        assert scheduler.steps < 200_000, "somebody is never served"
    assert scheduler.free == blocks and not scheduler.running
    assert not scheduler.victims._suspended and not scheduler.victims._back
    return scheduler


def two_kinds(n: int) -> list[int]:
    return [500 if i % 6 == 5 else 25 for i in range(n)]


def test_fewer_are_suspended_than_by_vllm() -> None:
    counts = {
        victim: served(victim, two_kinds(240)).preemptions
        for victim in ("newest", "rest", "context")
    }
    assert counts["newest"] > 20
    assert counts["rest"] < 0.7 * counts["newest"]
    assert counts["context"] < counts["newest"]


def test_short_ones_are_not_suspended_once_lengths_are_known() -> None:
    scheduler = SmallScheduler(60, "rest")
    suspended: list[int] = []
    suspend = scheduler._suspend

    def noted(victim: Any) -> None:
        suspended.append(victim.length)
        suspend(victim)

    scheduler._suspend = noted  # type: ignore[method-assign]
    coming = [Asked(f"r{i}", 20, length) for i, length in enumerate(two_kinds(400))]
    while len(scheduler.ended) < 400:
        if coming and scheduler.steps % 3 == 0:
            scheduler.waiting.add_request(coming.pop(0))
        if len(scheduler.ended) == 200:
            suspended.clear()
        scheduler.step()
    assert suspended and suspended.count(500) > 0.8 * len(suspended)


def all_at_once(scheduler: SmallScheduler, requests: list[Asked]) -> list[str]:
    """Serve requests that come together; return the names of those suspended, in turn."""
    for request in requests:
        scheduler.waiting.add_request(request)
    while len(scheduler.ended) < len(requests):
        scheduler.step()
        assert scheduler.steps < 10_000, "somebody is never served"
    return scheduler.suspended


@pytest.mark.parametrize("victim", ["rest", "age", "context"])
def test_background_goes_first_and_what_is_promised_last(victim: str) -> None:
    """However short the one is, and however long the other."""
    requests = [Asked("last", 40, 700), Asked("any", 30, 600), Asked("first", 20, 400)]
    for request in requests:
        wanted = request.request_id
        request.kv_transfer_params = {"headway": {"id": wanted, "suspended": wanted}}
    suspended = all_at_once(SmallScheduler(60, victim), requests)
    assert suspended[0] == "first" and "any" in suspended and "last" not in suspended


@pytest.mark.parametrize("victim", ["rest", "age", "context"])
def test_what_another_engine_copies_is_not_suspended(victim: str) -> None:
    """Its blocks are kept for that engine: memory would not be freed."""
    for copied in (set[str](), {"long"}):
        scheduler = SmallScheduler(60, victim)
        scheduler.connector.connector_scheduler.copied = copied
        suspended = all_at_once(scheduler, [Asked("long", 40, 700), Asked("short", 20, 500)])
        assert suspended and ("long" in suspended) == (not copied)


@given(
    lengths=st.lists(st.sampled_from([1, 5, 25, 60, 500, 700]), min_size=1, max_size=120),
    every=st.integers(1, 12),
    victim=st.sampled_from(["rest", "context"]),
)
def test_nobody_is_suspended_for_longer_than_its_bound(
    lengths: list[int], every: int, victim: str
) -> None:
    """After twice its expected rest no other begins before it, whatever arrives."""
    scheduler = SmallScheduler(60, victim)
    coming = [Asked(f"r{i}", 20, length) for i, length in enumerate(lengths)]
    while len(scheduler.ended) < len(lengths):
        if coming and scheduler.steps % every == 0:
            scheduler.waiting.add_request(coming.pop(0))
        before = {id(one.request): one for one in scheduler.victims._suspended.values()}
        scheduler.step()
        assert scheduler.steps < 200_000, "somebody is never served"
        overdue = [one for one in before.values() if one.until < scheduler.steps - 8]
        if overdue:
            first = min(overdue, key=lambda one: one.until).request
            late = [step for step, _ in first.passed_by if step > before[id(first)].until + 8]
            assert not late, "nobody begins before the one that has waited for longest"


def suspended_beside(others: int, blocks: int = 200) -> SmallScheduler:
    """Return a scheduler on which one of 640 tokens has just been suspended, as others run.

    All are expected to have 100 tokens, and it cannot come back at once.
    """
    scheduler = SmallScheduler(blocks, "age")
    for _ in range(60):
        scheduler.victims._lengths.ended(100, was_cut=False)
    for i in range(others):
        scheduler.waiting.add_request(Asked(f"r{i}", 320, 60))
    scheduler.step()
    assert len(scheduler.running) == others
    scheduler.victims._step = scheduler.victims._looked_at = 100
    scheduler._suspend(Asked("suspended", 640, 50))
    return scheduler


def begun_after(scheduler: SmallScheduler, request: Asked) -> int:
    """Return the steps after which a request begins that comes now."""
    scheduler.waiting.add_request(request)
    before = scheduler.steps
    while request.status != RequestStatus.RUNNING:
        scheduler.step()
        assert scheduler.steps - before < 1_000
    return scheduler.steps - before


def test_nothing_overwrites_the_cache_of_one_that_is_about_to_fit_again() -> None:
    """For the ten steps in which its 640 tokens would be computed anew."""
    full = suspended_beside(8)
    fits_soon = full.victims._keeping_cache
    assert fits_soon() == ["suspended"]
    assert begun_after(full, Asked("new", 16, 5)) == 10
    assert [one.request_id for one in full.waiting] == ["suspended"], "it was not soon enough"


def test_nothing_waits_for_a_cache_that_is_not_kept() -> None:
    scheduler = suspended_beside(8)
    scheduler.kv_cache_manager.enable_caching = False
    assert begun_after(scheduler, Asked("new", 16, 5)) == 1


def test_others_pass_one_that_will_not_fit_soon() -> None:
    scheduler = suspended_beside(9)
    assert scheduler.victims._keeping_cache() == []
    assert begun_after(scheduler, Asked("new", 16, 5)) == 1


def test_what_another_engine_has_begun_is_not_held_back() -> None:
    """Its client would wait in the middle of the answer."""
    scheduler = suspended_beside(8)
    new, moved = Asked("new", 16, 5), Asked("moved", 16, 5)
    moved.kv_transfer_params = {"headway": {"id": "moved", "generated": 9}}
    scheduler.waiting.add_request(new)
    assert begun_after(scheduler, moved) == 1
    assert new.status == RequestStatus.WAITING


def test_what_another_engine_has_begun_passes_what_waits_for_something_else() -> None:
    """As for its grammar: vLLM skips it, and stops at the suspended one behind it."""
    scheduler = suspended_beside(8)
    skipped, new, moved = Asked("skipped", 16, 5), Asked("new", 16, 5), Asked("moved", 16, 5)
    for request in (skipped, moved):
        request.kv_transfer_params = {"headway": {"id": request.request_id, "generated": 9}}
    for request in (skipped, new):
        scheduler.waiting.add_request(request)
    scheduler.victims.before_scheduling()
    scheduler.waiting.add_request(moved)
    scheduler.victims.before_scheduling()
    order = ["skipped", "moved", "suspended", "new"]
    assert [one.request_id for one in scheduler.waiting] == order


def test_a_prefilled_request_whose_cache_could_not_be_loaded_is_computed() -> None:
    """vLLM looks at it before all others, and stops there if it gets no tokens."""
    scheduler = suspended_beside(8)
    failed = Asked("failed", 16, 5, kv_transfer_params={"do_remote_prefill": True})
    scheduler.waiting.add_request(Asked("new", 16, 5))
    scheduler.victims.before_scheduling()
    assert scheduler.victims.most_tokens(failed, 16) == 16
    assert scheduler.victims.most_tokens(Asked("other", 16, 5), 16) == 0


def test_what_others_hold_is_no_room() -> None:
    """As blocks that another engine reads."""
    scheduler = suspended_beside(8)
    scheduler.free = 0
    assert scheduler.victims._keeping_cache() == []


def test_nothing_waits_long_for_a_huge_context() -> None:
    scheduler = SmallScheduler(12_800, "age", slots=256)
    for _ in range(60):
        scheduler.victims._lengths.ended(100, was_cut=False)
    for name in ("a", "b"):
        scheduler.waiting.add_request(Asked(name, 100_000, 3_000, max_tokens=5_000))
    while not scheduler.suspended:
        scheduler.step()
        assert scheduler.steps < 10_000
    assert 50 < begun_after(scheduler, Asked("new", 200, 5)) <= 129


def test_one_comes_back_at_once_where_nothing_runs() -> None:
    scheduler = suspended_beside(1)
    scheduler.running.clear()
    scheduler.free = 200
    scheduler.victims._looked_at = scheduler.victims._step
    scheduler.step()
    assert [one.request_id for one in scheduler.running] == ["suspended"]


def test_nobody_waits_for_a_request_of_background() -> None:
    scheduler = suspended_beside(8)
    (request,) = scheduler.waiting
    request.kv_transfer_params = {"headway": {"id": "suspended", "suspended": "first"}}
    assert begun_after(scheduler, Asked("new", 16, 5)) == 1


def test_a_forecast_far_too_long_does_not_leave_one_out_for_as_long() -> None:
    scheduler = SmallScheduler(60, "rest")
    scheduler.part = lambda kind: SimpleNamespace(
        means=lambda requests: np.full(len(requests), 9e3)
    )  # type: ignore[method-assign]
    for _ in range(60):
        scheduler.victims._lengths.ended(400, was_cut=False)
    scheduler._suspend(Asked("overestimated", 20, 400))
    scheduler._suspend(Asked("capped", 20, 400, max_tokens=10))
    limits = {name: one.until for name, one in scheduler.victims._suspended.items()}
    assert limits == {"overestimated": 800, "capped": 256}
    assert scheduler.victims._suspended["overestimated"].rest == 9_000


def test_all_come_back_soon_where_all_were_suspended_and_fit() -> None:
    """As when an operator resets the prefix cache."""
    scheduler = SmallScheduler(10_000, "rest", slots=256)
    for i in range(200):
        scheduler.waiting.add_request(Asked(f"r{i}", 20, 300))
    for _ in range(5):
        scheduler.step()
    while scheduler.running:
        scheduler._suspend(scheduler.running.pop())
    for _ in range(150):
        scheduler.step()
    assert len(scheduler.running) == 200


def test_one_whose_cache_is_loaded_from_elsewhere_is_not_held_back() -> None:
    scheduler = SmallScheduler(100, "rest")
    runs, loads = Asked("runs", 20, 300), Asked("loads", 20, 300)
    for request in (runs, loads):
        scheduler.waiting.add_request(request)
    scheduler.step()
    scheduler.running.remove(loads)
    scheduler._suspend(loads)
    assert scheduler.victims.most_tokens(loads, 21) == 0
    loads.status, loads.num_computed_tokens = RequestStatus.WAITING_FOR_REMOTE_KVS, 21
    assert scheduler.victims.most_tokens(loads, 1) == 1
    scheduler.victims.before_scheduling()
    assert not scheduler.victims._suspended


def test_nothing_happens_while_there_is_room() -> None:
    scheduler = SmallScheduler(10_000, "rest")
    for i in range(20):
        scheduler.waiting.add_request(Asked(f"r{i}", 20, 300 - i))
    for _ in range(50):
        scheduler.step()
        assert [one.request_id for one in scheduler.running] == [f"r{i}" for i in range(20)]


def test_who_is_back_is_not_suspended_before_it_has_gained_what_that_cost() -> None:
    scheduler = SmallScheduler(100, "rest")
    part = scheduler.victims
    part._kept_until["long"] = 50
    long, short = Asked("long", 900, 500), Asked("short", 600, 30)
    long.num_output_tokens = short.num_output_tokens = 1
    scheduler.running, scheduler.free = [long, short], 0
    part.before_scheduling()
    assert scheduler.running[-1] is short
    part._kept_until.clear()
    scheduler.running.append(scheduler.running.pop(0))
    part._sorted_at = -100
    long.num_output_tokens = 2
    part.before_scheduling()
    assert scheduler.running[-1] is long


def test_prompts_that_are_computed_stay_behind_what_decodes() -> None:
    scheduler = SmallScheduler(100, "rest")
    filling = Asked("filling", 900, 500, is_prefill_chunk=True)
    first, second = Asked("first", 100, 500), Asked("second", 50, 500)
    scheduler.running, scheduler.free = [first, filling, second], 0
    scheduler.victims.before_scheduling()
    assert [one.request_id for one in scheduler.running] == ["second", "first", "filling"]


class TestRestByAge:
    def test_is_the_mean_residual_life(self) -> None:
        rests = RestByAge()
        for i in range(100):
            rests.ended(10 if i % 2 else 1000, was_cut=False)
        assert rests.knows
        assert rests.at([0.0])[0] == pytest.approx(505.0)
        assert rests.at([11.0])[0] == pytest.approx(989.0, abs=2.0)

    def test_one_that_was_cut_would_have_gone_on(self) -> None:
        cut, ended = RestByAge(), RestByAge()
        for i in range(60):
            ended.ended(100, was_cut=False)
            cut.ended(100, was_cut=i % 2 == 0)
        assert cut.at([10.0])[0] > ended.at([10.0])[0]

    @given(st.lists(st.tuples(st.integers(1, 5000), st.booleans()), min_size=1, max_size=200))
    def test_is_never_less_than_one_token_nor_infinite(self, seen: list[tuple[int, bool]]) -> None:
        rests = RestByAge()
        for tokens, was_cut in seen:
            rests.ended(tokens, was_cut)
        found = rests.at(np.arange(0, 20_000, 37))
        assert (found >= 1.0).all() and np.isfinite(found).all()


def test_the_peak_of_what_is_held() -> None:
    assert peak(np.array([100.0, 50.0]), np.array([1.0, 1.0])) == pytest.approx(150.0, rel=0.02)
    assert peak(np.array([100.0]), np.array([1000.0])) > 400
    assert peak(np.empty(0), np.empty(0)) == 0.0


@pytest.mark.parametrize("given", [{"victim": "oldest"}, {"victim": 3}, {"victim": None}])
def test_no_other_victim_is_taken(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="one of rest, age, context, newest, not"):
        read_victim({"headway": given})
    assert read_victim({}) == "newest"


def test_the_age_alone_asks_no_forecast() -> None:
    scheduler = served("age", two_kinds(120))
    scheduler.part = pytest.fail  # type: ignore[method-assign,assignment]
    by_forecast = served("rest", two_kinds(120))
    assert len(scheduler.ended) == len(by_forecast.ended) == 120
    assert scheduler.preemptions == by_forecast.preemptions  # which knows none


def test_a_choice_that_fails_is_left_to_vllm_and_counted() -> None:
    scheduler = SmallScheduler(20, "rest")
    scheduler.part = lambda kind: SimpleNamespace(means=lambda requests: 1 / 0)  # type: ignore[method-assign]
    for i in range(6):
        scheduler.waiting.add_request(Asked(f"r{i}", 20, 60))
    while len(scheduler.ended) < 6:
        scheduler.step()
        assert scheduler.steps < 2_000
    assert scheduler.preemptions > 0
    assert scheduler.failures > 0
