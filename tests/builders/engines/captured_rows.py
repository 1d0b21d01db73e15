"""What must be true of captured rows, whoever served them."""

from pathlib import Path

from benchmarks.support.offline_engine import compare_vectors, missing_rows
from predictor.training.row_table import RowTable


def assert_rows_are_whole(rows: RowTable) -> None:
    """Assert a row for every token, and none of a part of a prompt or of an ended request."""
    assert missing_rows(rows) == 0
    totals = rows.requests.total_tokens[rows.request]
    assert (rows.remaining_tokens == totals - rows.generated_tokens).all()


def assert_vectors_equal(rows: RowTable, model: Path) -> None:
    """Assert that greedy answers' vectors are transformers', and predict the next token."""
    compared = compare_vectors(rows, model)
    assert compared.compared == len(rows) > 0
    assert compared.least_cosine >= 0.99999
    assert compared.wrong_tokens == 0
