"""Whether the hidden states that are captured are those that a model's next tokens come from.

vLLM's models end in two parts: a forward pass, whose states are captured, and ``compute_logits``.
Where that does more than multiply by a matrix (MiMo's and Step-3.5's apply the final norm there)
captured states would be wrong, and nothing else would say so.
"""

import logging
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any, NamedTuple

import torch
from vllm.v1.outputs import ModelRunnerOutput

from data_collection.capture.capture_hook import Cadence, CapturedRows
from data_collection.capture.requests import FinishedRequest, replay_of

logger = logging.getLogger(__name__)

_ROWS = 32
"""Greedy tokens that are compared: of MiMo's more than half differ."""
_FORCING = ("thinking_token_budget", "trace_decode_token_ids")
_PROBES = 4
_MOST_WRONG = _ROWS // 4
_MOST_TIED = 8
_FORBIDDEN = -1e30
_TIE = 0.01
"""Of the range of a row's logits: by so much less, a token may be the largest all the same."""


class UnlikeStatesError(ValueError):
    """Raised when a model's next tokens do not come from the states that would be captured."""

    def __init__(self, model: str, found: str) -> None:
        super().__init__(
            f"{model}: its next tokens do not come from the hidden states that vLLM's forward pass "
            f"returns ({found}): Headway can neither record them nor forecast from them"
        )


def state_width(model: torch.nn.Module, otherwise: int) -> int:
    """Return d of the states that the head takes, which a projection may make smaller."""
    head = _head(model)
    return otherwise if head is None else int(head.embedding_dim)


