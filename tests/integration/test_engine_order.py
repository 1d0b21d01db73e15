"""The order of service inside a real vLLM: the same tokens, short requests first."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked_vllm import post, run_forked, running_server, server_arguments
from offline_engines import serve_waves

from predictor.past.length_memory import LengthMemory

SCHEDULER = "rescheduler.ordering.vllm_scheduler.OrderedHeadwayScheduler"
LENGTHS = [60, 45, 30, 20, 12, 6]


def waves() -> list[dict[str, Any]]:
    """Return requests that take all eight places, then some that wait, the longest first."""
    generator = np.random.default_rng(0)

    def ask(name: str, tokens: int) -> dict[str, Any]:
        prompt = generator.integers(1000, 20_000, 24).tolist()
        return {"name": name, "prompt": prompt, "max_tokens": tokens}

    running = [ask(f"runs{i}", 20 + 4 * i) for i in range(8)]
    waiting = [ask(f"waits{tokens}", tokens) for tokens in LENGTHS]
    return [{"after": 4, "requests": running}, {"after": 4, "requests": waiting}]


def run(model: Path, **engine: Any) -> dict[str, Any]:
    in_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    seen: dict[str, Any] = run_forked(
        serve_waves, str(model), engine, waves(), environment=in_process
    )
    return seen


def test_what_waits_is_begun_in_order_of_its_length_and_answered_alike(smollm2: Path) -> None:
    by_vllm = run(smollm2)
    order = {"name": "shortest", "prompt_checkpoint": "checkpoints/smollm2-135m-instruct-prompt"}
    config = {"headway": {"order": order}}
    ordered = run(smollm2, scheduler_cls=SCHEDULER, additional_config=config)
    assert (by_vllm["scheduler"], ordered["scheduler"]) == ("Scheduler", "OrderedHeadwayScheduler")
    assert ordered["outputs"] == by_vllm["outputs"]
    assert len(ordered["outputs"]) == 8 + len(LENGTHS)
    names = [f"waits{tokens}" for tokens in LENGTHS]
    theirs = [by_vllm["first_step"][name] for name in names]
    ours = [ordered["first_step"][name] for name in names]
    assert theirs == sorted(theirs)
    assert ours == sorted(ours, reverse=True)
    assert ours[0] > ours[-1]
    assert ordered["left"] == [0, 0]


def test_what_waits_is_expected_to_be_answered_as_its_prefix_was(smollm2: Path) -> None:
    """All may generate as much; of two beginnings one was answered with few tokens before."""
    generator = np.random.default_rng(0)
    begins = {kind: generator.integers(1000, 20_000, 48).tolist() for kind in ("long", "short")}

    def ask(kind: str, name: str, tokens: int) -> dict[str, Any]:
        prompt = [*begins[kind], *generator.integers(1000, 20_000, 8).tolist()]
        return {"name": f"{kind}-{name}", "prompt": prompt, "max_tokens": tokens}

    lengths = {"long": 60, "short": 3}
    taught = [ask(kind, f"taught{i}", n) for i in range(4) for kind, n in lengths.items()]
    places = [ask("long", f"runs{i}", 20 + 4 * i) for i in range(8)]
    waiting = [ask(kind, f"waits{i}", 20) for kind in lengths for i in range(3)]
    seen: dict[str, Any] = run_forked(
        serve_waves,
        str(smollm2),
        {
            "scheduler_cls": SCHEDULER,
            "additional_config": {"headway": {"order": {"name": "shortest"}}},
        },
        [
            {"after": None, "requests": taught},
            {"after": None, "requests": places},
            {"after": 4, "requests": waiting},
        ],
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )
    assert seen["scheduler"] == "OrderedHeadwayScheduler"
    steps = seen["first_step"]
    long, short = ([steps[f"{kind}-waits{i}"] for i in range(3)] for kind in lengths)
    assert max(short) <= min(long)
    assert min(short) < max(long)
    assert len(seen["outputs"]) == len(taught) + len(places) + len(waiting)
    assert seen["left"] == [0, 0]


@pytest.mark.slow
def test_a_server_needs_two_flags(smollm2: Path, tmp_path: Path) -> None:
    past = tmp_path / "past"
    section = {"order": {"name": "boost", "past_file": str(past)}}
    arguments = server_arguments(
        smollm2, section, "--scheduler-cls", SCHEDULER, "--shutdown-timeout", "9"
    )
    with running_server(arguments, tmp_path / "server.log") as server:
        body = {"model": "smollm2", "prompt": "The sea is", "max_tokens": 4}
        with post(server.port, "/v1/completions", body) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
        assert not past.exists()
    assert LengthMemory.load(past).known == 2  # written as the server stops: its prompt, and others
