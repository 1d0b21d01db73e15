"""A step of vLLM: which requests and tokens it is of, what its runner computed, and its output."""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from data_collection.capture.averaged_states import on_device
from data_collection.capture.capture_hook import CaptureHook, Gather
from data_collection.capture.requests import replay_of
from data_collection.models import NORM_WITH_LOGITS
from data_collection.vllm_adapter.requests import adapter_of, asked_max_tokens
from data_collection.vllm_adapter.support import uses_v2_runner

_LAST_ALONE = "this model returns the states of its last layer alone"
FINISHED_ATTRIBUTE = "headway_finished"
"""Name under which our scheduler adds ended requests to vLLM's `SchedulerOutput`."""


def is_recording_rank() -> bool:
    """Whether this worker records: rank 0 of the last pipeline stage.

    Every tensor-parallel rank holds the same hidden states, and only the last pipeline stage
    holds the final ones.
    """
    return get_tensor_model_parallel_rank() == 0 and is_last_stage()


def is_last_stage() -> bool:
    """Whether this worker is of the last pipeline stage, which has the final hidden states."""
    return bool(get_pp_group().is_last_rank)


def note_scheduled(hook: CaptureHook, output: SchedulerOutput, replays: bool = False) -> None:
    """Pass the requests of a step, which may be replays, to the hook; from this output alone."""
    scheduled = output.num_scheduled_tokens
    for request in output.scheduled_new_reqs:
        prompt_tokens = request.prompt_len
        # The V2 runner sees a request resumed after preemption as a new one.
        known = len(request.prefill_token_ids) if request.prefill_token_ids else prompt_tokens
        sampling = request.sampling_params
        max_tokens = asked_max_tokens(sampling) if sampling else 0
        replay = replay_of(sampling.extra_args) if replays and sampling else None
        adapter = adapter_of(request)
        if replay is None:
            temperature = sampling.temperature if sampling else 1.0
            hook.request_added(
                request.req_id, prompt_tokens, max_tokens, temperature, adapter=adapter
            )
        else:
            of = replay.prompt_tokens, replay.max_tokens
            hook.request_added(request.req_id, *of, is_replay=True, adapter=adapter)
        hook.request_scheduled(
            request.req_id,
            request.num_computed_tokens,
            scheduled[request.req_id],
            known - prompt_tokens,
        )
    cached = output.scheduled_cached_reqs
    for name, computed, known in zip(
        cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
    ):
        hook.request_scheduled(name, computed, scheduled[name], known)


def compile_apart(vllm_config: Any, layer: int) -> None:
    """Let vLLM keep what it compiles of a model with this layer captured apart.

    Before the model is loaded: parts of it may have copies of the configuration.

    Raises:
        ValueError: the model has fewer layers, or the engine runs in a way that cannot capture it.
    """
    config, parallel = vllm_config.model_config, vllm_config.parallel_config
    layers, in_two = config.get_total_num_hidden_layers(), getattr(parallel, "use_ubatching", False)
    in_stages = "pipeline parallelism is on, and its stage may not be the last"
    problems = {
        _LAST_ALONE: any(one in NORM_WITH_LOGITS for one in config.architectures),
        f"this model has {layers} layers": not 1 <= layer <= layers,
        in_stages: parallel.pipeline_parallel_size > 1,
        "batches are split in two; drop --enable-dbo": in_two,
    }
    _refuse_layer(layer, problems)
    vllm_config.additional_config = {**vllm_config.additional_config, "headway_layer": layer}


def capture_layer(model_runner: Any, layer: int) -> None:
    """Let a model that has just been loaded return the states after so many layers, too.

    vLLM's models do so for the drafts of EAGLE-3.

    Raises:
        ValueError: the model cannot.
    """
    model = model_runner.get_model()
    _refuse_layer(layer, {_LAST_ALONE: not supports_eagle3(model)})
    try:
        model.set_aux_hidden_state_layers((layer,))
    except AssertionError as error:
        _refuse_layer(layer, {str(error): True})
    model_runner.use_aux_hidden_state_outputs = True


def _refuse_layer(layer: int, problems: Mapping[str, bool]) -> None:
    found = "; ".join(problem for problem, is_there in problems.items() if is_there)
    if found:
        raise ValueError(
            f"Headway cannot capture states after layer {layer}, which `layer` or the predictor "
            f"asks for: {found}. Predictors of the last layer can be trained without `layer`"
        )


def step_rows(model_runner: Any) -> tuple[Sequence[str], Gather]:
    """Return the ids of the batch that the runner has just computed, and what copies its rows.

    Those are hidden states of the last layer after the final norm, or of the one that
    `capture_layer` has chosen. On a GPU the copy is enqueued on the current stream at once: the
    buffer belongs to a CUDA graph.
    """
    state = model_runner.execute_model_state
    if state is None:
        return (), _nothing_ran
    if uses_v2_runner(model_runner):
        request_ids, last_rows = state.input_batch.req_ids, state.input_batch.logits_indices
    else:
        batch = model_runner.input_batch
        request_ids = batch.req_ids[: batch.num_reqs]
        last_rows = model_runner.query_start_loc.gpu[1:] - 1

    layers = state.aux_hidden_states
    states = layers[0] if layers else state.hidden_states

    def gather(positions: list[int], behind: list[int]) -> torch.Tensor:
        device = last_rows.device
        rows = last_rows[on_device(positions, device)] - on_device(behind, device)
        return torch.index_select(states, 0, rows)

    return request_ids, gather


def _nothing_ran(positions: list[int], behind: list[int]) -> torch.Tensor:
    raise RuntimeError(f"rows {positions} are due in a step that ran no model")


def step_tokens(scheduler: Any, output: SchedulerOutput) -> tuple[int, int]:
    """Return the tokens of a step that has just been scheduled, and their requests' context."""
    computed = attrgetter("num_computed_tokens")
    context = sum(computed(scheduler.requests[name]) for name in output.num_scheduled_tokens)
    return output.total_num_scheduled_tokens, context


Attach = Callable[[ModelRunnerOutput], None]


def with_output(output: Any, attach: Attach) -> Any:
    """Let something be attached to a step's output, now or once it has arrived.

    vLLM's shared empty output stays as it is.
    """
    if isinstance(output, AsyncModelRunnerOutput):
        return _Attaching(output, attach)
    if output is not None and output.req_ids:
        attach(output)
    return output


class _Attaching(AsyncModelRunnerOutput):  # type: ignore[misc]
    """An output that is still on its way."""

    def __init__(self, output: AsyncModelRunnerOutput, attach: Attach) -> None:
        self._output = output
        self._attach = attach

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the output and attach."""
        return with_output(self._output.get_output(), self._attach)

    def get_kv_connector_output(self) -> Any:
        """Return what vLLM 0.33 and later asks for when a step has failed."""
        return self._output.get_kv_connector_output()
