"""What an emulated engine makes of what a client asks of an answer's length."""

import pytest
from vllm import SamplingParams

from data_collection.vllm_adapter.emulated_runner import _least
from rescheduler.emulation.vllm_refusals import RefusedRequests


@pytest.mark.parametrize(
    ("asked", "least"),
    [
        (SamplingParams(max_tokens=700), 0),
        (SamplingParams(max_tokens=700, min_tokens=30), 30),
        (SamplingParams(max_tokens=700, ignore_eos=True), 700),
        (None, 0),
    ],
)
def test_a_client_that_wants_no_end_gets_a_script_without_one(
    asked: SamplingParams | None, least: int
) -> None:
    assert _least(asked) == least


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"logprobs": 3}, "logprobs"),
        ({"extra_args": {"emulated_length": "120"}}, "emulated_length"),
        ({"extra_args": {"emulated_seed": -1}}, "emulated_seed"),
    ],
)
def test_what_no_script_heeds_is_refused_by_name(fields: dict[str, object], name: str) -> None:
    RefusedRequests.validate_params(SamplingParams(extra_args={"emulated_length": 5}))
    with pytest.raises(ValueError, match=name):
        RefusedRequests.validate_params(SamplingParams(**fields))  # type: ignore[arg-type]
