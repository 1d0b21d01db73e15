"""A batch beside everything that can be killed: real vLLM without its model."""

from math import inf
from pathlib import Path

import pytest
from running_deployment import patient

from benchmarks.batch import killed_batch
from benchmarks.support.experiment import PromptLengths, drawn_load
from rescheduler.emulation.emulate_options import AnswerLengths, EmulateOptions
from rescheduler.engines.deployment import EngineOptions
from rescheduler.engines.launch_engines import launched
from rescheduler.engines.launch_local import local_deployment

REQUESTS = 120


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("prefill", [0, 1])
def test_killing_the_proxy_an_engine_and_the_batch_costs_no_answer(
    tmp_path: Path, prefill: int
) -> None:
    law = AnswerLengths(median=150, sigma=0.7, longest=600)
    engine = EngineOptions(
        max_num_seqs=16,
        block_size=16,
        kv_blocks=1_100,
        max_model_len=16_384,
        emulate=EmulateOptions(profile="h100-llama-8b", lengths=law, dilation=3.0),
        arguments=["--scheduling-policy", "priority"],
    )
    deployment = patient(local_deployment("smollm2", engine, decode=2, prefill=prefill))
    load = drawn_load(1, REQUESTS, inf, PromptLengths(50, 300), law)
    with launched(deployment, tmp_path / "logs") as engines:
        found = killed_batch(deployment, engines, load, tmp_path, concurrency=48)
    assert found._replace(seconds=0.0) == (REQUESTS, REQUESTS, 0, 0, 0, 0, 0.0)
