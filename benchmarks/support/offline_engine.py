"""Answers of an engine in this process tree, recorded, and compared with transformers'."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_collection.dataset.dataset_schema import Session
from data_collection.workload.engine_options import engine_arguments
from predictor.training.row_table import RowTable


@dataclass(frozen=True)
class VectorComparison:
    """Captured vectors beside those that transformers computes in float32."""

    compared: int
    least_cosine: float
    wrong_tokens: int  # vectors whose most likely token is not the one that was generated; 0 where
    # no logits are made of them: of an earlier layer, or averaged


def record(
    model: str,
    dataset: str,
    arguments: dict[str, Any],
    prompts: list[list[int]],
    max_tokens: int,
    captured: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Record greedy answers to prompts, a row for every token.

    ``captured`` says which states, as in a `CaptureConfig`.
    """
    from vllm import LLM, SamplingParams
    from vllm.config import CompilationMode

    section = {"k": 1, **(captured or {}), "record": {"path": dataset, "dtype": "float32"}}
    capture = {"headway": section}
    statistics = {"disable_log_stats": False}
    engine = LLM(**engine_arguments(model, capture, arguments | statistics))
    engine.generate(
        [{"prompt_token_ids": ids} for ids in prompts],
        SamplingParams(temperature=0.0, max_tokens=max_tokens, detokenize=False),
        use_tqdm=False,
    )
    config = engine.llm_engine.vllm_config
    (status, *_) = engine.collective_rpc("headway_status")
    seen = {
        "worker_cls": config.parallel_config.worker_cls,
        "workers": config.parallel_config.world_size,
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "cudagraph_mode": status["cudagraph_mode"],
        "compiles": config.compilation_config.mode != CompilationMode.NONE,
        "greedy_tokens_compared": status.get("greedy_tokens_compared", 0),
        "counters": {
            metric.name: metric.value for metric in engine.get_metrics() if hasattr(metric, "value")
        },
    }
    # Its default is five seconds: a busy machine needs longer to write the last rows.
    engine.llm_engine.engine_core.shutdown(timeout=120.0)
    return seen


def missing_rows(rows: RowTable) -> int:
    """Return how many requests do not have one row for every token, in order."""
    missing = 0
    for request, total in enumerate(rows.requests.total_tokens):
        n = rows.generated_tokens[rows.request == request]
        missing += n.tolist() != list(range(total))
    return missing


def compare_vectors(rows: RowTable, model: Path) -> VectorComparison:
    """Compare the rows of greedy answers with transformers on the same tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    if config.model_type == "cohere2":
        config.sliding_window += 1  # vLLM's window holds one token more, as in training
    # Its other kinds of attention leave out Gemma 2's soft cap.
    exact: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    reference = AutoModelForCausalLM.from_pretrained(model, config=config, **exact)
    inner = reference.base_model if reference.base_model is not reference else reference.model
    head: Any = reference.get_output_embeddings()  # type: ignore[no-untyped-call]
    vectors = torch.from_numpy(rows.vectors())
    cosines, wrong = [], 0
    for request in range(len(rows.requests)):
        prompt = rows.requests.prompt_token_ids[request]
        output = rows.requests.output_token_ids[request]
        if prompt is None or output is None:
            raise ValueError(f"request {request} was recorded without its tokens")
        mine = np.flatnonzero(rows.request == request)
        n = rows.generated_tokens[mine]
        with torch.inference_mode():
            expected = _states_of(inner, rows.session, prompt, output)[n]
            cosines.append(torch.nn.functional.cosine_similarity(vectors[mine], expected))
            if (rows.session.layer, rows.session.state_half_life) == ("last", 0):
                tokens = (vectors[mine] @ head.weight.T).argmax(dim=1)
                wrong += int((tokens != torch.tensor([output[i] for i in n])).sum())
    cosine = torch.cat(cosines)
    return VectorComparison(len(cosine), float(cosine.min()), wrong)


def _states_of(inner: Any, session: Session, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Return what transformers computes of an answer, at n = 0 and after each token, [n + 1, d]."""
    computed = inner(torch.tensor([prompt + output]), output_hidden_states=True)
    last = session.layer == "last"  # after the final norm
    found = computed.last_hidden_state if last else computed.hidden_states[int(session.layer)]
    states: torch.Tensor = found[0, len(prompt) - 1 :]
    if not session.state_half_life:
        return states
    ages = torch.arange(len(states))
    behind = (ages[:, None] - ages).double()
    shares = torch.where(behind >= 0, 0.5 ** (behind / session.state_half_life), 0.0)
    return (shares @ states.double() / shares.sum(dim=1, keepdim=True)).float()
