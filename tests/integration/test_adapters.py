"""Requests with a LoRA adapter in a real engine: recorded as such, and not forecast as others."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from forecast_messages import write_all_reading
from forked_vllm import run_forked
from safetensors.torch import save_file

from data_collection.workload.engine_options import engine_arguments
from predictor.models.checkpoint import load_predictor
from predictor.training.row_table import load_rows

pytestmark = pytest.mark.slow

ADAPTER = "poet"
RANK, LAYERS, WIDTH = 4, 30, 576
PROMPTS = [[504, 5646, 282, 4649], [1780, 260, 3218], [19556, 28, 1250]]
TOKENS = 12


def write_adapter(folder: Path) -> Path:
    """Write random changes to the output projections, large enough to change answers."""
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 8,
        "target_modules": ["o_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(3)
    weights = {}
    for layer in range(LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        weights[f"{name}.lora_A.weight"] = 0.1 * torch.randn(RANK, WIDTH, generator=generator)
        weights[f"{name}.lora_B.weight"] = 0.1 * torch.randn(WIDTH, RANK, generator=generator)
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def record_both(model: str, dataset: str, checkpoint: str, adapter: str) -> dict[str, Any]:
    """Record answers of the base model and of an adapter; return which requests were forecast."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    section = {
        "k": 1,
        "record": {"path": dataset, "dtype": "float32"},
        "forecast": {"checkpoint": checkpoint},
    }
    arguments = engine_arguments(model, {"headway": section}, {"enforce_eager": True})
    arguments |= {
        "worker_cls": "predictor.live.vllm_worker.LiveHeadwayWorker",
        "scheduler_cls": "predictor.live.vllm_scheduler.LiveHeadwayScheduler",
        "enable_lora": True,
        "max_lora_rank": 8,
        "max_model_len": 256,
    }
    engine = LLM(**arguments)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, detokenize=False)
    (before, *_) = engine.collective_rpc("headway_status")
    answers = {}
    for name in ("", ADAPTER):
        given = LoRARequest(name, 1, adapter) if name else None
        done = engine.generate(prompts, sampling, use_tqdm=False, lora_request=given)
        answers[name] = [list(one.outputs[0].token_ids) for one in done]
    (status, *_) = engine.collective_rpc("headway_status")
    engine.llm_engine.engine_core.shutdown(timeout=120.0)
    return {"answers": answers, "forecasts": status["forecasts"] - before["forecasts"]}


def test_requests_of_an_adapter_are_recorded_as_its_own_and_not_forecast(
    smollm2: Path, tmp_path: Path
) -> None:
    dataset, checkpoint = tmp_path / "dataset", write_all_reading(tmp_path / "predictor")
    adapter = write_adapter(tmp_path / "adapter")
    assert load_predictor(str(checkpoint)).adapter == ""
    seen = run_forked(record_both, str(smollm2), str(dataset), str(checkpoint), str(adapter))
    assert seen["answers"][""] != seen["answers"][ADAPTER]
    for name, answers in seen["answers"].items():
        rows = load_rows(dataset, name)
        recorded = [rows.requests.output_token_ids[i] for i in sorted(set(rows.request.tolist()))]
        assert sorted(answers) == sorted(recorded)
    n_base = sum(map(len, seen["answers"][""]))
    assert seen["forecasts"] == n_base
