"""What chaos blames for a request that failed."""

import time

import pytest

from benchmarks.chaos.ledger import Ledger

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
