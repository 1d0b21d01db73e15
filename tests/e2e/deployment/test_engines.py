"""What the engines of a launched deployment answer."""

import asyncio
import time

import pytest
from running_deployment import RunningDeployment, complete

from rescheduler.demo.demo_load import metric_total
from rescheduler.engines.deployment import Instance
from rescheduler.transfer.control_client import ControlClient
from rescheduler.transfer.control_messages import EngineState


def state(instance: Instance) -> EngineState:
    async def ask() -> EngineState:
        client = ControlClient(instance.control or "")
        try:
            return await client.state(120.0)
        finally:
            client.close()

    return asyncio.run(ask())


def state_once_free(instance: Instance) -> EngineState:
    """Return an engine's state once it holds nothing: leases take 30 s."""
    deadline = time.monotonic() + 300
    while (reported := state(instance)).free_blocks != reported.num_blocks or reported.frozen:
        assert time.monotonic() < deadline, f"{instance.name} never let go: {reported}"
        time.sleep(0.1)
    return reported


@pytest.mark.timeout(1200)
def test_every_engine_of_the_deployment_answers(deployment: RunningDeployment) -> None:
    answers = {i.name: complete(i)["choices"][0]["text"] for i in deployment.deployment.instances}
    assert len(set(answers.values())) == 1, "all serve the same model"
    for instance in deployment.deployment.decode:
        reported = state_once_free(instance)
        assert (reported.block_size, reported.max_num_seqs, reported.max_model_len) == (32, 8, 1024)


@pytest.mark.timeout(1200)
def test_a_prefilled_request_decodes_elsewhere(deployment: RunningDeployment) -> None:
    prompt = "Once upon a time there was a lighthouse. " * 8
    prefill, decode = deployment.deployment.prefill[0], deployment.deployment.decode[0]
    alone = complete(prefill, prompt=prompt, max_tokens=12)["choices"][0]["text"]
    mine = {"id": "a" * 32, "hop": 0}
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "headway": mine}
    prefilled = complete(prefill, prompt=prompt, max_tokens=1, kv_transfer_params=asked)
    params = {**prefilled["kv_transfer_params"], "headway": mine}
    answer = complete(decode, prompt=prompt, max_tokens=12, kv_transfer_params=params)
    assert answer["choices"][0]["text"] == alone
    state_once_free(decode)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_prefill_whose_lease_has_ended_is_computed_anew(deployment: RunningDeployment) -> None:
    """A request that a policy let wait: its blocks may hold another one's tokens by then."""
    prompt = "Once upon a time there was a mountain. " * 8
    prefill, decode = deployment.deployment.prefill[0], deployment.deployment.decode[0]
    alone = complete(prefill, prompt=prompt, max_tokens=12)["choices"][0]["text"]
    state_once_free(prefill)
    mine = {"id": "b" * 32, "hop": 0}
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "headway": mine}
    prefilled = complete(prefill, prompt=prompt, max_tokens=1, kv_transfer_params=asked)
    assert state(prefill).frozen == [mine["id"]]
    state_once_free(prefill)
    url, name = f"{decode.url}/metrics", "vllm:prompt_tokens_by_source_total"
    before = metric_total(url, name, source="local_compute")
    params = {**prefilled["kv_transfer_params"], "headway": mine}
    answer = complete(decode, prompt=prompt, max_tokens=12, kv_transfer_params=params)
    assert answer["choices"][0]["text"] == alone
    assert metric_total(url, name, source="local_compute") - before > 1
