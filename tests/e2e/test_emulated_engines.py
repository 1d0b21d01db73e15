"""Emulated engines: real vLLM without its model; scripts, steps, moves, refusals, forecasts."""

import asyncio
import json
import socket
import urllib.error
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from forked_vllm import post
from msgspec.structs import replace
from running_deployment import patient

from benchmarks.support.deployments import proxy
from benchmarks.support.experiment import PromptLengths, drawn_load
from rescheduler.demo.load import (
    EmulatedAnswer,
    EmulatedRequest,
    changed_answers,
    metric_total,
    preemptions,
    serve_load,
    step_sums,
)
from rescheduler.emulation.emulate_options import AnswerLengths, EmulateOptions, StepSeconds
from rescheduler.emulation.scripted_answers import LENGTH
from rescheduler.engines.deployment import Deployment, EngineOptions
from rescheduler.engines.emulated_deployment import model_to_load
from rescheduler.engines.launch_engines import launched
from rescheduler.engines.launch_local import local_deployment
from rescheduler.serving.admin_client import drain_instance, undrain_instance
from rescheduler.telemetry.subscriber import TelemetrySubscriber
from rescheduler.telemetry.telemetry_view import FinishedForecasts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ENGINE = EngineOptions(max_num_seqs=32, block_size=16, kv_blocks=400, max_model_len=2_048)
LAW = AnswerLengths(median=60, sigma=0.7, longest=400)
PROMPTS = PromptLengths(200, 900)
LONG = [EmulatedRequest(i, 100, 900, 0.0) for i in range(4)]
"""They last six seconds and more, and either instance has room for all of them."""
CONTEXTS, TOKENS, DILATION = (100, 4_000), 100, 4


@dataclass(frozen=True)
class Fleet:
    deployment: Deployment
    logs: list[Path]
    model: Path

    def load(
        self, load: list[EmulatedRequest], salt: int
    ) -> "asyncio.Future[list[EmulatedAnswer]]":
        url, name = self.deployment.proxy_url, self.deployment.served_name
        return asyncio.ensure_future(serve_load(url, name, load, 1.0, salt, 1_000))

    def moved(self) -> float:
        url, name = f"{self.deployment.proxy_url}/metrics", "headway_proxy_migrations_total"
        return metric_total(url, name, outcome="moved")

    async def drained_while(self, load: list[EmulatedRequest], salt: int) -> None:
        """Serve a load while instances are drained in turns; its answers are their scripts."""
        serving = self.load(load, salt)
        while not serving.done():
            for instance in self.deployment.decode:
                await self.drained(instance.name)
        answers = await serving
        assert [one.error for one in answers if one.error] == []
        assert changed_answers(answers, self.model) == 0

    async def drained(self, name: str) -> None:
        """Drain an instance, and let it serve again once nothing runs there."""
        admin = self.deployment.admin_url
        await asyncio.to_thread(drain_instance, admin, name)
        await asyncio.sleep(1.0)
        await asyncio.to_thread(undrain_instance, admin, name)


