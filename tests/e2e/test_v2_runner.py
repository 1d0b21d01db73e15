"""All that Headway adds to an engine, on the V2 runner with asynchronous scheduling.

That is vLLM's default on a GPU. Here Triton's interpreter runs its kernels, see
`tests/v2_engines`; every test asserts what the engines really ran.
"""

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from captured_rows import assert_rows_are_whole, assert_vectors_equal
from forecast_messages import assert_forecasts_equal
from listening import Listener, listener
from move_cases import CASES, Compared, assert_unchanged, there_and_back
from moving import GREEDY, STORY, Engine, Generation, engines_of, moved, runner_on
from recorded_requests import wait_until_recorded
from v2_engines import BATCHED_TOKENS, V2_RUNNER, V2Engines, v2_engines, v2_environment, what_ran

from benchmarks.support.offline_engine import compare_vectors
from predictor.training.row_table import load_rows
from rescheduler.demo.load import metric_in

pytestmark = pytest.mark.timeout(1200)

REQUESTS, PROMPT, GENERATED = 6, 150, 28
MOVES = 50
TRANSCRIPTS = Path(__file__).parents[2] / "transcripts/smollm2-135m-instruct/round-1.parquet"
FREED_WITHIN = 10.0
"""Seconds after the last move: before its lease of 15 ends, which would free what is forgotten."""


@pytest.fixture(scope="module")
def listening() -> Iterator[Listener]:
    with listener() as heard:
        yield heard


@pytest.fixture(scope="module")
def engines(listening: Listener, tmp_path_factory: pytest.TempPathFactory) -> Iterator[V2Engines]:
    with v2_engines(tmp_path_factory.mktemp("v2"), listening.endpoint) as running:
        yield running


@pytest.fixture
async def both(engines: V2Engines) -> AsyncIterator[list[Engine]]:
    """The engines, which let everything go after the test, and say what they ran."""
    async with engines_of(engines.instances, FREED_WITHIN) as connected:
        yield connected
    engines.assert_v2_with_steps_in_flight()


@pytest.fixture(scope="module")
def compared(engines: V2Engines) -> Compared:
    run = runner_on(engines.instances, FREED_WITHIN)
    return run(lambda both: there_and_back(both))  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("half_life", [0, 8])
def test_transcripts_are_replayed_as_prefills(
    smollm2: Path, headway_command: list[str], tmp_path: Path, half_life: float
) -> None:
    """In parts, several requests a step, while the step before is in flight.

    First in this file: the engines of the other tests would take the memory meanwhile.
    """
    reports, out, some = tmp_path / "what-runs", tmp_path / "dataset", tmp_path / "some.parquet"
    reports.mkdir()
    shipped = pq.read_table(TRANSCRIPTS)
    tokens = pc.list_value_length(shipped["output_token_ids"])
    long = pc.and_(pc.greater(tokens, BATCHED_TOKENS), pc.less(tokens, 3 * BATCHED_TOKENS))
    pq.write_table(shipped.filter(long)[:REQUESTS], some)
    options = {"max_num_batched_tokens": BATCHED_TOKENS, "async_scheduling": True}
    collect = [
        *(*headway_command, "collect", str(out), "--transcripts", str(some)),
        *("--record.k", "5", "--record.dtype", "float32"),
        *("--engine.dtype", "float32", "--engine.max_model_len", "1300"),
        *("--engine.extra", json.dumps(options)),
        *("--record.layer", "20" if half_life else "0"),
        *("--record.state_half_life", str(half_life)),
    ]
    done = subprocess.run(
        collect, env=os.environ | v2_environment(reports), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    runners, steps_in_flight = what_ran(reports)
    assert runners == [V2_RUNNER] and steps_in_flight == [1]
    rows = load_rows(out)
    assert rows.session.runner == "V2" and len(rows.requests) == REQUESTS
    assert rows.session.state_half_life == half_life
    assert len(rows) == sum(-(-total // 5) for total in rows.requests.total_tokens)
    assert compare_vectors(rows, smollm2).least_cosine >= 0.99999


async def test_what_is_captured_and_forecast_is_right(
    engines: V2Engines, listening: Listener, both: list[Engine], smollm2: Path
) -> None:
    """With prompts in chunks, cached prefixes and preemption, batches formed by deadlines."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1000, 20_000, (REQUESTS, PROMPT), generator=generator)
    prompts[:, :BATCHED_TOKENS] = prompts[0, :BATCHED_TOKENS]
    assert PROMPT > BATCHED_TOKENS

    async def generate(prompt: list[int]) -> None:
        body = {"prompt": prompt, "max_tokens": GENERATED, "temperature": 0}
        generation = await moved(both[:1], body | {"ignore_eos": True}, [])
        assert len(generation.tokens) == GENERATED

    answers = (generate(prompt) for prompt in prompts.tolist())
    await asyncio.gather(moved(both[1:], GREEDY | {"max_tokens": 4}, []), *answers)
    async with both[0].session.get(both[0].url + "/metrics") as response:
        metrics = await response.text()
    assert metric_in(metrics, "vllm:num_preemptions_total") > 0
    assert metric_in(metrics, "vllm:prefix_cache_hits_total") > 0
    dataset = engines.dataset(engines.instances[0])
    wait_until_recorded(dataset, REQUESTS)
    rows = load_rows(dataset)
    assert rows.session.runner == "V2"
    assert_rows_are_whole(rows)
    assert_vectors_equal(rows, smollm2)
    assert_forecasts_equal(listening.messages, rows, engines.checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_request_goes_there_and_back_unchanged(
    engines: V2Engines, compared: Compared, name: str
) -> None:
    assert_unchanged(compared, name, CASES[name])
    engines.assert_v2_with_steps_in_flight()


@pytest.mark.slow
async def test_fifty_moves_in_both_directions_leave_nothing_behind(
    engines: V2Engines, both: list[Engine]
) -> None:
    """A target reads while the source has a step in flight that does not know of the freeze."""
    body = GREEDY | {"max_tokens": 34}
    cuts = range(2, 32, 3)

    async def compare(number: int) -> list[Generation]:
        own = body | {"prompt": f"{number}. {STORY}"}
        hopping = (moved(start, own, cuts) for start in (both, both[::-1]))
        return await asyncio.gather(moved(both, own, []), *hopping)

    generations: list[list[Generation]] = []
    moves = 0
    while moves < MOVES:  # a freeze that comes late leaves fewer tokens for the next
        first = len(generations)
        round_ = await asyncio.gather(*(compare(first + number) for number in range(3)))
        made = sum(one.hops for same in round_ for one in same)
        assert made > 0
        moves += made
        generations += round_
    for plain, *others in generations:
        assert [one.tokens for one in others] == [plain.tokens] * 2
    assert "unrecognized request" not in engines.printed()
