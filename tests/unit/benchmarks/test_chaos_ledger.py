"""What chaos blames for a request that failed."""

import time
from contextlib import nullcontext

import pytest

from benchmarks.chaos.ledger import Ledger, Outage

EXPECTED = [1, 2, 3]


@pytest.mark.parametrize(
    ("tokens", "how", "counted", "requests"),
    [
        ([], "refused", "refused_at_proxy_restart", 0),
        ([], "503", "refused_at_proxy_restart", 0),  # by a proxy that is about to end
        ([], "5xx", "cut_by_proxy_restart", 1),
        ([1, 2], "5xx", "cut_by_proxy_restart", 1),
        ([1], "broken", "cut_by_proxy_restart", 1),
        ([1], "silent", "lost", 1),
    ],
)
def test_only_a_request_that_had_begun_is_cut_by_a_restart(
    tokens: list[int], how: str, counted: str, requests: int
) -> None:
    ledger = Ledger()
    with ledger.outage("proxy"):
        ledger.failed(0, tokens, EXPECTED, time.monotonic(), "why", how)
    assert ledger.counts[counted] == 1
    assert ledger.counts["requests"] == requests
    assert ledger.counts["tokens_changed"] == 0


@pytest.mark.parametrize(
    ("how", "counted"),
    [("5xx", "honest_5xx"), ("503", "honest_5xx"), ("refused", "lost"), ("429", "honest_429")],
)
def test_in_peace_every_failure_is_somebody_s_fault(how: str, counted: str) -> None:
    ledger = Ledger()
    ledger.failed(0, [], EXPECTED, time.monotonic(), "why", how)
    assert ledger.counts[counted] == ledger.counts["requests"] == 1


def test_who_fails_while_a_killer_is_about_is_an_innocent_that_was_lost() -> None:
    ledger = Ledger()
    with ledger.outage("killer"):
        ledger.failed(0, [], EXPECTED, time.monotonic(), "why", "5xx")
        ledger.failed(0, [1], EXPECTED, time.monotonic(), "why", "4xx")
        ledger.failed(0, [], EXPECTED, time.monotonic(), "why", "503")  # no engine is left
    names = ("innocents_lost", "honest_5xx_at_a_kill", "honest_4xx", "honest_5xx")
    assert [ledger.counts[name] for name in names] == [2, 1, 1, 0]
    assert ledger.counts["refused_without_engines"] == 1


@pytest.mark.parametrize(
    ("tokens", "how", "outage", "counted", "changed"),
    [
        (EXPECTED, "ended", "engine", "silent_ended", 0),
        ([1, 2], "ended", None, "silent_failed", 1),
        ([1, 2], "without_end", "engine", "silent_without_end", 0),
        ([2], "without_end", None, "silent_failed", 1),
        ([1], "APIError: no token in time", None, "silent_failed", 0),
        ([1], "APIError: its stream broke", "killer", "silent_failed_at_a_kill", 0),
        ([1], "APIError: the proxy stops", "proxy", "silent_cut_by_proxy_restart", 0),
    ],
)
def test_a_silent_stream_ends_rightly_with_all_of_its_tokens(
    tokens: list[int], how: str, outage: Outage | None, counted: str, changed: int
) -> None:
    ledger = Ledger()
    with nullcontext() if outage is None else ledger.outage(outage):
        ledger.silent(0, tokens, EXPECTED, how)
    assert ledger.counts[counted] == 1
    assert ledger.counts["tokens_changed"] == changed
