"""The FairBatching scheduler inside a real vLLM: the same tokens, in a better order, in time."""

import json
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from batching_profile import profile_of
from forecast_messages import CHECKPOINT
from forked_vllm import ended_server, post, run_forked, running_server, server_arguments
from listening import Listener, listener
from offline_engines import serve_waves

from predictor.live.telemetry_messages import Message, Snapshot
from rescheduler.step_time.profile import BatchTime, read_engine, read_steps

SCHEDULER = "rescheduler.batching.vllm_scheduler.FairBatchingScheduler"
MIDDLEWARE = "rescheduler.batching.admission.AdmissionMiddleware"
FLAGS = ["--scheduler-cls", SCHEDULER, "--middleware", MIDDLEWARE]
BATCH = BatchTime(constant=0.01, per_new=0.001, per_context=1e-6)
CROWDED = {"max_num_batched_tokens": 160, "num_gpu_blocks_override": 24}
"""Prompts are cut, and the cache holds 736 tokens: some requests are preempted."""


def prompt(seed: int, tokens: int, shared: int = 0) -> list[int]:
    """Return random tokens, the first of them the same for all."""
    head = np.random.default_rng(0).integers(1000, 20_000, shared)
    tail = np.random.default_rng(seed).integers(1000, 20_000, tokens - shared)
    return [*head.tolist(), *tail.tolist()]


def ask(name: str, tokens: list[int], n: int, **objectives: float) -> dict[str, Any]:
    return {"name": name, "prompt": tokens, "max_tokens": n, "objectives": objectives}


