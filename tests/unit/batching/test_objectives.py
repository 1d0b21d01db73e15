"""What a client may ask for, and when its tokens are due."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rescheduler.batching.objectives import Objectives, read_objectives

DEFAULT = Objectives(ttft=2.0, tpot=0.2)


@pytest.mark.parametrize("given", [None, {}, {"session_id": "a"}])
def test_what_is_not_asked_for_is_the_engine_s(given: dict[str, Any] | None) -> None:
    assert read_objectives(given, DEFAULT) == DEFAULT


def test_each_objective_is_the_client_s_own() -> None:
    assert read_objectives({"ttft_s": 1}, DEFAULT) == (1.0, 0.2)
    assert read_objectives({"tpot_s": 0.05, "ttft_s": 0.5}, DEFAULT) == (0.5, 0.05)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ttft_s": 0}, "ttft_s must be seconds from 0.001 to 3600, not 0"),
        ({"ttft_s": -1.0}, "ttft_s .* not -1.0"),
        ({"ttft_s": float("nan")}, "ttft_s .* not nan"),
        ({"ttft_s": 1e9}, "ttft_s .* not 1000000000.0"),
        ({"tpot_s": "0.1"}, "tpot_s must be seconds from 0.0001 to 60, not '0.1'"),
        ({"tpot_s": True}, "tpot_s .* not True"),
        ({"tpot_s": [0.1]}, r"tpot_s .* not \[0.1\]"),
    ],
)
def test_absurd_objectives_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_objectives(given, DEFAULT)


def test_tokens_are_due_one_tpot_apart_from_the_ttft_on() -> None:
    """Lyu et al. 2025, §3.1."""
    assert [DEFAULT.deadline(10.0, j) for j in (0, 1, 5)] == [12.0, 12.2, 13.0]


@given(
    st.floats(0.001, 3600),
    st.floats(0.0001, 60),
    st.floats(0, 1e9),
    st.integers(0, 100_000),
    st.integers(1, 1000),
)
def test_deadlines_do_not_depend_on_progress(
    ttft: float, tpot: float, arrival: float, token: int, more: int
) -> None:
    """A token that comes early makes those after it no more urgent."""
    objectives = Objectives(ttft, tpot)
    assert objectives.deadline(arrival, token + more) >= objectives.deadline(arrival, token)


def test_a_reserve_makes_every_token_due_earlier() -> None:
    planned = DEFAULT.less(0.25)
    assert planned == (1.5, pytest.approx(0.15))
    assert DEFAULT.less(0.0) == DEFAULT
    assert planned.deadline(10.0, 4) == pytest.approx(12.1)
