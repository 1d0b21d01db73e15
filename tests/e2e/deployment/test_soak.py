"""A short soak: random moves, clients that leave, an instance killed and started again."""

import asyncio

from msgspec.structs import replace
from running_deployment import RunningDeployment

from benchmarks.migration_soak import soak
from rescheduler.engines.deployment import ProxyOptions


def test_no_token_is_lost_or_changed_among_random_moves(
    deployment: RunningDeployment,
) -> None:
    described = deployment.deployment
    ports = {"port": described.proxy.port, "admin_port": described.proxy.admin_port}
    described = replace(described, proxy=ProxyOptions(**ports))
    result = asyncio.run(soak(deployment.launched, described, 8, seed=3))
    assert (result.lost, result.changed, result.leaked_blocks) == (0, 0, 0)
    assert result.kills == 1
    assert result.abandoned > 0
    assert result.moves.get("moved", 0) >= 3
