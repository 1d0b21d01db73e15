"""The censored likelihood is the one of the paper, and takes away the bias of cut requests."""

from pathlib import Path

import numpy as np
import pytest
import torch
from memoryless_dataset import hidden_states, true_median

from predictor import RequestRows, load_predictor
from predictor.models.survival_mlp import hazard_nll, hazard_rates, log_survival

HAZARDS = (0.1, 0.2, 0.3)
EDGES = torch.tensor([0.0, 5, 10, 20])

BINS = torch.tensor([0.0, 1, 2, 3, 4, 6, 10, 15, 25, 40, 80, 400])
"""Bins of one token near 0, and wider ones."""


def logits_of(*hazards: float) -> torch.Tensor:
    return torch.logit(torch.tensor(hazards, dtype=torch.float64))


def fitted_hazards(
    remaining: torch.Tensor, censored: torch.Tensor, edges: torch.Tensor = BINS
) -> torch.Tensor:
    """Return the hazards, one a bin for all rows alike, that minimise the mean `hazard_nll`."""
    logits = torch.full((len(edges) - 1,), -2.0, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logits], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        rows = logits.expand(len(remaining), -1)
        mean = hazard_nll(rows, remaining, censored, edges).mean()
        mean.backward()
        return mean

    optimizer.step(loss)
    return torch.sigmoid(logits.detach())


def geometric(p: float, n: int = 20_000, seed: int = 0) -> torch.Tensor:
    """Return n lengths with P(R > h) = (1 - p)^h."""
    drawn = np.random.default_rng(seed).geometric(p, n)
    return torch.from_numpy(drawn.astype(np.float64))


def ends_by_bin(p: float) -> torch.Tensor:
    """Return 1 - (1 - p)^w, the true hazard of each bin of `BINS` for geometric lengths."""
    return 1 - (1 - p) ** BINS.diff().double()


def standard_errors(p: float, remaining: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sampling error of each bin's hazard, and which bins 200 rows reached."""
    true = ends_by_bin(p)
    reached = (remaining[:, None] > BINS[:-1]).sum(dim=0)
    return torch.sqrt(true * (1 - true) / reached.clamp_min(1)), reached >= 200


def test_survival_is_the_product_of_what_passed_each_bin() -> None:
    survival = log_survival(logits_of(*HAZARDS)[None]).exp()
    torch.testing.assert_close(
        survival, torch.tensor([[1, 0.9, 0.9 * 0.8, 0.9 * 0.8 * 0.7]], dtype=torch.float64)
    )


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


@pytest.mark.parametrize(("p", "censored"), [(0.02, 0), (0.1, 0), (0.4, 0), (0.05, 1), (0.2, 1)])
def test_minimising_recovers_the_hazards_of_geometric_lengths(p: float, censored: bool) -> None:
    length, cap = geometric(p), geometric(p, seed=1)
    cut = (length > cap) & bool(censored)
    remaining = torch.where(cut, cap, length)
    true = ends_by_bin(p)
    error, reached = standard_errors(p, remaining)
    assert reached[:4].all(), "each bin of one token is seen"
    learned = fitted_hazards(remaining, cut)
    one_token = reached & (BINS.diff() == 1)
    assert ((learned - true).abs() <= 4 * error)[one_token].all()
    # Wider bins spread the ends before a cut evenly, which a falling curve does not quite.
    assert ((learned - true).abs() <= 0.1 * true * censored + 4 * error)[reached].all()
    if censored:
        assert 0.4 < cut.double().mean() < 0.6
        as_ended = fitted_hazards(remaining, torch.zeros_like(cut))
        assert ((as_ended - true) > 8 * error)[one_token].all()
        passed = [float((1 - hazards).cumprod(dim=0)[5]) for hazards in (true, learned, as_ended)]
        assert passed[1] == pytest.approx(passed[0], rel=0.05)
        assert passed[2] < 0.7 * passed[0], "P(R > 10) looks far too small"


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


@pytest.mark.parametrize("p", [0.01, 0.05, 0.3])
def test_rates_recover_the_end_probability_whatever_the_bins_and_cuts(p: float) -> None:
    length, cap = geometric(p), geometric(p, seed=1)
    rates = hazard_rates(torch.minimum(length, cap), length > cap, BINS.double())
    exposure = (torch.minimum(length, cap)[:, None].minimum(BINS[1:]) - BINS[:-1]).clamp_min(0)
    error = torch.sqrt(p * (1 - p) / exposure.sum(dim=0).clamp_min(1))
    well_seen = exposure.sum(dim=0) >= 500
    assert well_seen[:4].all()
    assert ((rates - p).abs() <= 4 * error)[well_seen].all()


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
