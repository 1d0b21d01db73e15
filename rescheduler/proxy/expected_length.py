"""How long answers are expected to be before anything of them is computed."""

import logging
from collections.abc import Callable
from contextlib import suppress

from data_collection.models import name_of, resolve_model
from rescheduler.emulation.length_posterior import EmulatedPrompts
from rescheduler.engines.deployment import Deployment, DeploymentError
from rescheduler.openai.openai_request import ClientRequest
from rescheduler.openai.prompt_text import prompt_text, temperature

__all__ = ["ExpectedLengths", "expected_lengths"]

logger = logging.getLogger("headway.serve")


class ExpectedLengths:
    """Forecasts requests from their prompts as they arrive.

    Args:
        checkpoint: of a predictor that reads prompts.
        model: that is served.

    Raises:
        DeploymentError: the checkpoint cannot be used.
    """

    def __init__(self, checkpoint: str, model: str) -> None:
        import torch  # which a proxy without a checkpoint does not load

        from predictor.prompts.prompt_predictor import PromptPredictor

        torch.set_num_threads(1)  # a forecast is too small to share
        try:
            self._predictor = PromptPredictor.load(checkpoint)
        except ValueError as error:
            raise DeploymentError(f"prompt_checkpoint: {error}") from error
        self._failed = False
        with suppress(ValueError):  # a folder of the engines' machines
            model = name_of(resolve_model(model))
        self._predictor.warn_of_other_model(model, logger)
        self._predictor.expected_tokens("Hello")  # so that no client waits for what is set up once

    def of(self, client: ClientRequest) -> int | None:
        """Return the tokens that an answer is expected to have; None if nothing is known."""
        if client.direct:
            return None
        try:
            prompt = prompt_text(client.body)
            if prompt is None:
                return None
            most, asked = client.max_tokens, temperature(client.body)
            expected = self._predictor.expected_tokens(prompt, most, asked)
            return max(1, round(expected))
        except Exception:
            if not self._failed:
                logger.exception("a prompt cannot be forecast; only the first one is shown")
            self._failed = True
            return None


def expected_lengths(deployment: Deployment) -> Callable[[ClientRequest], int | None] | None:
    """Return what forecasts a deployment's requests as they arrive, if anything does.

    It returns the tokens that an answer is expected to have; None if nothing is known.

    Raises:
        DeploymentError: the prompt checkpoint cannot be used.
    """
    emulate = deployment.engine.emulate
    if emulate is not None and emulate.prompt_forecast is not None:
        prompts = EmulatedPrompts(emulate.lengths, emulate.prompt_forecast)
        return lambda one: None if one.direct else prompts.expected_tokens(one.body, one.max_tokens)
    if deployment.prompt_checkpoint is not None:
        return ExpectedLengths(deployment.prompt_checkpoint, deployment.model).of
    return None
