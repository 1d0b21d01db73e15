"""Who is suspended by a real vLLM whose KV cache is full, with the same tokens as without."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked_vllm import run_forked
from offline_engines import serve_waves

SCHEDULER = "rescheduler.ordering.vllm_scheduler.SuspendingHeadwayScheduler"
BLOCKS = 20


def waves() -> list[dict[str, Any]]:
    """Return requests to learn from, then long ones among short ones that overflow."""
    generator = np.random.default_rng(0)

    def ask(name: str, tokens: int) -> dict[str, Any]:
        prompt = generator.integers(1000, 20_000, 24).tolist()
        return {"name": name, "prompt": prompt, "max_tokens": tokens}

    taught = [ask(f"taught{i}", 120 if i % 8 == 7 else 4) for i in range(32)]
    mixed = [ask(f"mixed{i}", 120 if i % 2 else 12) for i in range(20)]
    return [{"after": 0, "requests": taught}, {"after": None, "requests": mixed}]


def run(model: Path, asynchronous: bool, **engine: Any) -> dict[str, Any]:
    in_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    engine |= {"num_gpu_blocks_override": BLOCKS, "async_scheduling": asynchronous}
    seen: dict[str, Any] = run_forked(
        serve_waves, str(model), engine, waves(), environment=in_process
    )
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_answers_are_the_same_whoever_is_suspended(smollm2: Path, asynchronous: bool) -> None:
    by_vllm = run(smollm2, asynchronous)
    for victim in ("rest", "context"):
        config = {"headway": {"victim": victim}}
        chosen = run(smollm2, asynchronous, scheduler_cls=SCHEDULER, additional_config=config)
        assert chosen["scheduler"].removeprefix("Async") == "SuspendingHeadwayScheduler"
        assert chosen["outputs"] == by_vllm["outputs"]
        assert len(chosen["outputs"]) == 52
        assert by_vllm["preemptions"] > 0 and chosen["preemptions"] > 0
        assert chosen["left"] == [0, 0] and chosen["blocks_lost"] == 0
