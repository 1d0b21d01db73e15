"""A real vLLM server forecasts its requests; what it refuses."""

import json
import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from forecast_messages import CHECKPOINT, assert_forecasts_equal, write_all_reading
from forked_vllm import ended_server, post, run_forked, running_server, server_arguments
from listening import listener
from offline_engines import forecasts_between_steps
from recorded_requests import wait_until_recorded

from data_collection.dataset.validate_dataset import validate
from predictor.live.telemetry_messages import Finished, Message, Snapshot
from predictor.training.row_table import RowTable, load_rows

REQUESTS = 8
MAX_TOKENS = 40
FLAGS = [
    *("--worker-cls", "predictor.live.vllm_worker.LiveHeadwayWorker"),
    *("--scheduler-cls", "predictor.live.vllm_scheduler.LiveHeadwayScheduler"),
]


class Heard(NamedTuple):
    """What the telemetry said, what was recorded, and what the clients saw."""

    messages: list[Message]
    answers: list[dict[str, Any]]
    rows: RowTable
    dataset: Path
    checkpoint: Path


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("last", 0.0), id="last"),
        pytest.param(("20", 8.0), id="averaged", marks=pytest.mark.slow),
    ],
)
def heard(
    request: pytest.FixtureRequest, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Heard:
    folder = tmp_path_factory.mktemp("forecasts")
    dataset, reads = folder / "dataset", request.param
    checkpoint = write_all_reading(folder / "predictor", None, *reads)
    with listener() as listening:
        section = {
            "k": 1,  # so that the recorder and the forecaster take the same rows
            "record": {"path": str(dataset), "dtype": "float32", "flush_seconds": 1},
            "forecast": {
                "checkpoint": str(checkpoint),
                "telemetry": {"bind": "", "connect": [listening.endpoint], "instance": "decode-0"},
            },
        }
        arguments = server_arguments(smollm2, section, *FLAGS)
        with running_server(arguments, folder / "server.log") as server:
            answers = ask(server.port)
            listening.wait_until(lambda messages: len(ends(messages)) == REQUESTS)
            listening.wait_until_idle()
            wait_until_recorded(dataset, REQUESTS)
    rows = load_rows(dataset)
    assert (rows.session.layer, rows.session.state_half_life) == reads
    return Heard(listening.messages, answers, rows, dataset, checkpoint)


def ask(port: int) -> list[dict[str, Any]]:
    """What eight clients at once are answered."""
    answers: list[dict[str, Any]] = []

    def complete(i: int) -> None:
        body = {"model": "smollm2", "prompt": f"Write about the number {i}.", "temperature": i / 8}
        with post(port, "/v1/completions", body | {"max_tokens": MAX_TOKENS}) as response:
            answers.append(json.load(response))

    clients = [threading.Thread(target=complete, args=(i,)) for i in range(REQUESTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    return answers


def ends(messages: list[Message]) -> list[Any]:
    return [end for one in messages if isinstance(one, Finished) for end in one.requests]


def test_forecasts_equal_an_offline_pass_over_the_captured_vectors(heard: Heard) -> None:
    assert len(heard.rows.requests) == REQUESTS
    assert_forecasts_equal(heard.messages, heard.rows, heard.checkpoint)


def test_every_end_is_published_once_with_the_true_length(heard: Heard) -> None:
    events = ends(heard.messages)
    assert len(events) == len({event.request_id for event in events}) == REQUESTS
    for answer in heard.answers:
        (event,) = [event for event in events if answer["id"] in event.request_id]
        assert event.total_tokens == answer["usage"]["completion_tokens"]
        assert event.prompt_tokens == answer["usage"]["prompt_tokens"]
        assert event.finish_reason == answer["choices"][0]["finish_reason"]
        assert event.max_tokens == MAX_TOKENS


def test_messages_are_numbered_and_come_each_second_also_when_idle(heard: Heard) -> None:
    first = heard.messages[0].seq  # those sent before the subscription arrived are not heard
    numbers = [message.seq for message in heard.messages]
    assert numbers == list(range(first, first + len(numbers)))
    snapshots = [message for message in heard.messages if isinstance(message, Snapshot)]
    assert {message.instance for message in heard.messages} == {"decode-0"}
    assert 2 <= max(len(snapshot.requests) for snapshot in snapshots) <= REQUESTS
    assert 2 <= max(snapshot.gauges.running for snapshot in snapshots) <= REQUESTS
    assert max(snapshot.gauges.kv_usage for snapshot in snapshots) > 0
    last = next(m for m in reversed(heard.messages) if isinstance(m, Finished))
    idle = [s for s in snapshots if s.seq > last.seq]
    assert len(idle) >= 2 and not any(snapshot.requests for snapshot in idle)
    assert np.diff([snapshot.time for snapshot in idle]).max() < 5


def test_the_recording_beside_it_is_whole(heard: Heard) -> None:
    validate(heard.dataset)
    assert len(heard.rows.requests) == REQUESTS


def test_the_engines_own_scheduler_knows_the_forecasts(smollm2: Path) -> None:
    """In process, where the scheduler can be looked at between steps."""
    in_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    seen = run_forked(
        forecasts_between_steps, str(smollm2), str(CHECKPOINT), 12, environment=in_process
    )
    assert seen["scheduler"] == "LiveHeadwayScheduler"
    assert seen["requests_forecast"] == 3
    assert seen["left_behind"] == 0, "forecasts of ended requests are dropped"
    for generated, at_forecast, mean, cap in seen["forecasts"]:
        assert 0 <= at_forecast <= generated
        assert 1 <= mean <= cap - generated


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["model", "kind"])
def test_an_engine_that_cannot_forecast_does_not_start(
    smollm2: Path, tmp_path: Path, wrong: str
) -> None:
    if wrong == "model":
        checkpoint = other_models_checkpoint(tmp_path)
        expected = "trained on hidden states of acme/other-model"
    else:
        checkpoint = CHECKPOINT.with_name("smollm2-135m-instruct-star")
        expected = "holds a regression model"
    section = {"forecast": {"checkpoint": str(checkpoint), "telemetry": None}}
    printed = ended_server(server_arguments(smollm2, section, *FLAGS), tmp_path / "server.log")
    assert expected in printed


def other_models_checkpoint(folder: Path) -> Path:
    from predictor.models.checkpoint import export_checkpoint
    from predictor.models.survival_mlp import SurvivalMLP

    other = SurvivalMLP(
        edges=[0, 10, 100],
        model="acme/other-model",
        model_revision="1",
        hidden_size=576,
        k=20,
        widths=[8],
        inputs=[],
    )
    export_checkpoint(other, folder / "other", {})
    return folder / "other"
