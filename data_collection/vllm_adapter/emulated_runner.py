"""A model runner without a model: answers are scripted, KV transfers are the connector's own."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
import vllm.v1.worker.cpu_worker
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from data_collection.versions import vllm_release
from data_collection.vllm_adapter.nixl import TAILS


def engine_logger(name: str) -> logging.Logger:
    """Return a logger whose messages an engine prints, as it does vLLM's own."""
    logger: logging.Logger = init_logger(f"vllm.{name}")
    return logger


class Answers(Protocol):
    """What requests are answered: the script of an emulated engine."""

    def begin(self, name: str, arguments: Mapping[str, Any], min_tokens: int) -> None:
        """Learn of a request by its id in the engine, what its client attached, and a minimum."""

    def token(self, name: str, n: int) -> int | None:
        """Return token n of a request's answer; None: it ends."""

    def forget(self, names: Sequence[str]) -> None:
        """Forget requests."""


class StepSize(NamedTuple):
    """What a step computes.

    Attributes:
        context_tokens: read, those computed included.
    """

    requests: int
    new_tokens: int
    context_tokens: int


class _Request(NamedTuple):
    prompt_tokens: int
    tail: int
    """Tokens of the answer that another engine generated."""


class EmulatedRunner(CPUModelRunner):  # type: ignore[misc]
    """Runs nothing, and samples what `answers` says.

    Attributes:
        answers: given before the first step.
        step: size of the latest.
        batch: request ids of the latest step, in its order.
    """

    answers: Answers

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.step = StepSize(0, 0, 0)
        self.batch: list[str] = []
        self._samples: list[tuple[str, int | None]] = []
        self._requests: dict[str, _Request] = {}
        eos = self.model_config.hf_text_config.eos_token_id
        self._eos = int(eos[0] if isinstance(eos, list) else eos)

    def execute_model(
        self, scheduler_output: SchedulerOutput, intermediate_tensors: Any = None
    ) -> ModelRunnerOutput | None:
        """Note which requests sample, and let the connector transfer."""
        del intermediate_tensors
        if has_kv_transfer_group():
            get_kv_transfer_group().handle_preemptions(scheduler_output.kv_connector_metadata)
        self._take(scheduler_output)
        if not scheduler_output.total_num_scheduled_tokens:
            if not has_kv_transfer_group():
                return EMPTY_MODEL_RUNNER_OUTPUT
            return self.kv_connector_no_forward(scheduler_output, self.vllm_config)
        with (
            set_forward_context(None, self.vllm_config),
            self.maybe_get_kv_connector_output(scheduler_output) as transferred,
        ):
            pass
        self.kv_connector_output = transferred
        self.execute_model_state: Any = SimpleNamespace(hidden_states=None)
        return None

    def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput:
        """Return the tokens that the script has next."""
        del grammar_output
        transferred, self.kv_connector_output = self.kv_connector_output, None
        if self.execute_model_state is None:
            return ModelRunnerOutput.with_kv_conn_output_only(transferred)
        self.execute_model_state = None
        return ModelRunnerOutput(
            req_ids=self.batch,
            req_id_to_index={name: i for i, name in enumerate(self.batch)},
            sampled_token_ids=[self._sampled(name, n) for name, n in self._samples],
            kv_connector_output=transferred,
        )

    def rows(self) -> tuple[Sequence[str], Any]:
        """Return the batch, and what stands for its hidden states where rows are captured."""
        if self.execute_model_state is None:
            return (), None
        return self.batch, lambda positions, behind: torch.zeros(len(positions), 1)

    def _sampled(self, name: str, n: int | None) -> list[int]:
        if n is None:
            return []
        token = self.answers.token(name, n)
        return [self._eos if token is None else token]

    def _take(self, output: SchedulerOutput) -> None:
        for name in output.finished_req_ids:
            self._requests.pop(name, None)
        self.answers.forget(list(output.finished_req_ids))
        tails = getattr(output.kv_connector_metadata, TAILS, None) or {}
        scheduled = output.num_scheduled_tokens
        self._samples, context = [], 0
        for new in output.scheduled_new_reqs:
            name, sampling = new.req_id, new.sampling_params
            request = _Request(new.prompt_len, len(tails.get(name, ())))
            self._requests[name] = request
            extra = (sampling.extra_args or {}) if sampling else {}
            self.answers.begin(name, extra, _least(sampling))
            end = new.num_computed_tokens + scheduled[name]
            context += end
            n = end - request.prompt_tokens
            self._samples.append((name, n if n >= request.tail else None))
        cached = output.scheduled_cached_reqs
        for name, computed, known in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            end = computed + scheduled[name]
            context += end
            n = end - self._requests[name].prompt_tokens
            # A part of a prompt, or of what is computed again, samples nothing.
            self._samples.append((name, n if n >= known else None))
        self.batch = [name for name, _ in self._samples]
        tokens = output.total_num_scheduled_tokens
        self.step = StepSize(len(self.batch), tokens, context)


def _least(sampling: SamplingParams | None) -> int:
    """Return the tokens that a request wants at least."""
    if sampling is None:
        return 0
    return (sampling.max_tokens or 0) if sampling.ignore_eos else sampling.min_tokens


@contextmanager
def computes_nothing() -> Iterator[None]:
    """Let vLLM's CPU worker make an `EmulatedRunner` as its model runner."""
    original = vllm.v1.worker.cpu_worker.CPUModelRunner
    vllm.v1.worker.cpu_worker.CPUModelRunner = EmulatedRunner
    try:
        yield
    finally:
        vllm.v1.worker.cpu_worker.CPUModelRunner = original


def refuse_unemulated(config: VllmConfig) -> None:
    """Refuse an engine that cannot be emulated.

    Raises:
        ValueError: names all that is in the way.
    """
    parallel = config.parallel_config
    checks = (
        (vllm_release() != (0, 32), "vLLM 0.32"),
        (config.device_config.device_type != "cpu", "vLLM's CPU build"),
        (config.use_v2_model_runner, "the V1 runner: set VLLM_USE_V2_MODEL_RUNNER=0"),
        (parallel.world_size > 1, "a single worker: drop --tensor-parallel-size and the like"),
        (config.lora_config is not None, "no adapters: drop --enable-lora"),
    )
    needed = [text for is_wrong, text in checks if is_wrong]
    if needed:
        raise ValueError(f"an emulated engine requires {'; '.join(needed)}")


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logprobs": (None,),
    "prompt_logprobs": (None,),
    "logprob_token_ids": (None,),
    "thinking_token_budget": (None,),
    "trace_decode_token_ids": (None,),
    "structured_outputs": (None,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
}
"""Sampling parameters that a scripted answer cannot heed, and their values that ask nothing."""


class RefusedParameters(LogitsProcessor):  # type: ignore[misc]
    """Refuses, by its name, what a request asks of tokens that are scripted.

    Given to vLLM as ``--logits-processors``, whose checks run before a request is accepted.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse a request whose answer cannot be emulated; its client gets status 400.

        Raises:
            ValueError: names the parameters.
        """
        asked = [
            name
            for name, neutral in _NEUTRAL.items()
            if getattr(sampling_params, name, neutral[0]) not in neutral
        ]
        if asked:
            raise ValueError(
                f"this engine is emulated, its answers are scripted: it has no {', '.join(asked)}"
            )

    def __init__(self, *args: Any) -> None:
        del args

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Change nothing."""
        return logits

    def is_argmax_invariant(self) -> bool:
        """Yes: nothing is changed."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """Keep nothing."""
