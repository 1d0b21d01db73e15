"""What must be true of captured rows, whoever served them."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from predictor.training.row_table import RowTable

__all__ = ["assert_rows_are_whole", "assert_vectors_equal"]


def assert_rows_are_whole(rows: RowTable) -> None:
    """Assert a row for every token, and none of a part of a prompt or of an ended request."""
    for request in range(len(rows.requests)):
        n = rows.generated_tokens[rows.request == request]
        total = rows.requests.total_tokens[request]
        assert n.tolist() == list(range(total))
    totals = rows.requests.total_tokens[rows.request]
    assert (rows.remaining_tokens == totals - rows.generated_tokens).all()


def assert_vectors_equal(rows: RowTable, model: Path) -> None:
    """Assert that greedy answers' vectors are transformers', and predict the next token."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    vectors = torch.from_numpy(rows.vectors())
    for request in range(len(rows.requests)):
        prompt = rows.requests.prompt_token_ids[request]
        output = rows.requests.output_token_ids[request]
        assert prompt is not None and output is not None
        mine = np.flatnonzero(rows.request == request)
        n = rows.generated_tokens[mine]
        with torch.inference_mode():
            # Transformers' last hidden states after the final norm, [n_tokens, d].
            states = reference.model(torch.tensor([prompt + output])).last_hidden_state[0]
        expected = states[len(prompt) - 1 + n]
        cosine = torch.nn.functional.cosine_similarity(vectors[mine], expected)
        assert cosine.min() >= 0.99999, (request, float(cosine.min()))
        next_token = (vectors[mine] @ reference.lm_head.weight.T).argmax(dim=1)
        assert next_token.tolist() == [output[i] for i in n]