def waves() -> list[dict[str, Any]]:
    """Return requests of many lengths, then some that outgrow the cache, then an urgent one."""
    lengths = [[30, 210, 5], [150, 90], [64, 320], [33, 128, 7]]
    mixed = [
        [
            ask(f"mixed{i}-{j}", prompt(10 * i + j, n, shared=min(n // 2, 64)), 12)
            for j, n in enumerate(wave)
        ]
        for i, wave in enumerate(lengths)
    ]
    growing = [ask(f"grows{i}", prompt(50 + i, 120), 32, ttft_s=30.0, tpot_s=5.0) for i in range(6)]
    patient = [
        ask(f"patient{i}", prompt(100 + i, 200), 4, ttft_s=600.0, tpot_s=10.0) for i in range(3)
    ]
    urgent = [ask("urgent", prompt(200, 20), 4, ttft_s=0.5, tpot_s=10.0)]
    arriving = [{"after": 4, "requests": wave} for wave in mixed]
    alone = [{"after": None, "requests": growing}, {"after": None, "requests": patient}]
    return [*arriving, *alone, {"after": 1, "requests": urgent}]


def run(model: Path, **engine: Any) -> dict[str, Any]:
    in_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    seen: dict[str, Any] = run_forked(
        serve_waves, str(model), CROWDED | engine, waves(), environment=in_process
    )
    return seen


@pytest.fixture(scope="module")
def profile(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return profile_of(smollm2, tmp_path_factory.mktemp("profile") / "profile.yaml", BATCH)


@pytest.fixture(scope="module")
def by_vllm(smollm2: Path) -> dict[str, Any]:
    return run(smollm2)


@pytest.fixture(scope="module")
def fair(smollm2: Path, profile: Path) -> dict[str, Any]:
    section = {"profile": str(profile), "ttft_s": 0.5, "tpot_s": 0.08, "recalibrate": False}
    section |= {"deadlines": "first_token"}
    config = {"headway": {"batching": section}}
    return run(smollm2, scheduler_cls=SCHEDULER, additional_config=config)


def test_every_request_gets_the_tokens_that_vllm_gives_it(
    by_vllm: dict[str, Any], fair: dict[str, Any]
) -> None:
    """With prompts in chunks, a prefix cache, and preemption."""
    assert (by_vllm["scheduler"], fair["scheduler"]) == ("Scheduler", "FairBatchingScheduler")
    assert len(fair["outputs"]) == 20
    assert fair["outputs"] == by_vllm["outputs"]
    assert fair["prefix_hits"] > 0
    assert fair["preemptions"] > 0
    assert any(0 < sum(step["tokens"].values()) < 160 for step in fair["steps"])


def test_no_batch_exceeds_its_plan_or_its_budget(fair: dict[str, Any]) -> None:
    planned = [step for step in fair["steps"] if "planned" in step]
    assert len(planned) > 20
    for step in planned:
        for name, tokens in step["tokens"].items():
            assert tokens <= step["planned"][name]
        assert step["actual"] <= step["estimate"] + 1e-9
        if step["budget"] is not None and not step["only_decodes"]:
            late = 0.005  # the budget is read a moment before the plan
            assert step["actual"] <= step["budget"] + late
    cut = [step for step in planned if step["budget"] is not None and not step["only_decodes"]]
    assert cut, "prompts were computed beside decodes"


def test_an_idle_engine_holds_nothing(fair: dict[str, Any]) -> None:
    assert fair["blocks_lost"] == 0
    assert fair["left"] == [0, 0]


def test_an_urgent_prompt_overtakes_those_that_can_wait(
    by_vllm: dict[str, Any], fair: dict[str, Any]
) -> None:
    """In vLLM's order it comes last; its objective puts it right behind what has begun."""
    theirs, ours = by_vllm["first_step"], fair["first_step"]
    assert theirs["urgent"] >= max(theirs[f"patient{i}"] for i in range(3))
    assert ours["urgent"] <= ours["patient0"]
    assert ours["urgent"] < min(ours["patient1"], ours["patient2"])


def test_deadlines_can_count_from_the_first_token(fair: dict[str, Any]) -> None:
    """Once a request has begun, the time to its first token is as if it had been promised."""
    assert len(fair["begun"]) == 20
    for name, (ttft, seconds) in fair["begun"].items():
        assert 0 < ttft <= seconds, name


# A server: what its clients see.

TIGHT = {"ttft_s": 2.0, "tpot_s": 0.5}


class Served(NamedTuple):
    """A server that admits by a budget of about 400 tokens, and its telemetry."""

    port: int
    steps: Path
    telemetry: Listener


@pytest.fixture(scope="module")
def served(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    slow = BatchTime(constant=0.01, per_new=0.005, per_context=0.0)
    with listener() as listening:
        telemetry = {"bind": "", "connect": [listening.endpoint], "instance": "decode-0"}
        section = {
            "k": 5,
            "forecast": {"checkpoint": str(CHECKPOINT), "telemetry": telemetry},
            "batching": {
                "profile": str(profile_of(smollm2, folder / "profile.yaml", slow)),
                "admission": True,
                "recalibrate": False,
                "steps": str(folder / "steps.csv"),
                **TIGHT,
            },
        }
        worker = ["--worker-cls", "predictor.live.vllm_worker.LiveHeadwayWorker"]
        arguments = server_arguments(smollm2, section, *FLAGS, *worker)
        with running_server(arguments, folder / "server.log") as server:
            yield Served(server.port, folder / "steps.csv", listening)


@pytest.fixture
def busy(served: Served) -> Iterator[Served]:
    """The server while it answers another client, whose prompt is short."""
    body = {"prompt": "Once upon a time", "max_tokens": 400, "stream": True, "ignore_eos": True}
    with post(served.port, "/v1/completions", {"model": "smollm2", **body}) as response:
        assert response.readline().startswith(b"data: {")
        yield served


def refused(port: int, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any], Any]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(port, path, {"model": "smollm2", **body})
    with caught.value as error:
        return error.code, dict(error.headers), json.load(error)


LONG = " ".join(["word"] * 450)
TOO_LONG = {
    "completion": ("/v1/completions", {"prompt": LONG}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
    "two answers": ("/v1/completions", {"prompt": LONG, "n": 2}),
    "logprobs": ("/v1/completions", {"prompt": LONG, "logprobs": 2}),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kind", TOO_LONG)
def test_a_prompt_beyond_the_budget_is_429(busy: Served, kind: str, stream: bool) -> None:
    path, body = TOO_LONG[kind]
    status, headers, answer = refused(busy.port, path, body | {"stream": stream, "max_tokens": 5})
    assert status == 429
    assert int(headers["retry-after"]) >= 1
    assert answer["error"]["code"] == 429


def test_a_prompt_within_the_budget_is_served(busy: Served) -> None:
    body = {"model": "smollm2", "prompt": "The sea is", "max_tokens": 5, "temperature": 0}
    with post(busy.port, "/v1/completions", body) as response:
        assert json.load(response)["usage"]["completion_tokens"] == 5


def test_a_client_with_time_is_served_beyond_the_engine_s_own_budget(busy: Served) -> None:
    body = {"model": "smollm2", "prompt": LONG, "max_tokens": 3}
    patient = body | {"vllm_xargs": {"ttft_s": 60.0}}
    with post(busy.port, "/v1/completions", patient) as response:
        assert json.load(response)["choices"][0]["finish_reason"] == "length"


def test_an_engine_without_other_work_takes_any_prompt(served: Served) -> None:
    served.telemetry.wait_until_idle()  # earlier clients have left
    body = {"model": "smollm2", "prompt": LONG, "max_tokens": 3}
    with post(served.port, "/v1/completions", body) as response:
        assert json.load(response)["usage"]["prompt_tokens"] > 400


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_absurd_objectives_are_400(served: Served, stream: bool) -> None:
    body = {"prompt": "The sea is", "vllm_xargs": {"ttft_s": -2}, "stream": stream}
    status, _, answer = refused(served.port, "/v1/completions", body)
    assert status == 400
    assert "ttft_s must be seconds from 0.001 to 3600, not -2" in answer["error"]["message"]


def budgets_in(messages: list[Message]) -> list[float]:
    budgets = [one.gauges.prefill_budget for one in messages if isinstance(one, Snapshot)]
    return [budget for budget in budgets if budget is not None]


def test_the_budget_is_published_and_steps_are_written(busy: Served) -> None:
    busy.telemetry.wait_until(budgets_in)
    budgets = budgets_in(busy.telemetry.messages)
    assert max(budgets) <= 2.0 / 0.005
    steps = read_steps(busy.steps)
    assert len(steps) > 20 and (steps[:, 2] > 0).all()
    assert (steps[:, 1] >= steps[:, 0]).all(), "context includes what the step computes"
    assert read_engine(busy.steps).dtype == "float32"


@pytest.mark.slow
def test_an_engine_whose_profile_is_another_machine_s_does_not_start(
    smollm2: Path, tmp_path: Path
) -> None:
    path = profile_of(smollm2, tmp_path / "profile.yaml", BATCH, where="another machine")
    section = {"batching": {"profile": str(path)}}
    printed = ended_server(server_arguments(smollm2, section, *FLAGS), tmp_path / "server.log")
    expected = "the profile was measured with machine 'another machine', this engine has"
    assert expected in printed
