"""The comparison of captured states with the tokens that come of them."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.outputs import ModelRunnerOutput

from data_collection.capture.capture_hook import CapturedRows
from data_collection.capture.requests import FinishedRequest, Replay
from data_collection.vllm_adapter.logits import (
    GreedyCheck,
    UnlikeStatesError,
    refuse_changed_states,
    state_width,
)

WIDTH, VOCABULARY, ROWS = 16, 300, 8
WEIGHTS = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(2))


class Head(torch.nn.Module):
    """Rows of the weights, as a tensor-parallel rank has them, and padding."""

    def __init__(self, first: int = 0, end: int = VOCABULARY) -> None:
        super().__init__()
        self.weight = torch.cat([WEIGHTS[first:end], torch.full((4, WIDTH), 100.0)])
        self.embedding_dim = WIDTH
        self.shard_indices = SimpleNamespace(
            org_vocab_start_index=first, num_org_elements=end - first
        )
        self.quant_method = SimpleNamespace(
            apply=lambda head, states, bias: torch.nn.functional.linear(states, head.weight, bias)
        )


class Model(torch.nn.Module):
    """Forbids tokens as it computes logits."""

    def __init__(self, head: torch.nn.Module | None, forbidden: Sequence[int] = ()) -> None:
        super().__init__()
        self.forbidden = list(forbidden)
        self.language_model = torch.nn.Module()
        if head is not None:
            self.language_model.lm_head = head

    def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        logits = states @ WEIGHTS.T
        logits[:, self.forbidden] = -torch.inf
        return logits


def checked(
    head: torch.nn.Module | None,
    wrong: int,
    forbidden: Sequence[int] = (),
    is_linear: bool = False,
    is_alone: bool = True,
    **sampling: Any,
) -> GreedyCheck:
    """Return a check that has seen steps in which so many of eight rows are wrong."""
    model = Model(head, forbidden)
    check = GreedyCheck(model, "some/model", "step", is_linear, is_alone)
    names = [f"r{i}" for i in range(ROWS)]
    params = SamplingParams(**{"temperature": 0.0, **sampling})
    check.note(
        [SimpleNamespace(req_id=n, sampling_params=params, lora_request=None) for n in names]
    )
    for step in range(6):
        states = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
        numbers = [0] * ROWS
        check.on_rows(
            CapturedRows(step, names, numbers, numbers, numbers, [0.0] * ROWS, [""] * ROWS, states)
        )
        made_of = states.clone()
        made_of[:wrong] *= -1
        tokens = model.compute_logits(made_of).argmax(dim=1).tolist()
        output = ModelRunnerOutput(
            req_ids=names[::-1],
            req_id_to_index={name: i for i, name in enumerate(names[::-1])},
            sampled_token_ids=[[token] for token in tokens[::-1]],
        )
        rows = check.take()
        if rows is not None:
            check.compare(rows, output)
    return check


def test_right_states_pass_and_are_compared_only_so_long() -> None:
    check = checked(Head(), wrong=0)
    assert check.done
    assert check.compared == 32


def test_wrong_states_are_refused_by_the_model_s_name() -> None:
    with pytest.raises(UnlikeStatesError, match=r"^some/model: .*9 of the first 24 greedy"):
        checked(Head(), wrong=3)


def test_a_tie_or_two_are_none_of_the_model_s_faults() -> None:
    assert checked(Head(), wrong=1).done


def test_a_model_may_forbid_tokens() -> None:
    """As Chameleon does those of images."""
    assert checked(Head(), 0, range(150), is_linear=True).done
    for wrong, is_linear in ((8, True), (0, False)):
        with pytest.raises(UnlikeStatesError):
            checked(Head(), wrong, range(150), is_linear)


def test_a_rank_compares_the_tokens_that_it_has() -> None:
    assert 0 < checked(Head(0, 150), 0).compared < 6 * ROWS
    with pytest.raises(UnlikeStatesError):
        checked(Head(0, 150), 8)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.7},
        {"presence_penalty": 1.0},
        {"repetition_penalty": 1.2},
        {"logit_bias": {5: 10.0}},
        {"min_tokens": 3},
        {"bad_words": ["no"]},
        {"thinking_token_budget": 0},
        {"extra_args": Replay(4, 1, 9, "stop", 0.0).extra_args()},
    ],
)
def test_tokens_that_something_else_decides_are_not_compared(sampling: dict[str, Any]) -> None:
    assert checked(Head(), 8, **sampling).compared == 0


def test_with_tensor_parallelism_it_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    """One rank cannot compute what the model makes of its logits."""
    assert checked(Head(), 8, is_alone=False).done
    (logged,) = caplog.messages
    assert "some/model" in logged


@pytest.mark.parametrize("mask", [None, -torch.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("normalizes", [False, True])
def test_a_model_that_normalizes_states_first_is_refused(
    mask: float | None, normalizes: bool
) -> None:
    class Answering(torch.nn.Module):
        def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
            if normalizes:
                states = states / states.norm(dim=1, keepdim=True)
            logits = states @ WEIGHTS.T
            if mask is not None:
                logits[:, :50] = mask
            return logits

    asked = (Answering(), "m", WIDTH, torch.device("cpu"), torch.float32)
    if normalizes:
        with pytest.raises(UnlikeStatesError, match="it normalizes them"):
            refuse_changed_states(*asked)
    else:
        refuse_changed_states(*asked)


def test_a_model_whose_head_is_not_found_is_not_compared() -> None:
    assert checked(None, 8).done


def test_requests_that_have_ended_are_forgotten() -> None:
    check = checked(Head(), 0)
    ended = [FinishedRequest(f"r{i}", "stop", 1, 1, 1, None, [], {}, 0.0, 1.0) for i in range(ROWS)]
    check.on_finished(ended)
    assert not check._plain


def test_the_width_is_the_head_s() -> None:
    """OPT projects its states to a smaller width than its configuration says."""
    assert state_width(Model(Head()), 99) == WIDTH
    assert state_width(Model(None), 99) == 99
