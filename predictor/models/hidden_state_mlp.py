"""What every predictor on hidden states shares, and STAR's: one number from one hidden state."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from huggingface_hub import ModelCard, PyTorchModelHubMixin
from torch import nn

from data_collection.dataset.dataset_schema import Session
from predictor.forecasts.forecast import Forecast, PointForecast
from predictor.models.checkpoint_card import checkpoint_card

INPUTS = (
    *("generated_tokens", "prompt_tokens", "tokens_left"),
    *("temperature", "repetition", "repeated_suffix"),
)
"""Numbers a predictor may read beside the hidden state: token counts, the last to ``max_tokens``;
with what the answer is sampled; and what `repetition` says of all its tokens but the newest, which
an engine that schedules a step ahead does not know yet."""

PROMPT_LAYER = "prompt"
"""What a checkpoint that reads prompts names in place of a layer of the serving model."""

NO_REPETITION = (0.0, 0.0)
"""What `repetition` returns of an answer that has only begun. It is here because vLLM's worker on a
CPU does not start once numba is imported, which `repetition` needs."""


class CheckpointError(ValueError):
    """A folder is not a valid predictor checkpoint."""


class ModelMismatchError(ValueError):
    """A predictor was given hidden states of a model it was not trained on."""


class RequestRows(NamedTuple):
    """What is known of n running requests when they are forecast, on one device.

    Attributes:
        hidden_states: [n, d] float32, last layer, after the final norm, last token; or what else
            the predictor has been trained on (its ``layer`` and ``state_half_life``).
        numbers: [n, 6] float32, the columns of `INPUTS`; the first three are enough for a
            predictor that reads no other. An unknown one (nan) counts as the average.
    """

    hidden_states: torch.Tensor
    numbers: torch.Tensor


class HiddenStateMLP(
    nn.Module,
    PyTorchModelHubMixin,
    library_name="headway",
    tags=["length-prediction", "llm-serving"],
    license="apache-2.0",
):
    """An MLP on the serving model's hidden state (STAR §4.2, eq. 2), whatever its head.

    With h in R^d a hidden state, by default the last layer's of the last token after the norm,

        x = W_m φ(… φ(W_1 [z, c])),   z = (h - μ) / σ,   φ = ReLU,

    with biases. c are the standardised log(1 + x) of the numbers named by ``inputs``,
    none in STAR. The standardisations come from the training rows and fold into W_1: they
    change how fast the network learns, not what it can express.

    Every argument is kept in the checkpoint's ``config.json``.

    Args:
        outputs: values the last layer yields for a request.
        kind: which predictor the checkpoint is of.
        model: name of the serving model whose hidden states it reads.
        hidden_size: d.
        k: tokens between two rows of the training data.
        normalisation: what the serving model applied to it.
        state_half_life: tokens after which a state counts half in the average over an answer that
            it reads (`AveragedStates`); 0: it reads the last token's state.
        inputs: numbers read beside the hidden state, out of `INPUTS`.
        provenance: commit, versions, dataset, command and metrics, for the card.

    Raises:
        CheckpointError: an input has another name.
    """

    input_mean: torch.Tensor
    input_std: torch.Tensor
    count_columns: torch.Tensor
    count_mean: torch.Tensor
    count_std: torch.Tensor

    def __init__(
        self,
        outputs: int,
        *,
        kind: str,
        model: str,
        model_revision: str,
        hidden_size: int,
        k: int,
        layer: str = "last",
        normalisation: str = "final norm of the model",
        widths: Sequence[int] = (2048, 512, 64),
        inputs: Sequence[str] = (),
        trained_generated_tokens: Sequence[int] = (0, 0),
        trained_remaining_tokens: Sequence[int] = (0, 0),
        provenance: dict[str, Any] | None = None,
        adapter: str = "",
        state_half_life: float = 0.0,
    ) -> None:
        super().__init__()
        for name in inputs:
            if name not in INPUTS:
                raise CheckpointError(f"unknown input {name!r}; known: {', '.join(INPUTS)}")
        self.kind = kind
        self.serving_model = model
        self.model_revision = model_revision
        self.hidden_size = hidden_size
        self.k = k
        self.layer = layer
        self.adapter = adapter
        self.state_half_life = state_half_life
        self.inputs = tuple(inputs)
        self.provenance = dict(provenance or {})
        sizes = [hidden_size + len(self.inputs), *widths]
        layers: list[nn.Module] = []
        for wide, narrow in pairwise(sizes):
            layers += [nn.Linear(wide, narrow), nn.ReLU()]
        self.network = nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))
        # A buffer: an index that comes from the host cannot be captured in a CUDA graph.
        columns = torch.tensor([INPUTS.index(name) for name in self.inputs], dtype=torch.int64)
        self.register_buffer("count_columns", columns, persistent=False)
        self.register_buffer("input_mean", torch.zeros(hidden_size))
        self.register_buffer("input_std", torch.ones(hidden_size))
        self.register_buffer("count_mean", torch.zeros(len(self.inputs)))
        self.register_buffer("count_std", torch.ones(len(self.inputs)))

    def output(self, rows: RequestRows, noise: float = 0.0) -> torch.Tensor:
        """Return the last layer's values, [n, outputs]; noise is for training."""
        inputs = (rows.hidden_states - self.input_mean) / self.input_std
        if noise:
            inputs = inputs + noise * torch.randn_like(inputs)
        if self.inputs:
            numbers = ((self._logarithms(rows) - self.count_mean) / self.count_std).nan_to_num(0.0)
            inputs = torch.cat([inputs, numbers], dim=1)
        output: torch.Tensor = self.network(inputs)
        return output

    def standardise(self, rows: RequestRows) -> None:
        """Set the standardisation of the inputs to mean and deviation of the given rows.

        Raises:
            ValueError: an input is unknown in all of them.
        """
        self.refuse_unreadable(rows)
        self.input_mean.copy_(rows.hidden_states.mean(dim=0))
        self.input_std.copy_(rows.hidden_states.std(dim=0, correction=0) + 1e-6)
        if self.inputs:
            numbers = self._logarithms(rows)
            for name, unknown in zip(self.inputs, numbers.isnan().all(dim=0), strict=True):
                if unknown:
                    raise ValueError(
                        f"{name} is known of no row: record with token ids, or leave it out"
                    )
            self.count_mean.copy_(numbers.nanmean(dim=0))
            spread = (numbers - self.count_mean).square().nanmean(dim=0).sqrt()
            self.count_std.copy_(torch.where(spread > 1e-3, spread, 1.0))  # all alike: no scale

    def _logarithms(self, rows: RequestRows) -> torch.Tensor:
        return torch.log1p(rows.numbers.index_select(1, self.count_columns).clamp_min(0))

    def forecast(self, rows: RequestRows) -> Forecast:
        """Forecast n requests, capped by the tokens left to ``max_tokens``.

        Raises:
            ModelMismatchError: d is not the one the predictor was trained on.
        """
        raise NotImplementedError

    def refuse_unreadable(self, rows: RequestRows) -> None:
        """Refuse rows that lack what the predictor reads.

        Raises:
            ModelMismatchError: d is not the one the predictor was trained on.
            ValueError: an input is missing.
        """
        vectors = rows.hidden_states
        if vectors.ndim != 2 or vectors.shape[1] != self.hidden_size:
            raise ModelMismatchError(
                f"hidden states of shape {tuple(vectors.shape)} given to a predictor of "
                f"{self.serving_model}, whose vectors have {self.hidden_size} values"
            )
        for name in self.inputs:
            if INPUTS.index(name) >= rows.numbers.shape[1]:
                raise ValueError(
                    f"this predictor reads {', '.join(self.inputs)}: RequestRows needs all of "
                    f"{', '.join(INPUTS)}, not {rows.numbers.shape[1]} numbers"
                )

    def refuse_other_model(self, session: Session) -> None:
        """Refuse hidden states that were recorded from another model, revision or layer.

        Raises:
            ModelMismatchError: names both models.
        """
        if self.layer == PROMPT_LAYER != session.layer:
            raise ModelMismatchError(
                "this predictor reads prompts, not hidden states: give it as prompt_checkpoint"
            )
        states = (session.layer, session.state_half_life, session.hidden_size)
        self.refuse_other_states(session.model, session.revision, *states)

    def refuse_other_states(
        self, model: str, revision: str, layer: str, half_life: float, hidden_size: int
    ) -> None:
        """Refuse the hidden states of a model, of one of its layers, averaged or not.

        Raises:
            ModelMismatchError: names both.
        """
        reads = (self.layer, self.state_half_life, self.hidden_size)
        mine = (self.serving_model, self.model_revision, *reads)
        theirs = (model, revision, layer, half_life, hidden_size)
        if mine != theirs:
            raise ModelMismatchError(
                f"this predictor was trained on hidden states of {_named(*mine)}; these are of "
                f"{_named(*theirs)}. Collect the states that it reads (--record.layer and "
                "--record.state_half_life; an engine without them takes the predictor's), or train "
                "another with `headway train fit`"
            )

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        """Return the checkpoint's card, made from its configuration."""
        return ModelCard(checkpoint_card(self.config()))

    def config(self) -> dict[str, Any]:
        """Return what ``config.json`` holds: the arguments this predictor was built with."""
        config = self._hub_mixin_config
        assert isinstance(config, dict)
        defaults = HiddenStateMLP._hub_mixin_jsonable_default_values
        return {**defaults, **config, "kind": self.kind, "provenance": self.provenance}


