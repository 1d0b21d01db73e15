"""Rows of requests that were never recorded."""

from collections.abc import Sequence

import numpy as np

from data_collection.dataset.dataset_schema import Session
from predictor.training.row_table import HiddenStates, Requests, RowTable

Tokens = Sequence[int] | None


def row_table(
    total_tokens: Sequence[int],
    ages: Sequence[Sequence[int]],
    prompts: Sequence[Tokens],
    outputs: Sequence[Tokens],
    *,
    max_tokens: int,
    cut: Sequence[bool] | None = None,
    cut_by: str = "length",
    model: str = "m",
    k: int = 20,
) -> RowTable:
    """Return a row for each age of each request, with vectors of nothing."""
    totals, n = np.array(total_tokens, dtype=np.int64), len(total_tokens)
    censored = np.array(cut or [False] * n)
    request = np.repeat(np.arange(n), [len(own) for own in ages])
    generated = np.concatenate(ages).astype(np.int64)
    return RowTable(
        hidden_states=HiddenStates([np.zeros((len(request), 4), dtype=np.float16)]),
        vector=np.arange(len(request)),
        request=request,
        prompt_tokens=np.array([len(prompt or ()) for prompt in prompts])[request],
        generated_tokens=generated,
        remaining_tokens=totals[request] - generated,
        censored=censored[request],
        max_tokens=np.full(len(request), max_tokens),
        requests=Requests(
            request_id=[f"request-{i}" for i in range(n)],
            group=np.arange(n),
            total_tokens=totals,
            censored=censored,
            finish_reason=[cut_by if was_cut else "stop" for was_cut in censored],
            task=["chat"] * n,
            temperature=np.ones(n),
            prompt_token_ids=list(prompts),
            output_token_ids=list(outputs),
        ),
        session=Session(
            name="s", model=model, revision="r", hidden_size=4, dtype="float16", k=k,
            engine="vllm", runner="v1", headway="0", model_dtype="float32", started="2025",
        ),
    )  # fmt: skip
