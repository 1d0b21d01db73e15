"""Forecasts of requests from their prompts: a survival model on a prompt's vector."""

import logging
from collections.abc import Sequence
from math import nan
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from data_collection.shipped_files import find_shipped
from predictor.forecasts.forecast import SurvivalForecast
from predictor.models.checkpoint import load_predictor
from predictor.models.hidden_state_mlp import (
    NO_REPETITION,
    PROMPT_LAYER,
    CheckpointError,
    RequestRows,
)
from predictor.models.survival_mlp import SurvivalMLP
from predictor.prompts.prompt_embedding import PromptEmbedding, PromptEmbeddingError

__all__ = ["PromptPredictor", "prompt_numbers"]


class PromptPredictor:
    """Forecasts how many tokens a request will generate, before anything of it is computed.

    Args:
        model: a `SurvivalMLP` on the vectors of prompts.
        embedding: that makes them.

    Attributes:
        longest: answer that it was trained on, in tokens.
    """

    def __init__(self, model: SurvivalMLP, embedding: PromptEmbedding) -> None:
        self.model, self._embedding = model, embedding
        self.longest = int(model.config()["trained_remaining_tokens"][1])

    @classmethod
    def load(cls, checkpoint: str) -> "PromptPredictor":
        """Load a checkpoint that ``headway train fit --data.reads prompts`` wrote.

        Raises:
            CheckpointError: the folder is no checkpoint, is damaged, or reads hidden states.
        """
        model = load_predictor(checkpoint)
        if not isinstance(model, SurvivalMLP) or model.layer != PROMPT_LAYER:
            raise CheckpointError(
                f"{checkpoint}: forecasts from hidden states, not from prompts; train one with "
                "`headway train fit --config configs/predictor/prompt.yaml`"
            )
        if int(model.config()["trained_remaining_tokens"][1]) < 1:
            raise CheckpointError(
                f"{checkpoint}: config.json says trained_remaining_tokens "
                f"{list(model.config()['trained_remaining_tokens'])}: it has learned from no answer"
            )
        try:
            embedding = PromptEmbedding.load(Path(find_shipped(checkpoint)))
        except PromptEmbeddingError as error:
            raise CheckpointError(str(error)) from error
        if embedding.size != model.hidden_size:
            raise CheckpointError(
                f"{checkpoint}: its model reads {model.hidden_size} values, its embedding has "
                f"{embedding.size}"
            )
        return cls(model, embedding)

    def forecast(
        self,
        prompts: Sequence[Sequence[int]],
        temperature: npt.ArrayLike,
        max_tokens: npt.ArrayLike,
    ) -> SurvivalForecast:
        """Forecast n requests by their prompts' token ids.

        Args:
            prompts: as the engine gets them, with the chat template.
            temperature: [n] nan where unknown.
            max_tokens: [n] output tokens at most.
        """
        own = [self._embedding.own_tokens(prompt) for prompt in prompts]
        vectors = np.stack([self._embedding.vector(tokens) for tokens, _ in own])
        lengths = np.array([length for _, length in own])
        return self._forecast(vectors, lengths, temperature, max_tokens)

    def expected_tokens(
        self, prompt: str | Sequence[int], max_tokens: int | None = None, temperature: float = nan
    ) -> float:
        """Return the mean number of tokens that one answer is forecast to have.

        Args:
            prompt: text without a chat template, or token ids.
            max_tokens: output tokens at most. No answer is expected to be longer than the longest
                that was trained on, whatever its client allows.
            temperature: nan where unknown.
        """
        if isinstance(prompt, str):
            own, length = self._embedding.read(prompt)
        else:
            own, length = self._embedding.own_tokens(prompt)
        vector = self._embedding.vector(own)[None]
        most = self.longest if max_tokens is None else min(max(max_tokens, 1), self.longest)
        return float(self._forecast(vector, np.array([length]), [temperature], [most]).mean()[0])

    def warn_of_other_model(self, served: str, logger: logging.Logger) -> None:
        """Warn if another model is served than the one whose answers it was trained on."""
        trained = self.model.serving_model
        if served != trained:
            logger.warning(
                "prompt_checkpoint was trained on answers of %s, but %s is served", trained, served
            )

    def _forecast(
        self,
        vectors: npt.NDArray[np.float32],
        lengths: npt.NDArray[np.int64],
        temperature: npt.ArrayLike,
        max_tokens: npt.ArrayLike,
    ) -> SurvivalForecast:
        numbers = prompt_numbers(lengths, np.asarray(max_tokens), np.asarray(temperature))
        rows = RequestRows(torch.from_numpy(vectors), torch.from_numpy(numbers))
        return self.model.forecast(rows)


def prompt_numbers(
    lengths: npt.NDArray[np.int64],
    max_tokens: npt.NDArray[np.generic],
    temperature: npt.NDArray[np.generic],
) -> npt.NDArray[np.float32]:
    """Return the columns of `INPUTS` for requests that have no token yet, [n, 6]."""
    numbers = np.zeros((len(lengths), 6), dtype=np.float32)
    numbers[:, 1], numbers[:, 2], numbers[:, 3] = lengths, max_tokens, temperature
    numbers[:, 4:] = NO_REPETITION
    return numbers