def _named(model: str, revision: str, layer: str, half_life: float, hidden_size: int) -> str:
    averaged = f", averaged with a half-life of {half_life:g} tokens" if half_life else ""
    of = f"{layer} layer" if layer == "last" else f"layer {layer}"
    return f"{model} (revision {revision}, {of}{averaged}, d = {hidden_size})"


class RemainingLengthMLP(HiddenStateMLP):
    """Predict the remaining length of a request from one hidden state (STAR §4.2, eq. 2).

        y = s · w4 φ(W3 φ(W2 φ(W1 z)))

    with z and φ as in `HiddenStateMLP` and the scale s, ``target_scale``, fixed before training.
    Predictions are clipped to at least 0.

    Raises:
        CheckpointError: the checkpoint is of another kind or has another target.
    """

    def __init__(
        self,
        kind: str = "regression",
        target_transform: str = "tokens",
        target_scale: float = 1.0,
        **shared: Any,
    ) -> None:
        if kind != "regression" or target_transform != "tokens":
            raise CheckpointError(
                f"a {kind!r} checkpoint with target {target_transform!r} is no "
                "remaining-length regressor in tokens"
            )
        super().__init__(1, kind=kind, **shared)
        self.target_scale = target_scale

    def forward(self, rows: RequestRows, noise: float = 0.0) -> torch.Tensor:
        """Return remaining tokens [n], unclipped (for training)."""
        return self.output(rows, noise).squeeze(-1) * self.target_scale

    @torch.inference_mode()
    def forecast(self, rows: RequestRows) -> PointForecast:
        """Forecast n requests as step curves, capped by the tokens left to ``max_tokens``."""
        self.refuse_unreadable(rows)
        predicted = self(rows).clamp_min(0).cpu().numpy()
        return PointForecast.new(predicted, rows.numbers[:, 2].cpu().numpy())
