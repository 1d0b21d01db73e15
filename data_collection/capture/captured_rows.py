"""What the capture hook hands on: rows of hidden states, and the ends of requests."""

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec
import torch

__all__ = ["Cadence", "CapturedRows", "FinishedRequest", "RowConsumer"]

Cadence = Literal["request", "step"]
"""When rows are captured: whenever a request's own n is a multiple of k; or of every running
request together on each k-th engine step. Both capture the end of every prefill, n = 0."""


@dataclass(frozen=True, slots=True)
class CapturedRows:
    """The rows captured in one engine step, as a struct of arrays.

    Attributes:
        step: number of the engine step since the worker was armed.
        request_ids: [n_rows] ids inside the engine.
        prompt_tokens: [n_rows] prompt lengths.
        generated_tokens: [n_rows] tokens generated before this step's sample.
        max_tokens: [n_rows] the cap each request asked for; 0 when unknown.
        temperatures: [n_rows] with which each request is sampled.
        hidden_states: [n_rows, d] last layer, after the final norm, last token; on the
            engine's device and in the model's dtype. A copy: it may be kept.
    """

    step: int
    request_ids: list[str]
    prompt_tokens: list[int]
    generated_tokens: list[int]
    max_tokens: list[int]
    temperatures: list[float]
    hidden_states: torch.Tensor


class FinishedRequest(msgspec.Struct, frozen=True):
    """How a request ended, as the engine's scheduler knows it.

    Attributes:
        request_id: id inside the engine.
        finish_reason: ``stop``, ``length``, ``abort``, ``error`` or ``repetition``, or ``moved`` if
            another engine continues it.
        prompt_tokens: length of the prompt.
        total_tokens: tokens generated, the end-of-sequence token included.
        max_tokens: the cap the request asked for.
        prompt_token_ids: the prompt, or None when it came as embeddings.
        output_token_ids: [total_tokens] the answer.
        extra_args: what the client attached to its sampling parameters.
        temperature: with which the answer was sampled; None when unknown.
        top_p: nucleus of the sampling; None when unknown.
    """

    request_id: str
    finish_reason: str
    prompt_tokens: int
    total_tokens: int
    max_tokens: int
    prompt_token_ids: list[int] | None
    output_token_ids: list[int]
    extra_args: dict[str, Any]
    temperature: float | None = None
    top_p: float | None = None


class RowConsumer(Protocol):
    """Something that wants the captured rows: a recorder, a forecaster.

    Its methods are called on the engine's thread and must return at once.

    Attributes:
        cadence: which rows it wants.
    """

    cadence: Cadence

    def on_rows(self, rows: CapturedRows) -> None:
        """Take the rows of one step."""

    def on_finished(self, finished: list[FinishedRequest]) -> None:
        """Take the requests that ended; their last rows have been handed on before."""

    def close(self) -> None:
        """Write out what is held; the engine stops."""
