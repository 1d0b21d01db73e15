"""A vLLM API server with our worker class records what its clients happen to send."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked_vllm import post, running_server, server_arguments
from recorded_requests import wait_until_recorded

from data_collection.dataset.dataset_schema import read_sessions
from data_collection.dataset.validate_dataset import validate
from predictor.training.row_table import RowTable, load_rows


@dataclass(frozen=True)
class Served:
    """What the clients saw, and what was recorded meanwhile."""

    answers: dict[str, dict[str, Any]]
    rows: RowTable
    dataset: Path


@pytest.fixture(scope="module")
def served(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("live")
    dataset = folder / "dataset"
    section = {"k": 5, "record": {"path": str(dataset), "flush_seconds": 1}}
    flags = ["--shutdown-timeout", "60"]  # time for the recorder to write out what it holds
    flags += ["--worker-cls", "data_collection.vllm_worker.HeadwayWorker"]
    flags += ["--scheduler-cls", "data_collection.vllm_scheduler.HeadwayScheduler"]
    arguments = server_arguments(smollm2, section, *flags, longest=1024)
    with running_server(arguments, folder / "server.log") as server:
        answers = talk(server.port)
        wait_until_recorded(dataset, 5)
    yield Served(answers, load_rows(dataset), dataset)


def talk(port: int) -> dict[str, dict[str, Any]]:
    """Two clients at once, one with n = 2, and one that leaves in the middle."""
    answers: dict[str, dict[str, Any]] = {}

    def chat(name: str, text: str, **options: Any) -> None:
        body = {"model": "smollm2", "messages": [{"role": "user", "content": text}], **options}
        with post(port, "/v1/chat/completions", body) as response:
            answers[name] = json.load(response)

    def complete(name: str, prompts: list[str], **options: Any) -> None:
        body = {"model": "smollm2", "prompt": prompts, **options}
        with post(port, "/v1/completions", body) as response:
            answers[name] = json.load(response)

    clients = [
        threading.Thread(
            target=chat, args=("chat", "Name three colours."), kwargs={"n": 2, "max_tokens": 60}
        ),
        threading.Thread(
            target=complete,
            args=("completion", ["The sea is", "Once upon a time"]),
            kwargs={"max_tokens": 23, "temperature": 0, "ignore_eos": True},
        ),
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    body = {"model": "smollm2", "prompt": "A very long story:", "max_tokens": 900, "stream": True}
    with post(port, "/v1/completions", body | {"ignore_eos": True}) as response:
        for _ in range(20):
            line = response.readline()
            if line.startswith(b"data: {"):
                answers["left"] = json.loads(line[6:])
    return answers


def recorded(served: Served, answer: str) -> list[int]:
    """The recorded requests that a client's answer is about."""
    ids, name = served.rows.requests.request_id, served.answers[answer]["id"]
    return [i for i, request_id in enumerate(ids) if name in request_id]


def test_ids_join_and_lengths_are_true(served: Served) -> None:
    requests, usage = served.rows.requests, served.answers["chat"]["usage"]["completion_tokens"]
    chats = requests.total_tokens[recorded(served, "chat")]
    assert len(chats) == 2, "n = 2 is two requests of one group"
    assert chats.sum() == usage
    assert requests.total_tokens[recorded(served, "completion")].tolist() == [23, 23]
    groups = [set(requests.group[recorded(served, name)].tolist()) for name in served.answers]
    assert all(len(group) == 1 for group in groups)
    assert len(set.union(*groups)) == 3


def test_finish_reasons_come_from_the_engine(served: Served) -> None:
    requests = served.rows.requests
    for i in recorded(served, "chat"):
        sample = int(requests.request_id[i].split("_")[0])
        reason = served.answers["chat"]["choices"][sample]["finish_reason"]
        assert bool(requests.censored[i]) == (reason != "stop")
    assert requests.censored[recorded(served, "completion")].all(), "cut at max_tokens"


def test_a_request_whose_client_left_is_censored_with_what_it_had(served: Served) -> None:
    rows, (mine,) = served.rows, recorded(served, "left")
    length = int(rows.requests.total_tokens[mine])
    assert 1 <= length < 900
    assert rows.requests.censored[mine]
    n = rows.generated_tokens[rows.request == mine]
    assert n.tolist() == list(range(0, length, 5))


def test_the_dataset_is_valid_and_nothing_was_lost(served: Served) -> None:
    validate(served.dataset)
    (session,) = read_sessions(served.dataset)
    assert session.model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert session.requests == len(served.rows.requests) == 5
    assert session.dropped_rows == session.refused_rows == 0
    assert np.isfinite(served.rows.vectors()).all()
