"""The censored likelihood is the one of the paper, and takes away the bias of cut requests."""

from pathlib import Path

import numpy as np
import pytest
import torch
from memoryless_dataset import hidden_states, true_median

from predictor import RequestRows, load_predictor
from predictor.models.survival_mlp import hazard_nll, hazard_rates

HAZARDS = (0.1, 0.2, 0.3)
EDGES = torch.tensor([0.0, 5, 10, 20])


def logits_of(*hazards: float) -> torch.Tensor:
    return torch.logit(torch.tensor(hazards, dtype=torch.float64))


LIKELIHOODS = [
    (1, False, 0.1),
    (5, False, 0.1),  # bins are (0, 5], (5, 10], (10, 20]
    (7, False, 0.9 * 0.2),
    (10, False, 0.9 * 0.2),
    (20, False, 0.9 * 0.8 * 0.3),
    (35, False, 0.9 * 0.8 * 0.3),  # beyond the last edge counts as the last edge
    (7, True, 0.9 * (1 - 2 / 5 * 0.2)),  # two of the bin's five tokens passed
    (5, True, 0.9),
    (10, True, 0.9 * 0.8),
    (20, True, 0.9 * 0.8 * 0.7),
    (35, True, 0.9 * 0.8 * 0.7),
]


def test_the_likelihood_by_hand() -> None:
    tokens, cut, likelihood = (list(column) for column in zip(*LIKELIHOODS, strict=True))
    own = torch.stack([*[logits_of(*HAZARDS)] * len(tokens), logits_of(0.5, 0.6, 0.7)])
    nll = hazard_nll(own, torch.tensor([*tokens, 7.0]), torch.tensor([*cut, True]), EDGES)
    expected = [*likelihood, 0.5 * (1 - 2 / 5 * 0.6)]  # the last row has hazards of its own
    np.testing.assert_allclose(nll.numpy(), -np.log(expected), rtol=1e-6)


@pytest.mark.parametrize("size", [50.0, 90.0])
def test_gradients_stay_finite_at_extreme_logits(size: float) -> None:
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 3)
    tokens = torch.tensor([1.0, 5, 7, 10, 20, 40])
    for cut in (False, True):
        logits = (size * signs).repeat_interleave(len(tokens), dim=0).requires_grad_()
        remaining = tokens.repeat(len(signs))
        nll = hazard_nll(logits, remaining, torch.full(remaining.shape, cut), EDGES)
        assert torch.isfinite(nll).all() and (nll >= 0).all()
        nll.sum().backward()
        assert torch.isfinite(logits.grad).all()


def test_a_cut_at_an_edge_still_pulls_a_hazard_down() -> None:
    logits = torch.zeros(1, 3, requires_grad=True)
    hazard_nll(logits, torch.tensor([10.0]), torch.tensor([True]), EDGES).sum().backward()
    assert (logits.grad[0, :2] > 0).all(), "both bins were passed"
    assert logits.grad[0, 2] == 0, "of the bin after the cut nothing is known"


def test_rates_by_hand_with_the_tail_of_the_last_bins_that_were_reached() -> None:
    edges = torch.tensor([0.0, 10, 20, 30, 40, 50], dtype=torch.float64)
    # 40 end at 5, 40 are cut at 15, 20 end at 25: no bin beyond 30 was reached.
    tokens = torch.tensor([5.0] * 40 + [15.0] * 40 + [25.0] * 20, dtype=torch.float64)
    cut = torch.tensor([False] * 40 + [True] * 40 + [False] * 20)
    ends = np.array([40, 0, 20])
    seen = np.array([40 * 5 + 60 * 10, 40 * 5 + 20 * 10, 20 * 5])
    pooled = 60.5 / seen.sum()
    expected = (ends + 0.5) / (seen + 0.5 / pooled)
    rates = hazard_rates(tokens, cut, edges).numpy()
    np.testing.assert_allclose(rates[:3], expected)
    np.testing.assert_allclose(rates[3:], 60.5 / seen.sum())

    nothing_ended = hazard_rates(tokens, torch.ones_like(cut), edges)
    assert (nothing_ended > 0).all() and nothing_ended.max() < 0.01

    # With one fewer the third bin was reached by 19, and its ends count for nothing.
    fewer = hazard_rates(tokens[:-1], cut[:-1], edges).numpy()
    np.testing.assert_allclose(fewer[2:], 40.5 / (40 * 5 + 59 * 10 + 40 * 5 + 19 * 10))


def test_the_likelihood_removes_the_bias_of_l1_on_cut_requests(
    survival_checkpoint: Path, regressor_checkpoint: Path, as_ended_checkpoint: Path
) -> None:
    # Half of the requests were cut, the long ones more often. The true medians are known.
    x = np.linspace(-0.9, 0.9, 400)
    vectors = torch.from_numpy(hidden_states(x, np.random.default_rng(7)))
    rows = RequestRows(vectors, torch.tensor([20.0, 11, 500, 0.8, 0, 0]).repeat(len(x), 1))
    long = x > 0
    ratio = {}
    for folder in (survival_checkpoint, regressor_checkpoint, as_ended_checkpoint):
        median = load_predictor(str(folder)).forecast(rows).median()
        ratio[folder] = median[long].mean() / true_median(x)[long].mean()
        assert np.corrcoef(median, true_median(x))[0, 1] > 0.7, "it reads the hidden state"
    assert ratio[survival_checkpoint] == pytest.approx(1, abs=0.12)
    assert ratio[regressor_checkpoint] < 0.7
    assert ratio[as_ended_checkpoint] < 0.8
