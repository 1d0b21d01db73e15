"""What the engines of a launched deployment answer."""

import asyncio
import time
from typing import Any

import aiohttp
import pytest
from running_deployment import RunningDeployment, complete

from rescheduler.demo.demo_load import metric_total
from rescheduler.engines.deployment import Instance
from rescheduler.transfer.control_client import ControlClient
from rescheduler.transfer.control_messages import EngineState, Renewed, RequestStatus


def state(instance: Instance) -> EngineState:
    async def ask() -> EngineState:
        client = ControlClient(instance.control or "")
        try:
            return await client.state(120.0)
        finally:
            client.close()

    return asyncio.run(ask())


def renew(instance: Instance, ids: list[str]) -> Renewed:
    async def ask() -> Renewed:
        client = ControlClient(instance.control or "")
        try:
            return await client.renew(ids, 120.0)
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
def test_an_engine_says_which_requests_it_has(deployment: RunningDeployment) -> None:
    """By migration id, or else by what its API calls them; and it makes steps meanwhile."""
    decode, id = deployment.deployment.decode[0], "b" * 32
    names = [id, "cmpl-two-answers", "cmpl-nobody", "c" * 32]

    async def ask() -> tuple[list[list[RequestStatus]], list[int]]:
        control = ControlClient(decode.control or "")
        body = {"model": deployment.deployment.served_name, "prompt": "a b c", "max_tokens": 200}
        body |= {"ignore_eos": True}
        mine = {"kv_transfer_params": {"headway": {"id": id, "hop": 0}}}
        statuses, steps = [], []
        try:
            async with aiohttp.ClientSession(decode.url) as session:

                async def generate(more: dict[str, Any], name: str) -> None:
                    headers = {"X-Request-Id": name}
                    answer = session.post("/v1/completions", json=body | more, headers=headers)
                    async with answer as response:
                        assert response.status == 200, await response.text()
                        await response.read()

                async with asyncio.TaskGroup() as tasks:
                    running = [
                        tasks.create_task(generate(mine, "one-answer")),
                        tasks.create_task(generate({"n": 2}, "two-answers")),
                    ]
                    while not all(task.done() for task in running):
                        found = await control.find(names, 120.0)
                        statuses.append(found.statuses)
                        steps.append(found.steps)
                        await asyncio.sleep(0.05)
                found = await control.find(names, 120.0)
                statuses.append(found.statuses)
        finally:
            control.close()
        return statuses, steps

    statuses, steps = asyncio.run(ask())
    unknown = RequestStatus.UNKNOWN
    assert [RequestStatus.RUNNING] * 2 + [unknown] * 2 in statuses
    assert statuses[-1] == [unknown] * 4
    assert steps == sorted(steps) and steps[-1] > steps[0]
    assert state(decode).incarnation == state(decode).incarnation != ""


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


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_prefill_whose_lease_is_renewed_is_read_however_late(
    deployment: RunningDeployment,
) -> None:
    """Also by an engine that has been idle meanwhile, and by one that has had steps."""
    prefill, decode = deployment.deployment.prefill[0], deployment.deployment.decode[0]
    url, name = f"{decode.url}/metrics", "vllm:prompt_tokens_by_source_total"
    for id, busy in (("c" * 32, False), ("d" * 32, True)):
        prompt = f"Once upon a time there was a river, {id[0]}. " * 8
        state_once_free(prefill)
        mine = {"id": id, "hop": 0}
        asked = {"do_remote_decode": True, "do_remote_prefill": False, "headway": mine}
        prefilled = complete(prefill, prompt=prompt, max_tokens=1, kv_transfer_params=asked)
        params = {**prefilled["kv_transfer_params"], "headway": mine}
        for _ in range(8):  # of 5 s: longer than the lease
            time.sleep(5)
            renewed = renew(prefill, ["unknown", id])
            assert renewed.ids == [id]
            assert renewed.until > params["remote_blocks_expiry_time"]
            params["remote_blocks_expiry_time"] = renewed.until
            if busy:
                complete(prefill, prompt="Another", max_tokens=2)
        assert state(prefill).frozen == [id]
        sources = ("local_compute", "external_kv_transfer")
        before = [metric_total(url, name, source=source) for source in sources]
        answer = complete(decode, prompt=prompt, max_tokens=12, kv_transfer_params=params)
        computed, read = (
            metric_total(url, name, source=source) - one
            for source, one in zip(sources, before, strict=True)
        )
        assert computed <= 1 and read > 50
        alone = complete(prefill, prompt=prompt, max_tokens=12)["choices"][0]["text"]
        assert answer["choices"][0]["text"] == alone
    state_once_free(prefill)
