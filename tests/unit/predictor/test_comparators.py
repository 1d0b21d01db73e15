"""Comparators that read no text, and what all of them refuse."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from row_tables import row_table

from predictor.evaluation.comparators import (
    COMPARATORS,
    ConstantMedian,
    KaplanMeier,
    create_comparator,
)
from predictor.evaluation.report import LABELS, OWN_NAME
from predictor.training.row_table import RowTable
from rescheduler.papers.comparators import PromptSelfReport, parse_length, row_token_ids

K = 20
MAX_TOKENS = 4096


def rows_of(
    total_tokens: list[int],
    censored: list[bool] | None = None,
    with_token_ids: bool = True,
    cut_by: str = "length",
) -> RowTable:
    """Return the rows that k = 20 gives for requests of these lengths: n = 0, 20, 40, ..."""
    return row_table(
        total_tokens,
        ages=[range(0, total, K) for total in total_tokens],
        prompts=[[1, 2, 3] if with_token_ids else None] * len(total_tokens),
        outputs=[list(range(n)) if with_token_ids else None for n in total_tokens],
        max_tokens=MAX_TOKENS,
        cut=censored,
        cut_by=cut_by,
    )


def at_age(rows: RowTable, *ages: int) -> RowTable:
    """Return one row of the first request for each age."""
    table = rows.select(np.zeros(len(ages), dtype=np.int64))
    table.generated_tokens[:] = ages
    return table


def kaplan_meier(total_tokens: list[int], censored: list[bool], *ages: int) -> list[float]:
    rows = rows_of(total_tokens, censored)
    comparator = KaplanMeier()
    comparator.fit(rows, rows)
    predicted: npt.NDArray[np.float32] = comparator.predict(at_age(rows, *ages))
    return predicted.tolist()


@pytest.mark.parametrize(("cut_by", "median"), [("abort", 25), ("length", 40)])
def test_constant_is_the_median_of_the_tokens_that_came(cut_by: str, median: float) -> None:
    # Rows: 40 -> 40, 20; 30 -> 30, 10; 100 -> 100, 80, 60, 40, 20 where max_tokens ended it.
    # Left by its client at 100, it does not say what would have come.
    rows = rows_of([40, 30, 100], [False, False, True], cut_by=cut_by)
    comparator = ConstantMedian()
    comparator.fit(rows, rows)
    predicted = comparator.predict(rows)
    assert predicted.shape == (len(rows),)
    assert predicted.dtype == np.float32
    assert set(predicted.tolist()) == {median}


def test_kaplan_meier_by_hand_with_cuts() -> None:
    # At risk 5, 3, 2 at 10, 30, 40: S = 4/5, 4/5 * 2/3 = 8/15, 4/15. The request cut at 20 is
    # at risk at 10 only, that cut at 50 always; taken as ended they would give 30 at age 0.
    totals, cut = [10, 20, 30, 40, 50], [False, True, False, False, True]
    assert kaplan_meier(totals, cut, 0, 10, 30) == [40, 30, 10]


def test_kaplan_meier_expects_max_tokens_where_half_the_requests_were_cut() -> None:
    totals, cut = [10, 500, 500, 500], [False, True, True, True]
    left = [MAX_TOKENS - age for age in (0, 100, 500, 900)]
    assert kaplan_meier(totals, cut, 0, 100, 500, 900) == left


def test_kaplan_meier_forecasts_the_conditional_curve_to_max_tokens() -> None:
    # S = 3/4, 1/2 at 10 and 20; two of the four were cut at 30.
    rows = rows_of([10, 20, 30, 30], [False, False, True, True])
    comparator = KaplanMeier()
    comparator.fit(rows, rows)
    fresh, aged = at_age(rows, 0), at_age(rows, 10)
    fresh.max_tokens[:] = aged.max_tokens[:] = 50
    h = [0, 9, 10, 20, 39, 40, 49, 50]
    np.testing.assert_allclose(
        comparator.forecast(fresh).at(h)[0], [1, 1, 3 / 4, 1 / 2, 1 / 2, 1 / 2, 1 / 2, 0]
    )
    np.testing.assert_allclose(
        comparator.forecast(aged).at(h)[0], [1, 1, 2 / 3, 2 / 3, 2 / 3, 0, 0, 0]
    )


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=60))
def test_without_cuts_the_median_at_age_0_is_the_lower_median(totals: list[int]) -> None:
    predicted = kaplan_meier(totals, [False] * len(totals), 0)
    assert predicted == [sorted(totals)[(len(totals) - 1) // 2]]


@given(
    st.lists(st.tuples(st.integers(1, 3000), st.booleans()), min_size=1, max_size=40),
    st.lists(st.integers(0, 4000), min_size=1, max_size=20),
)
def test_the_expected_total_never_falls_with_age(
    requests: list[tuple[int, bool]], ages: list[int]
) -> None:
    totals, cut = [list(column) for column in zip(*requests, strict=True)]
    ages = sorted(ages)
    remaining = np.array(kaplan_meier(totals, cut, *ages))
    assert (remaining >= 0).all()
    assert (np.diff(np.array(ages) + remaining) >= 0).all()


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40), st.integers(1, 40))
def test_cutting_requests_never_shortens_the_prediction(totals: list[int], cut: int) -> None:
    flags = [i < cut for i in range(len(totals))]
    assert kaplan_meier(totals, flags, 0) >= kaplan_meier(totals, [False] * len(totals), 0)


def test_row_token_ids_stop_at_the_row() -> None:
    rows = rows_of([50])
    assert row_token_ids(rows, 0) == ([1, 2, 3], [])
    assert row_token_ids(rows, 2) == ([1, 2, 3], list(range(40)))
    with pytest.raises(ValueError, match="request-0 was recorded without token ids"):
        row_token_ids(rows_of([50], with_token_ids=False), 1)


@pytest.mark.parametrize("comparator", [ConstantMedian, KaplanMeier, PromptSelfReport])
def test_predicting_before_fitting_is_refused(
    comparator: Callable[[], ConstantMedian | KaplanMeier | PromptSelfReport],
) -> None:
    with pytest.raises(RuntimeError, match="call fit before predict"):
        comparator().predict(rows_of([50]))


@pytest.mark.parametrize(
    ("comparator", "message"),
    [(ConstantMedian, "no request of 6 rows ran to its end"), (PromptSelfReport, "uncensored")],
)
def test_only_requests_that_clients_left_are_refused(
    comparator: Callable[[], ConstantMedian | PromptSelfReport], message: str
) -> None:
    rows = rows_of([50, 60], [True, True], cut_by="abort")
    with pytest.raises(ValueError, match=message):
        comparator().fit(rows, rows)


@pytest.mark.parametrize(
    ("answer", "length"),
    [
        ("150", 150),
        ("About 1,200 tokens.", 1200),
        ("Between 100 and 200", 100),
        ("12,34", 12),
        ("I cannot tell", None),
        ("", None),
    ],
)
def test_first_number_of_an_answer(answer: str, length: int | None) -> None:
    assert parse_length(answer) == length


def test_registry_names_what_it_builds() -> None:
    for name in ("constant_median", "kaplan_meier", "prompt_self_report"):
        assert create_comparator(name, {}).name == name
    assert {*COMPARATORS, OWN_NAME} == set(LABELS), "each has a label for tables and figures"
