"""Captured vectors against transformers, over the ways in which vLLM computes a step."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from captured_rows import assert_rows_are_whole, assert_vectors_equal
from forked_vllm import run_forked
from transformers import AutoTokenizer

from benchmarks.support.offline_engine import record
from predictor.training.row_table import RowTable, load_rows

QUESTIONS = [
    "What is the capital of France?",
    "Name three colours.",
    "Write a haiku about the sea.",
    "Is 17 a prime number? Answer yes or no.",
    "Explain what a queue is in two sentences.",
    "Count from one to twenty in words.",
]
LONG = "Summarise in one sentence: " + "The harbour was quiet and the boats lay still. " * 20

CASES: dict[str, dict[str, Any]] = {
    "base": {},
    # Long prompts in parts of 48 tokens; too few blocks for all, so that requests are
    # preempted and recomputed; shared prefixes are found in the cache.
    "stress": {
        "max_num_batched_tokens": 48,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 22,
        "block_size": 32,
        "max_model_len": 512,
    },
    # Three attention heads of nine each.
    "tensor-parallel": {"tensor_parallel_size": 3, "max_model_len": 512},
    "compiled": {"enforce_eager": False, "max_model_len": 512},
}
TOKENS = {"base": 24, "stress": 36, "tensor-parallel": 12, "compiled": 24}
CAPTURED: dict[str, dict[str, Any]] = {
    "last": {},
    "layer-20": {"layer": 20},
    "averaged": {"layer": 20, "state_half_life": 8.0},
}


@dataclass(frozen=True)
class Recording:
    rows: RowTable
    counters: dict[str, float]


def _slow(*case: str) -> Any:
    return pytest.param(case, marks=pytest.mark.slow, id="-".join(case))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("base", "last"), id="base"),
        pytest.param(("stress", "last"), id="stress"),
        pytest.param(("stress", "averaged"), id="stress-averaged"),
        *(_slow("tensor-parallel", captured) for captured in ("last", "averaged")),
        *(_slow("compiled", captured) for captured in ("last", "layer-20", "averaged")),
    ],
)
def recording(
    request: pytest.FixtureRequest, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Recording:
    case, captured = request.param
    folder = tmp_path_factory.mktemp(case)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    texts = QUESTIONS + ([LONG, LONG, *QUESTIONS[:4]] if case == "stress" else [])
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in texts
    ]
    arguments = {"dtype": "float32", "enforce_eager": True, **CASES[case]}
    dataset, tokens = folder / "dataset", TOKENS[case]
    what = CAPTURED[captured]
    seen = run_forked(record, str(smollm2), str(dataset), arguments, prompts, tokens, what)
    assert seen["worker_cls"] == "data_collection.vllm_worker.HeadwayWorker"
    assert seen["compiles"] == (case == "compiled")
    # Nothing can be compared where no logits are made of what is captured.
    assert (seen["greedy_tokens_compared"] >= 32) == (captured == "last")
    assert seen["workers"] == CASES[case].get("tensor_parallel_size", 1)
    return Recording(load_rows(dataset), seen["counters"])


def test_vectors_equal_transformers_and_predict_the_next_token(
    recording: Recording, smollm2: Path
) -> None:
    assert_vectors_equal(recording.rows, smollm2)


def test_every_token_has_one_row_and_ghosts_and_partial_prefills_have_none(
    recording: Recording,
) -> None:
    assert_rows_are_whole(recording.rows)


def test_the_stress_case_did_preempt_hit_the_prefix_cache_and_chunk(
    recording: Recording, request: pytest.FixtureRequest
) -> None:
    if request.node.callspec.params["recording"][0] != "stress":
        assert len(recording.rows.requests) == len(QUESTIONS)
        return
    assert recording.counters["vllm:num_preemptions"] > 0
    assert recording.counters["vllm:prefix_cache_hits"] > 0
    assert recording.rows.prompt_tokens.max() > CASES["stress"]["max_num_batched_tokens"]
