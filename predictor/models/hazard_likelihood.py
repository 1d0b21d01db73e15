"""The likelihood of discrete-time hazards, for requests that ended and requests that were cut."""

import torch
from torch.nn.functional import logsigmoid

__all__ = ["hazard_nll", "hazard_rates", "log_survival"]


def log_survival(logits: torch.Tensor) -> torch.Tensor:
    r"""Return log S at every edge, [n, n_bins + 1], from hazard logits [n, n_bins].

    The hazard of bin j is the probability that a request ends in (e_j, e_{j+1}] given that it
    passed e_j: λ_j = sigmoid(logit_j), and

    .. math:: \log S(e_j) = \sum_{i < j} \log(1 - \lambda_i).
    """
    steps = logsigmoid(-logits)
    start = torch.zeros_like(steps[:, :1])
    return torch.cat([start, steps.cumsum(dim=1)], dim=1)


def hazard_nll(
    logits: torch.Tensor, remaining: torch.Tensor, censored: torch.Tensor, edges: torch.Tensor
) -> torch.Tensor:
    r"""Return each row's negative log-likelihood, [n], in nats.

    A request that ended after r tokens, r in (e_j, e_{j+1}], contributes

    .. math:: -\log S(e_j) - \log \lambda_j,

    and one that was cut after c tokens, c in (e_j, e_{j+1}], only says that it passed c. With
    ends spread evenly over a bin, as `SurvivalForecast` reads the curve,

    .. math:: -\log S(c) = -\log S(e_j) - \log\Big(1 - \frac{c - e_j}{e_{j+1} - e_j}
        \lambda_j\Big).

    The even spread's density within a bin is left out: it does not depend on the logits.
    Treating the second kind as the first is what makes predictors err on the short side.

    Args:
        logits: [n, n_bins] hazard logits.
        remaining: [n] tokens until the request ended or was cut, at least 1; more than the
            last edge counts as the last edge.
        censored: [n] bool, whether the request was cut.
        edges: [n_bins + 1] ascending tokens from 0.
    """
    last = logits.shape[1] - 1
    bins = (torch.searchsorted(edges, remaining.to(edges.dtype)) - 1).clamp(0, last)
    low, high = edges[bins], edges[bins + 1]
    part = ((remaining - low) / (high - low)).clamp(0, 1)
    passed = log_survival(logits).gather(1, bins[:, None]).squeeze(1)
    logit = logits.gather(1, bins[:, None]).squeeze(1)
    # 1 - part·λ written so that it neither cancels nor reaches log 0 at part = 1.
    stays, ends = torch.sigmoid(-logit), torch.sigmoid(logit)
    cut = torch.log((1 - part) * ends + stays + 1e-12)
    return -(passed + torch.where(censored, cut, logsigmoid(logit)))


def hazard_rates(tokens: torch.Tensor, censored: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    r"""Return the hazard per token that fits all observations alike, [n_bins].

    .. math:: \lambda_j = \frac{\text{ends in bin } j + 1/2}{\text{tokens seen in bin } j
        + 1 / (2 \bar\lambda)}

    with the pooled rate as a prior worth half an end. A bin that fewer than 20 observations
    reached takes the rate of the last three that more did reach: the data says nothing there,
    and a constant hazard assumes least.

    Args:
        tokens: [n] after which each observation ended or was cut.
        censored: [n] bool.
        edges: [n_bins + 1] ascending tokens from 0.
    """
    seen = (torch.minimum(tokens[:, None], edges[1:]) - edges[:-1]).clamp_min(0)
    in_bin = (tokens[:, None] > edges[:-1]) & (tokens[:, None] <= edges[1:])
    ends = (in_bin & ~censored[:, None]).sum(dim=0).to(edges.dtype)
    exposure = seen.sum(dim=0)
    pooled = (ends.sum() + 0.5) / exposure.sum().clamp_min(1)
    rates = (ends + 0.5) / (exposure + 0.5 / pooled)
    known = (seen > 0).sum(dim=0) >= 20
    if known.any() and not known.all():
        last = torch.nonzero(known).squeeze(1)[-3:]
        tail = (ends[last].sum() + 0.5) / exposure[last].sum()
        rates[last[-1] + 1 :] = tail
    return rates
