"""A short soak: random moves, clients that leave, an instance killed and started again."""

import asyncio
from typing import Any

from benchmarks.migration_soak import soak


def test_no_token_is_lost_or_changed_among_random_moves(deployment: Any) -> None:
    result = asyncio.run(soak(deployment.launched, deployment.deployment, 15, seed=3))
    assert (result.lost, result.changed, result.leaked_blocks) == (0, 0, 0)
    assert result.kills == 1
    assert result.abandoned > 0
    assert result.moves.get("moved", 0) >= 5
