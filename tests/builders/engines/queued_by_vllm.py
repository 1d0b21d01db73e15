"""An engine's order of service over vLLM's own queue, without the engine."""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.core.sched.request_queue import FCFSRequestQueue

from rescheduler.ordering.engine_order import EngineOrder


class QueuedByVllm:
    """What the order reads of vLLM's request."""

    def __init__(self, name: str, prompt: int, most: int, generated: int = 0) -> None:
        self.request_id, self.prompt_token_ids = name, list(range(prompt))
        self.num_tokens, self.num_output_tokens = prompt + generated, generated
        self.max_tokens, self.arrival_time = most, time.time()
        self.sampling_params = SimpleNamespace(temperature=0.8, stop=[])
        self.reason, self.kv_transfer_params = "stop", None
        self.lora_request, self.cache_salt = None, None

    def get_finished_reason(self) -> str:
        return self.reason


class _Forecasts:
    """What an engine has forecast: the tokens that some requests will still generate."""

    def __init__(self, remaining: dict[str, int]) -> None:
        self._remaining = remaining

    def means(self, requests: list[Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.array([self._remaining.get(one.request_id, np.nan) for one in requests], float)


def engine_order(
    *requests: QueuedByVllm,
    policy: str = "fcfs",
    forecasts: dict[str, int] | None = None,
    rank: int = 0,
    **order: Any,
) -> EngineOrder:
    queue = FCFSRequestQueue()
    queue.extend(requests)
    scheduler = SimpleNamespace(
        vllm_config=SimpleNamespace(
            model_config=SimpleNamespace(model="acme/other"),
            additional_config={"headway": {"order": order or {"name": "shortest"}}},
            scheduler_config=SimpleNamespace(policy=policy, max_num_seqs=4),
            parallel_config=SimpleNamespace(pipeline_parallel_size=1, data_parallel_index=rank),
        ),
        waiting=queue,
        skipped_waiting=[],
        kv_holding_waiting=[],
        running=[],
        part=lambda kind: _Forecasts(forecasts or {}),
        kv_cache_manager=SimpleNamespace(usage=0.5),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[None]),
        cache_config=SimpleNamespace(num_gpu_blocks=100),
        block_size=16,
        failures=0,
    )
    return EngineOrder(scheduler)


def names(part: EngineOrder) -> list[str]:
    return [request.request_id for request in part.scheduler.waiting]
