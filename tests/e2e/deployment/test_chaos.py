"""A minute of what `benchmarks.chaos` does for half an hour."""

import asyncio

from running_deployment import RunningDeployment

from benchmarks.chaos.chaos import chaos
from rescheduler.engines.deployment import Deployment, ProxyOptions


def test_honest_clients_get_their_tokens_whatever_happens(
    deployment: RunningDeployment, chaos_seconds: float = 50.0
) -> None:
    described = _with_short_deadlines(deployment.deployment)
    kinds = ("stop", "kill_decode", "restart")
    ledger = asyncio.run(
        chaos(deployment.launched, described, chaos_seconds, kinds, questions=8, seed=2)
    )
    counts = ledger.counts
    promised = ("tokens_changed", "lost", "blocks_leaked", "honest_5xx", "honest_4xx")
    assert {name: counts[name] for name in promised} == dict.fromkeys(promised, 0), ledger.notes
    assert counts["requests"] >= 8 and counts["moves"] >= 4, counts
    assert counts["stops"] + counts["kills"] + counts["proxy_restarts"] >= 1, counts
    assert counts["poison_5xx"] == 0, ledger.notes


def _with_short_deadlines(deployment: Deployment) -> Deployment:
    from msgspec.structs import replace

    ports = {"port": deployment.proxy.port, "admin_port": deployment.proxy.admin_port}
    return replace(deployment, proxy=ProxyOptions(**ports))
