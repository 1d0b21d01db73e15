"""Forecasts from a trace's own past: what files say of prefixes, and what is known when."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rescheduler.ordering import create_order
from rescheduler.routing import create_policy
from rescheduler.simulator.config.simulation_config import read_config
from rescheduler.simulator.results.metrics import RunResult
from rescheduler.simulator.simulation import run, run_setup
from rescheduler.simulator.workloads.trace import ResampledTrace, TraceBlock, first_requests
from rescheduler.simulator.workloads.trace_files import TraceFile

SHORT, LONG = 10, 400


def read(path: Path) -> TraceBlock:
    return first_requests(TraceFile(path), np.random.default_rng(0), 1_000_000)


def keys(block: TraceBlock) -> list[list[int]]:
    return [np.frombuffer(raw, dtype=np.uint64).tolist() for raw in block.prefixes]


def mooncake(path: Path, hash_ids: list[object]) -> Path:
    with gzip.open(path, "wt") as file:
        for i, ids in enumerate(hash_ids):
            line = {"timestamp": 1000 * i, "input_length": 600, "output_length": 5}
            file.write(json.dumps(line | ({} if ids is None else {"hash_ids": ids})) + "\n")
    return path


def test_blocks_of_a_prompt_are_read_as_published(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "trace.jsonl.gz", [[0, 1, 2], [0], [], None, [0, 1, 2, 3]])
    assert keys(read(path)) == [[0, 1, 2], [0], [], [], [0, 1, 2, 3]]


def test_hashes_of_other_kinds_stand_for_themselves_or_for_nothing(tmp_path: Path) -> None:
    ids: list[object] = [["a", "b"], ["a", "c"], [1 << 60], [-4], {"x": 1}, 7]
    read_keys = keys(read(mooncake(tmp_path / "trace.jsonl.gz", ids)))
    assert read_keys[0][0] == read_keys[1][0]
    assert read_keys[0][1] != read_keys[1][1]
    assert [len(one) for one in read_keys] == [2, 2, 1, 1, 0, 0]


def test_a_long_prompt_has_its_first_and_last_blocks(tmp_path: Path) -> None:
    read_keys = keys(read(mooncake(tmp_path / "trace.jsonl.gz", [list(range(1000))])))
    assert read_keys == [[*range(16), *range(952, 1000)]]


@pytest.mark.parametrize(
    "header",
    [
        "arrival_s,input_tokens,output_tokens,session",
        "Timestamp,Request tokens,Response tokens,Session ID",
    ],
)
def test_a_column_tells_conversations(tmp_path: Path, header: str) -> None:
    path = tmp_path / "trace.csv"
    rows = [f"{i},10,20,{name}" for i, name in enumerate(["a", "b", "a", "", "b"] * 3)]
    path.write_text("\n".join([header, *rows]) + "\n")
    first, second, again, none, _ = keys(read(path))[:5]
    assert first == again
    assert first != second
    assert none == []


def test_a_trace_without_them_has_no_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,10,20\n")
    assert len(read(path).prefixes) == 0


def block(n: int, gap: float, spread_clients: bool) -> TraceBlock:
    """Return requests that are short and long in turn, by client or by conversation."""
    number = np.arange(n)
    name = number % 2 if not spread_clients else number * 0
    prefixes = np.array(
        [np.array([7, i % 2], dtype=np.uint64).tobytes() for i in range(n)], dtype=np.object_
    )
    return TraceBlock(
        arrival=number.astype(np.float64) * gap,
        prompt=np.full(n, 16),
        output=np.where(number % 2, LONG, SHORT),
        template=np.full(n, -1),
        client=name,
        prefixes=prefixes if spread_clients else np.empty(0, dtype=np.object_),
    )


def test_what_is_drawn_twice_has_not_been_there_before() -> None:
    recorded = block(100, 1.0, True)
    drawn = first_requests(
        ResampledTrace("trace", recorded, 1000), np.random.default_rng(0), 1_000_000
    )
    runs = np.split(np.array(keys(drawn)), 1000 // 5)  # a run has a twentieth of the requests
    first = [{tuple(one) for one in run} for run in runs]
    assert all(len(one) == 2 for one in first)
    assert len(set.union(*first)) == 2 * len(runs)


def served(path: Path, forecast: str, order: str) -> RunResult:
    values: dict[str, Any] = {"cluster": {"instances": 1, "slots": 4}, "clock": "independent"}
    values |= {"trace": {"path": str(path)}, "arrivals": {"kind": "trace"}, "policies": "jsq"}
    values |= {"forecast": {"name": forecast}, "pool": {"limit": 10_000}}
    config = read_config(values)
    return run(run_setup(config), create_policy("jsq"), 0, order=create_order(order))


def csv(path: Path, columns: TraceBlock, by: str) -> Path:
    lines = [f"arrival_s,input_tokens,output_tokens,{by}"]
    for i in range(len(columns.prompt)):
        lines.append(f"{columns.arrival[i]},16,{columns.output[i]},name{i % 2}")
    path.write_text("\n".join(lines) + "\n")
    return path


def latency(result: RunResult) -> float:
    return float((result.requests.end - result.requests.arrival).mean())


@pytest.mark.parametrize("by", ["client", "session"])
def test_short_requests_go_first_once_their_kind_has_been_seen(tmp_path: Path, by: str) -> None:
    path = csv(tmp_path / "trace.csv", block(600, 0.1, False), by)
    boosted = served(path, "past", "boost").requests
    assert sorted(boosted.number.tolist()) == [*range(600)]
    assert boosted.output[np.argsort(boosted.number)].tolist() == [SHORT, LONG] * 300
    as_they_come = latency(served(path, "none", "fcfs"))
    past, truth = (latency(served(path, name, "shortest")) for name in ("past", "oracle"))
    assert truth <= past < 0.75 * as_they_come
    assert as_they_come - past > 0.8 * (as_they_come - truth)


def test_nothing_is_known_before_anything_has_ended(tmp_path: Path) -> None:
    path = csv(tmp_path / "trace.csv", block(100, 0.0, False), "client")
    blind, past = served(path, "none", "fcfs"), served(path, "past", "shortest")
    assert past.requests.start.tolist() == blind.requests.start.tolist()
