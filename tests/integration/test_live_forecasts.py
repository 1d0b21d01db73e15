"""A real vLLM server, scheduling asynchronously, forecasts its requests; what it refuses."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq
from serving import free_port, post, wait_until_ready

from data_collection.dataset.validate_dataset import validate
from predictor.live.telemetry_messages import (
    TOPIC,
    Finished,
    Forecasts,
    Message,
    Snapshot,
    decode_message,
    decode_survival,
)
from predictor.models.checkpoint import load_predictor
from predictor.models.hidden_state_mlp import RequestRows
from predictor.training.row_table import RowTable, load_rows

CHECKPOINT = Path(__file__).parents[2] / "checkpoints" / "smollm2-135m-instruct"
REQUESTS = 8
MAX_TOKENS = 40
LIVE = [
    "--worker-cls",
    "predictor.live.vllm_worker.LiveHeadwayWorker",
    "--scheduler-cls",
    "predictor.live.vllm_scheduler.LiveHeadwayScheduler",
]


@dataclass
class Heard:
    """What the telemetry said, what was recorded, and what the clients saw."""

    messages: list[Message] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    rows: RowTable | None = None
    dataset: Path | None = None


def server_command(model: Path, port: int, section: dict[str, Any]) -> list[str]:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", "smollm2", "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    command += ["--max-model-len", "512", "--max-num-seqs", "8", *LIVE]
    return [*command, "--additional-config", json.dumps({"headway": section})]


@pytest.fixture(scope="module")
def heard(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Heard]:
    folder = tmp_path_factory.mktemp("forecasts")
    port, log, heard = free_port(), folder / "server.log", Heard(dataset=folder / "dataset")
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.subscribe(b"")
        endpoint = f"tcp://127.0.0.1:{subscriber.bind_to_random_port('tcp://127.0.0.1')}"
        section = {
            "k": 1,  # so that the recorder and the forecaster take the same rows
            "record": {"path": str(heard.dataset), "dtype": "float32", "flush_seconds": 1},
            "forecast": {
                "checkpoint": str(CHECKPOINT),
                "telemetry": {"bind": "", "connect": [endpoint], "instance": "decode-0"},
            },
        }
        listening = threading.Event()

        def listen() -> None:
            while not listening.is_set():
                if subscriber.poll(200):
                    topic, payload = subscriber.recv_multipart()
                    assert topic == TOPIC
                    heard.messages.append(decode_message(payload))

        listener = threading.Thread(target=listen)
        listener.start()
        with log.open("w") as output:
            server = subprocess.Popen(
                [*server_command(smollm2, port, section), "--async-scheduling"],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            wait_until_ready(port, server, log)
            ask(port, heard)
            os.kill(server.pid, signal.SIGTERM)
            server.wait(timeout=60)
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()
            listening.set()
            listener.join()
    heard.rows = load_rows(heard.dataset)
    yield heard


def ask(port: int, heard: Heard) -> None:
    """Eight clients at once, and a pause in which the engine is idle."""

    def complete(i: int) -> None:
        body = {"model": "smollm2", "prompt": f"Write about the number {i}.", "temperature": 0}
        with post(port, "/v1/completions", body | {"max_tokens": MAX_TOKENS}) as response:
            heard.answers.append(json.load(response))

    clients = [threading.Thread(target=complete, args=(i,)) for i in range(REQUESTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    threading.Event().wait(3)


def told(heard: Heard) -> dict[tuple[str, int], tuple[int, np.ndarray]]:
    """(request id, n when it was forecast) -> tokens left and curve."""
    found = {}
    for message in heard.messages:
        if isinstance(message, Snapshot | Forecasts):
            coded = [request.survival for request in message.requests]
            curves = decode_survival(coded, len(message.edges))
            for request, curve in zip(message.requests, curves, strict=True):
                found[request.request_id, request.forecast_at] = (request.tokens_left, curve)
    return found


def test_forecasts_equal_an_offline_pass_over_the_captured_vectors(heard: Heard) -> None:
    """Within 1e-4 in probability: the wire rounds to 1/65,535, the batches differ."""
    rows, predictor = heard.rows, load_predictor(str(CHECKPOINT))
    assert rows is not None
    offline = predictor.forecast(
        RequestRows(torch.from_numpy(rows.vectors()), torch.from_numpy(rows.counts()))
    )
    curves = told(heard)
    compared = 0
    for i in range(len(rows)):
        name = rows.requests.request_id[rows.request[i]]
        key = (name, int(rows.generated_tokens[i]))
        if key in curves:
            left, curve = curves[key]
            np.testing.assert_allclose(curve, offline.survival[i], atol=1e-4)
            assert left == rows.tokens_left()[i]
            compared += 1
    assert compared >= 0.9 * len(rows) > 0
    firsts = {name for name, n in curves if n == 0}
    assert len(firsts) == REQUESTS, "every request is forecast at the end of its prefill"


def test_every_end_is_told_once_with_the_true_length(heard: Heard) -> None:
    events = [
        event
        for message in heard.messages
        if isinstance(message, Finished)
        for event in message.requests
    ]
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
    assert heard.dataset is not None and heard.rows is not None
    validate(heard.dataset)
    assert len(heard.rows.requests) == REQUESTS


def test_the_engines_own_scheduler_knows_the_forecasts(smollm2: Path) -> None:
    """In process, where the scheduler can be looked at between steps."""
    script = Path(__file__).with_name("scheduler_forecasts.py")
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        [sys.executable, str(script), str(smollm2), str(CHECKPOINT)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["requests_forecast"] == 3
    assert seen["left_behind"] == 0, "forecasts of ended requests are dropped"
    for generated, at_forecast, mean, cap in seen["forecasts"]:
        assert 0 <= at_forecast <= generated
        assert 1 <= mean <= cap - generated


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
    done = subprocess.run(
        server_command(smollm2, free_port(), section),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0
    assert expected in done.stdout + done.stderr


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
