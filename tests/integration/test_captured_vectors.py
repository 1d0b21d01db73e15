"""Captured vectors against transformers, over the ways in which vLLM computes a step."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked_vllm import run_forked
from offline_engines import record
from transformers import AutoModelForCausalLM, AutoTokenizer

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
}


@dataclass(frozen=True)
class Recording:
    rows: RowTable
    counters: dict[str, float]


@pytest.fixture(scope="module", params=list(CASES))
def recording(
    request: pytest.FixtureRequest, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Recording:
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    texts = QUESTIONS + ([LONG, LONG, *QUESTIONS] if request.param == "stress" else [])
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in texts
    ]
    arguments = {"dtype": "float32", "enforce_eager": True, **CASES[request.param]}
    dataset, tokens = folder / "dataset", 36 if request.param == "stress" else 24
    seen = run_forked(record, str(smollm2), str(dataset), arguments, prompts, tokens)
    assert seen["worker_cls"] == "data_collection.vllm_worker.HeadwayWorker"
    return Recording(load_rows(dataset), seen["counters"])


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


def hidden_states(reference: Any, token_ids: list[int]) -> torch.Tensor:
    """Transformers' last hidden states after the final norm, [n_tokens, d]."""
    with torch.inference_mode():
        return reference.model(torch.tensor([token_ids])).last_hidden_state[0]


def test_vectors_equal_transformers_and_predict_the_next_token(
    recording: Recording, reference: Any
) -> None:
    rows = recording.rows
    vectors = torch.from_numpy(rows.vectors())
    for request in range(len(rows.requests)):
        prompt = rows.requests.prompt_token_ids[request]
        output = rows.requests.output_token_ids[request]
        assert prompt is not None and output is not None
        mine = np.flatnonzero(rows.request == request)
        n = rows.generated_tokens[mine]
        expected = hidden_states(reference, prompt + output)[len(prompt) - 1 + n]
        cosine = torch.nn.functional.cosine_similarity(vectors[mine], expected)
        assert cosine.min() >= 0.99999, (request, float(cosine.min()))
        next_token = (vectors[mine] @ reference.lm_head.weight.T).argmax(dim=1)
        assert next_token.tolist() == [output[i] for i in n]


def test_every_token_has_one_row_and_ghosts_and_partial_prefills_have_none(
    recording: Recording,
) -> None:
    rows = recording.rows
    for request in range(len(rows.requests)):
        n = rows.generated_tokens[rows.request == request]
        total = rows.requests.total_tokens[request]
        assert n.tolist() == list(range(total))
    totals = rows.requests.total_tokens[rows.request]
    assert (rows.remaining_tokens == totals - rows.generated_tokens).all()


def test_the_stress_case_did_preempt_hit_the_prefix_cache_and_chunk(
    recording: Recording, request: pytest.FixtureRequest
) -> None:
    if request.node.callspec.params["recording"] != "stress":
        assert len(recording.rows.requests) == len(QUESTIONS)
        return
    assert recording.counters["vllm:num_preemptions"] > 0
    assert recording.counters["vllm:prefix_cache_hits"] > 0
    assert recording.rows.prompt_tokens.max() > CASES["stress"]["max_num_batched_tokens"]
