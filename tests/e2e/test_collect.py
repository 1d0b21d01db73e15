"""`headway collect` as a user runs it: interrupted, its engine killed, resumed, disk full."""

import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from data_collection.dataset.dataset_schema import requests_files, rows_files
from data_collection.dataset.validate_dataset import validate
from predictor.training.row_table import load_rows

N_PROMPTS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("collect")
    lines = [
        {"id": f"{i}_p", "prompt": f"Tell me a story about the number {i}.", "task": "story"}
        for i in range(N_PROMPTS)
    ]
    lines.append({"id": "long", "prompt": "word " * 2000})
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


@pytest.fixture
def start(headway_command: list[str], folder: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    running: list[subprocess.Popen] = []

    def start(out: Path, *options: str, spawns: bool = False) -> subprocess.Popen:
        """Start a collection; its engine spawns its processes, as for users, or forks them."""
        environment = dict(os.environ)
        if spawns:
            folders = environment["PYTHONPATH"].split(os.pathsep)
            kept = [path for path in folders if Path(path).name != "forked_engines"]
            environment["PYTHONPATH"] = os.pathsep.join(kept)
        command = [
            *headway_command,
            "collect",
            str(out),
            "--prompts",
            str(folder / "prompts.jsonl"),
        ]
        command += ["--engine.dtype", "float32", "--engine.max_model_len", "512"]
        command += ["--sampling.max_tokens", "32", "--arrivals.concurrency", "6"]
        command += ["--record.flush_seconds", "0.5", *options]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the whole group, as in a terminal
        )
        running.append(process)
        return process

    yield start
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def wait_for_rows(dataset: Path, process: subprocess.Popen, shards: int) -> None:
    while len(rows_files(dataset)) < shards:
        assert process.poll() is None, process.communicate()[0][-3000:]
        time.sleep(0.1)


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


def test_interrupt_then_kill_then_finish(
    start: Callable[..., subprocess.Popen], folder: Path
) -> None:
    dataset = folder / "dataset"

    process = start(dataset)
    wait_for_rows(dataset, process, shards=1)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate()
    assert process.returncode == 1, output[-3000:]
    assert "interrupted" in output and "run the same command again" in output
    validate(dataset)
    after_interrupt = driven(dataset)
    assert 0 < len(after_interrupt) < N_PROMPTS

    process = start(dataset)
    wait_for_rows(dataset, process, shards=len(rows_files(dataset)) + 1)
    engine = [
        child for child in psutil.Process(process.pid).children(recursive=True)
        if "Worker" in child.name() or "EngineCore" in child.name()
    ]  # fmt: skip
    assert engine, "the engine's processes name themselves"
    for child in engine:
        child.kill()
    output, _ = process.communicate()
    assert process.returncode == 1, output[-3000:]
    assert "the engine died" in output and "lost" in output
    validate(dataset)
    after_kill = driven(dataset)
    assert set(after_interrupt) < set(after_kill)

    process = start(dataset)
    output, _ = process.communicate()
    assert process.returncode == 0, output[-3000:]
    assert f"of {N_PROMPTS + 1} prompts are done already" in output
    assert "1 prompts are longer than the model's 512 tokens and left out: long" in output
    validate(dataset)
    assert driven(dataset) == {f"prompt-{i}_p": 1 for i in range(N_PROMPTS)}

    rows = load_rows(dataset)
    assert set(rows.requests.task) <= {"story", ""}
    cut = rows.requests.total_tokens == 32
    assert (rows.requests.censored[cut]).all(), "answers that reached the cap are censored"
    assert "3 sessions" in describe(dataset)


def describe(dataset: Path) -> str:
    sessions = (dataset / "README.md").read_text().split("## Sessions")[1]
    return f"{sessions.count('- `')} sessions"


def test_a_full_disk_stops_the_collection_and_leaves_a_valid_dataset(
    start: Callable[..., subprocess.Popen], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        # Room for the first six answers (220 kB of rows) and not for all 24.
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a small disk needs root")
    try:
        process = start(disk / "dataset", "--record.k", "1", spawns=True)
        wait_for_spawned(process)
        output, _ = process.communicate()
        assert process.returncode == 1, output[-3000:]
        assert "recording failed: No space left on device" in output
        assert "run the same command again" in output
        assert rows_files(disk / "dataset"), "some shards fitted"
        validate(disk / "dataset")
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)  # an engine may still end
