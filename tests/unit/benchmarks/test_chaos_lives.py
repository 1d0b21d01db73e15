"""Which engines chaos takes to have lived, and what it makes of breakers and counters."""

import time

import pytest

from benchmarks.chaos.ledger import (
    Ledger,
    Lives,
    PromptTokens,
    ProxyCounters,
    ServiceWatch,
    read_prompt_tokens,
)

OUT = ("living_out_of_service", "stopped_out_of_service", "dead_out_of_service")
UP = {"decode-0": "closed", "decode-1": "closed"}
DOWN = {"decode-0": "open", "decode-1": "closed"}


def lives(*ended: str) -> Lives:
    return Lives(lambda name: name not in ended)


def counted(ledger: Ledger, *names: str) -> tuple[int, ...]:
    return tuple(ledger.counts[name] for name in names)


def test_an_engine_that_lives_and_is_taken_out_is_counted_once_until_it_is_back() -> None:
    ledger = Ledger()
    watch = ServiceWatch(lives(), ledger)
    for states in (UP, DOWN, DOWN, {**DOWN, "decode-0": "half_open"}, UP, DOWN):
        watch.see(states, 1, time.monotonic())
    assert counted(ledger, *OUT) == (2, 0, 0)
    assert "decode-0 is taken out of service, and lives (running)" in ledger.notes[0]


def test_an_engine_that_is_stopped_lives() -> None:
    ledger, alive = Ledger(), lives()
    watch = ServiceWatch(alive, ledger)
    watch.see(UP, 1, time.monotonic())
    with alive.stopped("decode-0"):
        watch.see(DOWN, 1, time.monotonic())
    assert counted(ledger, *OUT) == (1, 1, 0)


@pytest.mark.parametrize("started", [True, False])
def test_a_killed_engine_is_dead_until_its_successor_has_started(started: bool) -> None:
    ledger, alive = Ledger(), lives()
    watch = ServiceWatch(alive, ledger)
    with alive.dead("decode-0"):
        watch.see(UP, 1, time.monotonic())
        if not started:
            watch.see(DOWN, 1, time.monotonic())
    watch.see(DOWN, 1, time.monotonic() + 1)  # it is noticed late
    assert counted(ledger, *OUT) == (0, 0, 1)
    watch.see(UP, 1, time.monotonic() + 60)
    watch.see(DOWN, 1, time.monotonic() + 61)
    assert counted(ledger, *OUT) == (1, 0, 1)


def test_an_engine_that_has_ended_on_its_own_is_dead() -> None:
    ledger = Ledger()
    watch = ServiceWatch(lives("decode-0"), ledger)
    watch.see(DOWN, 1, time.monotonic())
    assert counted(ledger, *OUT) == (0, 0, 1)


def test_a_new_proxy_takes_an_engine_out_anew() -> None:
    ledger = Ledger()
    watch = ServiceWatch(lives(), ledger)
    for proxy in (1, 1, 2):
        watch.see(DOWN, proxy, time.monotonic())
    assert counted(ledger, *OUT) == (2, 0, 0)


def metrics(recomputed: int, twice: int) -> str:
    return (
        f'headway_proxy_recomputed_requests_total{{instance_name="decode-0"}} {recomputed}\n'
        "# TYPE headway_proxy_prompts_computed_twice_total counter\n"
        f'headway_proxy_prompts_computed_twice_total{{why="lease"}} {twice}\n'
        f'headway_proxy_migrations_total{{source="a",target="b",outcome="moved"}} {twice}\n'
    )


def test_recomputed_requests_are_divided_by_whether_their_engine_lived() -> None:
    ledger, alive = Ledger(), lives()
    counters = ProxyCounters(alive, ledger)
    counters.add(metrics(2, 1), time.monotonic())
    with alive.dead("decode-0"):
        counters.add(metrics(5, 1), time.monotonic())
    counters.add(metrics(4, 3), time.monotonic() + 60)  # of a new proxy
    counters.add(metrics(6, 3), time.monotonic() + 61)
    names = ("recomputed_of_living", "recomputed_after_deaths", "resumed_elsewhere")
    assert counted(ledger, *names) == (4, 7, 11)
    assert counted(ledger, "prompts_computed_twice", "moves") == (3, 3)
    assert counters.tells_of_prompts


def test_a_proxy_without_the_counter_does_not_tell_of_prompts() -> None:
    counters = ProxyCounters(lives(), Ledger())
    counters.add("headway_proxy_event_loop_max_stall_seconds 0.02\n", time.monotonic())
    assert not counters.tells_of_prompts


def engine_metrics(computed: int, requests: int) -> str:
    return (
        f'vllm:prompt_tokens_by_source_total{{source="local_compute"}} {computed}\n'
        'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"} 9000\n'
        f"vllm:request_prompt_tokens_sum {20 * requests}\n"
        f"vllm:request_prompt_tokens_count {requests}\n"
    )


def test_prompts_that_decode_engines_compute_are_counted_by_their_tokens() -> None:
    before = read_prompt_tokens(engine_metrics(30, 10))
    after = read_prompt_tokens(engine_metrics(160, 70) + engine_metrics(10, 5))
    assert before == PromptTokens(30, 10, 200)
    assert after.prompts_since(before) == 7
    assert after.prompts_since(after) == 0
