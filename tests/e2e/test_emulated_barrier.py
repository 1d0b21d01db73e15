"""Emulated engines behind a barrier: vLLM's own steps, as long as the longest of them."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from rescheduler.emulation.emulate_options import EmulateOptions, StepSeconds
from rescheduler.emulation.scripted_answers import LENGTH
from rescheduler.engines.deployment import EngineOptions
from rescheduler.engines.launch_engines import launched
from rescheduler.engines.launch_local import local_deployment

CONTEXTS, TOKENS, DILATION = (100, 4_000), 100, 4


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_engines_step_together_and_one_goes_on_alone(tmp_path: Path) -> None:
    emulate = EmulateOptions(
        step_time=StepSeconds(constant=0.02, per_new=0, per_context=1e-5),
        kv_tokens=32_000,
        forecast=None,
        dilation=DILATION,
        barrier=True,
        logs=str(tmp_path / "steps"),
    )
    engine = EngineOptions(max_num_seqs=8, max_model_len=8_192, block_size=32, emulate=emulate)
    deployment = local_deployment("smollm2", engine, decode=2, prefill=0)

    async def answered(session: aiohttp.ClientSession, url: str, context: int, tokens: int) -> None:
        body: dict[str, Any] = {"model": "smollm2", "prompt": [9] * context, "max_tokens": 1_000}
        body["vllm_xargs"] = {LENGTH: tokens}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()

    async def work() -> None:
        urls = [one.url for one in deployment.decode]
        async with aiohttp.ClientSession() as session:
            await asyncio.gather(
                answered(session, urls[0], CONTEXTS[0], 2 * TOKENS),  # ends last, alone
                answered(session, urls[1], CONTEXTS[1], TOKENS),
            )

    with launched(deployment, tmp_path / "logs"):
        asyncio.run(work())
    short, long = (
        np.genfromtxt(tmp_path / "steps" / f"{one.name}.csv", delimiter=",", names=True)
        for one in deployment.decode
    )
    own = DILATION * (0.02 + 1e-5 * long["context_tokens"])
    assert long["asked_seconds"] == pytest.approx(own, abs=1e-5)  # it is always the longest
    both = (long["end"] > short["end"][2]) & (long["end"] < short["end"][-3])
    shared = np.flatnonzero(both)[5:-5]
    assert len(shared) > TOKENS / 2
    apart = np.abs(long["asked_seconds"][shared][:, None] - short["asked_seconds"]).min(axis=1)
    assert (apart < 1e-5).mean() > 0.9  # who says nothing for long is left out of a step
    alone = short["end"] > long["end"][-1] + 0.5
    assert alone.sum() > TOKENS / 4
    assert short["asked_seconds"][alone] == pytest.approx(
        DILATION * (0.02 + 1e-5 * short["context_tokens"][alone]), abs=1e-5
    )
