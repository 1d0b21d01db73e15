"""What the engines of a launched deployment answer."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import closing
from typing import Any, TypeVar

import aiohttp
import pytest
from running_deployment import RunningDeployment, complete

from rescheduler.demo.load import metric_total
from rescheduler.engines.deployment import Instance
from rescheduler.transfer.control_client import ControlClient
from rescheduler.transfer.control_messages import EngineState, RequestStatus

pytestmark = pytest.mark.timeout(1200)

T = TypeVar("T")


def asked(instance: Instance, ask: Callable[[ControlClient], Coroutine[Any, Any, T]]) -> T:
    """Return what an engine's control socket answers."""

    async def answer() -> T:
        with closing(ControlClient(instance.control or "")) as client:
            return await ask(client)

    return asyncio.run(answer())


def state(instance: Instance) -> EngineState:
    return asked(instance, lambda client: client.state(120.0))


def state_once_free(instance: Instance) -> EngineState:
    """Return an engine's state once it holds nothing: leases take 30 s."""
    deadline = time.monotonic() + 300
    while (reported := state(instance)).free_blocks != reported.num_blocks or reported.frozen:
        assert time.monotonic() < deadline, f"{instance.name} never let go: {reported}"
        time.sleep(0.1)
    return reported


def text(instance: Instance, prompt: str, **fields: Any) -> str:
    answer: str = complete(instance, prompt=prompt, max_tokens=12, **fields)["choices"][0]["text"]
    return answer


def prefilled(instance: Instance, prompt: str, id: str) -> dict[str, Any]:
    """Compute a prompt, and return with what another engine is to read it."""
    mine = {"id": id, "hop": 0}
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "headway": mine}
    answer = complete(instance, prompt=prompt, max_tokens=1, kv_transfer_params=asked)
    return {**answer["kv_transfer_params"], "headway": mine}


def test_every_engine_of_the_deployment_answers(deployment: RunningDeployment) -> None:
    answers = {i.name: complete(i)["choices"][0]["text"] for i in deployment.deployment.instances}
    assert len(set(answers.values())) == 1, "all serve the same model"
    for instance in deployment.deployment.decode:
        reported = state_once_free(instance)
        assert (reported.block_size, reported.max_num_seqs, reported.max_model_len) == (32, 8, 1024)


def test_an_engine_says_which_requests_it_has(deployment: RunningDeployment) -> None:
    """By migration id, or else by what its API calls them; and it makes steps meanwhile."""
    decode, id = deployment.deployment.decode[0], "b" * 32
    names = [id, "cmpl-two-answers", "cmpl-nobody", "c" * 32]

    async def ask(control: ControlClient) -> tuple[list[list[RequestStatus]], list[int]]:
        body = {"model": deployment.deployment.served_name, "prompt": "a b c", "max_tokens": 200}
        body |= {"ignore_eos": True}
        mine = {"kv_transfer_params": {"headway": {"id": id, "hop": 0}}}
        statuses, steps = [], []
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
        return statuses, steps

    statuses, steps = asked(decode, ask)
    unknown = RequestStatus.UNKNOWN
    assert [RequestStatus.RUNNING] * 2 + [unknown] * 2 in statuses
    assert statuses[-1] == [unknown] * 4
    assert steps == sorted(steps) and steps[-1] > steps[0]
    assert state(decode).incarnation == state(decode).incarnation != ""


def test_a_prefilled_request_decodes_elsewhere(deployment: RunningDeployment) -> None:
    prompt = "Once upon a time there was a lighthouse. " * 8
    prefill, decode = deployment.deployment.prefill[0], deployment.deployment.decode[0]
    alone = text(prefill, prompt)
    params = prefilled(prefill, prompt, "a" * 32)
    assert text(decode, prompt, kv_transfer_params=params) == alone
    state_once_free(decode)


@pytest.mark.slow
def test_a_prefill_whose_lease_has_ended_is_computed_anew(deployment: RunningDeployment) -> None:
    """A request that a policy let wait: its blocks may hold another one's tokens by then."""
    prompt = "Once upon a time there was a mountain. " * 8
    prefill, decode = deployment.deployment.prefill[0], deployment.deployment.decode[0]
    alone = text(prefill, prompt)
    state_once_free(prefill)
    params = prefilled(prefill, prompt, "b" * 32)
    assert state(prefill).frozen == ["b" * 32]
    state_once_free(prefill)
    url, name = f"{decode.url}/metrics", "vllm:prompt_tokens_by_source_total"
    before = metric_total(url, name, source="local_compute")
    assert text(decode, prompt, kv_transfer_params=params) == alone
    assert metric_total(url, name, source="local_compute") - before > 1


@pytest.mark.slow
def test_a_prefill_whose_lease_is_renewed_is_read_however_late(
    deployment: RunningDeployment,
) -> None:
    """Also by an engine that has been idle meanwhile, and by one that has had steps."""
    prefill, decode = deployment.deployment.prefill[0], deployment.deployment.decode[0]
    url, name = f"{decode.url}/metrics", "vllm:prompt_tokens_by_source_total"
    for id, busy in (("c" * 32, False), ("d" * 32, True)):
        prompt = f"Once upon a time there was a river, {id[0]}. " * 8
        state_once_free(prefill)
        params = prefilled(prefill, prompt, id)
        for _ in range(8):  # of 5 s: longer than the lease
            time.sleep(5)
            renewed = asked(prefill, lambda client, id=id: client.renew(["unknown", id], 120.0))
            assert renewed.ids == [id]
            assert renewed.until > params["remote_blocks_expiry_time"]
            params["remote_blocks_expiry_time"] = renewed.until
            if busy:
                complete(prefill, prompt="Another", max_tokens=2)
        assert state(prefill).frozen == [id]
        sources = ("local_compute", "external_kv_transfer")
        before = [metric_total(url, name, source=source) for source in sources]
        answer = text(decode, prompt, kv_transfer_params=params)
        computed, read = (
            metric_total(url, name, source=source) - one
            for source, one in zip(sources, before, strict=True)
        )
        assert computed <= 1 and read > 50
        assert answer == text(prefill, prompt)
    state_once_free(prefill)
