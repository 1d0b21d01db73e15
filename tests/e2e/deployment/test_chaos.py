"""A minute of what `benchmarks.chaos` does for half an hour."""

import asyncio

import pytest
from msgspec.structs import replace
from running_deployment import RunningDeployment

from benchmarks.chaos.chaos import chaos
from rescheduler.engines.proxy_options import ProxyOptions

pytestmark = pytest.mark.slow

SECONDS = 60.0
KINDS = ("garbage", "restart", "kill_decode", "stop")
AT_LEAST = {"requests": 8, "moves": 2, "garbage": 1, "proxy_restarts": 1, "kills": 1}


@pytest.mark.timeout(1200)
def test_honest_clients_get_their_tokens_whatever_happens(deployment: RunningDeployment) -> None:
    described = deployment.deployment
    ports = {"port": described.proxy.port, "admin_port": described.proxy.admin_port}
    described = replace(described, proxy=ProxyOptions(**ports))
    ledger = asyncio.run(
        chaos(
            deployment.launched,
            described,
            SECONDS,
            KINDS,
            questions=8,
            at_once=6,
            seed=2,
            at_least=AT_LEAST,
        )
    )
    counts = ledger.counts
    harmless = ("tokens_changed", "lost", "blocks_leaked", "honest_5xx", "honest_4xx")
    harmless += ("poison_5xx", "poison_unanswered")
    assert {name: counts[name] for name in harmless} == dict.fromkeys(harmless, 0), ledger.notes
    assert all(counts[name] >= count for name, count in AT_LEAST.items()), counts
