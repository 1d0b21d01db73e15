"""`headway collect` as a user runs it: interrupted, its engine killed, resumed, disk full."""

import json
import os
import signal
import subprocess
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil
import pyarrow.parquet as pq
import pytest
from forked_vllm import Command, running_command
from truncated_model import truncated_model

from data_collection.dataset.dataset_commands import export_transcripts
from data_collection.dataset.dataset_schema import requests_files, rows_files
from data_collection.dataset.validate_dataset import validate
from predictor.training.row_table import load_rows

N_PROMPTS = 24


@pytest.fixture(scope="module")
def folder(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("collect")
    truncated_model(smollm2, 8, folder / "model")
    write_prompts(folder / "prompts.jsonl", N_PROMPTS)
    return folder


def write_prompts(path: Path, count: int) -> None:
    """Write so many prompts, and one that is too long."""
    lines = [
        {"id": f"{i}_p", "prompt": f"Tell me a story about the number {i}.", "task": "story"}
        for i in range(count)
    ]
    lines.append({"id": "long", "prompt": "word " * 2000})
    path.write_text("\n".join(map(json.dumps, lines)))


def arguments(folder: Path, out: Path, *options: str) -> list[str]:
    return [
        *("collect", str(out)),
        *("--prompts", str(folder / "prompts.jsonl"), "--model", str(folder / "model")),
        *("--engine.dtype", "float32", "--engine.max_model_len", "512"),
        *("--sampling.max_tokens", "32", "--arrivals.concurrency", "4"),
        *("--record.flush_seconds", "0.5", *options),
    ]


def ran(collect: list[str], log: Path) -> tuple[int | None, str]:
    """The status of a command that has ended, and what it printed."""
    with running_command(collect, log) as command:
        return command.end()


def wait_for_rows(dataset: Path, command: Command, shards: int) -> None:
    deadline = time.monotonic() + 600
    while len(rows_files(dataset)) < shards:
        assert command.is_running(), command.end()[1][-3000:]
        assert time.monotonic() < deadline, f"{shards} shards were never written"
        time.sleep(0.05)


def wait_for_spawned(process: subprocess.Popen) -> None:
    while process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if any("spawn_main" in part for part in child.cmdline()):
                    return
        time.sleep(0.05)
    raise AssertionError(f"nothing was spawned: {process.communicate()[0][-3000:]}")


def driven(dataset: Path) -> Counter[str]:
    """How often each prompt was answered to its end."""
    names: Counter[str] = Counter()
    for file in requests_files(dataset):
        for row in pq.read_table(file).to_pylist():
            if row["finish_reason"] in ("stop", "length"):
                names[row["external_id"]] += 1
    return names


@pytest.mark.slow
def test_interrupt_then_kill_then_finish(folder: Path) -> None:
    dataset = folder / "dataset"
    # One at a time: the others take many times as long as the first few, which are waited for.
    collect = arguments(folder, dataset, "--arrivals.concurrency", "1")

    with running_command(collect, folder / "interrupted.log") as command:
        wait_for_rows(dataset, command, shards=1)
        os.killpg(command.pid, signal.SIGINT)  # as Ctrl-C does in a terminal
        status, output = command.end()
    assert status == 1, output[-3000:]
    assert "interrupted" in output and "run the same command again" in output
    validate(dataset)
    after_interrupt = driven(dataset)
    assert 0 < len(after_interrupt) < N_PROMPTS

    with running_command(collect, folder / "killed.log") as command:
        wait_for_rows(dataset, command, shards=len(rows_files(dataset)) + 1)
        engine = [
            child for child in psutil.Process(command.pid).children(recursive=True)
            if "Worker" in child.name() or "EngineCore" in child.name()
        ]  # fmt: skip
        assert engine, "the engine's processes name themselves"
        for child in engine:
            child.kill()
        status, output = command.end()
    assert status == 1, output[-3000:]
    assert "the engine died" in output and "lost" in output
    validate(dataset)
    after_kill = driven(dataset)
    assert set(after_interrupt) < set(after_kill)

    status, output = ran(arguments(folder, dataset), folder / "finished.log")
    assert status == 0, output[-3000:]
    assert f"of {N_PROMPTS + 1} prompts are done already" in output
    assert "1 prompts are longer than the model's 512 tokens and left out: long" in output
    validate(dataset)
    assert driven(dataset) == {f"prompt-{i}_p": 1 for i in range(N_PROMPTS)}

    rows = load_rows(dataset)
    assert set(rows.requests.task) <= {"story", ""}
    cut = rows.requests.total_tokens == 32
    assert (rows.requests.censored[cut]).all(), "answers that reached the cap are censored"
    assert (dataset / "README.md").read_text().split("## Sessions")[1].count("- `") == 3


def test_transcripts_give_the_rows_of_the_run_that_they_are_of(folder: Path) -> None:
    """Same tokens, same states, also where the answer is prefilled in several parts."""
    live, again = folder / "live", folder / "again"
    transcripts = folder / "mine.parquet"
    status, output = ran(arguments(folder, live), folder / "live.log")
    assert status == 0, output[-3000:]
    assert f"{len(load_rows(live))} rows of {N_PROMPTS} requests recorded" in output
    export_transcripts(live, transcripts)

    replay = arguments(
        folder, again, "--transcripts", str(transcripts),
        "--engine.extra", '{"max_num_batched_tokens": 40, "enable_chunked_prefill": true}',
    )  # fmt: skip
    status, output = ran(replay, folder / "again.log")
    assert status == 0, output[-3000:]
    validate(again)
    status, output = ran(replay, folder / "resumed.log")
    assert status == 0 and f"{N_PROMPTS} of {N_PROMPTS} transcripts are done already" in output

    was, found = states(live), states(again)
    assert was.keys() == found.keys() and len(was) == 2 * N_PROMPTS
    for key, state in was.items():
        cosine = state @ found[key] / np.linalg.norm(state) / np.linalg.norm(found[key])
        assert cosine >= 0.9999, (key, cosine)
    assert answers(again) == answers(live)

    other = arguments(folder, folder / "other", "--transcripts", str(transcripts))
    other[other.index("--model") + 1] = "smollm2"
    status, output = ran(other, folder / "other.log")
    assert status == 1 and "whose states would be of answers that it did not give" in output


def states(dataset: Path) -> dict[tuple[str, int], npt.NDArray[np.float64]]:
    """The hidden states of a dataset, by request and number of generated tokens."""
    name = {
        row["request_id"]: row["external_id"]
        for file in requests_files(dataset)
        for row in pq.read_table(file).to_pylist()
    }
    return {
        (name[row["request_id"]], row["generated_tokens"]): np.array(row["hidden_state"])
        for file in rows_files(dataset)
        for row in pq.read_table(file).to_pylist()
    }


def answers(dataset: Path) -> dict[str, dict[str, object]]:
    """All that is known of the requests, without the ids that an engine gives."""
    return {
        row["external_id"]: {k: v for k, v in row.items() if k != "request_id"}
        for file in requests_files(dataset)
        for row in pq.read_table(file).to_pylist()
    }


@pytest.mark.slow
def test_a_full_disk_stops_the_collection_and_leaves_a_valid_dataset(
    headway_command: list[str], folder: Path, tmp_path: Path
) -> None:
    """As for users: the engine spawns its processes, which tests otherwise fork."""
    kept = [
        path
        for path in os.environ["PYTHONPATH"].split(os.pathsep)
        if Path(path).name != "forked_engines"
    ]
    # Far from their end when the disk is full, which the engine is asked for once a second.
    many = tmp_path / "many.jsonl"
    write_prompts(many, 10 * N_PROMPTS)
    collect = arguments(folder, tmp_path / "disk" / "dataset", "--record.k", "1")
    collect += ["--prompts", str(many)]
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        # Room for the first six answers (220 kB of rows) and not for four times as many.
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a small disk needs root")
    try:
        process = subprocess.Popen(
            [*headway_command, *collect],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(kept)},
        )
        try:
            wait_for_spawned(process)
            output, _ = process.communicate()
        finally:
            process.kill()
        assert process.returncode == 1, output[-3000:]
        assert "recording failed: No space left on device" in output
        assert "run the same command again" in output
        assert rows_files(disk / "dataset"), "some shards fitted"
        validate(disk / "dataset")
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)  # an engine may still end
