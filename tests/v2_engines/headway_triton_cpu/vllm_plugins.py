"""What vLLM does otherwise on a CPU, what the interpreter cannot run, and a report."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch


def keep_async_scheduling() -> None:
    """Leave asynchronous scheduling as asked for, which the CPU's platform switches off."""
    from vllm.platforms.cpu import CpuPlatform

    if "keeps_async" in vars(CpuPlatform):
        return
    check = CpuPlatform.check_and_update_config.__func__

    def check_and_keep(cls: Any, vllm_config: Any) -> None:
        asked = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked

    CpuPlatform.check_and_update_config = classmethod(check_and_keep)
    CpuPlatform.keeps_async = True


def sample_with_torch() -> None:
    """Cut the sampled tokens' distribution by torch instead of by Triton's kernel."""
    from vllm.v1.sample.ops import topk_topp_sampler as sampler

    sampler.apply_top_k_top_p_triton = sampler.apply_top_k_top_p_pytorch


class _WholeRows:
    """A kernel that takes a row of logits as one block.

    The interpreter's time goes by the number of operations, and hardly by their size.

    Args:
        kernel: whose last positional argument is the size of the vocabulary.
        block_maxima: which argument receives a maximum of each block; None: none does.
    """

    def __init__(self, kernel: Any, block_maxima: int | None = None) -> None:
        self._kernel, self._block_maxima = kernel, block_maxima

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*args: Any, **options: Any) -> None:
            vocabulary: int = args[-1]
            if self._block_maxima is not None:  # those of the other blocks are not computed
                args[self._block_maxima].fill_(-torch.inf)
            options["BLOCK_SIZE"] = 1 << (vocabulary - 1).bit_length()
            self._kernel[grid[:1]](*args, **options)

        return run


def sample_in_whole_rows() -> None:
    """Compute what goes over a vocabulary in one block instead of up to 48, without checks."""
    from triton.runtime.interpreter import interpreter_builder
    from vllm.v1.worker.gpu.sample import gumbel, logprob, penalties

    if isinstance(gumbel._gumbel_sample_kernel, _WholeRows):
        return
    interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)
    gumbel._gumbel_sample_kernel = _WholeRows(gumbel._gumbel_sample_kernel, block_maxima=2)
    gumbel._temperature_kernel = _WholeRows(gumbel._temperature_kernel)
    logprob._topk_log_softmax_kernel = _WholeRows(logprob._topk_log_softmax_kernel)
    logprob._ranks_kernel = _WholeRows(logprob._ranks_kernel)
    penalties._penalties_kernel = _WholeRows(penalties._penalties_kernel)


def store_with_any_mask() -> None:
    """Let the interpreter store with a mask of integers, as the grammar's kernel has it."""
    from triton.runtime.interpreter import InterpreterBuilder, _interpreter

    def store(self: Any, ptrs: Any, value: Any, mask: Any, cache_policy: Any) -> Any:
        return _interpreter.store(ptrs.data, value.data, mask.data.astype(bool))

    InterpreterBuilder.create_masked_store = store


def report_what_runs() -> None:
    """Let every engine write which runner and scheduler it runs.

    Also how many steps were in flight while it scheduled another, at most.

    Each process, of a scheduler or a worker or both, writes a file into the folder that
    ``HEADWAY_WHAT_RUNS`` names, from inside a step.
    """
    folder = os.environ.get("HEADWAY_WHAT_RUNS")
    if folder is None:
        return
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.cpu_worker import CPUWorker

    if "reported" in vars(EngineCore):
        return
    EngineCore.reported = {}
    step, execute = EngineCore.step_with_batch_queue, CPUWorker.execute_model

    def report(**facts: Any) -> None:
        known = EngineCore.reported | facts
        if known != EngineCore.reported:
            EngineCore.reported = known
            Path(folder, f"{os.getpid()}.json").write_text(json.dumps(known))

    def step_and_report(self: Any) -> Any:
        most = max(EngineCore.reported.get("steps_in_flight", 0), len(self.batch_queue))
        report(scheduler=type(self.scheduler).__qualname__, steps_in_flight=most)
        return step(self)

    def execute_and_report(self: Any, *args: Any, **kwargs: Any) -> Any:
        runner = type(self.model_runner)
        report(runner=f"{runner.__module__}.{runner.__qualname__}")
        return execute(self, *args, **kwargs)

    EngineCore.step_with_batch_queue = step_and_report
    CPUWorker.execute_model = execute_and_report
