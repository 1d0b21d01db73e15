"""Traces: published files, generated lengths, arrival processes."""

import gzip
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from rescheduler.simulator.workloads.length_generators import TASKS, FiveTasks
from rescheduler.simulator.workloads.trace import (
    BLOCK_REQUESTS,
    MOST_CLIENTS,
    ResampledTrace,
    Trace,
    TraceBlock,
    first_requests,
    timed_blocks,
)
from rescheduler.simulator.workloads.trace_files import GENERATORS, TraceFile, create_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:04.0319600,110,27
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 23:59:59.500000+00:00,1452,3
2024-05-11 00:00:00.250000+00:00,656,14
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,API log
"""
MOONCAKE = """{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}
{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46]}
{"timestamp": 30535, "input_length": 12, "output_length": 1, "hash_ids": []}
"""
HEADWAY = "arrival_s,input_tokens,output_tokens,client\n7.5,263,832,a\n7.75,299,432,b\n"
LENGTHS = "bench,input_tokens,output_tokens\nv2,29,610\nv2,26,967\n"


def write(path: Path, text: str) -> Path:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def whole(trace: Trace, seed: int = 0) -> TraceBlock:
    return first_requests(trace, np.random.default_rng(seed), 10**9)


def timed(trace: Trace, kind: Any, **options: Any) -> TraceBlock:
    blocks = list(timed_blocks(trace, np.random.default_rng(0), kind, **options))
    return TraceBlock(*map(np.concatenate, zip(*blocks, strict=True)))


@pytest.mark.parametrize("name", ["log.txt", "log.gz"])
@pytest.mark.parametrize(
    ("text", "arrival", "prompt", "output"),
    [
        (LENGTHS, None, [29, 26], [610, 967]),
        (AZURE, [0, 0.052, 0.052], [4808, 3180, 110], [10, 8, 27]),
        (AZURE_2024, [0, 0.75], [1452, 656], [3, 14]),
        (BURSTGPT, [0, 113], [472, 417], [18, 276]),
        (MOONCAKE, [0, 3.053, 3.053], [6955, 6472, 12], [52, 26, 1]),
        (HEADWAY, [0, 0.25], [263, 299], [832, 432]),
    ],
)
def test_published_formats_are_read(
    tmp_path: Path,
    name: str,
    text: str,
    arrival: list[float] | None,
    prompt: list[int],
    output: list[int],
) -> None:
    trace = TraceFile(write(tmp_path / name, text))
    block = whole(trace)
    assert trace.name == name
    assert trace.has_arrivals == (arrival is not None)
    assert np.isnan(block.arrival).all() if arrival is None else block.arrival.tolist() == arrival
    assert block.prompt.tolist() == prompt
    assert block.output.tolist() == output
    assert (block.template == -1).all()


def test_a_file_may_be_read_in_part_and_without_its_empty_requests(tmp_path: Path) -> None:
    path = write(tmp_path / "lengths.csv", LENGTHS + "v2,0,5\nv2,3,0\n\nv2,8,4.0\n")
    assert whole(create_trace(path=path, skip_empty=True)).output.tolist() == [610, 967, 4]
    assert whole(create_trace(path=path, requests=1)).prompt.tolist() == [29]
    for both in ({}, {"name": "star", "path": path}):
        with pytest.raises(ValueError, match="either the name of a generator or the path"):
            create_trace(**both)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"log: no requests in it"),
        ("arrival_s,input_tokens,output_tokens\n", r"log: no requests in it"),
        ("time,in,out\n1,2,3\n", r"log:1: unknown header 'time,in,out'; known: arrival_s,input_"),
        ("TIMESTAMP,ContextTokens\n", r"log:1: has .* as Azure's .*lacks 'GeneratedTokens'"),
        (AZURE + "2023-11-16 18:18:00,12\n", r"log:5: 2 columns, but the header has 3"),
        (AZURE + "2023-11-16 18:18:00,12,x\n", r"log:5: GeneratedTokens is 'x', no whole number"),
        (AZURE + "2023-11-16 18:18:00,1.5,9\n", r"log:5: ContextTokens is '1\.5', no whole number"),
        (AZURE + "yesterday,12,9\n", r"log:5: TIMESTAMP is 'yesterday', no time"),
        (AZURE + "2023-11-16 18:17:00,12,9\n", r"log:5: arrives before the request above it; sort"),
        (BURSTGPT + "nan,GPT-4,3,4,7,API log\n", r"log:5: nan is not a time"),
        (BURSTGPT + "119,GPT-4,0,4,4,API log\n", r"log:5: 0 prompt tokens; .* take the line out"),
        (AZURE + "2023-11-16 18:18:00,7,0\n", r"log:5: 0 output tokens; .*skip_empty: true"),
        (HEADWAY + "9,-4,3,c\n", r"log:4: -4 prompt tokens; a length cannot be negative"),
        (HEADWAY + "9,4,20000000,c\n", r"log:4: 20000000 output tokens are more than 10000000"),
        (HEADWAY + "9,4,5," + "c" * 300 + "\n", r"log:4: a client of 300 characters, 256 are the"),
        ("input_tokens,output_tokens,client,client\n", r"log:1: has the column 'client' twice"),
        (MOONCAKE + '{"timestamp": 1\n', r"log:4: no request of Mooncake's"),
        (MOONCAKE + '{"timestamp": 40000, "input_length": 3}\n', r"log:4: .*`output_length`"),
        (MOONCAKE + '{"timestamp": 9, "input_length": 3, "output_length": 1}', r"log:4: arrives b"),
        ("x" * 2_000_000, r"log:1: a line of over 1 MiB"),
    ],
)
def test_an_invalid_trace_is_reported_by_file_and_line(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        whole(TraceFile(write(tmp_path / "log", text)))


def test_damaged_bytes_are_reported_by_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(HEADWAY.encode() + b"9,4,5,\xff\xfe\n")
    with pytest.raises(ValueError, match=r"log:\d: not UTF-8"):
        whole(TraceFile(path))
    rows = "".join(f"{i},{i % 977 + 1},{i % 613 + 1}\n" for i in range(20_000))
    zipped = gzip.compress(("arrival_s,input_tokens,output_tokens\n" + rows).encode())
    path.write_bytes(zipped[: len(zipped) // 2])
    with pytest.raises(ValueError, match=r"log:\d{4,}: the gzip file is not whole"):
        whole(TraceFile(path))
    path.write_bytes(zipped[:2000] + bytes(100) + zipped[2100:])
    with pytest.raises(ValueError, match=r"log:\d+: (the gzip file is not whole|not UTF-8)"):
        whole(TraceFile(path))
    with pytest.raises(ValueError, match="nowhere: cannot be read: No such file"):
        TraceFile(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        TraceFile(tmp_path)


def test_clients_are_numbered_as_they_appear(tmp_path: Path) -> None:
    rows = [f"{i},9,{i % 7 + 1},{name}\n" for i, name in enumerate(["b", "a", "b", "", " a ", "c"])]
    header = "arrival_s,input_tokens,output_tokens,client\n"
    trace = TraceFile(write(tmp_path / "log.csv", header + "".join(rows)))
    block = whole(trace)
    assert block.client.tolist() == [0, 1, 0, 2, 1, 3]
    assert timed(trace, "poisson").client.tolist() == [0, 1, 0, 2, 1, 3]
    drawn = whole(ResampledTrace("log", block, 500))
    of_output = {(1, 0), (2, 1), (3, 0), (4, 2), (5, 1), (6, 3)}
    assert set(zip(drawn.output.tolist(), drawn.client.tolist(), strict=True)) == of_output
    for text in (AZURE, BURSTGPT, MOONCAKE, LENGTHS):
        assert not whole(TraceFile(write(tmp_path / "log", text))).client.any()


def test_clients_of_a_file_are_bounded(tmp_path: Path) -> None:
    """Memory and the time of a decision grow with them; whoever comes too late shares a number."""
    n = MOST_CLIENTS + 50
    rows = "".join(f"9,3,c{i}\n" for i in (*range(n), 0, 1, n - 1))
    trace = TraceFile(write(tmp_path / "log.csv", "input_tokens,output_tokens,client\n" + rows))
    client = whole(trace).client
    assert client[:MOST_CLIENTS].tolist() == list(range(MOST_CLIENTS))
    assert (client[MOST_CLIENTS:n] == MOST_CLIENTS - 1).all()
    assert client[n:].tolist() == [0, 1, MOST_CLIENTS - 1]


def test_blocks_make_up_the_file(tmp_path: Path) -> None:
    n = 2 * BLOCK_REQUESTS + 5
    lengths = np.random.default_rng(0).integers(1, 3000, (n, 2))
    lines = [f"{10 + i / 8},{p},{o}\n" for i, (p, o) in enumerate(lengths.tolist())]
    path = write(tmp_path / "long.gz", "arrival_s,input_tokens,output_tokens\n" + "".join(lines))
    blocks = list(TraceFile(path).blocks(np.random.default_rng(0)))
    assert [len(block.prompt) for block in blocks] == [BLOCK_REQUESTS, BLOCK_REQUESTS, 5]
    joined = whole(TraceFile(path))
    assert joined.arrival.tolist() == (np.arange(n) / 8).tolist()
    assert np.stack([joined.prompt, joined.output], axis=1).tolist() == lengths.tolist()
    sample = first_requests(TraceFile(path), np.random.default_rng(0), BLOCK_REQUESTS + 1)
    assert sample.output.tolist() == lengths[: BLOCK_REQUESTS + 1, 1].tolist()


@pytest.mark.parametrize("name", sorted(set(GENERATORS) - {"replay"}))
def test_generators_give_the_requests_they_were_asked_for(name: str) -> None:
    trace = create_trace(name, requests=BLOCK_REQUESTS + 10)
    sizes = [len(block.prompt) for block in trace.blocks(np.random.default_rng(1))]
    block, again, other = (whole(trace, seed) for seed in (1, 1, 2))
    assert sizes == [BLOCK_REQUESTS, 10]
    assert not trace.has_arrivals
    assert np.isnan(block.arrival).all()
    assert block.prompt.min() >= 1 <= block.output.min()
    assert block.prompt.dtype == block.output.dtype == block.template.dtype == np.int64
    np.testing.assert_array_equal(block.prompt, again.prompt)
    assert (block.prompt != other.prompt).any()


def test_geometric_outputs_end_with_one_probability() -> None:
    block = whole(create_trace("geometric", requests=60_000, mean_prompt=40, mean_output=50))
    assert block.output.mean() == pytest.approx(50, rel=0.02)
    assert block.output.std() == pytest.approx(np.sqrt(50 * 49), rel=0.02)
    assert (block.output > 100).mean() == pytest.approx((1 - 1 / 50) ** 100, rel=0.05)
    assert (block.prompt.min(), block.prompt.max()) == (1, 79)
    assert block.prompt.mean() == pytest.approx(40, rel=0.02)
    other = whole(create_trace("geometric", requests=60_000, mean_prompt=40, prompts="geometric"))
    assert other.prompt.std() == pytest.approx(np.sqrt(40 * 39), rel=0.03)


def test_lognormal_lengths_have_their_median_and_are_cut() -> None:
    options = {"prompt_median": 80, "prompt_sigma": 0.5, "output_median": 300}
    options |= {"output_sigma": 1.2, "output_max": 1000}
    block = whole(create_trace("lognormal", requests=60_000, **options))
    assert np.median(block.prompt) == pytest.approx(80, rel=0.02)
    assert np.log(block.prompt).std() == pytest.approx(0.5, rel=0.03)
    assert np.median(block.output) == pytest.approx(300, rel=0.02)
    assert block.output.max() == 1000
    assert (block.output == 1000).mean() == pytest.approx(0.158, abs=0.01)  # P(z > ln(10/3)/1.2)


def test_homogeneous_outputs_are_alike() -> None:
    block = whole(create_trace("homogeneous", requests=20_000, output=64, longest_prompt=9))
    assert set(block.output.tolist()) == {64}
    np.testing.assert_allclose(np.bincount(block.prompt)[1:] / 20_000, 1 / 9, rtol=0.1)


@pytest.mark.parametrize(
    ("subset", "part", "levels", "tokens"),
    [
        ("all", "prompt", (50, 75, 90, 95), (251, 758, 1796, 2461)),
        ("all", "output", (50, 75, 90, 95), (34, 134, 272, 460)),
        ("gpt4_conversation", "prompt", (50, 80, 95, 99), (582, 1427, 2345, 3549)),
        ("gpt4_conversation", "output", (50, 80, 95, 99), (243, 434, 669, 964)),
    ],
)
def test_burstgpt_like_lengths_have_the_published_quantiles(
    subset: str, part: str, levels: tuple[int, ...], tokens: tuple[int, ...]
) -> None:
    block = whole(create_trace("burstgpt_like", requests=200_000, subset=subset))
    lengths = getattr(block, part)
    # Those of the whole log are over failures too, 1.8% that have no tokens.
    failures = round(len(lengths) * 25_443 / (1_429_737 - 25_443)) if subset == "all" else 0
    found = np.percentile(np.concatenate([np.zeros(failures), lengths]), levels)
    np.testing.assert_allclose(found, tokens, rtol=0.03)


def test_burstgpt_like_lengths_have_the_published_means_and_spreads() -> None:
    conversation = whole(
        create_trace("burstgpt_like", requests=200_000, subset="gpt4_conversation")
    )
    assert conversation.prompt.mean() == pytest.approx(830, rel=0.01)
    assert conversation.output.mean() == pytest.approx(271, rel=0.01)
    everything = whole(create_trace("burstgpt_like", requests=200_000))
    assert np.log(everything.prompt).std() == pytest.approx(1.134, rel=0.03)
    assert np.log(everything.output).std() == pytest.approx(1.817, rel=0.05)


class Lengths(NamedTuple):
    """Outputs in tokens, and the shares of those below 1,000 and above 30,000."""

    mean: float
    median: float
    std: float
    percentiles: dict[int, float]
    short: float
    long: float


STAR_LENGTHS = {
    # Means and medians are published (Wang et al. 2026, Table 2), and for ShareGPT std and shares;
    # the rest are those of the generator when it was fitted.
    "sharegpt": Lengths(
        7542, 1536, 12_005, {10: 596, 25: 911, 90: 32_670, 95: 32_734, 99: 32_757}, 0.2922, 0.1729
    ),
    "alpaca": Lengths(
        8596, 987, 13_354, {10: 366, 25: 566, 90: 32_739, 95: 32_748, 99: 32_756}, 0.5062, 0.2213
    ),
}


@pytest.mark.parametrize("dataset", STAR_LENGTHS)
def test_star_lengths_are_those_of_its_table_2(dataset: str) -> None:
    expected = STAR_LENGTHS[dataset]
    block = whole(create_trace("star", requests=300_000, dataset=dataset))
    output = block.output
    assert output.mean() == pytest.approx(expected.mean, rel=0.015)
    assert np.median(output) == pytest.approx(expected.median, rel=0.015)
    for level, tokens in expected.percentiles.items():
        assert np.percentile(output, level) == pytest.approx(tokens, rel=0.015)
    assert output.std() == pytest.approx(expected.std, rel=0.015)
    assert (output < 1000).mean() == pytest.approx(expected.short, abs=0.004)
    assert (output > 30_000).mean() == pytest.approx(expected.long, abs=0.004)
    assert (block.prompt + output).max() == 32_768 - 6


def classes_of(block: TraceBlock) -> list[str]:
    prompts, decodes = block.prompt >= 500, block.output >= 250
    return [
        "LH"[p] + "LH"[d] for p, d in zip(prompts.astype(int), decodes.astype(int), strict=True)
    ]


def test_the_scenarios_of_paper_001_differ_in_the_order_alone() -> None:
    for scenario, first, second in (("lh_then_hl", "LH", "HL"), ("hl_then_lh", "HL", "LH")):
        classes = classes_of(whole(create_trace("mixed_classes", scenario=scenario)))
        assert classes == [first] * 1500 + [second] * 1500
    mixed = classes_of(whole(create_trace("mixed_classes")))
    assert sorted(mixed) == ["HL"] * 1500 + ["LH"] * 1500
    assert 650 < mixed[:1500].count("LH") < 850
    four = classes_of(whole(create_trace("mixed_classes", scenario="random")))
    assert {name: four.count(name) for name in ("LL", "LH", "HL", "HH")} == dict.fromkeys(
        ("LL", "LH", "HL", "HH"), 750
    )


def test_phases_and_counts_go_on_across_blocks() -> None:
    n = 2 * BLOCK_REQUESTS + 1
    phases = classes_of(whole(create_trace("mixed_classes", requests=n, scenario="hl_then_lh")))
    assert phases == ["HL"] * (BLOCK_REQUESTS + 1) + ["LH"] * BLOCK_REQUESTS
    mixed = classes_of(whole(create_trace("mixed_classes", requests=n - 1, scenario="random")))
    assert [mixed.count(name) for name in ("LL", "LH", "HL", "HH")] == [BLOCK_REQUESTS // 2] * 4


def test_every_task_has_the_mean_and_the_heavy_share_of_the_table() -> None:
    for i, task in enumerate(TASKS.values()):
        shares = tuple(float(j == i) for j in range(len(TASKS)))
        trace = FiveTasks(requests=60_000, shares=shares, longest=100_000)
        block = first_requests(trace, np.random.default_rng(i), 60_000)
        assert block.output.mean() == pytest.approx(task.mean_output, rel=0.04)
        assert np.mean(block.output >= 125) == pytest.approx(task.heavy, abs=0.01)
        assert block.prompt.mean() == pytest.approx(task.mean_prompt, rel=0.04)


def test_the_mix_is_the_tables_and_may_drift() -> None:
    mixed = first_requests(create_trace("five_tasks"), np.random.default_rng(0), 2000)
    assert mixed.prompt.max() <= 1000 and (mixed.prompt + mixed.output).max() <= 4096
    n = sum(task.samples for task in TASKS.values())
    many = first_requests(FiveTasks(requests=100_000), np.random.default_rng(1), 100_000)
    for name, mean in (("prompt", "mean_prompt"), ("output", "mean_output")):
        expected = sum(task.samples * getattr(task, mean) for task in TASKS.values()) / n
        assert getattr(many, name).mean() == pytest.approx(expected, rel=0.03), name
    drifting = FiveTasks(requests=10_000, shares=(1, 0, 0, 0, 0), drift_to=(0, 1, 0, 0, 0))
    block = first_requests(drifting, np.random.default_rng(0), 10_000)
    assert block.output[-2000:].mean() > 3 * block.output[:2000].mean()


@pytest.mark.parametrize(
    ("kind", "cv", "expected_cv"), [("poisson", 3.0, 1.0), ("gamma", 1.0, 1.0), ("gamma", 3.0, 3.0)]
)
def test_drawn_arrivals_have_their_rate_and_spread(
    kind: str, cv: float, expected_cv: float
) -> None:
    trace = create_trace("homogeneous", requests=200_000)
    gaps = np.diff(timed(trace, kind, rate=8.0, cv=cv).arrival, prepend=0.0)
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(expected_cv, rel=0.03)
    # Gaps do not remember those before, across blocks either.
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.02


def test_arrivals_change_neither_lengths_nor_order() -> None:
    trace = create_trace("star", requests=300)
    plain = whole(trace)
    for kind in ("poisson", "gamma", "revelation"):
        drawn = timed(trace, kind)
        np.testing.assert_array_equal(drawn.prompt, plain.prompt)
        np.testing.assert_array_equal(drawn.output, plain.output)


def test_a_traces_own_times_are_scaled(tmp_path: Path) -> None:
    trace = TraceFile(write(tmp_path / "log", BURSTGPT))
    assert timed(trace, "trace", scale=2).arrival.tolist() == [0, 56.5]
