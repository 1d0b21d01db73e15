"""Headway's predictor: a survival curve of the remaining length from hidden states."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import logsigmoid

from predictor.forecasts.forecast import SurvivalForecast
from predictor.forecasts.kaplan_meier import Recalibration
from predictor.models.hidden_state_mlp import CheckpointError, HiddenStateMLP, RequestRows


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
        logits: [n, n_bins].
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


class SurvivalMLP(HiddenStateMLP):
    r"""Predict P(R > h) for the remaining tokens R of a request, at every edge of a grid.

    .. math:: S(e_j) = g\Big(\prod_{i < j} \big(1 - \operatorname{sigmoid}(x_i)\big)\Big)

    with x the trunk's output (`HiddenStateMLP`), one discrete-time hazard a bin, and g the
    post-hoc `Recalibration`, the identity at first. Trained with `hazard_nll`.

    Args:
        edges: [n_edges] the grid, in whole tokens from 0 to the model's limit.
        recalibration_nominal: [n_knots] where g is given, as P(R ≤ h).
        recalibration_observed: [n_knots] what was observed there.

    Raises:
        CheckpointError: the checkpoint is of another kind.
        ForecastError: the edges or the recalibration are none.
    """

    edges: torch.Tensor

    def __init__(
        self,
        edges: Sequence[int],
        kind: str = "survival",
        recalibration_nominal: Sequence[float] = (0.0, 1.0),
        recalibration_observed: Sequence[float] = (0.0, 1.0),
        **shared: Any,
    ) -> None:
        if kind != "survival":
            raise CheckpointError(f"a {kind!r} checkpoint holds no survival predictor")
        if shared.pop("averaging_half_life", 0):
            raise CheckpointError(
                "it averages a request's forecasts, which Headway no longer does. Train it again, "
                "best on averages of hidden states (docs/collect.md, Which states); or set "
                "averaging_half_life to 0 in its config.json, then `headway evaluate recalibrate`"
            )
        super().__init__(len(edges) - 1, kind=kind, **shared)
        SurvivalForecast.new(edges, [[1.0, *[0.0] * (len(edges) - 1)]])
        self.recalibration = Recalibration(recalibration_nominal, recalibration_observed)
        grid = torch.tensor(list(edges), dtype=torch.float32)
        self.register_buffer("edges", grid, persistent=False)

    def forward(self, rows: RequestRows, noise: float = 0.0) -> torch.Tensor:
        """Return hazard logits, [n, n_edges - 1] (for training)."""
        return self.output(rows, noise)

    def survival(self, rows: RequestRows) -> torch.Tensor:
        """Return S at every edge, [n, n_edges], before g."""
        return log_survival(self(rows)).exp()

    @torch.inference_mode()
    def forecast(self, rows: RequestRows) -> SurvivalForecast:
        """Forecast n rows, capped by the tokens left to each request's end."""
        return self._capped(self.recalibration.apply(self._learned(rows)), rows)

    @torch.inference_mode()
    def forecast_as_learned(self, rows: RequestRows) -> SurvivalForecast:
        """Forecast n rows without the recalibration, to see what it does."""
        return self._capped(self._learned(rows), rows)

    def _learned(self, rows: RequestRows) -> npt.NDArray[np.float64]:
        self.refuse_unreadable(rows)
        return self.survival(rows).cpu().numpy().astype(np.float64)

    def _capped(self, curves: npt.NDArray[np.float64], rows: RequestRows) -> SurvivalForecast:
        left = rows.numbers[:, 2].cpu().numpy()
        return SurvivalForecast.new(self.edges.cpu().numpy(), curves, left)

    def fingerprint(self) -> str:
        """Return 12 hexadecimal digits that name the weights and what is done to their curves."""
        knots = self.recalibration.nominal, self.recalibration.observed
        digest = hashlib.sha256(repr((self.edges.tolist(), *knots)).encode())
        for name, values in sorted(self.state_dict().items()):
            digest.update(name.encode() + values.cpu().numpy().tobytes())
        return digest.hexdigest()[:12]

    def recalibrate(self, recalibration: Recalibration) -> None:
        """Use another post-hoc recalibration, also in checkpoints saved from here on."""
        self.recalibration = recalibration
        self._hub_mixin_config = self.config() | {
            "recalibration_nominal": list(recalibration.nominal),
            "recalibration_observed": list(recalibration.observed),
        }
