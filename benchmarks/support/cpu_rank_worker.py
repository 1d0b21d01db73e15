"""A vLLM worker for data-parallel ranks with experts of their own on CPUs, which logs its steps.

Given to vLLM as ``--worker-cls benchmarks.support.cpu_rank_worker.CpuRankWorker``, with where
its logs begin in ``--additional-config``: ``{"step_log": PREFIX}`` makes ``PREFIX-RANK.csv``.

vLLM 0.32 lacks three things for this, which are added here. The collectives in which ranks exchange
their tokens before and after every expert layer exist for GPUs only; and its CPU kernel takes the
numbers of experts for places in the rank's own weights, reading beyond their end.
"""

import os
import time
from typing import Any

import torch
import torch.distributed
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.cpu_worker import CPUWorker


def _all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Return all ranks' rows, one rank after another; padded, since gloo wants as many of each."""
    if isinstance(input_, list):
        return [_all_gatherv(self, one, dim, sizes) for one in input_]
    rows = sizes or [len(input_)] * self.world_size
    padded = input_.new_zeros((max(rows), *input_.shape[1:]))
    padded[: len(input_)] = input_
    parts = [torch.empty_like(padded) for _ in rows]
    torch.distributed.all_gather(parts, padded, group=self.device_group)
    return torch.cat([part[:n] for part, n in zip(parts, rows, strict=True)])


def _reduce_scatterv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Return this rank's rows of the sum over all ranks."""
    rows = sizes or [len(input_) // self.world_size] * self.world_size
    total = input_.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(total, group=self.device_group)
    return torch.split(total, rows)[self.rank_in_group]


_compute_experts = CPUUnquantizedExperts.apply


def _compute_own_experts(
    self: Any,
    *,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    **others: Any,
) -> None:
    """Compute this rank's experts, at their own places; what others compute counts nothing here."""
    if expert_map is not None:
        place = expert_map[topk_ids.long()]
        topk_weights = topk_weights.masked_fill(place < 0, 0.0)
        topk_ids = place.clamp(min=0).to(topk_ids.dtype)
    others |= {"topk_weights": topk_weights, "topk_ids": topk_ids, "expert_map": expert_map}
    _compute_experts(self, **others)


CpuCommunicator.all_gatherv = _all_gatherv
CpuCommunicator.reduce_scatterv = _reduce_scatterv
CPUUnquantizedExperts.apply = _compute_own_experts


class CpuRankWorker(CPUWorker):  # type: ignore[misc]
    """Writes a line as each step begins: when, its requests, tokens computed, and their contexts.

    The time is of the monotonic clock, which all processes share. A step without requests, which a
    rank makes because another one has some, has zeros.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        prefix = self.vllm_config.additional_config["step_log"]
        rank = self.vllm_config.parallel_config.data_parallel_rank
        self._log = os.open(f"{prefix}-{rank}.csv", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            new = scheduler_output.total_num_scheduled_tokens
            begun = sum(one.num_computed_tokens for one in scheduler_output.scheduled_new_reqs)
            before = begun + sum(scheduler_output.scheduled_cached_reqs.num_computed_tokens)
            self._write(len(scheduler_output.num_scheduled_tokens), new, before + new)
        return super().execute_model(scheduler_output)

    def execute_dummy_batch(self) -> None:
        self._write(0, 0, 0)
        super().execute_dummy_batch()

    def _write(self, requests: int, new: int, context: int) -> None:
        os.write(self._log, f"{time.monotonic():.6f},{requests},{new},{context}\n".encode())