def refuse_changed_states(
    model: torch.nn.Module, name: str, width: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Refuse a model whose logits are the same of h and 2 h: it normalizes states as it makes them.

    Every tensor-parallel rank has to ask at once; states are of the width, device and dtype.

    Raises:
        UnlikeStatesError: it is one.
    """
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(_PROBES, width, generator=generator).to(device, dtype)
    with torch.inference_mode():
        once, twice = (model.compute_logits(scale * states) for scale in (1.0, 2.0))  # type: ignore[operator]
    if once is None or twice is None:  # of another rank
        return
    once, twice = once.float(), twice.float()
    allowed = (once > _FORBIDDEN) & (twice > _FORBIDDEN)  # a model may forbid tokens
    once, twice = once[allowed], twice[allowed]
    if (twice - once).norm() < _TIE * once.norm():
        raise UnlikeStatesError(name, "it normalizes them as it computes logits")


def processes_logits(model_config: Any) -> bool:
    """Whether an engine has logits processors of others: their tokens may be any."""
    return bool(model_config.logits_processors or entry_points(group="vllm.logits_processors"))


class _Rows(NamedTuple):
    """Which tokens may be next by the rows of a step: ``likely[i]``, of those ranks have."""

    request_ids: list[str]
    likely: list[set[int]]


class GreedyCheck:
    r"""A consumer of rows that compares the first greedy ones with the tokens that come of them.

    Of a row h whose request is greedy, and whose logits nothing else changes, the next token is

    .. math:: \arg\max_v (W h)_v

    with the weights W of the head, up to ties. With tensor parallelism it is the largest of those
    that this rank has, or it is another rank's. A model may forbid some tokens as it computes
    logits: where `refuse_changed_states` has accepted it, what it computes of h counts as well.
    With tensor parallelism one rank cannot compute that, and what differs is only logged.

    The engine waits for these few products, so that what is compared when a step's tokens arrive,
    in whichever thread, is on the host.

    Args:
        model: whose states are captured.
        name: of the model.
        cadence: of the rows that are captured anyway.
        is_linear: whether `refuse_changed_states` has accepted the model.
        is_alone: whether this is the only tensor-parallel rank.

    Attributes:
        compared: tokens so far.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        name: str,
        cadence: Cadence,
        is_linear: bool = False,
        is_alone: bool = True,
    ) -> None:
        self.cadence = cadence
        self._head = _head(model)
        self._model = model
        self._name = name
        self._computes, self._is_alone = is_linear and is_alone, is_alone
        self._plain: set[str] = set()
        self._rows: _Rows | None = None
        self.compared = self._wrong = 0

    @property
    def done(self) -> bool:
        """Whether enough has been compared, or nothing can be."""
        return self._head is None or self.compared >= _ROWS

    def note(self, new_requests: Sequence[Any]) -> None:
        """Remember which requests of a step, new to the worker, are greedy and nothing more."""
        if not self.done:
            self._plain.update(one.req_id for one in new_requests if _is_plain(one))

    def on_rows(self, rows: CapturedRows) -> None:
        """Find which tokens greedy requests may get, until their step's tokens are there."""
        if self.done:
            return
        names = rows.request_ids
        greedy = [i for i, name in enumerate(names) if name in self._plain][:_ROWS]
        if not greedy:
            return
        states, head = rows.hidden_states[greedy], self._head
        with torch.inference_mode():
            bias = getattr(head, "bias", None)
            shard = head.quant_method.apply(head, states, bias=bias)
            first = head.shard_indices.org_vocab_start_index
            likely = _likely(shard[:, : head.shard_indices.num_org_elements], first)
            if self._computes:
                of_model = _likely(self._model.compute_logits(states), 0)  # type: ignore[operator]
                likely = [a | b for a, b in zip(likely, of_model, strict=True)]
        self._rows = _Rows([names[i] for i in greedy], likely)

    def on_finished(self, finished: list[FinishedRequest]) -> None:
        """Forget requests."""
        self._plain.difference_update(request.request_id for request in finished)

    def close(self) -> None:
        """Nothing is held."""

    def take(self) -> _Rows | None:
        """Return the rows of the step that has just run."""
        rows, self._rows = self._rows, None
        return rows

    def compare(self, rows: _Rows, output: ModelRunnerOutput) -> None:
        """Compare the rows of a step with its tokens.

        Raises:
            UnlikeStatesError: too many differ.
        """
        shard = self._head.shard_indices
        first, end = shard.org_vocab_start_index, shard.org_vocab_start_index
        end += shard.num_org_elements
        sampled = dict(zip(output.req_ids, output.sampled_token_ids, strict=True))
        for name, likely in zip(rows.request_ids, rows.likely, strict=True):
            tokens = sampled.get(name)
            if tokens and first <= tokens[0] < end:
                self.compared += 1
                self._wrong += int(tokens[0]) not in likely
        if self._wrong > _MOST_WRONG:
            found = f"{self._wrong} of the first {self.compared} greedy tokens differ"
            error = UnlikeStatesError(self._name, found)
            if self._is_alone:
                raise error
            logger.error("%s; or this model changes its logits", error)
            self.compared = _ROWS


def _likely(logits: torch.Tensor, first: int) -> list[set[int]]:
    """Return, for each row, the tokens with the largest logit, up to ties."""
    logits = logits.float()
    values, tokens = logits.topk(min(_MOST_TIED, logits.shape[1]), dim=1)
    tie = values[:, 0] - _TIE * (values[:, 0] - logits.amin(dim=1))
    near, tokens = (values >= tie[:, None]).cpu(), (tokens + first).cpu()
    return [set(row[kept].tolist()) for row, kept in zip(tokens, near, strict=True)]


def _head(model: torch.nn.Module) -> Any:
    """Return the matrix that logits are made with; None if it is not where models have it."""
    for module in model.modules():
        head = getattr(module, "lm_head", None)
        head = getattr(head, "base_layer", head)
        if hasattr(head, "shard_indices") and hasattr(head, "quant_method"):
            return head
    return None


def _is_plain(request: Any) -> bool:
    """Whether the largest logit is a request's next token."""
    sampling = request.sampling_params
    return (
        sampling is not None
        and request.lora_request is None
        and replay_of(sampling.extra_args) is None
        and sampling.temperature == 0
        and sampling.repetition_penalty == 1
        and not (sampling.presence_penalty or sampling.frequency_penalty)
        and not (sampling.logit_bias or sampling.allowed_token_ids or sampling.bad_words)
        and not sampling.min_tokens
        and sampling.structured_outputs is None
        and all(getattr(sampling, name, None) is None for name in _FORCING)
    )
