"""What the scheduler reads of ``--additional-config``, and what clients may ask for themselves."""

from typing import Any

import pytest

from data_collection.capture.capture_config import CaptureConfig, read_capture_config
from predictor.live.engine_forecasts import LiveConfig
from rescheduler.batching.batching_config import read_batching_config
from rescheduler.batching.objectives import Objectives, read_objectives


def section(**batching: Any) -> dict[str, Any]:
    return {"headway": {"batching": batching}}


def test_the_defaults_are_fairbatching_with_a_profile() -> None:
    config = read_batching_config(section(profile="profile.yaml"))
    assert config.formation == "fairbatching" and not config.admission
    assert config.objectives == (2.0, 0.2)


@pytest.mark.parametrize(
    ("batching", "message"),
    [
        ({"formatoin": "vllm"}, "unknown field `formatoin`.*Known keys: formation, profile"),
        ({"formation": "fifo"}, "no formation 'fifo'; there are fairbatching, .*, vllm"),
        ({}, "formation 'fairbatching' needs to know how long.*headway profile"),
        ({"formation": "fairbatching_fixed"}, "'fairbatching_fixed' needs to know"),
        ({"formation": "sarathi", "admission": True}, "admission needs to know how long"),
        ({"formation": "vllm", "tpot_s": 0}, "tpot_s must be seconds from 0.0001 to 60, not 0"),
        ({"formation": "sarathi", "token_budget": 0}, "`int` >= 1.*token_budget"),
        ({"formation": "vllm", "reserve": 1.0}, "`float` < 1.*reserve"),
        ({"formation": "vllm", "reserve": -0.1}, "`float` >= 0.*reserve"),
    ],
)
def test_what_cannot_work_is_refused_by_name(batching: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_batching_config(section(**batching))


@pytest.mark.parametrize("formation", ["vllm", "sarathi"])
def test_formations_that_count_tokens_need_no_profile(formation: str) -> None:
    assert read_batching_config(section(formation=formation)).profile is None


@pytest.mark.parametrize("additional", [{}, {"headway": {"k": 20}}, {"headway": None}])
def test_a_missing_section_shows_one(additional: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"no 'batching' in its 'headway' section; give"):
        read_batching_config(additional)


@pytest.mark.parametrize("kind", [CaptureConfig, LiveConfig])
def test_the_worker_leaves_batching_to_the_scheduler(kind: type[CaptureConfig]) -> None:
    both = {"headway": {"k": 5, "batching": {"profile": "profile.yaml"}}}
    assert read_capture_config(both, kind).k == 5
    assert "batching" in both["headway"]


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


def test_a_reserve_makes_every_token_due_earlier() -> None:
    planned = DEFAULT.less(0.25)
    assert planned == (1.5, pytest.approx(0.15))
    assert DEFAULT.less(0.0) == DEFAULT
    assert planned.deadline(10.0, 4) == pytest.approx(12.1)