async def test_a_deployment_on_ipv6_serves_moves_and_reports(tmp_path: Path) -> None:
    """Prompts and caches come over NIXL, whose side channel is on ::1, too."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no ::1")
    lengths = AnswerLengths(median=60, sigma=0.7, longest=900)
    engine = replace(ENGINE, emulate=EmulateOptions(profile="h100-llama-8b", lengths=lengths))
    made = patient(local_deployment("smollm2", engine))
    values = json.loads(msgspec.json.encode(made).replace(b"127.0.0.1", b"[::1]"))
    values["proxy"]["host"] = "::1"
    deployment = Deployment.from_values(values)
    fleet = Fleet(deployment, [], Path(model_to_load(deployment)))
    with launched(deployment, tmp_path / "logs", serve=True, tethered=True):
        with TelemetrySubscriber([str(one.telemetry) for one in deployment.decode]) as heard:
            await fleet.drained_while(LONG, 4)
            assert len(heard.view.instances) == 2
        assert fleet.moved() > 0
        metrics = f"{deployment.proxy_url}/metrics"
        assert metric_total(metrics, "headway_proxy_recomputed_requests_total") == 0
        assert metric_total(metrics, "headway_proxy_kv_load_failures_total") == 0


def test_two_engines_behind_a_barrier_step_together_and_one_goes_on_alone(tmp_path: Path) -> None:
    """vLLM's own steps, as long as the longest of them."""
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


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A prefill and two decode engines, and their proxy."""
    folder = tmp_path_factory.mktemp("emulated")
    emulate = EmulateOptions(profile="h100-llama-8b", lengths=LAW, logs=str(folder / "steps"))
    of_the_gpus = ["--tensor-parallel-size", "8", "--quantization", "fp8"]
    engine = replace(ENGINE, emulate=emulate, arguments=of_the_gpus)
    deployment = patient(local_deployment("smollm2", engine))
    with launched(deployment, folder / "logs"), proxy(deployment, folder):
        logs = [folder / "steps" / f"{one.name}.csv" for one in deployment.decode]
        yield Fleet(deployment, logs, Path(model_to_load(deployment)))


async def test_answers_are_their_scripts_through_hand_overs_and_preemptions(fleet: Fleet) -> None:
    before = preemptions(fleet.deployment)
    # Three times what the caches hold, so that requests are preempted and computed again.
    for seed in range(1, 4):  # how many run at a time is up to the machine as well
        await fleet.drained_while(drawn_load(seed, 60, inf, PROMPTS, LAW), 1)
        if preemptions(fleet.deployment) > before:
            break
    assert preemptions(fleet.deployment) > before


async def test_answers_are_their_scripts_through_moves(fleet: Fleet) -> None:
    before = fleet.moved()
    await fleet.drained_while(LONG, 4)
    assert fleet.moved() > before


async def test_every_step_is_asked_to_take_what_its_size_says(fleet: Fleet) -> None:
    await fleet.load(drawn_load(2, 10, inf, PROMPTS, LAW), 2)
    await asyncio.sleep(1.5)
    emulate = fleet.deployment.engine.emulate
    assert emulate is not None
    step_time = emulate.resolved().step_time
    assert step_time is not None
    for log in fleet.logs:
        text = log.read_text()
        rows = np.genfromtxt(text[: text.rfind("\n")].split("\n"), delimiter=",", names=True)
        asked = [step_time.of(int(row["new_tokens"]), int(row["context_tokens"])) for row in rows]
        assert rows["asked_seconds"] == pytest.approx(asked, abs=2e-6)
        decoding = rows[rows["new_tokens"] == rows["requests"]]
        assert len(decoding) > len(rows) / 2, "most steps generate a token a request"
        assert rows["seconds"].sum() >= 0.98 * rows["asked_seconds"].sum()
    assert step_sums(fleet.logs, 0.0).steps > 100


def completion(fleet: Fleet, **fields: Any) -> tuple[int, Any]:
    body = {"model": "smollm2", "prompt": "One two three", "max_tokens": 5} | fields
    try:
        with post(fleet.deployment.proxy.port, "/v1/completions", body) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.parametrize(
    "asked",
    [
        {"logprobs": 2},
        {"repetition_penalty": 1.2},
        {"frequency_penalty": 0.5},
        {"logit_bias": {"5": 3}},
        {"bad_words": ["three"]},
        {"structured_outputs": {"regex": "a+"}},
        {"vllm_xargs": {"emulated_length": 0}},
    ],
)
def test_what_a_script_cannot_heed_is_refused_by_its_name(
    fleet: Fleet, asked: dict[str, Any]
) -> None:
    status, answer = completion(fleet, **asked)
    assert status == 400, answer
    (name,) = asked
    assert "emulated" in json.dumps(answer) and name in json.dumps(answer)


def test_ordinary_clients_get_answers_of_the_law(fleet: Fleet) -> None:
    status, answer = completion(fleet, max_tokens=500, seed=3, temperature=0.8, top_p=0.9, n=2)
    assert status == 200, answer
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "stop"]
    assert answer["choices"][0]["text"] != answer["choices"][1]["text"]
    status, answer = completion(fleet, max_tokens=7, ignore_eos=True, min_tokens=7)
    assert status == 200 and answer["usage"]["completion_tokens"] == 7
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_forecasts_are_published_and_say_something_of_the_lengths(fleet: Fleet) -> None:
    endpoints = [str(instance.telemetry) for instance in fleet.deployment.decode]
    with ExitStack() as stack:
        heard = [stack.enter_context(TelemetrySubscriber(endpoint)) for endpoint in endpoints]
        ended: list[FinishedForecasts] = []
        lengths = np.linspace(20, 390, 40).astype(int).tolist()
        load = [EmulatedRequest(9_000_000 + i, 200, n, i / 40) for i, n in enumerate(lengths)]
        answers = await fleet.load(load, 3)
        assert all(not one.error for one in answers)
        while len(ended) < len(load):
            await asyncio.sleep(0.1)
            heard_now = [one for subscriber in heard for one in subscriber.take_finished()]
            ended += [one for one in heard_now if one.event.finish_reason == "stop"]
    truth = [one.event.total_tokens for one in ended]
    assert sorted(truth) == sorted(lengths)
    first = [one.forecast().median()[0] for one in ended]
    assert np.corrcoef(np.log(truth), np.log(np.maximum(first, 1)))[0, 1] > 0.3
